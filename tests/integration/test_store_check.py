"""The check of a store before a run: each way it can be unusable is named with its setting, quickly."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from tasks.errors import UserError
from tasks.services import free_port
from tasks.store import Store
from tasks.store.check import check_readable, check_writable
from tests.integration.s3 import BUCKET, S3


def refused(store: Store) -> UserError:
    """What both checks say; the one for readers only where they differ in a word."""
    if not store.local:
        with pytest.raises(UserError) as reading:
            check_readable(store)
    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        check_writable(store)
    assert store.local or reading.value.setting == caught.value.setting
    assert time.monotonic() - started < 4.0
    assert caught.value.fix
    return caught.value


def test_a_usable_store_passes_and_nothing_is_left_in_it(tmp_path: Path, s3_env: S3) -> None:
    for store in (Store(str(tmp_path / "new" / "deep")), Store(f"s3://{BUCKET}/fresh", s3_env.endpoint_url)):
        check_readable(store)
        check_writable(store)
        assert store.names("") == []
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_names_store_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refused(Store(str(tmp_path / "file" / "runs"))).setting == "store.root"
    assert refused(Store("/proc/runs")).setting == "store.root"


@pytest.mark.parametrize("kind", ["closed", "silent", "no such host", "not a url"])
def test_an_endpoint_that_is_not_there_names_the_endpoint(kind: str, s3_env: S3) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = {
            "closed": f"http://127.0.0.1:{free_port()}",
            "silent": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "no such host": "http://nowhere.invalid:8333",
            "not a url": "localhost:8333",
        }[kind]
        assert refused(Store(f"s3://{BUCKET}/run", url)).setting == "store.endpoint_url"


def test_missing_credentials_name_the_variables(
    s3_env: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    error = refused(Store(f"s3://{BUCKET}/run", s3_env.endpoint_url))
    assert error.setting == "AWS_ACCESS_KEY_ID" and "no credentials" in error.problem


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_name_the_variables_and_are_not_shown(
    s3_env: S3, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setenv(wrong, "w" * 20)
    error = refused(Store(f"s3://{BUCKET}/run", s3_env.endpoint_url))
    assert error.setting == "AWS_ACCESS_KEY_ID" and "refuses" in error.problem
    for secret in (s3_env.access_key, s3_env.secret_key, "w" * 20):
        assert secret not in str(error)


def test_a_missing_bucket_is_named(s3_env: S3) -> None:
    error = refused(Store("s3://no-such-bucket/run", s3_env.endpoint_url))
    assert error.setting == "store.root" and "no-such-bucket" in error.problem
