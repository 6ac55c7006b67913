"""A spool: JSON lines on disk that one daemon thread hands to a slow or absent receiver, in order.

Invariants: `append` only writes a line to a local file, so it never waits for the receiver; a line leaves the
spool only after the receiver took it, so neither a killed process nor a dead receiver loses one; one thread of
one process sends at a time (a file lock), and what a process leaves unsent the next one sends. A line may be
sent again after a kill between its sending and its acknowledgement: the receiver must take that.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger("rollart.tracking")

Item = dict[str, Any]
LINES_AT_ONCE = 500
FIRST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_AT_CLOSE_S = 0.5, 30.0, 1.0


class Spool:
    """Lines in `<folder>/<name>.jsonl`; `<name>.sent` holds how many of its bytes are done with."""

    def __init__(self, folder: Path, name: str, send: Callable[[Sequence[Item]], None]):
        self.name, self.send = name, send
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.lines, self.sent = folder / f"{name}.jsonl", folder / f"{name}.sent"
        self.lock_file = folder / f"{name}.lock"
        self.closing, self.stopped = threading.Event(), threading.Event()
        self.last_error = ""
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._thread: threading.Thread | None = None

    def append(self, item: Item) -> None:
        """Add a line; returns as soon as the operating system has it. A full disk loses it, with a message."""
        line = json.dumps(item, separators=(",", ":")).encode() + b"\n"
        try:
            with self._lock:
                if self._file is None:
                    self._file = self._open()
                self._file.write(line)
        except OSError as error:
            self._say(f"{self.name} cannot be kept in {self.lines}: {error}")
        self._wake.set()

    def start(self) -> None:
        """Start to send, what earlier processes left first."""
        self._thread = threading.Thread(target=self._work, name=f"spool-{self.name}", daemon=True)
        self._thread.start()

    def close(self, deadline_s: float) -> bool:
        """Send what is left, for at most `deadline_s`; returns whether all of it was sent."""
        self.closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(deadline_s)
        self.stopped.set()
        return not self.lines.exists()

    def unsent(self) -> tuple[list[Item], int]:
        """The next items to send, and the offset behind them."""
        offset = self._offset()
        items: list[Item] = []
        try:
            with self.lines.open("rb") as file:
                file.seek(offset)
                while len(items) < LINES_AT_ONCE and (line := file.readline()).endswith(b"\n"):
                    offset += len(line)
                    try:
                        items.append(json.loads(line))
                    except ValueError:
                        pass  # torn by a kill: its caller never heard that it was taken
        except FileNotFoundError:
            pass
        return items, offset

    def _open(self) -> IO[bytes]:
        """The file to append to, kept open: one system call a line, so that a busy interpreter delays it once."""
        if self.lines.exists() and not self.lines.read_bytes().endswith(b"\n"):
            with self.lines.open("ab") as file:
                file.write(b"\n")  # an earlier process was killed in the middle of a line
        return self.lines.open("ab", buffering=0)

    def _offset(self) -> int:
        try:
            offset = int(self.sent.read_text())
            return offset if offset <= self.lines.stat().st_size else 0
        except (FileNotFoundError, ValueError):
            return 0

    def _done(self, offset: int) -> None:
        part = self.sent.with_suffix(".part")
        part.write_text(str(offset))
        os.replace(part, self.sent)

    def _work(self) -> None:
        with self.lock_file.open("w") as lock:
            while not self._locked(lock):
                if self.stopped.wait(0.2):
                    return
            pause = FIRST_PAUSE_S
            while not self.stopped.is_set():
                self._wake.clear()
                items, offset = self.unsent()
                if not items:
                    if self.closing.is_set():
                        self._remove()
                        return
                    self._wake.wait(1.0)
                elif self._try(items):
                    self._done(offset)
                    pause = FIRST_PAUSE_S
                else:
                    self._rest(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_S)

    def _locked(self, lock: Any) -> bool:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False

    def _try(self, items: list[Item]) -> bool:
        try:
            self.send(items)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            self._say(f"MLflow takes no {self.name}; they are kept in {self.lines} for now: {redact(reason)}")
            return False
        if self.last_error:
            logger.warning("MLflow takes %s again", self.name)
        self.last_error = ""
        return True

    def _say(self, message: str) -> None:
        if message != self.last_error:
            logger.warning(message)
        self.last_error = message

    def _rest(self, pause: float) -> None:
        until = time.monotonic() + pause
        while (left := until - time.monotonic()) > 0 and not self.stopped.wait(min(left, 0.2)):
            if self.closing.is_set():
                until = min(until, time.monotonic() + LONGEST_PAUSE_AT_CLOSE_S)

    def _remove(self) -> None:
        with self._lock:
            if self.unsent()[0]:
                return
            if self._file is not None:
                self._file.close()
                self._file = None
            self.sent.unlink(missing_ok=True)  # first: lines without an offset are sent again, not lost
            self.lines.unlink(missing_ok=True)


def redact(text: str) -> str:
    """The text with user names and passwords inside URIs masked."""
    return re.sub(r"://[^/@\s\"']+@", "://***@", text)
