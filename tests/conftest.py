"""Fixtures that several folders of tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.s3 import S3, s3_server


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    """A real S3 server for the whole session; its faults are cleared by whoever sets them."""
    with s3_server() as server:
        yield server


@pytest.fixture
def s3_env(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """The server, with access to it in this process's environment and its faults cleared before and after."""
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    from s3fs import S3FileSystem

    s3.faults.clear()
    S3FileSystem.clear_instance_cache()  # fsspec keeps file systems, with the credentials of their first use
    yield s3
    s3.faults.clear()
    S3FileSystem.clear_instance_cache()
