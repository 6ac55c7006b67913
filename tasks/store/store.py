"""The object store: the only state that stages share.

Invariants: data is written before the manifest that names it; a reader trusts only what a manifest names and
checks sizes and sha256; an object appears whole or not at all; nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import fsspec

from tasks.errors import DeadlineExceeded, UserError

T = TypeVar("T")

MANIFEST = "manifest.json"
RETRY_DEADLINE_S = 60.0
CHUNK = 1 << 20  # bytes; larger ones come from fresh pages each time, at twice the cost
AT_ONCE = 4  # objects of one set that are hashed and moved side by side
SILENT_S = 2.0  # a shorter outage is not worth a word

logger = logging.getLogger("rollart.store")


class CorruptObject(Exception):
    """An object is not what its manifest says: missing, short, or of another sha256."""


class Store:
    """Objects below one root URI: a local folder, s3://, or anything fsspec speaks.

    Keys are relative, with `/`. All methods block; transient errors (5xx, lost connections) are retried with
    back-off for RETRY_DEADLINE_S, then raise DeadlineExceeded.
    """

    def __init__(self, uri: str, endpoint_url: str | None = None):
        self.endpoint_url = endpoint_url
        self.fs, self.root = _filesystem(uri, endpoint_url)
        self.local = isinstance(self.fs, fsspec.implementations.local.LocalFileSystem)
        self.uri = f"{self.root}" if self.local else f"{uri.split('://')[0]}://{self.root}"

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    def below(self, prefix: str) -> Store:
        """The store rooted at `prefix` of this one."""
        return Store(f"{self.uri}/{prefix}", self.endpoint_url)

    @property
    def name(self) -> str:
        """The last part of the URI; of a run's store, the run's name."""
        return self.uri.rstrip("/").rsplit("/", 1)[-1]

    @property
    def poll_s(self) -> float:
        """How long to wait between two looks at one key: an object store charges for each."""
        return 0.05 if self.local else 0.25

    # single objects

    def exists(self, key: str) -> bool:
        """Whether there is an object. Not `fs.isfile`, which takes a store that is away for one without it."""

        def found() -> bool:
            try:
                return self.fs.info(self._path(key))["type"] == "file"
            except (FileNotFoundError, NotADirectoryError):
                return False

        return self._retry(found, f"existence of {key}")

    def read(self, key: str) -> bytes:
        """The object's bytes. Raises FileNotFoundError."""
        return self._retry(lambda: self.fs.cat_file(self._path(key)), f"read of {key}")

    def write(self, key: str, data: bytes) -> None:
        """Write an object, whole or not at all."""
        if self.local:
            _atomically(Path(self._path(key)), lambda part: part.write_bytes(data))
        else:
            self._retry(lambda: self.fs.pipe_file(self._path(key), data), f"write of {key}")

    def read_json(self, key: str) -> Any:
        """A JSON object. Raises FileNotFoundError."""
        return json.loads(self.read(key))

    def write_json(self, key: str, value: Any) -> None:
        self.write(key, json.dumps(value, indent=1, sort_keys=True).encode())

    def delete(self, prefix: str) -> None:
        """Remove an object or all objects below a prefix, manifest first. No error if there is none."""
        self._retry(lambda: self._delete(prefix), f"removal of {prefix}")

    # sets of objects under a manifest

    def put(self, prefix: str, objects: dict[str, bytes | Path], **facts: Any) -> dict[str, Any]:
        """Write `objects` below `prefix`, then the manifest with their sizes, hashes and `facts`.

        Returns the manifest. A prefix that already has a manifest is left as it is: a rewrite is a no-op.
        """
        if (existing := self.manifest(prefix)) is not None:
            return existing
        with ThreadPoolExecutor(AT_ONCE) as threads:
            written = threads.map(
                lambda name: self._write_content(f"{prefix}/{name}", objects[name]), objects
            )
            files = dict(zip(objects, written, strict=True))
        manifest = {**facts, "files": files, "written_at": time.time()}
        self.write_json(f"{prefix}/{MANIFEST}", manifest)
        return manifest

    def manifest(self, prefix: str) -> dict[str, Any] | None:
        """The manifest at `prefix`, or None while the set is not complete."""
        try:
            return self.read_json(f"{prefix}/{MANIFEST}")
        except FileNotFoundError:
            return None

    def get(self, prefix: str, name: str) -> bytes:
        """One object of a manifest, checked. Raises CorruptObject, or FileNotFoundError without a manifest."""
        expected = self._file_in(prefix, name)
        try:
            data = self.read(f"{prefix}/{name}")
        except FileNotFoundError:
            raise CorruptObject(f"{self.uri}/{prefix}/{name} is missing, but its manifest names it") from None
        _check(f"{self.uri}/{prefix}/{name}", len(data), hashlib.sha256(data).hexdigest(), expected)
        return data

    def fetch(self, prefix: str, folder: Path, read_only: bool = False) -> dict[str, Any]:
        """Copy a manifest's objects into `folder`, checked; returns the manifest. Raises like `get`.

        `read_only`: the caller promises not to change the files, so that on the disk of a local store they are
        the store's own under a second name, which keeps them when the store deletes its one.
        """
        manifest = self.manifest(prefix) or self._missing(prefix)
        folder.mkdir(parents=True, exist_ok=True)

        def fetch_one(name: str) -> None:
            self._fetch_one(f"{prefix}/{name}", folder / name, manifest["files"][name], read_only)

        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(fetch_one, manifest["files"]))
        return manifest

    def verify(self, prefix: str) -> None:
        """Read all objects of a manifest. Raises CorruptObject, or FileNotFoundError without a manifest."""
        for name in (self.manifest(prefix) or self._missing(prefix))["files"]:
            self.get(prefix, name)

    def copy(self, source: str, target: str, **facts: Any) -> dict[str, Any]:
        """Copy a manifest's objects to another prefix, data first; its facts are kept, `facts` override."""
        manifest = self.manifest(source) or self._missing(source)
        kept = {key: value for key, value in manifest.items() if key not in ("files", "written_at")}
        objects: dict[str, bytes | Path] = {name: self.get(source, name) for name in manifest["files"]}
        return self.put(target, objects, **{**kept, **facts})

    def numbers(self, folder: str) -> list[int]:
        """The integers among the names directly below `folder`, sorted: versions, waves, batches."""
        names = (name.removesuffix(".json").removesuffix(".parquet") for name in self.names(folder))
        return sorted(int(name) for name in names if name.lstrip("-").isdigit())

    def names(self, folder: str) -> list[str]:
        """Names directly below `folder`, sorted; empty if there is none."""

        path = self._path(folder).rstrip("/")

        def listed() -> list[str]:
            try:
                entries = self.fs.ls(path, detail=False, **({} if self.local else {"refresh": True}))
            except (FileNotFoundError, NotADirectoryError):
                return []
            found = (str(entry).rstrip("/") for entry in entries)  # a prefix's marker lists the prefix itself
            names = (entry.rsplit("/", 1)[-1] for entry in found if entry != path)
            return sorted(name for name in names if not name.startswith("."))

        return self._retry(listed, f"listing of {folder}")

    def wait_for(self, prefix: str, deadline_s: float, look_at: str) -> dict[str, Any]:
        """Wait until `prefix` has a manifest; raises DeadlineExceeded that says where to look."""
        started = time.monotonic()
        while (manifest := self.manifest(prefix)) is None:
            if time.monotonic() - started > deadline_s:
                raise DeadlineExceeded(f"{self.uri}/{prefix}/{MANIFEST}", deadline_s, look_at)
            time.sleep(self.poll_s)
        return manifest

    # how

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"

    def _file_in(self, prefix: str, name: str) -> dict[str, Any]:
        manifest = self.manifest(prefix) or self._missing(prefix)
        if name not in manifest["files"]:
            raise CorruptObject(f"{self.uri}/{prefix}: the manifest does not name {name}")
        return manifest["files"][name]

    def _write_content(self, key: str, content: bytes | Path) -> dict[str, Any]:
        """Write an object; returns its size and sha256."""
        if self.local and isinstance(content, Path):
            return _atomically(Path(self._path(key)), lambda part: _copy(content, part))
        described = _describe(content)
        if isinstance(content, bytes):
            self.write(key, content)
        else:
            self._retry(lambda: self.fs.put_file(str(content), self._path(key)), f"write of {key}")
        return described

    def _fetch_one(self, key: str, target: Path, expected: dict[str, Any], read_only: bool) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            if self.local and read_only and _linked(Path(self._path(key)), part):
                found = _describe(part)
            elif self.local:
                found = _copy(Path(self._path(key)), part)
            else:
                self._retry(lambda: self.fs.get_file(self._path(key), str(part)), f"read of {key}")
                found = _describe(part)
            _check(f"{self.uri}/{key}", found["size"], found["sha256"], expected)
            os.replace(part, target)
        except FileNotFoundError:
            raise CorruptObject(f"{self.uri}/{key} is missing, but its manifest names it") from None
        finally:
            part.unlink(missing_ok=True)

    def _delete(self, prefix: str) -> None:
        path = self._path(prefix)
        if self.fs.isfile(path):
            self.fs.rm_file(path)
            return
        if self.fs.isfile(f"{path}/{MANIFEST}"):
            self.fs.rm_file(f"{path}/{MANIFEST}")
        try:
            objects = [] if self.local else self.fs.find(path)
            self.fs.rm(path, recursive=True)
        except FileNotFoundError:
            return
        if hasattr(self.fs, "call_s3"):
            self._delete_markers(path, objects)

    def _delete_markers(self, path: str, objects: list[str]) -> None:
        """Some S3 servers go on listing an emptied prefix until its marker, the key with a `/` behind, is removed."""
        folders = {path}
        for name in objects:
            inner = name.removeprefix(f"{path}/").split("/")[:-1]
            folders |= {"/".join([path, *inner[:depth]]) for depth in range(1, len(inner) + 1)}
        for folder in sorted(folders, key=len, reverse=True):
            bucket, key = folder.split("/", 1)
            self.fs.call_s3("delete_object", Bucket=bucket, Key=f"{key}/")

    def _missing(self, prefix: str) -> NoReturn:
        raise FileNotFoundError(f"{self.uri}/{prefix}/{MANIFEST}")

    def _retry(self, operation: Callable[[], T], what: str) -> T:
        started, pause = time.monotonic(), 0.2
        while True:
            try:
                result = operation()
                _outages.over(self.uri)
                return result
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError):
                _outages.over(self.uri)
                raise  # an answer, not a fault
            except Exception as error:
                if self.local or not isinstance(error, _transient_errors()):
                    raise
                waited = time.monotonic() - started
                if waited + pause > RETRY_DEADLINE_S:
                    raise DeadlineExceeded(
                        f"the {what} in {self.uri}", waited, f"the store's endpoint ({error})"
                    ) from error
                _outages.note(self.uri, waited, f"{what}: {error}")
            time.sleep(pause)
            pause = min(2 * pause, 5.0)


