"""Hash, dedupe, pack and pad on generated rows: ``make bench-hash`` and so on.

The contenders of dedupe are those of ``fast-axolotl bench``. Beside them stand the earlier package
and what ``dedupe_files`` takes in a fresh process. Inputs are Parquet files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.children import RunError, run_child
from benchmarks.command import Tell, execute, race_parser
from benchmarks.race import Session, add_race_options, open_session, run_case
from benchmarks.result import Case, Goal, Measurement, Result
from fast_axolotl.cli.bench import OURS, Request, dedupe
from fast_axolotl.cli.race import Contender
from fast_axolotl.errors import UsageError
from fast_axolotl.system import peak_memory_bytes

NOTES = (
    "answers are compared before anything is timed, by a digest",
    "alternating repeats, each the mean of as many passes as take 0.2 s; ratios are of medians",
    "not included: imports, compiling or loading kernels, and a first pass",
)
OURS_LISTS, OURS_TORCH = "fast-axolotl, lists", "fast-axolotl, torch"

_TOKENS_SHARE, _MOST_TOKEN_ROWS = 5, 20_000
"""A tokenized row stands for five short ones. Axolotl takes a tenth of a millisecond for each."""
_MOST_PLAN_ROWS = 100_000
_VOCABULARY = 30_000
_PAD_ROWS = 64
"""Rows padded together, to the longest of them: a batch of a training."""
_MOST_ROWS = 200
"""Axolotl's default: the most sequences in one pack."""
_UNITS = {"": 1, "k": 1000, "m": 1_000_000}
_BUDGETS = {"1 GB": 10**9, "192 MiB": 192 * 1024**2}
"""Room for everything, and the least that is taken, where a large input goes over to disk."""
_MOST_STATE_BYTES, _LEAST_STATE_ROWS = 40.0, 100_000
"""For each different row of a file; the smallest set weighs more for a few rows."""


def main(arguments: Sequence[str] | None = None) -> None:
    name, *others = sys.argv[1:] if arguments is None else arguments
    if name not in OPERATIONS:
        sys.exit(f"no operation is called {name!r}; choose from {', '.join(OPERATIONS)}")

    def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
        os.environ.update({"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"})
        sizes = parse_sizes(options.sizes)
        with open_session(options, folder, tell) as session:
            cases = list(OPERATIONS[name](sizes, session))
        return Result(cases=cases, notes=NOTES, versions=session.versions)

    parser = race_parser(name, __doc__)
    parser.prog = f"python -m benchmarks.operations {name}"
    parser.add_argument("--sizes", default="10k,100k,1M", help="numbers of rows: 10k,1M,2500")
    add_race_options(parser)
    execute(parser, run, others)


def parse_sizes(text: str) -> tuple[int, ...]:
    """``10k,1M`` as (10000, 1000000): ascending, each once."""
    sizes = set()
    for part in filter(None, map(str.strip, text.split(","))):
        number = part.rstrip("kKmM")
        try:
            size = float(number) * _UNITS[part[len(number) :].lower()]
        except (ValueError, KeyError):
            size = 0.0
        if not 1 <= size < 2**63 or size != int(size):
            raise UsageError(f"cannot read {part!r} as a size; write 10k, 1M or 2500")
        sizes.add(int(size))
    if not sizes:
        raise UsageError(f"cannot read {text!r} as sizes; write 10k,100k,1M or plain numbers")
    return tuple(sorted(sizes))


