"""Files that are not on this machine: ``file://``, ``memory://``, ``s3://`` and ``http://``.

S3 is moto's server, a real one on a loopback port; HTTP is a small server that can be told how to
fail. No test waits: the back-off goes through ``remote.pause`` and ``remote.clock``.
"""

from __future__ import annotations

import gzip
import lzma
import multiprocessing
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pyarrow as pa
import pytest

from fast_axolotl import open_dataset
from fast_axolotl.errors import (
    AccessError,
    DataError,
    MissingExtraError,
    MissingFileError,
    ResumeError,
)
from fast_axolotl.reading import remote
from support.files import arrow_bytes, jsonl_bytes, parquet_bytes, read_rows
from support.http_site import Site, http_site, s3_bucket

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:(botocore|aiobotocore|moto|werkzeug|responses|s3fs).*",
    "ignore:datetime.datetime.utcnow:DeprecationWarning",
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)

BUCKET = "rows"


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"id": index, "text": f"rów {index}"} for index in range(count)]


def encoded(ending: str) -> bytes:
    """300 rows as a file of this kind."""
    if ending == "parquet":
        return parquet_bytes(rows_of(300), row_group_size=100)
    if ending == "arrow":
        return arrow_bytes(rows_of(300), batch_rows=100)
    data = jsonl_bytes(rows_of(300))
    return gzip.compress(data) if ending.endswith(".gz") else data


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The waits that were asked for, none of which happens; the jitter is at its largest."""
    asked: list[float] = []
    monkeypatch.setattr(remote, "pause", asked.append)
    monkeypatch.setattr(remote, "clock", lambda: sum(asked))
    monkeypatch.setattr(remote, "random", SimpleNamespace(uniform=lambda _, most: most))
    yield asked
    for thread in threading.enumerate():
        if thread.name.startswith("fast-axolotl-reader"):
            thread.join(30)


# file:// and memory://


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


@pytest.mark.parametrize(("kind", "count"), [("arrow", 1), ("jsonl", 20)])
def test_a_state_of_mapped_or_joined_files_does_not_fit_their_remote_copies(
    memory: Any, tmp_path: Path, kind: str, count: int
) -> None:
    """They are cut into other units."""
    data = encoded("arrow") if kind == "arrow" else jsonl_bytes(rows_of(3))
    for name in (f"{number}.{kind}" for number in range(count)):
        (tmp_path / name).write_bytes(data)
        memory.pipe_file(f"/rows/{name}", data)
    with pytest.raises(ResumeError, match="other files"):
        open_dataset("memory://rows").load_state_dict(open_dataset(tmp_path).state_dict())


def test_a_damaged_remote_file_names_its_address(memory: Any) -> None:
    memory.pipe_file("/rows.jsonl", jsonl_bytes(rows_of(3)) + b"broken\n")
    with pytest.raises(DataError, match=r"memory://rows\.jsonl, line 4: "):
        read_rows("memory://rows.jsonl")
    memory.pipe_file("/rows.parquet", parquet_bytes(rows_of(3))[:-20])
    with pytest.raises(DataError, match=r"memory://rows\.parquet"):
        read_rows("memory://rows.parquet")


# s3://


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    """What a client needs to reach a server with some objects."""
    with s3_bucket(BUCKET) as (filesystem, options):
        for index in range(3):
            part = rows_of(30)[index * 10 :][:10]
            filesystem.pipe_file(f"{BUCKET}/parts/part-{index}.jsonl", jsonl_bytes(part))
        filesystem.pipe_file(f"{BUCKET}/parts/README.md", b"hello")
        for ending in ("parquet", "jsonl"):
            filesystem.pipe_file(f"{BUCKET}/rows.{ending}", encoded(ending))
        yield options


def test_objects_prefixes_and_globs_read(s3: dict[str, Any]) -> None:
    for name in ("rows.parquet", "rows.jsonl", "parts", "parts/", "parts/part-*.jsonl"):
        count = 30 if name.startswith("parts") else 300
        assert read_rows(f"s3://{BUCKET}/{name}", storage_options=s3) == rows_of(count), name
    reader = open_dataset(f"s3://{BUCKET}/parts", storage_options=s3)
    assert reader.stats.ignored_files == (f"s3://{BUCKET}/parts/README.md",)


def test_an_object_that_is_replaced_while_it_is_read_is_an_error(
    s3: dict[str, Any], delays: list[float]
) -> None:
    uri = f"s3://{BUCKET}/changing.jsonl"
    filesystem = fsspec.filesystem("s3", **s3)
    filesystem.pipe_file(uri, jsonl_bytes(rows_of(300)))
    reader = open_dataset(uri, storage_options=s3)
    filesystem.pipe_file(uri, jsonl_bytes(rows_of(300)[::-1]))
    with pytest.raises(DataError, match="changed while it was read"):
        list(reader)
    assert delays == []


def test_a_file_system_without_its_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(MissingExtraError, match="pip install s3fs"):
        open_dataset(f"s3://{BUCKET}/rows.parquet")


# http://


@pytest.fixture
def site() -> Iterator[Site]:
    with http_site() as found:
        yield found


@pytest.fixture(params=["jsonl", "parquet", "jsonl.gz", "arrow"])
def uri(site: Site, request: pytest.FixtureRequest) -> str:
    """300 rows on the site, in each kind of file."""
    name = f"/rows.{request.param}"
    site.files[name] = encoded(request.param)
    return site.url + name


@pytest.mark.parametrize("fault", ["drop", "reset", "short", "long", "503", "429"])
def test_whatever_a_server_does_the_rows_come_complete_and_in_order(
    site: Site, uri: str, delays: list[float], fault: str
) -> None:
    site.faults = [fault, fault, "", fault, fault]
    assert read_rows(uri, num_threads=1) == rows_of(300)
    assert len(delays) >= 2
    assert set(delays) == {0.5, 1.0}


def test_a_connection_without_a_byte_counts_as_failed_and_a_slow_one_does_not(
    site: Site, uri: str, delays: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "STALL_SECONDS", 0.15)
    site.slow_seconds, site.faults = 0.05, ["slow"]
    assert read_rows(uri, num_threads=1) == rows_of(300)
    assert delays == []
    site.slow_seconds, site.faults = 0.5, ["hang"]
    assert read_rows(uri, num_threads=1) == rows_of(300)
    assert delays == [0.5]


@pytest.mark.parametrize("fault", ["drop", "long", "500"])
def test_a_connection_that_begins_to_fail_is_an_error_that_counts_the_attempts(
    site: Site, uri: str, delays: list[float], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The footer and the first bytes came; the rows do not."""
    reader = open_dataset(uri, num_threads=1, retry_seconds=100)
    site.always = fault
    with pytest.raises(DataError, match=r"failed \d+ times in \d+ s, last with") as caught:
        list(reader)
    assert caught.value.path == uri
    assert "check the network" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert delays[:8] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert 70 <= sum(delays) <= 100
    assert "retrying for up to 100 s" in caplog.text


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        ("refused", AccessError, "credentials"),
        ("absent", MissingFileError, "no such file"),
        ("400", DataError, "storage_options"),
        ("no ranges", DataError, "range requests"),
        ("replaced, told by its tag", DataError, "changed while it was read"),
        ("replaced, told by its time", DataError, "changed while it was read"),
    ],
)
def test_what_cannot_get_better_is_an_error_at_once(
    site: Site, uri: str, delays: list[float], what: str, error: type[DataError], text: str
) -> None:
    name, data = site.files.popitem()
    site.files = {} if what == "absent" else {name: data}
    site.refused, site.with_tags = {name} if what == "refused" else set(), "time" not in what
    if what in ("400", "no ranges"):
        site.always, site.files[name] = what, data + bytes(70_000)

    def read() -> None:
        reader = open_dataset(uri, num_threads=1)
        if what.startswith("replaced"):
            site.files[name], site.changed = data[::-1], site.changed + 1
        list(reader)

    with pytest.raises(error, match=text) as caught:
        read()
    assert caught.value.path == uri
    assert delays == []


