"""Files that are not on this machine: ``file://``, ``memory://``, ``s3://`` and ``http://``.

S3 is moto's server, a real one on a loopback port; HTTP is a small server that can be told to drop
connections. No test waits: the back-off goes through ``storage.time``, which is replaced.
"""

from __future__ import annotations

import gzip
import json
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from fast_axolotl import open_dataset, streaming_dataset_reader
from fast_axolotl.errors import AccessError, DataError, MissingExtraError, MissingFileError
from fast_axolotl.reading import storage
from fast_axolotl.reading.files import find_files
from support.files import jsonl_bytes, parquet_bytes, read_rows

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:(botocore|aiobotocore|moto|werkzeug|responses|s3fs).*",
    "ignore:datetime.datetime.utcnow:DeprecationWarning",
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)

KEY, SECRET = "testing", "testing-secret"
BUCKET = "rows"


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"id": index, "text": f"rów {index}"} for index in range(count)]


def encoded(ending: str) -> bytes:
    """300 rows as a file of this kind."""
    if ending == "parquet":
        return parquet_bytes(rows_of(300), row_group_size=100)
    data = jsonl_bytes(rows_of(300))
    return gzip.compress(data) if ending.endswith(".gz") else data


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The waits that were asked for, none of which happens."""
    asked: list[float] = []
    monkeypatch.setattr(storage, "time", SimpleNamespace(sleep=asked.append))
    yield asked
    for thread in threading.enumerate():
        if thread.name.startswith("fast-axolotl-reader"):
            thread.join(30)


# file:// and memory://


def test_a_file_uri_reads_a_local_file(tmp_path: Path) -> None:
    path = tmp_path / "rows with space.jsonl"
    path.write_bytes(jsonl_bytes(rows_of(9)))
    assert read_rows(f"file://{path}") == rows_of(9)


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_memory_uri_reads(memory: Any, ending: str) -> None:
    memory.pipe_file(f"/data/rows.{ending}", encoded(ending))
    assert read_rows(f"memory://data/rows.{ending}") == rows_of(300)
    (batch,) = streaming_dataset_reader(f"memory://data/rows.{ending}", ending)
    assert batch["id"] == list(range(300))


def test_a_memory_folder_and_a_glob_read_their_files_in_order(memory: Any) -> None:
    for index in (2, 0, 1):
        memory.pipe_file(f"/data/part-{index}.jsonl", jsonl_bytes(rows_of(30)[index * 10 :][:10]))
    memory.pipe_file("/data/README.md", b"hello")
    assert read_rows("memory://data") == rows_of(30)
    assert read_rows("memory://data/part-*.jsonl") == rows_of(30)
    reader = open_dataset("memory://data")
    assert reader.stats.ignored_files == ("memory://data/README.md",)


def test_a_missing_memory_file_is_a_missing_file_at_once(memory: Any, delays: list[float]) -> None:
    with pytest.raises(MissingFileError, match=r"memory://data/absent\.jsonl"):
        open_dataset("memory://data/absent.jsonl")
    assert delays == []


def test_an_address_of_an_unknown_kind_is_an_error_that_names_it() -> None:
    with pytest.raises(DataError, match=r"nosuch://bucket/rows\.jsonl"):
        open_dataset("nosuch://bucket/rows.jsonl")


def test_a_damaged_remote_file_names_its_address(memory: Any) -> None:
    memory.pipe_file("/rows.jsonl", jsonl_bytes(rows_of(3)) + b"broken\n")
    with pytest.raises(DataError, match=r"memory://rows\.jsonl, line 4: "):
        read_rows("memory://rows.jsonl")
    memory.pipe_file("/rows.parquet", parquet_bytes(rows_of(3))[:-20])
    with pytest.raises(DataError, match=r"memory://rows\.parquet"):
        read_rows("memory://rows.parquet")


def test_a_remote_file_that_shrinks_is_an_error(memory: Any, delays: list[float]) -> None:
    data = jsonl_bytes([{"text": "x" * 10_000}] * 2000)
    memory.pipe_file("/rows.jsonl", data)
    reader = open_dataset("memory://rows.jsonl", memory_budget=16 * 1024 * 1024, num_threads=1)
    batches = iter(reader)
    next(batches)
    memory.pipe_file("/rows.jsonl", data[:1000])
    with pytest.raises(DataError, match=r"memory://rows\.jsonl"):
        list(batches)


# s3://


@dataclass
class S3:
    """A server, and what a client needs to reach it."""

    endpoint: str

    @property
    def options(self) -> dict[str, Any]:
        return {
            "key": KEY,
            "secret": SECRET,
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def uri_for_pyarrow(self, path: str) -> str:
        host = self.endpoint.removeprefix("http://")
        return (
            f"s3://{KEY}:{SECRET}@{BUCKET}/{path}?endpoint_override={host}&scheme=http"
            "&region=us-east-1"
        )


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    filesystem = fsspec.filesystem("s3", skip_instance_cache=True, **S3(endpoint).options)
    filesystem.call_s3("create_bucket", Bucket=BUCKET)
    for index in range(3):
        part = rows_of(30)[index * 10 :][:10]
        filesystem.pipe_file(f"{BUCKET}/parts/part-{index}.jsonl", jsonl_bytes(part))
    filesystem.pipe_file(f"{BUCKET}/parts/README.md", b"hello")
    for ending in ("parquet", "jsonl"):
        filesystem.pipe_file(f"{BUCKET}/rows.{ending}", encoded(ending))
    filesystem.pipe_file(f"{BUCKET}/large.jsonl", jsonl_bytes(rows_of(20_000)))
    yield S3(endpoint)
    server.stop()


@pytest.fixture
def without_s3fs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *((name, 300) for name in ("rows.parquet", "rows.jsonl")),
        *((name, 30) for name in ("parts", "parts/", "parts/part-*.jsonl")),
    ],
)
def test_objects_prefixes_and_globs_read(s3: S3, name: str, count: int) -> None:
    assert read_rows(f"s3://{BUCKET}/{name}", storage_options=s3.options) == rows_of(count)


@pytest.mark.parametrize(
    "uri", [f"s3://{BUCKET}/absent.parquet", f"s3://{BUCKET}/absent-*", "s3://no-such-bucket/rows"]
)
def test_a_missing_object_is_a_missing_file_at_once(s3: S3, delays: list[float], uri: str) -> None:
    with pytest.raises(MissingFileError, match=re.escape(uri)):
        open_dataset(uri, storage_options=s3.options)
    assert delays == []


@pytest.mark.parametrize(
    ("name", "count"),
    [("rows.parquet", 300), ("rows.jsonl", 300), ("parts", 30), ("large.jsonl", 20_000)],
)
def test_pyarrow_reads_where_s3fs_is_missing(
    s3: S3, without_s3fs: None, name: str, count: int
) -> None:
    """Several byte ranges, too: fsspec's wrapper gives the whole file for any of them."""
    assert read_rows(s3.uri_for_pyarrow(name)) == rows_of(count)


