"""Whole datasets through the stages of a job: repeated rows left out, or token lists packed.

Both read the input in shares and write a folder of Parquet files, in order. It appears whole: a
local one is renamed at the end, in an object store the file ``_SUCCESS`` comes last.

``dedupe_on``: stage ``digest`` digests the rows of every share, ``first_rows`` finds the repeated
ones, and stage ``write`` reads again and writes the others: the rows of ``dedupe_files``. A share
of repeated rows alone is not read again.

``pack_on``: stage ``pack`` plans up to 100,000 rows or 16 Mi tokens of a share at a time, for which
a task holds some 350 MB. Packs are not padded.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fast_axolotl.cluster.engines import open_engine
from fast_axolotl.cluster.first_rows import Part, find_repeated, read_array
from fast_axolotl.cluster.job import JobSummary, Tally, open_job
from fast_axolotl.cluster.shares import Share, Shares, read_share
from fast_axolotl.cluster.store import Store
from fast_axolotl.cluster.tasks import Answer, Engine, Heard, Task, run_stage
from fast_axolotl.dedupe.output import GROUP_BYTES
from fast_axolotl.dedupe.rows import digest_batch, take_rows
from fast_axolotl.dedupe.seen import fresh_secret
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.packing.plan import Method, plan_packs
from fast_axolotl.reading import format_of_name, held_bytes
from fast_axolotl.reading.rows import Rows, take

__all__ = ["dedupe_on", "pack_on"]

_PLANNED_ROWS = 100_000
_PLANNED_TOKENS = 16 * 1024 * 1024
_PACK_BYTES = 32 * 1024 * 1024
"""A share to pack is no smaller where there is more: each leaves some packs that are not full."""

_GROUP_TOKENS = 2 * 1024 * 1024
"""Tokens in a row group."""

_MOST_REJECTIONS = 100
_TOKENS = pa.list_(pa.int32())
_Inputs = str | Path | Sequence[str | Path]


def dedupe_on(
    inputs: _Inputs,
    output: str,
    *,
    columns: Sequence[str] | None = None,
    engine: str = "local",
    address: str = "auto",
    workers: int = 0,
    memory: int = 4 * 1024**3,
    work: str | None = None,
    restart: bool = False,
    overwrite: bool = False,
    heard: Heard = lambda _: None,
    **read_options: Any,
) -> JobSummary:
    """Writes the rows of ``inputs`` that come for the first time, in their order.

    Args:
        inputs: What ``open_dataset`` reads: files, folders, globs or URIs.
        output: A folder to make, as a path or a URL.
        columns: Compare these columns only; whole rows are written all the same.
        engine: ``local`` or ``ray``.
        address: Of the Ray cluster: ``auto`` or ``HOST:PORT``.
        workers: Tasks at a time; 0 takes all cores of this machine or of the cluster.
        memory: Bytes that a working process may hold.
        work: The folder for files between stages; ``output`` with ``.work`` by default. All nodes
            must see it under this name. The same call continues there after an interruption.
        restart: Removes what an earlier run left there.
        overwrite: Replaces an output that exists.
        heard: Told of stages and tasks.
        read_options: For ``open_dataset``: ``format``, ``split``, ``json_field``, ``on_error``, ….
    """
    shares = Shares.open(inputs, memory=memory, **read_options)
    about = {"job": "dedupe", "columns": columns and list(columns)}
    places = (output, work, restart, overwrite)
    with _open_job(shares, about, places, (engine, address, workers), heard) as job:
        schema = shares.one_schema(job.engine, job.store, job.tally.hear)
        names = list(schema.names if columns is None else columns)
        missing = [name for name in names if name not in schema.names]
        if missing or not names or len(set(names)) != len(names):
            raise UsageError(
                f"columns must be different names out of {', '.join(schema.names)}, not {names}"
            )
        if not job.store.exists("secret.json"):
            job.store.write_json("secret.json", fresh_secret().tolist())
        secret = job.store.read_json("secret.json")
        cut = shares.cut()
        given = [{"share": share} for share in cut]
        digests = job.run("digest", given, schema=schema, columns=names, secret=secret)
        ends = np.cumsum([0, *(answer["rows"] for answer in digests)]).tolist()
        parts = [
            Part(name=share.name, num_rows=answer["rows"], first_place=start)
            for share, start, answer in zip(cut, ends, digests, strict=False)
        ]
        hear = job.tally.hear
        repeated = find_repeated(job.engine, job.store, parts, memory=memory, heard=hear)
        with job.store.writing("repeated.npy") as path, path.open("wb") as file:
            np.save(file, repeated)
        drops = np.searchsorted(repeated, ends).tolist()
        given = []
        for number, share in enumerate(cut):
            rows, drop = ends[number : number + 2], drops[number : number + 2]
            has_rows = rows[1] - rows[0] > drop[1] - drop[0]
            if has_rows or (share is cut[-1] and not given):  # without rows there is a schema
                part = f"part-{len(given):05d}.parquet"
                given.append({"share": share, "rows": rows, "drop": drop, "part": part})
        written = job.run("write", given, schema=schema)
    rejections = [item for answer in digests for item in answer["rejections"]]
    return job.summary(
        rows_in=ends[-1],
        dropped={"unreadable": _sum(digests, "rejected")} if rejections else {},
        duplicates=len(repeated),
        rows_out=ends[-1] - len(repeated),
        tokens=0,
        bytes_out=_sum(written, "bytes_out"),
        extra={"rejections": rejections[:_MOST_REJECTIONS]} if rejections else {},
    )


def pack_on(
    inputs: _Inputs,
    output: str,
    *,
    length: int,
    column: str = "input_ids",
    others: Sequence[str] | None = None,
    long: Literal["error", "drop", "cut"] = "error",
    method: Method = "first_fit",
    engine: str = "local",
    address: str = "auto",
    workers: int = 0,
    memory: int = 4 * 1024**3,
    work: str | None = None,
    restart: bool = False,
    overwrite: bool = False,
    heard: Heard = lambda _: None,
    **read_options: Any,
) -> JobSummary:
    """Writes packs of whole sequences: the columns given, ``position_ids`` and ``lengths``.

    Args:
        length: Tokens that a pack holds at most.
        column: The lists of token ids.
        others: Lists with a value for each token; ``labels`` by default, where the data has it.
        long: What to do with a row of more tokens: stop, leave it out, or cut off its end.
        method: One of ``plan_packs``.

    The others are those of ``dedupe_on``.
    """
    shares = Shares.open(inputs, memory=memory, **read_options)
    names = shares.schema.names
    optional = [name for name in ("labels",) if name in names] if others is None else [*others]
    columns = [column, *optional]
    if missing := [name for name in columns if name not in names]:
        raise UsageError(f"there is no column {missing[0]!r}; there are: {', '.join(names)}")
    if len({*columns, "position_ids", "lengths"}) != len(columns) + 2:
        raise UsageError(f"columns must be different, and not position_ids or lengths: {columns}")
    if length < 1 or long not in ("error", "drop", "cut"):
        raise UsageError(f"length must be at least 1, long error, drop or cut: {length}, {long!r}")
    about = {"job": "pack", "columns": columns, "length": length, "long": long, "method": method}
    places = (output, work, restart, overwrite)
    with _open_job(shares, about, places, (engine, address, workers), heard) as job:
        given = [{"share": share} for share in shares.cut(least_bytes=_PACK_BYTES)]
        schema = pa.schema([shares.schema.field(name) for name in columns])
        packed = job.run("pack", given, schema=schema, length=length, long=long, method=method)
    dropped = {reason: _sum(packed, reason) for reason in ("too long", "empty", "unreadable")}
    packs, tokens = _sum(packed, "packs"), _sum(packed, "tokens")
    return job.summary(
        rows_in=_sum(packed, "rows"),
        dropped={reason: count for reason, count in dropped.items() if count},
        duplicates=0,
        rows_out=packs,
        tokens=tokens,
        bytes_out=_sum(packed, "bytes_out"),
        extra={
            "efficiency": tokens / (packs * length) if packs else None,
            "length": length,
            "sequences": _sum(packed, "sequences"),
            "cut": _sum(packed, "cut"),
        },
    )


def digest(
    store: Store, *, share: Share, schema: pa.Schema, columns: list[str], secret: Any, memory: int
) -> Answer:
    """Writes the digests of a share's rows, 16 bytes each."""
    if share.options.on_error == "raise":  # else a damaged column hides its row
        share = replace(share, options=replace(share.options, columns=tuple(columns)))
        schema = pa.schema([schema.field(name) for name in columns])
    secret = np.array(secret, np.uint64)
    num_rows, rejections = 0, []
    with store.writing(f"digests/{share.name}.npy") as path, path.open("wb") as file:
        for is_done in (False, True):
            head = {"descr": "<u8", "fortran_order": False, "shape": (num_rows, 2)}
            np.lib.format.write_array_header_1_0(file, head)
            if is_done:
                break
            for rows in read_share(share, schema, memory):
                rejections += rows.rejections
                num_rows += rows.table.num_rows
                for batch in rows.table.select(columns).to_batches():
                    file.write(digest_batch(batch, secret, 1).data)
            file.seek(0)
    return {
        "rows": num_rows,
        "bytes_out": 16 * num_rows,
        "rejected": sum(item.num_rows or 0 for item in rejections),
        "rejections": [asdict(item) for item in rejections[:_MOST_REJECTIONS]],
    }


