"""Calls under a deadline: what hangs is abandoned on a daemon thread and counted, and its caller goes on.

Python cannot end a thread, so an abandoned call keeps its memory until it returns or its process ends; a
process that has abandoned too many is to be replaced (`abandoned_calls`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_local = threading.local()
_lock = threading.Lock()
_abandoned = 0


class CallHung(Exception):
    """A call did not return within its deadline."""


def call(function: Callable[..., T], *arguments: Any, deadline_s: float) -> T:
    """`function(*arguments)`, on this thread's helper thread.

    Raises CallHung after `deadline_s`, and whatever the function raises (an exit of the interpreter too, as
    RuntimeError: user code must not end the process).
    """
    helper = getattr(_local, "helper", None)
    if helper is None:
        helper = _local.helper = _Helper()
    try:
        return helper.call(function, arguments, deadline_s)
    except CallHung:
        _local.helper = None
        raise


def abandoned_calls() -> int:
    """How many calls this process has abandoned that have still not returned."""
    return _abandoned


def _count(change: int) -> None:
    global _abandoned
    with _lock:
        _abandoned += change


class _Helper:
    """A daemon thread that runs one call at a time; a new thread a call would cost several times more."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._left = False
        self._state = threading.Lock()
        threading.Thread(target=self._run, name="environment", daemon=True).start()

    def call(self, function: Callable[..., T], arguments: tuple[Any, ...], deadline_s: float) -> T:
        self._calls.put((function, arguments))
        try:
            ok, value = self._results.get(timeout=deadline_s)
        except queue.Empty:
            with self._state:
                if self._results.empty():
                    self._left = True
                    _count(+1)
                    raise CallHung(f"no answer within {deadline_s:g} s") from None
            ok, value = self._results.get()
        if ok:
            return value
        if isinstance(value, Exception):
            raise value
        raise RuntimeError(f"{type(value).__name__}: {value}") from value

    def _run(self) -> None:
        while True:
            function, arguments = self._calls.get()
            try:
                result = (True, function(*arguments))
            except BaseException as error:
                result = (False, error)
            with self._state:
                self._results.put(result)
                if self._left:
                    _count(-1)
                    return
            del function, arguments, result