def test_a_remote_reader_resumes_where_it_stopped(s3: S3) -> None:
    uris = [f"s3://{BUCKET}/rows.parquet", f"s3://{BUCKET}/rows.jsonl"]
    for options in ({}, {"shuffle": 3}):
        whole = read_rows(uris, storage_options=s3.options, batch_size=70, **options)
        first = open_dataset(uris, storage_options=s3.options, batch_size=70, **options)
        batches = iter(first)
        head = [row for _ in range(3) for row in next(batches).to_pylist()]
        state = json.loads(json.dumps(first.state_dict()))
        first.close()
        second = open_dataset(uris, storage_options=s3.options, batch_size=70, **options)
        second.load_state_dict(state)
        tail = [row for batch in second for row in batch.to_pylist()]
        assert head + tail == whole


def test_shards_of_a_remote_dataset_partition_it(s3: S3) -> None:
    uri = f"s3://{BUCKET}/parts"
    shares = [read_rows(uri, storage_options=s3.options, shard=(index, 3)) for index in range(3)]
    assert sorted(row["id"] for share in shares for row in share) == list(range(30))


def test_a_remote_source_travels_to_another_process(s3: S3) -> None:
    sources, _ = find_files(f"s3://{BUCKET}/rows.jsonl", storage_options=s3.options)
    again = pickle.loads(pickle.dumps(sources[0]))
    assert again.read_at(0, 20) == jsonl_bytes(rows_of(300))[:20]


def test_without_s3fs_storage_options_name_the_extra(s3: S3, without_s3fs: None) -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'fast-axolotl\[s3\]'"):
        open_dataset(f"s3://{BUCKET}/rows.parquet", storage_options=s3.options)


# http://


@dataclass
class Site:
    """What the server serves, and how it fails."""

    files: dict[str, bytes] = field(default_factory=dict)
    drops_left: int = 0
    """Bodies still to be cut short."""
    refused: set[str] = field(default_factory=set)
    requests: int = 0
    url: str = ""

    def take_drop(self) -> bool:
        self.drops_left -= 1
        return self.drops_left >= 0


