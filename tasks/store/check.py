"""Whether a store can be written, or read, asked before anything is started.

Invariant: an answer within DEADLINE_S, whatever the endpoint does, and no credential in any message.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tasks.errors import UserError
from tasks.store.store import Store

DEADLINE_S = 4.0
_CONNECT_S = 2.0


def check_writable(store: Store) -> None:
    """Write and remove a small object. Raises UserError naming the setting, within DEADLINE_S."""
    if store.local:
        _check_folder(Path(store.root))
        return
    _ask(store, _write_probe, "write to", "s3:PutObject")


def check_readable(store: Store) -> None:
    """Look into a store that is not local. Raises UserError naming the setting, within DEADLINE_S."""
    _ask(store, _read_probe, "read", "s3:ListBucket and s3:GetObject")


def _ask(store: Store, operation: Callable[[Any, str], None], verb: str, permission: str) -> None:
    """Do an operation without the store's retries, and without a session that fsspec has kept."""
    if not store.uri.startswith(("s3://", "s3a://")):
        return
    _check_reachable(store)
    outcome: list[BaseException | None] = []

    def probe() -> None:
        try:
            operation(type(store.fs)(**{**store.fs.storage_options, "skip_instance_cache": True}), store.root)
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=probe, name="store-check", daemon=True)
    thread.start()
    thread.join(DEADLINE_S - 0.5)
    if not outcome:
        raise UserError(
            _endpoint_setting(store),
            f"{_endpoint(store)} does not answer",
            "check that it is an S3 server, and up",
        )
    if outcome[0] is not None:
        raise _explain(store, outcome[0], verb, permission) from None


def _check_folder(folder: Path) -> None:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise UserError("store.root", f"{existing} is a file, not a folder", "name a folder")
    probe = existing / f".{secrets.token_hex(6)}"
    try:
        probe.write_bytes(b"1")
        probe.unlink()
    except OSError as error:
        raise UserError(
            "store.root",
            f"{folder} cannot be written ({error.strerror})",
            "name a folder that you may write to",
        ) from None


def _check_reachable(store: Store) -> None:
    parts = urlsplit(_endpoint(store))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(
            _endpoint_setting(store), f"{_endpoint(store)!r} is not a URL", "for example http://host:8333"
        )
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname, port), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise UserError(
            _endpoint_setting(store),
            f"{_endpoint(store)} cannot be reached ({error})",
            "start the S3 server, or correct the address",
        ) from None


def _write_probe(fs: Any, root: str) -> None:
    path = f"{root}/.check-{secrets.token_hex(6)}"
    fs.pipe_file(path, b"1")
    fs.rm_file(path)


def _read_probe(fs: Any, root: str) -> None:
    try:
        fs.ls(root)
    except FileNotFoundError:  # a root without anything below it; a bucket must be there
        fs.ls(root.split("/")[0])


def _explain(store: Store, error: BaseException, verb: str, permission: str) -> UserError:
    import botocore.exceptions as boto

    bucket = store.root.split("/")[0]
    causes = list(_causes(error))
    if any(isinstance(cause, boto.NoCredentialsError | boto.PartialCredentialsError) for cause in causes):
        return UserError(
            "AWS_ACCESS_KEY_ID", f"there are no credentials for {_endpoint(store)}",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile in ~/.aws",
        )  # fmt: skip
    codes = {
        cause.response.get("Error", {}).get("Code", "")
        for cause in causes
        if isinstance(cause, boto.ClientError)
    }
    if codes & {
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "AuthorizationHeaderMalformed",
        "ExpiredToken",
    }:
        return UserError(
            "AWS_ACCESS_KEY_ID", f"{_endpoint(store)} refuses the credentials ({', '.join(codes)})",
            "correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )  # fmt: skip
    if "NoSuchBucket" in codes or isinstance(error, FileNotFoundError):
        return UserError(
            "store.root", f"there is no bucket {bucket!r} at {_endpoint(store)}", "create it, or name another"
        )
    if "AccessDenied" in codes or isinstance(error, PermissionError):
        return UserError(
            "store.root",
            f"the credentials may not {verb} {store.uri}",
            f"grant them {permission}, or name another bucket",
        )
    return UserError(
        "store.root",
        f"it is not possible to {verb} {store.uri} ({type(error).__name__})",
        "look at the S3 server's log",
    )


def _causes(error: BaseException | None) -> Any:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _endpoint(store: Store) -> str:
    url = store.endpoint_url or os.environ.get("AWS_ENDPOINT_URL") or "https://s3.amazonaws.com"
    return url if "@" not in url else f"{url.split('://')[0]}://{url.rsplit('@', 1)[1]}"


def _endpoint_setting(store: Store) -> str:
    return (
        "store.endpoint_url"
        if store.endpoint_url or not os.environ.get("AWS_ENDPOINT_URL")
        else "AWS_ENDPOINT_URL"
    )
