"""Kernels compile on first use, for their own types, and keep or forget the result without fuss."""

from __future__ import annotations

import json
import re
import shutil
import threading
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from numba import types

from fast_axolotl.kernels import jit, threads
from support.children import SOURCE, python_output

pytestmark = pytest.mark.kernels

STRICT = ("-W", "error", "-c")


@jit.kernel(types.int64(jit.INT64), types.int64(jit.INT32))
def total(values: np.ndarray) -> int:
    result = 0
    for index in range(len(values)):
        result += values[index]
    return result


def test_a_kernel_takes_its_types_writeable_or_not_and_no_others() -> None:
    values = np.arange(10)
    assert total(values) == 45
    values.flags.writeable = False
    assert total(values) == 45
    assert total(values.astype(np.int32)) == 45
    for wrong in (values.astype(np.float64), np.arange(20)[::2], values.reshape(2, 5)):
        with pytest.raises(TypeError):
            total(wrong)


def test_threads_that_call_at_once_compile_once() -> None:
    fresh = jit.Kernel(total._function, total._signatures)
    results: list[int] = []
    callers = [
        threading.Thread(target=lambda: results.append(fresh(np.arange(10)))) for _ in range(8)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == [45] * 8


def test_every_kernel_is_listed_and_none_compiles_before_it_is_called() -> None:
    listed = python_output(
        *STRICT,
        "import json\n"
        "from fast_axolotl.kernels.jit import all_kernels\n"
        "print(json.dumps([[item.name, item._compiled is None] for item in all_kernels()]))",
    )
    names, untouched = zip(*json.loads(listed), strict=True)
    assert all(untouched)
    decorator = re.compile(r"^@(?:jit\.)?kernel\(", re.MULTILINE)
    modules = (SOURCE / "fast_axolotl").glob("kernels/*.py")
    written = [decorator.findall(path.read_text()) for path in modules]
    assert len(set(names)) == sum(map(len, written))


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    # A copy, whose own folder cannot serve as a cache either: a file is in its place.
    copy = tmp_path / "fast_axolotl"
    package = SOURCE / "fast_axolotl"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for module in ("kernels", "dedupe", "reading"):
        (copy / module / "__pycache__").write_text("")
    code = (
        "import pyarrow as pa\n"
        "from fast_axolotl import unique_rows\n"
        "from fast_axolotl.kernels.rowhash import absorb\n"
        "print(unique_rows(pa.table({'x': ['a', 'b', 'a']})).tolist(), absorb.is_kept)"
    )
    for folder in ("/dev/null/cache", "/proc/cache"):
        home = {"HOME": folder, "XDG_CACHE_HOME": folder, "NUMBA_CACHE_DIR": folder}
        assert python_output("-B", *STRICT, code, source=tmp_path, **home) == "[0, 1] False\n"


def test_a_forked_child_goes_on_with_the_kernels_of_its_parent() -> None:
    python_output(
        *STRICT,
        "import os, pyarrow as pa\n"
        "from fast_axolotl import unique_rows\n"
        "table = pa.table({'x': [str(i % 90_000) for i in range(100_000)]})\n"
        "assert len(unique_rows(table)) == 90_000\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(0 if len(unique_rows(table)) == 90_000 else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0",
    )


def test_warmup_compiles_everything_and_keeps_it(tmp_path: Path) -> None:
    said = python_output("-m", "fast_axolotl", "warmup", NUMBA_CACHE_DIR=str(tmp_path))
    assert said.startswith(f"{len(jit.all_kernels())} kernels ready after ")
    kept = {path.name.split("-")[0] for path in tmp_path.rglob("*.nbi")}
    assert {item.name for item in jit.all_kernels()} <= kept


def test_slices_cover_everything_once_and_an_error_in_a_thread_reaches_the_caller() -> None:
    for total_rows, count in product([0, 1, 2, 7, 100], [1, 2, 3, 8]):
        ranges = threads.slices(total_rows, count)
        rows = [row for start, stop in ranges for row in range(start, stop)]
        assert rows == list(range(total_rows))
        assert len(ranges) <= count

    def fail(start: int, _: int) -> None:
        if start:
            raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        threads.spread(fail, [(0, 1), (1, 2)], 2)