class _Outages:
    """Says once that a store is away and once that it is back, however many threads wait for it."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._lock = threading.Lock()

    def note(self, uri: str, waited: float, reason: str) -> None:
        with self._lock:
            if waited < SILENT_S or uri in self._since:
                return
            self._since[uri] = time.monotonic() - waited
        text = "the store %s does not answer and is asked again for up to %.0f s (%s)"
        logger.warning(text, uri, RETRY_DEADLINE_S, reason)

    def over(self, uri: str) -> None:
        if not self._since:
            return
        with self._lock:
            since = self._since.pop(uri, None)
        if since is not None:
            logger.warning("the store %s answers again, after %.0f s", uri, time.monotonic() - since)


_outages = _Outages()


def _filesystem(uri: str, endpoint_url: str | None) -> tuple[Any, str]:
    """The fsspec filesystem and the root path below it. Raises UserError for an unknown scheme."""
    scheme = uri.split("://")[0] if "://" in uri else "file"
    if scheme == "file":
        uri = str(Path(uri.removeprefix("file://")).expanduser().absolute())
    options: dict[str, Any] = {}
    if scheme in ("s3", "s3a"):
        options = {
            "use_listings_cache": False,
            "endpoint_url": endpoint_url or os.environ.get("AWS_ENDPOINT_URL"),
            # one quick second attempt, for a part of a large object; the rest is _retry's, which knows the deadline
            "config_kwargs": {"retries": {"mode": "standard", "total_max_attempts": 2}},
        }
    try:
        fs, root = fsspec.core.url_to_fs(uri, **options)
    except (ValueError, ImportError) as error:
        raise UserError(
            "store.root", f"{uri!r} cannot be opened ({error})", "use a folder or s3://bucket/prefix"
        ) from None
    return fs, str(root).rstrip("/")


def _transient_errors() -> tuple[type[Exception], ...]:
    """What a remote store may answer once and not again. s3fs lets its HTTP layers' own errors through."""
    import aiohttp
    import botocore.exceptions as boto

    return OSError, aiohttp.ClientError, boto.HTTPClientError, boto.ConnectionError


