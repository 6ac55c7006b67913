"""The store's promises, each held on a local folder and on a real S3 server over HTTP."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tasks.store.store as store_module
from tasks.errors import DeadlineExceeded, UserError
from tasks.services import free_port
from tasks.store import CorruptObject, Store, folder_objects
from tests.integration.s3 import BUCKET, S3


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of either kind."""
    if request.param == "folder":
        return Store(str(tmp_path / "store"))
    s3: S3 = request.getfixturevalue("s3_env")
    return Store(f"s3://{BUCKET}/{secrets.token_hex(6)}", s3.endpoint_url)


@pytest.fixture
def remote(s3_env: S3) -> Store:
    return Store(f"s3://{BUCKET}/{secrets.token_hex(6)}", s3_env.endpoint_url)


# round trips


def test_what_was_put_is_what_get_and_fetch_return(store: Store, tmp_path: Path) -> None:
    big = tmp_path / "big.bin"
    big.write_bytes(os.urandom(12 << 20))  # more than one part of a multipart upload
    written = store.put("weights/1", {"a.json": b"{}", "empty": b"", "deep/er/big.bin": big}, version=1)
    assert written["version"] == 1 and written == store.manifest("weights/1")
    assert store.get("weights/1", "a.json") == b"{}" and store.get("weights/1", "empty") == b""
    manifest = store.fetch("weights/1", tmp_path / "copy")
    assert (tmp_path / "copy/deep/er/big.bin").read_bytes() == big.read_bytes()
    assert {
        str(p.relative_to(tmp_path / "copy")) for p in (tmp_path / "copy").rglob("*") if p.is_file()
    } == set(manifest["files"])
    assert set(folder_objects(tmp_path / "copy")) == {"a.json", "empty", "deep/er/big.bin"}
    digest = hashlib.sha256(big.read_bytes()).hexdigest()
    assert manifest["files"]["deep/er/big.bin"] == {"size": 12 << 20, "sha256": digest}


def test_what_was_fetched_read_only_outlives_the_store_and_leaves_it_as_it_was(
    store: Store, tmp_path: Path
) -> None:
    store.put("weights/1", {"f": b"x" * 5000})
    for _ in range(2):  # the second one finds the files of the first
        store.fetch("weights/1", tmp_path / "copy", read_only=True)
    assert [p.name for p in (tmp_path / "copy").iterdir()] == ["f"]
    store.put("weights/2", {"f": b"y" * 5000})
    store.fetch("weights/2", tmp_path / "copy", read_only=True)  # over the file of version 1
    assert store.get("weights/1", "f") == b"x" * 5000
    store.delete("weights/2")
    assert (tmp_path / "copy/f").read_bytes() == b"y" * 5000


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.binary(max_size=3000), name=st.from_regex(r"[a-z0-9][a-z0-9 ._+=-]{0,20}[a-z0-9]", fullmatch=True)
)
def test_any_bytes_under_any_usual_name_come_back(store: Store, data: bytes, name: str) -> None:
    key = f"{secrets.token_hex(4)}/{name}"
    assert not store.exists(key)
    store.write(key, data)
    assert store.exists(key) and store.read(key) == data
    assert store.names(key.split("/")[0]) == [name]


def test_a_store_below_another_and_one_opened_by_its_uri_see_the_same_objects(store: Store) -> None:
    store.below("run").write_json("status.json", {"a": 1})
    assert store.read_json("run/status.json") == {"a": 1}
    again = Store(store.below("run").uri, store.endpoint_url)
    assert again.read_json("status.json") == {"a": 1} and again.uri == store.below("run").uri


def test_an_object_that_is_rewritten_reads_as_its_newest_content(store: Store) -> None:
    for beat in range(5):
        store.write_json("services/trainer.json", {"beat": beat})
        assert store.read_json("services/trainer.json") == {"beat": beat}


def test_a_second_put_changes_nothing(store: Store) -> None:
    first = store.put("batches/0", {"batch.parquet": b"one"}, k=0)
    assert store.put("batches/0", {"batch.parquet": b"two"}, k=9) == first
    assert store.get("batches/0", "batch.parquet") == b"one"


def test_a_copy_holds_the_same_objects_and_facts(store: Store) -> None:
    store.put("weights/-1", {"model": b"w"}, version=-1, probe=[1])
    store.copy("weights/-1", "weights/0", version=0)
    manifest = store.manifest("weights/0")
    assert manifest is not None and (manifest["version"], manifest["probe"]) == (0, [1])
    assert store.get("weights/0", "model") == b"w"