def size_name(size: int) -> str:
    """The shortest way to write it: ``10k`` for 10000."""
    for unit, factor in (("M", 1_000_000), ("k", 1000)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def _race(
    session: Session,
    kind: str,
    text: str,
    table: pa.Table,
    contenders: Callable[[Request], list[Contender]],
    sequence_len: int = 0,
) -> Case:
    """All libraries on a table, which is written as Parquet."""
    path, size = session.folder / "input.parquet", len(table)
    pq.write_table(table, path)
    request = {"paths": [str(path)], "columns": table.column_names, "rows": size}
    request["table"] = table.combine_chunks()
    request["sequence_len"] = sequence_len
    name = f"{kind}-{size_name(size)}"
    case = run_case(session, name, f"{size:,} {text}", contenders(request), rows=size)
    path.unlink()
    return case


def hash_cases(sizes: Sequence[int], session: Session) -> Iterator[Case]:
    """SHA-256 of the texts of a list."""
    from fast_axolotl.dedupe import parallel_hash_rows

    def hashers(request: Request) -> list[Contender]:
        rows = request["table"].column(0).to_pylist()

        def plain() -> list[str]:
            return [sha256(row.encode()).hexdigest() for row in rows]

        way = "list → list"
        return [
            Contender(OURS, way, lambda: parallel_hash_rows(rows)),
            Contender("hashlib", way, plain, OURS),
            session.earlier(request, "parallel_hash_rows", way),
        ]

    for size in sizes:
        table = pa.table(
            {"text": [f'{{"id": {index}, "text": "row {index}"}}' for index in range(size)]}
        )
        yield _race(session, "hash", "short texts", table, hashers)


def dedupe_cases(sizes: Sequence[int], session: Session) -> Iterator[Case]:
    """Tokenized rows, a column of texts, a list of texts, and files."""
    for size in sorted({min(_MOST_TOKEN_ROWS, max(1, size // _TOKENS_SHARE)) for size in sizes}):
        text = "tokenized rows, mean 365 tokens, a fifth repeated"
        yield _race(session, "tokens", text, token_rows(size), dedupe)
    for size in sizes:
        numbers = np.random.default_rng(0).permutation(size) // 2
        table = pa.table({"text": _texts(numbers)})
        yield _race(session, "text", "texts, each of which comes twice", table, dedupe)
        text = "texts, each of which comes twice, to indices and hashes"
        yield _race(session, "list", text, table, partial(_in_lists, session))
    for size in sizes:
        yield _files_case(size, session)


def _in_lists(session: Session, request: Request) -> list[Contender]:
    """Lists, to indices and hashes."""
    from fast_axolotl.dedupe import deduplicate_indices

    texts = request["table"]["text"].to_pylist()
    gives = "list → lists"
    return [
        Contender(OURS_LISTS, gives, lambda: deduplicate_indices(texts)),
        session.earlier(request, "deduplicate_indices", gives, OURS_LISTS),
    ]


def _files_case(size: int, session: Session) -> Case:
    """``dedupe_files`` on Parquet in fresh processes, compared with ``unique_rows``."""
    from fast_axolotl.dedupe import unique_rows

    name = f"files-{size_name(size)}"
    rng = np.random.default_rng(0)
    numbers = np.arange(size)
    repeats = rng.random(size) < 0.01
    numbers[repeats] = (numbers[repeats] * rng.random(int(repeats.sum()))).astype(np.int64)
    table = pa.table({"text": _texts(numbers)})
    source, target = session.folder / "short.parquet", session.folder / "unique.parquet"
    pq.write_table(table, source, row_group_size=100_000)
    expected = table.take(unique_rows(table))
    measurements = []
    for label, budget in _BUDGETS.items():
        runs: list[dict[str, Any]] = []
        try:
            for repeat in range(min(session.repeats, 3)):
                session.tell(f"{name}, {label}: run {repeat + 1}")
                child_arguments = ("--child", str(source), str(target), str(budget))
                runs.append(json.loads(run_child("benchmarks.operations", *child_arguments)))
                if not pq.read_table(target).equals(expected):
                    raise RunError("another answer than unique_rows")
                target.unlink()
        except RunError as error:
            measurements.append(Measurement(name=f"budget {label}", reason=str(error)))
            continue
        values = {
            "rows_per_second": round(median(run["rows_per_second"] for run in runs)),
            "state_bytes_per_row": runs[0]["state_bytes"] / runs[0]["rows_out"],
            "spilled_bytes": runs[0]["spilled_bytes"],
            "peak_bytes": max((run["peak_bytes"] or 0 for run in runs), default=0) or None,
        }
        seconds = tuple(run["seconds"] for run in runs)
        measurements.append(Measurement(name=f"budget {label}", seconds=seconds, values=values))
    source.unlink()
    state = measurements[0].values.get("state_bytes_per_row")
    goal = Goal("set of rows seen, per kept row", _MOST_STATE_BYTES, "bytes", state)
    return Case(
        name=name,
        text=f"a Parquet file of {size:,} short rows, one in a hundred repeated",
        rows=size,
        measurements=measurements,
        goals=[goal] if size >= _LEAST_STATE_ROWS else [],
    )


def child(source: str, target: str, budget: str) -> None:
    """Dedupes a file in this fresh process, and prints what that cost."""
    from fast_axolotl.dedupe.files import dedupe_files
    from fast_axolotl.kernels.jit import all_kernels

    for kernel in all_kernels():
        if kernel.name.startswith(("rowhash.", "digests.")):
            kernel.compile()
    start = peak_memory_bytes() or 0
    summary = dedupe_files(source, target, memory_budget=int(budget))
    print(json.dumps({**asdict(summary), "peak_bytes": (peak_memory_bytes() or 0) - start}))


def pack_cases(sizes: Sequence[int], session: Session) -> Iterator[Case]:
    """Plans of which rows share a pack."""
    for size in sorted({min(size, _MOST_PLAN_ROWS) for size in sizes}):
        table = _token_lists(_lengths(size))
        text = "lengths, mean 365, into packs of 4,096 by first fit"
        yield _race(session, "plan", text, table, _planners, 4096)


def _planners(request: Request) -> list[Contender]:
    """Which rows of tokens share a pack, by first fit; longer ones count as full."""
    from fast_axolotl.packing import plan_packs

    capacity = request["sequence_len"]
    column = request["table"].column(0).drop_null()
    lengths = np.minimum(pc.list_value_length(column).to_numpy(), capacity).astype(np.int64)

    def plain() -> list[list[int]]:
        if len(lengths) > 20_000:
            raise NotImplementedError("it is quadratic: up to 20,000 rows only")
        free: list[int] = []
        packs: list[list[int]] = []
        for index, length in enumerate(lengths.tolist()):
            rooms = enumerate(free)
            fits = (at for at, room in rooms if room >= length and len(packs[at]) < _MOST_ROWS)
            if (place := next(fits, len(packs))) == len(packs):
                free.append(capacity)
                packs.append([])
            free[place] -= length
            packs[place].append(index)
        return packs

    def axolotl() -> Any:
        pack = import_module("axolotl.utils.samplers.multipack").pack_group
        return pack(lengths, 0, capacity, len(lengths), _MOST_ROWS)

    gives = "lengths → packs"
    return [
        Contender(OURS, gives, partial(plan_packs, lengths, capacity, max_rows=_MOST_ROWS)),
        Contender("Axolotl", gives, axolotl, OURS, "axolotl"),
        Contender("Python first fit", gives, plain, OURS),
    ]


def pad_cases(sizes: Sequence[int], session: Session) -> Iterator[Case]:
    """Batches of 64 sequences, each to its longest."""

    def padders(request: Request) -> list[Contender]:
        earlier = session.earlier(request, "pad_sequences", "lists → lists")
        return [*_padders(request), earlier]

    rng = np.random.default_rng(0)
    for size in sizes:
        table = _token_lists(rng.integers(10, 257, size))
        yield _race(session, "pad", "sequences of 10–256 tokens", table, padders)


def _padders(request: Request) -> list[Contender]:
    """Batch by batch, as a training pads: each is gone before the next one."""
    from fast_axolotl.packing import pad_sequences

    rows = request["table"].column(0).drop_null().to_pylist()
    batches = [rows[start : start + _PAD_ROWS] for start in range(0, len(rows), _PAD_ROWS)]

    def plain(sequences: Sequence[list[int]]) -> list[list[int]]:
        width = max(map(len, sequences))
        return [row + [0] * (width - len(row)) for row in sequences]

    def torch(sequences: Sequence[list[int]]) -> Any:
        pad = import_module("torch.nn.utils.rnn").pad_sequence
        return pad([*map(import_module("torch").tensor, sequences)], batch_first=True)

    tensors = partial(pad_sequences, output="torch")
    return [
        Contender(OURS, "lists → lists", lambda: map(pad_sequences, batches)),
        Contender("plain Python", "lists → lists", lambda: map(plain, batches), OURS),
        Contender(OURS_TORCH, "lists → torch", lambda: map(tensors, batches), None, "torch"),
        Contender("torch", "lists → torch", lambda: map(torch, batches), OURS_TORCH, "torch"),
    ]


OPERATIONS: Mapping[str, Callable[[Sequence[int], Session], Iterator[Case]]] = {
    "hash": hash_cases,
    "dedupe": dedupe_cases,
    "pack": pack_cases,
    "pad": pad_cases,
}


# Inputs, always the same for one size.


def _texts(numbers: Any) -> Any:
    texts = pc.cast(pa.array(numbers), pa.string())
    return pc.binary_join_element_wise("Sample text content", texts, "of a row", " ")


def _lengths(count: int) -> Any:
    """Of rows of a chat dataset: log-normal, mean 365 tokens, at most 4,096."""
    sigma = 0.8
    lengths = np.random.default_rng(1).lognormal(np.log(365) - sigma**2 / 2, sigma, count)
    return np.clip(lengths.astype(np.int64), 1, 4096)


def _token_lists(lengths: Any) -> pa.Table:
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    tokens = np.random.default_rng(0).integers(0, _VOCABULARY, int(lengths.sum()), dtype=np.int32)
    return pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens)})


def token_rows(count: int) -> pa.Table:
    """Tokenized rows, a fifth of which repeat an earlier one."""
    rng = np.random.default_rng(0)
    distinct = max(1, round(count * 0.8))
    ids = _token_lists(_lengths(distinct)).column(0).combine_chunks()
    tokens = ids.values.to_numpy()
    labels = np.where(rng.random(len(tokens)) < 0.3, -100, tokens).astype(np.int64)
    make = partial(pa.ListArray.from_arrays, ids.offsets)
    mask = make(np.ones(len(tokens), np.int8))
    table = pa.table({"input_ids": ids, "attention_mask": mask, "labels": make(labels)})
    chosen = np.arange(count)
    chosen[distinct:] = rng.integers(0, distinct, count - distinct)
    return table.take(pa.array(rng.permutation(chosen))).combine_chunks()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