def test_a_forked_process_reads_on(site: Site, uri: str) -> None:
    """The event loop of fsspec stays behind in the process that forked."""
    reader = open_dataset(uri)

    def read() -> None:
        assert sum(batch.num_rows for batch in reader) == 300

    child = multiprocessing.get_context("fork").Process(target=read)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    read()


# Signed addresses


def test_a_state_resumes_with_another_signature_and_no_message_shows_one(
    site: Site, uri: str, delays: list[float]
) -> None:
    first = open_dataset(f"{uri}?part=1&X-Amz-Signature=s3cret", batch_size=70)
    batches = iter(first)
    head = next(batches).to_pylist()
    state = first.state_dict()
    first.close()
    second = open_dataset(f"{uri}?part=1&X-Amz-Signature=0ther", batch_size=70, num_threads=1)
    second.load_state_dict(state)
    assert head + [row for batch in second for row in batch.to_pylist()] == rows_of(300)
    assert "0ther" not in repr(second.files)

    site.always = "403"
    with pytest.raises(AccessError, match="expired, open a new signed URL") as caught:
        list(second)
    assert caught.value.path == f"{uri}?part=1&X-Amz-Signature=***"
    site.always = "502"
    with pytest.raises(DataError, match="X-Amz-Signature=\\*\\*\\*") as caught:
        list(second)
    assert "0ther" not in "".join(traceback.format_exception(caught.value))