# absent things


def test_what_is_not_there_says_so(store: Store, tmp_path: Path) -> None:
    assert store.manifest("weights/9") is None and not store.exists("weights/9")
    assert store.names("nothing") == [] and store.numbers("nothing") == []
    for read in (
        lambda: store.read("x"),
        lambda: store.get("w", "x"),
        lambda: store.fetch("w", tmp_path / "f"),
    ):
        with pytest.raises(FileNotFoundError):
            read()
    store.delete("nothing")
    with pytest.raises(DeadlineExceeded, match=r"weights/9/manifest\.json.*look at the trainer"):
        store.wait_for("weights/9", 0.3, "the trainer's log")


# listings


def test_numbers_right_after_writes_are_complete_sorted_and_may_be_negative(store: Store) -> None:
    wanted = [-3, -2, -1, 0, 9, 10, 11, 100]
    for number in wanted:
        store.put(f"weights/{number}", {"f": b"x"})
        store.write_json(f"metrics/{number}.json", {})
        assert number in store.numbers("weights") and number in store.numbers("metrics")
    assert store.numbers("weights") == store.numbers("metrics") == wanted


def test_a_listing_of_more_than_a_thousand_names_is_complete(store: Store) -> None:
    count = 1010  # S3 answers with at most 1000 a page
    threads = [
        threading.Thread(
            target=lambda part=part: [
                store.write(f"groups/0/{i}.parquet", b"x") for i in range(part, count, 8)
            ]
        )
        for part in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.numbers("groups/0") == list(range(count))
    assert store.names("groups") == ["0"]


def test_a_deleted_set_is_gone_at_once_and_its_neighbours_stay(store: Store) -> None:
    for version in (1, 10, 2):
        store.put(f"weights/{version}", {"f": b"x", "deep/g": b"y"})
    store.write("weights-note", b"stays")
    store.delete("weights/1")
    assert store.manifest("weights/1") is None and not store.exists("weights/1/f")
    assert store.numbers("weights") == [2, 10]
    assert store.get("weights/10", "deep/g") == b"y" and store.read("weights-note") == b"stays"
    store.put("weights/1", {"f": b"new"})
    assert store.get("weights/1", "f") == b"new" and store.numbers("weights") == [1, 2, 10]
    store.delete("weights-note")
    assert not store.exists("weights-note")


# a reader in the middle of a write


def test_a_reader_that_arrives_mid_write_sees_nothing_or_everything(store: Store, tmp_path: Path) -> None:
    versions = 12
    content = {f"part-{i}": bytes([i]) * (300_000 + i) for i in range(3)}

    def write() -> None:
        for version in range(versions):
            store.put(f"weights/{version}", dict(content), version=version)

    writer = threading.Thread(target=write)
    writer.start()
    seen_absent = 0
    for version in range(versions):
        while store.manifest(f"weights/{version}") is None:
            seen_absent += 1
        folder = tmp_path / str(version)
        store.fetch(f"weights/{version}", folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == content
    writer.join()
    assert seen_absent > 0


def test_a_reader_of_a_rewritten_object_never_sees_part_of_it(store: Store) -> None:
    done = threading.Event()

    def write() -> None:
        beat = 0
        while not done.is_set():
            beat += 1
            store.write_json(
                "services/engine-0.json", {"beat": beat, "pad": "x" * (1 + beat * 997 % 100_000)}
            )

    store.write_json("services/engine-0.json", {"beat": 0, "pad": ""})
    writer = threading.Thread(target=write)
    writer.start()
    try:
        until, last = time.monotonic() + 2, 0
        while time.monotonic() < until:
            beat = store.read_json("services/engine-0.json")["beat"]
            assert beat >= last
            last = beat
    finally:
        done.set()
        writer.join()
    assert last > 5


def test_a_writer_killed_in_the_middle_leaves_nothing_that_a_reader_trusts(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    source = tmp_path / "big"
    source.write_bytes(bytes(400 << 20))
    script = (
        "import sys; from pathlib import Path; from tasks.store import Store\n"
        "print('go', flush=True); Store(sys.argv[1]).put('weights/1', {'big': Path(sys.argv[2])})"
    )
    process = subprocess.Popen([sys.executable, "-c", script, store.uri, str(source)], stdout=subprocess.PIPE)
    until = time.monotonic() + 60
    while not list(Path(store.uri).rglob(".big.*")) and time.monotonic() < until:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = [path.name for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert left and all(name.startswith(".big.") for name in left), "the kill came too late or too early"
    assert store.manifest("weights/1") is None and store.names("weights/1") == []
    assert not store.exists("weights/1/big")
    store.put("weights/1", {"big": b"whole"})
    assert store.get("weights/1", "big") == b"whole"


# damage


def damage(store: Store, key: str, how: str) -> None:
    data = store.read(key)
    if how == "missing":
        store.delete(key)
    else:
        half = len(data) // 2
        flipped = data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
        store.write(key, data[:half] if how == "truncated" else flipped)


@pytest.mark.parametrize("how", ["truncated", "flipped", "missing"])
def test_a_damaged_object_is_named_and_never_returned(store: Store, tmp_path: Path, how: str) -> None:
    store.put("weights/3", {"model.safetensors": os.urandom(50_000), "config.json": b"{}"})
    damage(store, "weights/3/model.safetensors", how)
    with pytest.raises(CorruptObject, match=r"weights/3/model\.safetensors"):
        store.get("weights/3", "model.safetensors")
    for read_only in (False, True):
        with pytest.raises(CorruptObject, match=r"weights/3/model\.safetensors"):
            store.fetch("weights/3", tmp_path / "f", read_only)
    assert not (tmp_path / "f/model.safetensors").exists() and list((tmp_path / "f").glob(".*")) == []


# faults of the network


def test_answers_of_503_are_survived(remote: Store, s3_env: S3, tmp_path: Path) -> None:
    for number in range(3):
        s3_env.faults.refuse = 3
        remote.put(f"weights/{number}", {"f": b"x" * 1000, "g": b"y"})
        s3_env.faults.refuse = 3
        assert remote.exists(f"weights/{number}/f")  # and not: it is not there
        s3_env.faults.refuse = 3
        assert remote.get(f"weights/{number}", "f") == b"x" * 1000
        s3_env.faults.refuse = 3
        remote.fetch(f"weights/{number}", tmp_path / str(number))
        s3_env.faults.refuse = 3
        assert remote.numbers("weights") == list(range(number + 1))
    assert s3_env.faults.refused >= 36


def test_an_outage_of_seconds_is_survived(remote: Store, s3_env: S3) -> None:
    s3_env.faults.refuse_until = time.monotonic() + 6
    started = time.monotonic()
    remote.put("weights/1", {"f": b"x"})
    assert time.monotonic() - started > 5
    assert remote.get("weights/1", "f") == b"x"


def test_an_answer_cut_on_its_way_is_read_again(remote: Store, s3_env: S3, tmp_path: Path) -> None:
    content = os.urandom(200_000)
    remote.put("weights/1", {"f": content})
    for cut in (1, 2):
        s3_env.faults.cut = cut
        assert remote.get("weights/1", "f") == content
        s3_env.faults.cut = cut
        remote.fetch("weights/1", tmp_path / str(cut))
        assert (tmp_path / str(cut) / "f").read_bytes() == content
    assert s3_env.faults.was_cut == 6


def test_a_dead_endpoint_is_a_deadline_that_says_where_to_look(
    s3_env: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "RETRY_DEADLINE_S", 1.0)
    url = f"http://127.0.0.1:{free_port()}"
    store = Store(f"s3://{BUCKET}/run", url)
    for operation in (lambda: store.read("a"), lambda: store.write("a", b"x"), lambda: store.names("a")):
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded) as caught:
            operation()
        assert time.monotonic() - started < 15
        assert f"s3://{BUCKET}/run" in str(caught.value) and url in str(caught.value)


def test_no_credential_appears_in_any_log_or_error(
    remote: Store, s3_env: S3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)  # DEBUG is botocore's own dump of requests, which nobody runs with
    texts = [repr(remote), remote.uri]
    s3_env.faults.refuse = 4
    remote.put("weights/1", {"f": b"x"})
    monkeypatch.setattr(store_module, "RETRY_DEADLINE_S", 0.5)
    s3_env.faults.refuse_until = time.monotonic() + 30
    for operation in (lambda: remote.read("a"), lambda: remote.write("a", b"x"), lambda: remote.names("a")):
        with pytest.raises(DeadlineExceeded) as caught:
            operation()
        error: BaseException | None = caught.value
        while error is not None:
            texts.append(f"{error} {error!r}")
            error = error.__cause__ or error.__context__
    texts.append(caplog.text)
    for secret in (s3_env.access_key, s3_env.secret_key):
        assert not any(secret in text for text in texts)


def test_an_unknown_scheme_names_the_setting() -> None:
    with pytest.raises(UserError) as caught:
        Store("nope://bucket/x")
    assert caught.value.setting == "store.root"
