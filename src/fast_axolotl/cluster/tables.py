"""``dedupe --engine``: remove duplicate rows of a dataset in parallel tasks.

A share is a run of neighbouring units of the input. Stage ``digest`` digests the rows of every
share; the process that deals out the shares finds the repeated ones; stage ``write`` reads again
and writes the others: the rows of ``dedupe_files``, in a folder of Parquet files. CSV and
compressed files are not cut. The types of JSON and CSV are found before, by a scan.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fast_axolotl.cluster.engines import Answer
from fast_axolotl.cluster.job import Heard, Job, JobSummary, Output, find_repeated
from fast_axolotl.cluster.store import Store
from fast_axolotl.dedupe.output import ParquetWriter
from fast_axolotl.dedupe.rows import column_names, digest_batch, keep_rows
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.reading import format_of_name, open_dataset
from fast_axolotl.reading.blocks import Dataset, Unit
from fast_axolotl.reading.order import Piece, Position
from fast_axolotl.reading.reader import LEAST_MEMORY_BUDGET, dataset_of
from fast_axolotl.reading.rows import Rows, read_rows
from fast_axolotl.reading.unify_types import Known

_MIB = 1024 * 1024
_SHARES = 256
"""Data is cut into about so many shares, as long as they are not too small or too large."""

_LEAST_BYTES, _MOST_BYTES = 4 * _MIB, 256 * _MIB
_MEMORY_SHARE = 8
"""Of a process's memory, this part is for reading ahead."""


class Share(NamedTuple):
    """What one task reads."""

    dataset: Dataset
    """Its files."""
    units: list[Unit]
    schema: pa.Schema
    memory: int

    def read(self) -> Iterator[Rows]:
        """The rows, table by table, under the schema."""
        pieces = [Piece((unit,)) for unit in self.units]
        types, budget = Known(self.schema), self.memory // _MEMORY_SHARE
        with ExitStack() as running:
            yield from read_rows(self.dataset, pieces, Position(), types, 1, budget, running)