def write(
    store: Store,
    *,
    share: Share,
    schema: pa.Schema,
    rows: Sequence[int],
    drop: Sequence[int],
    part: str,
    target: str,
    memory: int,
) -> Answer:
    """Writes the rows of a share that are not repeated."""
    start, stop = rows
    keep = np.ones(stop - start, bool)
    if drop[1] > drop[0]:
        keep[read_array(store, "repeated.npy", np.dtype("<i8"), *drop) - start] = False
    at, held = 0, list[pa.RecordBatch]()
    with (
        Store(target).writing(part) as path,
        pq.ParquetWriter(path, schema, compression="zstd") as writer,
    ):
        for table in (rows.table for rows in read_share(share, schema, memory)):
            for batch in table.to_batches():
                held.append(take_rows(batch, np.flatnonzero(keep[at : at + batch.num_rows])))
                at += batch.num_rows
            if sum(map(held_bytes, held)) >= GROUP_BYTES:
                writer.write_table(pa.Table.from_batches(held))
                held = []
        if at != len(keep):
            raise DataError(
                f"of {len(keep):,} rows that were read first {at:,} are there now: the input "
                "changed meanwhile; run again with restart=True (--restart)",
                path=share.files[0].source.path,
            )
        if held:
            writer.write_table(pa.Table.from_batches(held))
        writer.close()
        num_bytes = path.stat().st_size
    return {"rows": int(keep.sum()), "bytes_out": num_bytes}