class Handler(BaseHTTPRequestHandler):
    """Ranges, dropped connections, 403 and 404."""

    protocol_version = "HTTP/1.1"
    site: Site

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        return None

    def _answer(self, *, with_body: bool) -> None:
        self.site.requests += with_body
        data = self.site.files.get(self.path)
        if self.path in self.site.refused or data is None:
            self.send_response(403 if self.path in self.site.refused else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start, stop = self._range(len(data))
        body = data[start:stop]
        self.send_response(200 if len(body) == len(data) else 206)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body)))
        if len(body) != len(data):
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.end_headers()
        if with_body and self.site.take_drop():
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.close_connection = True
        elif with_body:
            self.wfile.write(body)

    def _range(self, size: int) -> tuple[int, int]:
        told = self.headers.get("Range", "").removeprefix("bytes=")
        if not told:
            return 0, size
        first, _, last = told.partition("-")
        return int(first), min(size, int(last) + 1) if last else size


@pytest.fixture
def site() -> Iterator[Site]:
    found = Site()
    handler = type("SiteHandler", (Handler,), {"site": found})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield found
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_an_http_file_reads(site: Site, ending: str) -> None:
    site.files[f"/rows.{ending}"] = encoded(ending)
    assert read_rows(f"{site.url}/rows.{ending}") == rows_of(300)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_dropped_connections_are_retried_with_growing_delays(
    site: Site, delays: list[float], ending: str
) -> None:
    site.files[f"/rows.{ending}"] = encoded(ending)
    site.drops_left = 3
    assert read_rows(f"{site.url}/rows.{ending}", num_threads=1) == rows_of(300)
    assert site.drops_left < 0
    assert delays[:3] == [0.2, 0.4, 0.8]


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "jsonl.gz"])
def test_a_connection_that_always_drops_is_an_error_that_counts_the_attempts(
    site: Site, delays: list[float], ending: str
) -> None:
    site.files[f"/rows.{ending}"] = encoded(ending)
    site.drops_left = 10**9
    uri = f"{site.url}/rows.{ending}"
    with pytest.raises(DataError, match=f"failed {storage.RETRIES} times") as caught:
        read_rows(uri, num_threads=1)
    assert caught.value.path == uri
    assert "check the network" in str(caught.value)
    assert delays == [0.2, 0.4, 0.8, 1.6]
    assert site.requests >= storage.RETRIES


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_connection_that_begins_to_drop_while_reading(
    site: Site, delays: list[float], ending: str
) -> None:
    """The footer and the first bytes came; the rows do not."""
    site.files[f"/rows.{ending}"] = encoded(ending)
    reader = open_dataset(f"{site.url}/rows.{ending}", num_threads=1)
    site.drops_left = 10**9
    with pytest.raises(DataError, match=f"failed {storage.RETRIES} times") as caught:
        list(reader)
    assert caught.value.path == f"{site.url}/rows.{ending}"
    assert "\n" not in str(caught.value)


def test_a_page_that_is_absent_or_refused_is_an_error_at_once(
    site: Site, delays: list[float]
) -> None:
    site.refused.add("/rows.jsonl")
    with pytest.raises(AccessError, match="credentials"):
        open_dataset(f"{site.url}/rows.jsonl")
    with pytest.raises(MissingFileError, match=r"/absent\.jsonl"):
        open_dataset(f"{site.url}/absent.jsonl")
    assert delays == []


def test_a_server_that_is_not_there_is_an_error_that_names_it(delays: list[float]) -> None:
    with pytest.raises(DataError, match=f"failed {storage.RETRIES} times") as caught:
        open_dataset("http://127.0.0.1:9/rows.jsonl")
    assert caught.value.path == "http://127.0.0.1:9/rows.jsonl"
    assert len(delays) == storage.RETRIES - 1


class NoCredentialsError(Exception):
    """As botocore calls it."""


@pytest.mark.parametrize(
    ("failure", "kind", "waits"),
    [
        (ConnectionResetError("reset by peer"), DataError, [0.2, 0.4, 0.8, 1.6]),
        (NoCredentialsError("Unable to locate credentials"), AccessError, []),
    ],
)
def test_a_source_sleeps_through_its_own_seam(
    failure: Exception, kind: type[DataError], waits: list[float]
) -> None:
    class Failing:
        def cat_file(self, *_: object, **__: object) -> bytes:
            raise failure

    asked: list[float] = []
    source = storage.Source(
        path="s3://bucket/rows", num_bytes=10, filesystem=Failing(), sleep=asked.append
    )
    with pytest.raises(kind, match=type(failure).__name__):
        source.read_at(0, 10)
    assert asked == waits


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