def dedupe_on(
    inputs: Any,
    output: str,
    *,
    columns: Sequence[str] | None = None,
    memory: int = 4 * 1024**3,
    work: str | None = None,
    restart: bool = False,
    overwrite: bool = False,
    heard: Heard = lambda *_: None,
    format: str = "auto",
    split: str | None = None,
    **engine: Any,
) -> JobSummary:
    """Writes the rows of ``inputs`` that come for the first time, in their order, into a folder.

    Only ``columns`` are compared. Files between stages lie in ``work``, which all nodes see under
    this name; the same call continues there after an interruption, unless ``restart`` is set.
    ``engine`` is for ``Job``.
    """
    final = Store(str(output).rstrip("/"))
    if format_of_name(final.url)[0] not in (None, "parquet"):
        raise UsageError(
            f"output {output} becomes a folder of Parquet files; remove the file ending"
        )
    store = Store(work or f"{final.url}.work")
    if f"{store.url}/".startswith(f"{final.url}/"):
        raise UsageError(f"--work {store.url} is inside the output; choose another folder")
    place = Output(final, store, is_ours=False)
    listed = [inputs] if isinstance(inputs, str | Path) else inputs
    # Other processes have other working directories.
    paths = [str(p) if "://" in str(p) else os.path.abspath(p) for p in listed]  # noqa: PTH100
    budget = max(LEAST_MEMORY_BUDGET, memory // _MEMORY_SHARE)
    reader = open_dataset(paths, format=format, memory_budget=budget, infer="scan", split=split)
    dataset, schema = dataset_of(reader), reader.schema
    sources = [item.source for item in reader.files]
    if inside := [one.identity for one in sources if one.identity.startswith(f"{final.url}/")]:
        raise UsageError(f"output {output} contains the input {inside[0]}; choose another")
    names = column_names(schema, columns, "the input")
    options = asdict(dataset.options)
    del options["block_bytes"]
    description = {
        "job": "dedupe",
        "columns": names,
        "output": final.url,
        "inputs": [[one.identity, one.num_bytes, one.version] for one in sources],
        "format": format,
        "options": options,
    }
    with ExitStack() as held:
        place.claim(held, description, restart=restart, overwrite=overwrite)
        job = Job(heard, memory=memory, preload=[__name__], **engine)
        held.callback(job.close)
        cut = _cut(dataset, schema, memory)
        shares = {f"{number:05d}": {"share": share} for number, share in enumerate(cut)}
        keys = {"columns": names, "secret": place.secret}
        named = {name: {"name": name, **given, **keys} for name, given in shares.items()}
        digests = job.run(store, digest, named)
        stops = accumulate((answer["rows"] for answer in digests.values()), initial=0)
        rows = {name: range(*edges) for name, edges in zip(digests, pairwise(stops), strict=True)}
        num_rows = sum(map(len, rows.values()))
        numbers = ((name, np.arange(span.start, span.stop)) for name, span in rows.items())
        keep = ~find_repeated(store, numbers, num_rows, memory)
        store.write_array("keep", keep)
        tasks: dict[str, dict[str, Any]] = {}
        for name, span in rows.items():
            is_last = span.stop == num_rows and not tasks  # at least a schema
            if keep[span.start : span.stop].any() or is_last:
                part = f"part-{len(tasks):05d}.parquet"
                where = {"part": part, "target": place.parts.url}
                tasks[part] = {**shares[name], **where, "rows": [span.start, span.stop]}
        place.forget_missing(tasks)
        written = job.run(store, write, tasks)
        place.publish(written, {} if final.is_local else {"_SUCCESS": "{}"})
        store.remove()
    return job.summary(
        outputs=(final.url,),
        rows_in=num_rows,
        dropped={},
        duplicates=num_rows - int(keep.sum()),
        bytes_in=sum(one.num_bytes for one in sources),
    )


def _cut(dataset: Dataset, schema: pa.Schema, memory: int) -> Iterator[Share]:
    """All units of a dataset in shares, in order."""
    units = dataset.units()
    begins = [*accumulate((unit.num_bytes for unit in units), initial=0)]
    share_bytes = max(_LEAST_BYTES, min(begins[-1] // _SHARES, _MOST_BYTES))
    numbered = zip(begins, units, strict=False)
    alike = groupby(numbered, lambda pair: pair[0] // share_bytes)
    for group in [[unit for _, unit in pairs] for _, pairs in alike] or [[]]:
        files = {file: index for index, file in enumerate(dict.fromkeys(u.file for u in group))}
        theirs = replace(dataset, files=tuple(dataset.files[file] for file in files))
        yield Share(theirs, [replace(u, file=files[u.file]) for u in group], schema, memory)


def digest(
    store: Store, *, name: str, share: Share, columns: list[str], secret: Sequence[int]
) -> Answer:
    """Writes the digests of a share's rows."""
    schema = pa.schema([share.schema.field(name) for name in columns])
    dataset, num_rows = share.dataset.with_options(columns=tuple(columns)), 0
    share = share._replace(dataset=dataset, schema=schema)
    with store.writing(f"digests/{name}") as path, path.open("wb") as file:
        for rows in share.read():
            for batch in rows.table.select(columns).to_batches():
                file.write(digest_batch(batch, np.array(secret, np.uint64), 1).data)
                num_rows += batch.num_rows
    return {"rows": num_rows, "bytes_out": 16 * num_rows}


def write(store: Store, *, share: Share, rows: Sequence[int], part: str, target: str) -> Answer:
    """Writes the rows of a share that are not repeated; ``rows`` are its first and last number."""
    keep = store.read_array("keep", "?", *rows)
    at = 0
    with Store(target).writing(part) as path:
        writer = ParquetWriter(path, share.schema)
        for found in share.read():
            for batch in found.table.to_batches():
                writer.write(keep_rows(batch, keep[at : at + batch.num_rows]))
                at += batch.num_rows
        writer.close()
        num_bytes = path.stat().st_size
        if at != len(keep):
            raise DataError(
                f"the input had {len(keep):,} rows at the first read and {at:,} at the second: it "
                "changed; run again with restart=True (--restart)",
                path=share.dataset.files[0].source.path,
            )
    return {"rows": int(keep.sum()), "bytes_out": num_bytes}