def pack(
    store: Store,
    *,
    share: Share,
    schema: pa.Schema,
    length: int,
    long: str,
    method: Method,
    target: str,
    memory: int,
) -> Answer:
    """Packs the rows of a share."""
    options = replace(share.options, columns=tuple(schema.names), may_widen=True)
    share = replace(share, options=options)
    counts: Counter[str] = Counter()
    added = [pa.field("position_ids", _TOKENS), pa.field("lengths", _TOKENS)]
    packed = pa.schema([pa.field(name, _TOKENS) for name in schema.names] + added)
    read = (
        _sequences(share, rows, schema.names, length, long, counts)
        for rows in read_share(share, schema, memory)
    )
    with (
        Store(target).writing(f"part-{share.name}.parquet") as path,
        pq.ParquetWriter(path, packed, compression="zstd") as writer,
    ):
        for table in _planned_together(read):
            lengths = pc.list_value_length(table.column(0)).to_numpy()
            plan = plan_packs(lengths, length, method=method)
            ordered = lengths[plan.indices]
            edges = np.append(0, np.cumsum(ordered))
            # Taken in the order of the plan, the tokens of a pack are neighbours.
            taken = take(table, plan.indices).columns
            flat = [
                (pa.concat_arrays(lists.chunks).flatten(), edges[plan.offsets]) for lists in taken
            ]
            places = np.arange(edges[-1]) - np.repeat(edges[:-1], ordered)
            flat += [(pa.array(places, pa.int32()), edges[plan.offsets])]
            flat += [(pa.array(ordered, pa.int32()), plan.offsets)]
            tokens = [
                pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)
                for values, offsets in flat
            ]
            writer.write_table(
                pa.Table.from_arrays(tokens, schema=packed),
                row_group_size=max(1, _GROUP_TOKENS // length),
            )
            counts.update(packs=len(plan), sequences=len(lengths), tokens=plan.total_length)
        writer.close()
        counts["bytes_out"] = path.stat().st_size
    return dict(counts)


def _sequences(
    share: Share, rows: Rows, columns: Sequence[str], length: int, long: str, counts: Counter[str]
) -> pa.Table:
    """The rows to pack, as lists of 32-bit numbers."""
    table = rows.table.combine_chunks()
    counts["rows"] += table.num_rows
    counts["unreadable"] += sum(item.num_rows or 0 for item in rows.rejections)
    lists = []
    for name in columns:
        try:
            lists.append(
                pa.concat_arrays([pa.array([], _TOKENS), *table[name].cast(_TOKENS).chunks])
            )
            if lists[-1].flatten().null_count:
                raise pa.ArrowInvalid("null among the tokens")
        except pa.ArrowException as error:
            raise DataError(
                f"column {name!r} of type {table[name].type} holds no lists of token ids ({error}); "
                "tokenise it first, or name another column",
                path=share.place(rows, 0)["path"],
            ) from None
    lengths = [pc.fill_null(pc.list_value_length(column), 0).to_numpy() for column in lists]
    for name, others in zip(columns, lengths, strict=True):
        if (differs := np.flatnonzero(others != lengths[0])).size:
            row = int(differs[0])
            raise DataError(
                f"the row has {lengths[0][row]:,} {columns[0]} and {others[row]:,} {name}: give "
                "every token one value, or leave the column out",
                **share.place(rows, row),
            )
    is_long = lengths[0] > length
    if long == "error" and is_long.any():
        row = int(np.argmax(is_long))
        raise DataError(
            f"the row has {lengths[0][row]:,} tokens and a pack holds {length:,}: pass a larger "
            'length, or long="cut" or "drop" (--long)',
            **share.place(rows, row),
        )
    keep = lengths[0] > 0
    counts["empty"] += int(np.count_nonzero(~keep))
    counts["cut" if long == "cut" else "too long"] += int(np.count_nonzero(is_long))
    if long == "cut":
        lists = [pc.list_slice(column, 0, length) for column in lists]
    else:
        keep &= ~is_long
    return take(pa.table(lists, list(columns)), np.flatnonzero(keep))


def _planned_together(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows, as many at a time as are planned together, however they come."""
    held, num_rows, num_tokens = list[pa.Table](), 0, 0
    for table in tables:
        ends = np.cumsum(pc.list_value_length(table.column(0)).to_numpy())
        start = 0
        while start < table.num_rows:
            before = int(ends[start - 1]) if start else 0
            most = int(np.searchsorted(ends, before + _PLANNED_TOKENS - num_tokens, side="right"))
            stop = min(start + _PLANNED_ROWS - num_rows, max(most, start + (not held)))
            if stop > start:
                held.append(table.slice(start, stop - start))
                num_rows, num_tokens = (
                    num_rows + stop - start,
                    num_tokens + int(ends[stop - 1]) - before,
                )
                start = stop
            else:
                yield pa.concat_tables(held).combine_chunks()
                held, num_rows, num_tokens = [], 0, 0
    if num_rows:
        yield pa.concat_tables(held).combine_chunks()


@dataclass(slots=True, kw_only=True)
class _Job:
    """What the stages of one job share."""

    shares: Shares
    engine: Engine
    store: Store
    output: Store
    parts: Store
    """Where they are written: beside a local output, into another one."""
    tally: Tally
    began: float

    def run(self, stage: str, given: Sequence[Mapping[str, Any]], **shared: Any) -> list[Answer]:
        """The answers of a stage's tasks, one for each share."""
        shared["memory"] = self.shares.memory
        if stage != "digest":
            shared["target"] = self.parts.url
        tasks = [
            Task(
                stage=stage,
                name=arguments["share"].name,
                function=f"{__name__}:{stage}",
                arguments={**shared, **arguments},
            )
            for arguments in given
        ]
        return list(run_stage(self.engine, self.store, stage, tasks, self.tally.hear).values())

    def summary(self, **figures: Any) -> JobSummary:
        return JobSummary(
            outputs=(self.output.url,),
            bytes_in=self.shares.num_bytes,
            seconds=time.perf_counter() - self.began,
            stages=self.tally.stages(),
            nodes=self.tally.nodes(),
            **figures,
        )


@contextmanager
def _open_job(
    shares: Shares,
    about: Mapping[str, Any],
    places: tuple[str, str | None, bool, bool],
    workforce: tuple[str, str, int],
    heard: Heard,
) -> Iterator[_Job]:
    """A job, whose output is in place at the end."""
    began = time.perf_counter()
    url, work, restart, overwrite = places
    kind, address, workers = workforce
    if format_of_name(url.rstrip("/"))[0] not in (None, "parquet"):
        raise UsageError(f"output {url} becomes a folder of Parquet files: give it no ending")
    output = parts = Store(url.rstrip("/"))
    if output.is_local:
        parts = Store(f"{output.url}.parts")
    work = work or f"{output.url}.work"
    is_new = restart or not Store(work).exists("job.json")
    if is_new and output.exists("") and not overwrite:
        raise UsageError(
            f"output {url} exists and is left as it is: pass overwrite=True (--overwrite) to "
            "replace it, or choose another name"
        )
    description = {**about, "output": output.url, **shares.describe()}
    store = open_job(work, description, restart=restart)
    if is_new:
        parts.remove()
    with closing(
        open_engine(kind, address=address, workers=workers, memory=shares.memory)
    ) as engine:
        yield _Job(
            shares=shares,
            engine=engine,
            store=store,
            output=output,
            parts=parts,
            tally=Tally(heard),
            began=began,
        )
    if not output.is_local:
        output.write_json("_SUCCESS", {})
    elif parts.exists(""):  # else an earlier run came as far as this
        if output.exists(""):
            shutil.rmtree(output.path(""))
        Path(parts.path("")).rename(output.path(""))
    store.remove()


def _sum(answers: Sequence[Answer], name: str) -> int:
    return sum(int(answer.get(name, 0)) for answer in answers)
