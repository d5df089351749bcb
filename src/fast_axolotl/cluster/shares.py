"""A dataset cut into shares that any process can read on its own, with the one schema of all.

A share is a run of neighbouring units, over several files where they are small. Where it is cut
follows from the files alone. It carries what a process needs to open its files, and opens no
others. CSV and compressed files are not cut: a share takes them whole. ``one_schema`` is the schema
that a scan of the reader finds, but that every share is scanned by a task.
"""

from __future__ import annotations

import os
import warnings
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from fast_axolotl.cluster.store import Store
from fast_axolotl.cluster.tasks import Answer, Engine, Heard, Task, run_stage
from fast_axolotl.reading.blocks import Dataset, InputFile, ReadOptions, Unit
from fast_axolotl.reading.formats import FormatWarning, open_files
from fast_axolotl.reading.order import Piece, Position, Span
from fast_axolotl.reading.reader import LEAST_MEMORY_BUDGET, dataset_of, open_dataset
from fast_axolotl.reading.rows import Rows, read_rows
from fast_axolotl.reading.schema import TypeClash, join_or_mark
from fast_axolotl.reading.unify_types import Known, first_schema

_MIB = 1024 * 1024
_SHARES = 256
"""Data is cut into about so many shares, as long as they are not too small or too large."""

_LEAST_BYTES = 4 * _MIB
_MOST_BYTES = 256 * _MIB
_MEMORY_SHARE = 8
"""Of a process's memory, this part is for reading ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one task reads."""

    name: str
    files: tuple[InputFile, ...]
    units: tuple[Unit, ...]
    """Each one counts its file among ``files``."""
    format: str
    options: ReadOptions

    def place(self, rows: Rows, row: int) -> dict[str, str]:
        """Where a row of a table lies: the file, and the row from the unit's beginning on."""
        unit = self.units[rows.start.piece]
        item = self.files[unit.file]
        kind = "byte" if item.format in ("json", "jsonl", "csv", "text") else "row group"
        behind = f", counted from {kind} {unit.start:,}" if unit.start else ""
        return {"path": item.source.path, "place": f"row {rows.start.row + row + 1:,}{behind}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """A dataset, opened by the process that deals out its shares."""

    dataset: Dataset
    schema: pa.Schema
    """What the first rows tell."""
    format: str
    memory: int

    @classmethod
    def open(cls, inputs: Any, *, memory: int, format: str = "auto", **options: Any) -> Shares:
        """What ``open_dataset`` opens with these options."""
        listed = [inputs] if isinstance(inputs, str | Path) else inputs
        # Other processes have other working directories.
        paths = [str(p) if "://" in str(p) else os.path.abspath(p) for p in listed]  # noqa: PTH100
        budget = max(LEAST_MEMORY_BUDGET, memory // _MEMORY_SHARE)
        with warnings.catch_warnings():
            # CSV as text is only what a sample says; the scan follows.
            warnings.filterwarnings("ignore", "only the first rows of more than", FormatWarning)
            reader = open_dataset(paths, format=format, memory_budget=budget, **options)
        return cls(dataset=dataset_of(reader), schema=reader.schema, format=format, memory=memory)

    @property
    def num_bytes(self) -> int:
        return sum(item.source.num_bytes for item in self.dataset.inputs)

    def describe(self) -> dict[str, Any]:
        """All that its rows depend on, for ``open_job``."""
        sources = [item.source for item in self.dataset.inputs]
        options = asdict(self.dataset.options)
        del options["block_bytes"]
        return {
            "inputs": [[source.identity, source.num_bytes, source.version] for source in sources],
            "format": self.format,
            "options": options,
        }

    def cut(self, units: Sequence[Unit] | None = None, least_bytes: int = 0) -> list[Share]:
        """All units, or those given, in order."""
        units = self.dataset.units() if units is None else units
        total = sum(unit.num_bytes for unit in units)
        share_bytes = max(least_bytes or _LEAST_BYTES, min(total // _SHARES, _MOST_BYTES))
        groups: list[list[Unit]] = [[]]
        size = 0
        for unit in units:
            size += unit.num_bytes
            if groups[-1] and size > share_bytes:
                groups.append([])
                size = unit.num_bytes
            groups[-1].append(unit)
        shares = []
        for number, group in enumerate(groups):
            files = {file: index for index, file in enumerate(dict.fromkeys(u.file for u in group))}
            share = Share(
                name=f"{number:05d}",
                files=tuple(self.dataset.inputs[file] for file in files),
                units=tuple(replace(unit, file=files[unit.file]) for unit in group),
                format=self.format,
                options=self.dataset.options,
            )
            shares.append(share)
        return shares

    def one_schema(self, engine: Engine, store: Store, heard: Heard) -> pa.Schema:
        """The schema of all rows; JSON and CSV are read for it, in stage ``types``."""

        def scan(units: Sequence[Unit], known: pa.Schema) -> pa.Schema:
            shares = self.cut(units)
            tasks = [
                Task(
                    stage="types",
                    name=share.name,
                    function=f"{__name__}:find_types",
                    arguments={"share": share, "known": known, "memory": self.memory},
                )
                for share in shares
            ]
            answers = run_stage(engine, store, "types", tasks, heard)
            conflict = self.dataset.options.on_conflict
            for share in shares:
                text = answers[share.name]["schema"]
                found = pa.ipc.read_schema(pa.py_buffer(b64decode(text)))
                is_csv = any(item.format == "csv" for item in share.files)
                try:
                    known = join_or_mark(known, found, conflict, text_wins=is_csv)
                except TypeClash as clash:
                    raise clash.error(share.files[0].source.path) from None
            return known

        return first_schema(self.dataset, scan=scan, num_threads=1, budget=self.memory, warn=False)


def find_types(store: Store, *, share: Share, known: pa.Schema, memory: int) -> Answer:
    """The types of a share's rows, joined with what is known before."""
    rows = 0
    share = replace(share, options=replace(share.options, may_widen=True))
    for part in read_share(share, known, memory):
        known, rows = part.table.schema, rows + part.table.num_rows
    return {"schema": b64encode(known.serialize()).decode(), "rows": rows}


def read_share(share: Share, schema: pa.Schema, memory: int) -> Iterator[Rows]:
    """The rows of a share, table by table, under ``schema``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FormatWarning)  # said where the dataset was opened
        opened = open_files([item.source for item in share.files], share.format, share.options)
    dataset = Dataset(
        inputs=tuple(item for item, _ in opened),
        formats=tuple(file for _, file in opened),
        options=share.options,
        window_bytes=0,
    )
    yield from read_rows(
        dataset,
        [Piece((Span((unit,)),)) for unit in share.units],
        Position(),
        Known(schema),
        num_threads=1,
        budget=memory // _MEMORY_SHARE,
        closers=[],
    )
