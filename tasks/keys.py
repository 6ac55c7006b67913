"""The key of a run: what its engines, its reward function and its environments cluster ask for.

On one machine it is made at random and kept in the run's work folder. On pools, ROLLART_KEY gives every process the
same secret (`rollart deploy` puts it into a Prefect Secret block, from which the work pools set it), and the key of a
run is derived from it: no run can use the services of another one, and the secret itself never leaves the pools.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
from typing import Any

from cryptography.fernet import Fernet, InvalidToken

from tasks.errors import UserError
from tasks.services import work_folder
from tasks.store import Store

SECRET = "ROLLART_KEY"  # of all runs on the pools
API_KEY = "ROLLART_API_KEY"  # of one run, for the processes of a service


def run_key(store: Store) -> str:
    """The key of the run at `store`, for this process."""
    if given := os.environ.get(API_KEY):
        return given
    if secret := os.environ.get(SECRET):
        return hmac.new(secret.encode(), store.uri.encode(), hashlib.sha256).hexdigest()
    return _kept_key(store)


def _kept_key(store: Store) -> str:
    """The key in the run's work folder, made once, with mode 0600."""
    path = work_folder(store) / "engine.key"
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32))
    return path.read_text()


def fingerprint(key: str) -> str:
    """Tells keys apart without giving them away: 8 hexadecimal digits."""
    return hmac.new(key.encode(), b"fingerprint", hashlib.sha256).hexdigest()[:8]


def seal(key: str, value: dict[str, Any]) -> bytes:
    """Encrypt a JSON object, so that it may lie in the store."""
    return _cipher(key).encrypt(json.dumps(value).encode())


def unseal(key: str, data: bytes) -> dict[str, Any]:
    """What `seal` encrypted. Raises UserError with another key."""
    try:
        return json.loads(_cipher(key).decrypt(data))
    except InvalidToken:
        raise UserError(
            SECRET, "is not the one with which the run's services were started", "set the same on every pool"
        ) from None


def _cipher(key: str) -> Fernet:
    return Fernet(base64.urlsafe_b64encode(hashlib.sha256(b"seal" + key.encode()).digest()))