# Few requests


def parquet_of(rows: int, columns: int, group: int) -> bytes:
    """Uncompressed, so that sizes are as they look: 8 bytes a value."""
    numbers = pa.array(range(rows), pa.int64())
    table = pa.table({f"c{index}": numbers for index in range(columns)})
    return parquet_bytes(table, row_group_size=group, compression="none", use_dictionary=False)


@pytest.mark.parametrize(
    ("rows", "columns", "group", "wanted", "most"),
    [
        (20_000, 8, 2_000, None, 14),
        (400_000, 8, 40_000, None, 14),
        (20_000, 8, 2_000, ["c1", "c6"], 22),
        (200_000, 60, 200_000, ["c1"], 5),
    ],
)
def test_a_remote_row_group_takes_a_request_or_one_for_each_run_of_wanted_columns(
    site: Site, rows: int, columns: int, group: int, wanted: list[str] | None, most: int
) -> None:
    """Two more for the first and the last bytes; hardly more bytes than wanted come."""
    site.files["/rows.parquet"] = parquet_of(rows, columns, group)
    reader = open_dataset(f"{site.url}/rows.parquet", columns=wanted)
    assert sum(batch.num_rows for batch in reader) == rows
    assert len(site.requests) <= most
    wanted_bytes = rows * 8 * (columns if wanted is None else len(wanted))
    pieces = (2 + 2 * rows // group) * 64 * 1024
    assert site.num_bytes <= wanted_bytes * 1.2 + pieces


@pytest.mark.parametrize("ending", ["arrow", "jsonl.gz", "jsonl.xz", "arrow-stream"])
def test_reads_that_follow_each_other_grow(site: Site, ending: str) -> None:
    rows = [{"id": index, "text": os.urandom(500).hex()} for index in range(4_000)]
    data = {
        "arrow": lambda: arrow_bytes(rows, batch_rows=100),
        "arrow-stream": lambda: arrow_bytes(rows, pa.ipc.new_stream, batch_rows=100),
        "jsonl.gz": lambda: gzip.compress(jsonl_bytes(rows), 1),
        "jsonl.xz": lambda: lzma.compress(jsonl_bytes(rows), preset=0),
    }[ending]()
    site.files["/rows"] = data
    assert read_rows(f"{site.url}/rows", format=ending.partition("-")[0]) == rows
    assert len(site.requests) <= (60 if ending.startswith("arrow") else 20)  # 40 headers
    passes = 1.2 if ending.startswith("arrow") else 2.0  # the first rows tell the types
    assert site.num_bytes <= passes * len(data) + 4 * 64 * 1024


def test_fsspec_keeps_what_was_read_where_the_path_says_so(site: Site, tmp_path: Path) -> None:
    site.files["/rows.jsonl"] = encoded("jsonl")
    path, options = f"filecache::{site.url}/rows.jsonl", {"cache_storage": str(tmp_path)}
    for _ in range(2):
        assert read_rows(path, storage_options={"filecache": options}) == rows_of(300)
    assert len(site.requests) == 1


LEAVE_EARLY = """
import io
import fsspec, pyarrow as pa, pyarrow.parquet as pq
from fast_axolotl import open_dataset
sink = io.BytesIO()
table = pa.table({"text": ["x" * 2000] * 10_000})
pq.write_table(table, sink, row_group_size=500, compression="none", use_dictionary=False)
fsspec.filesystem("memory").pipe_file("/rows.parquet", sink.getvalue())
batches = iter(open_dataset("memory://rows.parquet", num_threads=4))
next(batches)
"""


def test_a_program_that_ends_in_the_middle_of_a_remote_file_ends_cleanly() -> None:
    """A reader thread inside pyarrow must not come back to an interpreter that is gone."""
    command = [sys.executable, "-c", LEAVE_EARLY]
    children = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for child in children:
        _, errors = child.communicate(timeout=60)
        assert (child.returncode, errors) == (0, "")