def _atomically(target: Path, write: Callable[[Path], T]) -> T:
    """Write a file, whole or not at all; returns what `write` returns."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        written = write(part)
        os.replace(part, target)
        return written
    finally:
        part.unlink(missing_ok=True)


def _copy(source: Path, target: Path) -> dict[str, Any]:
    """Copy a file, reading it once; returns the size and sha256 of what was copied, hashed beside the writing."""
    digest, size = hashlib.sha256(), 0
    with source.open("rb") as reader, target.open("wb") as writer, ThreadPoolExecutor(1) as hasher:
        while chunk := reader.read(CHUNK):
            hashed = hasher.submit(digest.update, chunk)
            writer.write(chunk)
            hashed.result()
            size += len(chunk)
    return {"size": size, "sha256": digest.hexdigest()}


def _linked(source: Path, target: Path) -> bool:
    """Give a file a second name; false where that cannot be: another disk, a file system without, no such file."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def _describe(content: bytes | Path) -> dict[str, Any]:
    if isinstance(content, bytes):
        return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return {"size": content.stat().st_size, "sha256": _sha256(content)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(where: str, size: int, sha256: str, expected: dict[str, Any]) -> None:
    if size != expected["size"]:
        raise CorruptObject(f"{where} has {size} bytes, but its manifest says {expected['size']}")
    if sha256 != expected["sha256"]:
        raise CorruptObject(f"{where} has another sha256 than its manifest says")


def folder_objects(folder: Path, names: Iterable[str] | None = None) -> dict[str, bytes | Path]:
    """All files below a local folder, as `Store.put` takes them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    found: dict[str, bytes | Path] = {str(path.relative_to(folder)): path for path in files}
    return found if names is None else {name: found[name] for name in names}
