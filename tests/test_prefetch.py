"""Decoding ahead: order, errors, the budget, and threads that end when nobody listens."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import pytest

from fast_axolotl import open_dataset
from fast_axolotl.errors import UsageError
from fast_axolotl.reading.prefetch import Prefetcher
from support.files import SMALL_BUDGET, make_rows, write_jsonl

TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Piece:
    number: int
    weight: int = 1


def pieces(stop: int | None = None) -> Iterator[tuple[Piece]]:
    return ((Piece(number),) for number in islice(count(), stop))


def double(piece: Piece) -> tuple[int, int]:
    return 2 * piece.number, 1


def interrupt(_: object) -> None:
    raise KeyboardInterrupt


def reader_threads() -> list[threading.Thread]:
    return [item for item in threading.enumerate() if item.name.startswith("fast-axolotl-reader")]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """Threads end after the item in hand; none may outlive a test."""
    yield
    gc.collect()
    for thread in reader_threads():
        thread.join(TIMEOUT_SECONDS)
    assert reader_threads() == []


@pytest.mark.parametrize("num_threads", [1, 5])
def test_results_come_in_the_order_of_the_tasks(num_threads: int) -> None:
    turns = [threading.Event() for _ in range(6)]

    def backwards(piece: Piece) -> tuple[int, int]:
        if num_threads > 1 and piece.number % 2 == 0 and piece.number < 5:
            assert turns[piece.number + 1].wait(TIMEOUT_SECONDS)
        if piece.number < 6:
            turns[piece.number].set()
        return double(piece)

    ahead = Prefetcher(pieces(500), backwards, num_threads=num_threads, budget=100)

    assert [(piece.number, result) for (piece,), result in ahead] == [
        (n, 2 * n) for n in range(500)
    ]


@pytest.mark.parametrize("where", ["decoding", "splitting", "an iterator that ends"])
def test_an_error_comes_after_the_tasks_before_it(where: str) -> None:
    def split() -> Iterator[tuple[Piece]]:
        yield from pieces(7 if where == "splitting" else None)
        raise LookupError("seven")

    def decode(piece: Piece) -> tuple[int, int]:
        if piece.number != 7:
            return double(piece)
        if where == "decoding":
            raise LookupError("seven")
        return next(iter(()))

    ahead = Prefetcher(split(), decode, num_threads=3, budget=1000)

    results = iter(ahead)
    assert [result for _, result in islice(results, 7)] == [0, 2, 4, 6, 8, 10, 12]
    with pytest.raises((LookupError, RuntimeError), match=r"seven|raised StopIteration"):
        next(results)
    ahead.close()


@pytest.mark.parametrize("budget", [1, 300])
def test_reading_ahead_holds_at_most_the_budget_and_one_item(budget: int) -> None:
    """Also where every item is larger than the budget."""
    lock, sizes = threading.Lock(), Counter[str]()

    def decode(piece: Piece) -> tuple[int, int]:
        with lock:
            sizes["held"] += 3 * piece.weight
            sizes["most"] = max(sizes["most"], sizes["held"])
        return piece.weight, 3 * piece.weight

    weighty = ((Piece(number, weight=10 + number % 7),) for number in range(2000))
    for _, weight in Prefetcher(weighty, decode, num_threads=3, budget=budget):
        with lock:
            sizes["held"] -= 3 * weight
            sizes["came"] += 1

    assert (sizes["held"], sizes["came"]) == (0, 2000)
    assert sizes["most"] <= budget + 2 * 3 * 16


def test_a_forked_child_may_drop_what_its_parent_reads() -> None:
    """A thread of the parent may hold the lock at the fork, and the child has no such thread."""
    ahead = Prefetcher(pieces(), double, num_threads=1, budget=5)
    next(iter(ahead))
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with ahead._changed:
            held.set()
            release.wait(TIMEOUT_SECONDS)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(TIMEOUT_SECONDS)
    child = os.fork()
    if child == 0:
        signal.alarm(TIMEOUT_SECONDS // 3)
        ahead.close()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    release.set()
    holder.join()
    ahead.close()

    assert os.waitstatus_to_exitcode(status) == 0


# The same through the reader.


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prefetch")
    return write_jsonl(folder / "rows.jsonl", make_rows(12_000, 1000))


@pytest.mark.parametrize("ending", ["close", "drop", "exhaust", "interrupt", "next", "with"])
def test_a_reader_that_ends_leaves_no_thread(path: Path, ending: str) -> None:
    reader = open_dataset(path, memory_budget=SMALL_BUDGET, num_threads=2, batch_size=10)
    batches = iter(reader)
    next(batches)
    assert len(reader_threads()) == 2

    if ending == "close":
        reader.close()
        with pytest.raises(UsageError, match="no longer valid"):
            next(batches)
    elif ending == "drop":
        del batches
    elif ending == "exhaust":
        assert sum(batch.num_rows for batch in batches) == 11_990
    elif ending == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            list(map(interrupt, batches))
    elif ending == "next":
        batches = iter(reader)
        assert next(batches).column("id")[0].as_py() == 0
        del batches
    else:
        with reader:
            pass


INTERRUPTED_READ = """
import sys
from fast_axolotl import open_dataset

reader = open_dataset(sys.argv[1], memory_budget=16 * 2**20, batch_size=10)
try:
    while True:
        for batch in reader:
            print("reading", flush=True)
finally:
    print("left the loop", flush=True)
"""

# Where tests run in the background, shells have them ignore an interrupt.
INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def test_ctrl_c_ends_the_process(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE + INTERRUPTED_READ, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=TIMEOUT_SECONDS)

    assert process.returncode == -signal.SIGINT
    assert out.endswith("left the loop\n")
    assert errors.rstrip().endswith("KeyboardInterrupt")
