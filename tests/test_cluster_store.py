"""The work folder of a job on an object store, and storage that fails for a while."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from fast_axolotl.cluster import engines, store
from fast_axolotl.cluster.engines import run_tasks
from fast_axolotl.cluster.job import Output
from fast_axolotl.cluster.shards import deal, write
from fast_axolotl.cluster.store import Store, may_pass
from fast_axolotl.errors import DataError
from support.axolotl import AGAINST_AXOLOTL
from support.cluster_tasks import squares, task


class Counted(MemoryFileSystem):
    """An object store that counts the bytes that leave it, and fails when it is told to."""

    protocol = "counted"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    num_read = 0
    failures: ClassVar[list[Exception]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("counted:", "memory:")))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **more: Any) -> bytes:
        if Counted.failures:
            raise Counted.failures.pop()
        data: bytes = super().cat_file(path, start, end, **more)
        Counted.num_read += len(data)
        return data


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    fsspec.register_implementation("counted", Counted, clobber=True)
    monkeypatch.setattr(store, "_PAUSES", (0.0, 0.0))
    Counted.store.clear()
    Counted.num_read = 0
    yield Store("counted://work")
    Counted.failures.clear()


@AGAINST_AXOLOTL[0]
def test_write_reads_of_an_object_store_what_it_writes(counted: Store) -> None:
    rng = np.random.default_rng(0)
    units, rows, pieces = 6, 2000, 40
    places = rng.permutation(units * rows).reshape(units, rows)
    for unit in range(units):
        table = pa.table(
            {"input_ids": list(rng.integers(0, 99999, (rows, 100))), "n": places[unit]}
        )
        file = pa.BufferOutputStream()
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, 1000)
        with counted.writing(f"tokens/{unit}.arrow") as path:
            path.write_bytes(file.getvalue())
        counted.write_array(f"places/{unit}", places[unit])
    counted.write_array("edges", np.linspace(0, units * rows, pieces + 1).astype(np.int64))
    counted.write_json("types.json", {"final": table.schema.serialize().to_pybytes().hex()})
    counted.write_json("dealt.json", [str(unit) for unit in range(units)])
    for unit in range(units):
        deal(counted, unit=str(unit))
    Counted.num_read = num_bytes = 0
    numbers = []
    for shard in range(4):
        span = range(shard * pieces // 4, (shard + 1) * pieces // 4)
        done = write(counted, name=f"{shard}.arrow", pieces=span, target="counted://out")
        num_bytes += done["bytes_out"]
    assert Counted.num_read <= 1.3 * num_bytes
    for shard in range(4):
        data = Store("counted://out").read(f"{shard}.arrow")
        numbers += pa.ipc.open_stream(data).read_all()["n"].to_pylist()
    assert numbers == list(range(units * rows))


def test_two_who_run_one_job_in_an_object_store_make_the_same_digests(counted: Store) -> None:
    keys = []
    for job in "aab":
        output = Output(Store("counted://out"), "", counted, is_ours=True)
        with ExitStack() as held:
            output.claim(held, {"job": job}, restart=True)
        keys.append(output.secret)
    assert keys[0] == keys[1] != keys[2]


class Response(Exception):
    """As of boto; others have the status themselves."""

    def __init__(self, number: int, **more: Any) -> None:
        self.response = {"ResponseMetadata": {"HTTPStatusCode": number}}
        self.__dict__.update(more)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ESTALE, "stale"), Response(503), Response(0, status=500), TimeoutError()],
)
def test_errors_of_storage_that_may_pass_are_tried_again(
    counted: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    counted.write_json("a", 1)
    Counted.failures += [error] * 2
    assert counted.read_json("a") == 1
    Counted.failures += [error] * 3
    with pytest.raises(DataError, match=r"does not answer .* the same command again") as caught:
        counted.read_json("a")
    assert may_pass(caught.value)
    monkeypatch.setattr(engines, "_MOMENT_SECONDS", 0.0)
    monkeypatch.setattr(Store, "read_json", lambda *_: (_ for _ in ()).throw(error))
    kind, reason = engines._attempt(str(tmp_path), task("read", name="a"))
    assert (kind, type(error).__name__ in reason) == ("lost", True)


def test_other_errors_of_storage_are_not_tried_again(counted: Store) -> None:
    for error in (Response(403), PermissionError(errno.EACCES, "no"), FileNotFoundError("x")):
        assert not may_pass(error)
        Counted.failures += [error] * 2
        with pytest.raises(type(error)):
            counted.read_json("a")
        Counted.failures.clear()


def test_so_many_workers_have_so_many_tasks(tmp_path: Path) -> None:
    class Counting(engines.Local):
        most = 0

        def start(self, url: str, task: engines.Task) -> Any:
            key = super().start(url, task)
            self.most = max(self.most, len(self._busy))
            return key

    engine = Counting(workers=2)
    assert len(list(run_tasks(engine, str(tmp_path), squares(8), print))) == 8
    engine.close()
    assert engine.most == 2
