"""Whole datasets through the stages of a job: repeated rows left out, or token lists packed.

Both read the input in shares and write a folder of Parquet files, in order. It appears whole: a
local one is renamed at the end, in an object store the file ``_SUCCESS`` comes last. The file
``_fast-axolotl`` in it names the job that wrote it. A folder without that file is somebody else's
and is never replaced, and before a job ends it compares every file with what its task reported.

``dedupe_on``: stage ``digest`` digests the rows of every share, ``first_rows`` finds the repeated
ones, and stage ``write`` reads again and writes the others: the rows of ``dedupe_files``. A share
of repeated rows alone is not read again.

``pack_on``: stage ``pack`` plans up to 100,000 rows or 16 Mi tokens of a share at a time, for which
a task holds some 350 MB. Packs are not padded.
"""

from __future__ import annotations

import shutil
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fast_axolotl.cluster.engines import open_engine
from fast_axolotl.cluster.first_rows import Part, find_repeated, read_array, write_array
from fast_axolotl.cluster.job import JobSummary, Ledger, lock_job, open_job
from fast_axolotl.cluster.shares import Share, Shares, read_share
from fast_axolotl.cluster.store import Store
from fast_axolotl.cluster.tasks import Answer, Heard, Task, run_stage
from fast_axolotl.dedupe.output import GROUP_BYTES
from fast_axolotl.dedupe.rows import digest_batch, take_rows
from fast_axolotl.dedupe.seen import fresh_secret
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.packing.plan import Method, plan_packs
from fast_axolotl.reading import Rejection, format_of_name, held_bytes
from fast_axolotl.reading.rows import Rows, take

_PLANNED_ROWS = 100_000
_PLANNED_TOKENS = 16 * 1024 * 1024
_PACK_BYTES = 32 * 1024 * 1024
"""A share to pack is no smaller where there is more: each leaves some packs that are not full."""

_GROUP_TOKENS = 2 * 1024 * 1024
"""Tokens in a row group."""

_MARK = "_fast-axolotl"
"""The file of an output that names its job. Readers of Parquet folders skip it."""

_MOST_REJECTIONS = 100
_TOKENS = pa.list_(pa.int32())


def dedupe_on(
    inputs: Any, output: str, *, columns: Sequence[str] | None = None, **options: Any
) -> JobSummary:
    """Writes the rows of ``inputs`` that come for the first time, in their order.

    Args:
        inputs: What ``open_dataset`` reads: files, folders, globs or URIs.
        output: A folder to make, as a path or a URL.
        columns: Compare these columns only; whole rows are written all the same.
        options: Those of a job, see ``_Job``; the others are for ``open_dataset``: ``format``,
            ``split``, ``json_field``, ``on_error``, ….
    """
    job = _Job(inputs, output, {"job": "dedupe", "columns": columns and list(columns)}, **options)
    with job.held:
        store, hear, memory = job.store, job.ledger.hear, job.shares.memory
        schema = job.shares.one_schema(job.engine, store, hear)
        names = list(schema.names if columns is None else columns)
        if not names or not set(names) <= set(schema.names) or len(set(names)) != len(names):
            store.remove()  # nothing is left of a job that cannot be meant
            raise UsageError(f"columns must be among {', '.join(schema.names)}, not {names}")
        if not store.exists("secret.json"):
            store.write_json("secret.json", fresh_secret().tolist())
        secret = store.read_json("secret.json")
        cut = job.shares.cut()
        given: list[dict[str, Any]] = [{"share": share} for share in cut]
        digests = job.run("digest", given, schema=schema, columns=names, secret=secret)
        ends = np.cumsum([0, *(answer["rows"] for answer in digests)]).tolist()
        parts = [
            Part(name=share.name, num_rows=answer["rows"], first_place=start)
            for share, start, answer in zip(cut, ends, digests, strict=False)
        ]
        repeated = find_repeated(job.engine, store, parts, memory=memory, heard=hear)
        write_array(store, "repeated.npy", repeated)
        drops = np.searchsorted(repeated, ends).tolist()
        given = []
        for number, share in enumerate(cut):
            rows, drop = ends[number : number + 2], drops[number : number + 2]
            has_rows = rows[1] - rows[0] > drop[1] - drop[0]
            if has_rows or (share is cut[-1] and not given):  # without rows there is a schema
                part = f"part-{len(given):05d}.parquet"
                given.append({"share": share, "rows": rows, "drop": drop, "part": part})
        written = job.run_into_parts("write", given, schema=schema)
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
    inputs: Any,
    output: str,
    *,
    length: int,
    column: str = "input_ids",
    others: Sequence[str] | None = None,
    long: Literal["error", "drop", "cut"] = "error",
    method: Method = "first_fit",
    **options: Any,
) -> JobSummary:
    """Writes packs of whole sequences: the columns given, ``position_ids`` and ``lengths``.

    Args:
        inputs: As for ``dedupe_on``, like ``output`` and ``options``.
        length: Tokens that a pack holds at most.
        column: The lists of token ids.
        others: Lists with a value for each token; ``labels`` by default, where the data has it.
        long: What to do with a row of more tokens: stop, leave it out, or cut off its end.
        method: One of ``plan_packs``.
    """
    how = {"length": length, "long": long, "method": method}
    if length < 1 or long not in ("error", "drop", "cut"):
        raise UsageError(f"length must be 1 or more, and long one of error, drop or cut, not {how}")
    about = {"job": "pack", "columns": [column, *(others or ())], **how}
    job = _Job(inputs, output, about, **options)
    known = job.shares.schema
    optional = [name for name in ("labels",) if name in known.names] if others is None else others
    columns = [column, *optional]
    with job.held:
        kept = set(known.names) - {"position_ids", "lengths"}
        if not set(columns) <= kept or len(set(columns)) != len(columns):
            job.store.remove()
            raise UsageError(f"columns must be among {', '.join(sorted(kept))}, not {columns}")
        given = [
            {"share": share, "part": f"part-{share.name}.parquet"}
            for share in job.shares.cut(least_bytes=_PACK_BYTES)
        ]
        schema = pa.schema([known.field(name) for name in columns])
        packed = job.run_into_parts("pack", given, schema=schema, **how)
    dropped = {reason: _sum(packed, reason) for reason in ("too long", "empty", "unreadable")}
    packs, tokens = _sum(packed, "rows"), _sum(packed, "tokens")
    extra: dict[str, Any] = {name: _sum(packed, name) for name in ("sequences", "cut")}
    if rejections := [item for answer in packed for item in answer["rejections"]]:
        extra["rejections"] = rejections[:_MOST_REJECTIONS]
    return job.summary(
        rows_in=_sum(packed, "rows_in"),
        dropped={reason: count for reason, count in dropped.items() if count},
        duplicates=0,
        rows_out=packs,
        tokens=tokens,
        bytes_out=_sum(packed, "bytes_out"),
        extra={"efficiency": round(tokens / (packs * length), 4) if packs else None, **extra},
    )


class _Job:
    """A job from its first look at the data until its output is in place."""

    def __init__(
        self,
        inputs: Any,
        output: str,
        about: Mapping[str, Any],
        *,
        engine: str = "local",
        address: str = "auto",
        workers: int = 0,
        memory: int = 4 * 1024**3,
        work: str | None = None,
        restart: bool = False,
        overwrite: bool = False,
        heard: Heard = lambda _: None,
        **read_options: Any,
    ) -> None:
        """Args:
        engine: ``local`` or ``ray``.
        address: Of the Ray cluster: ``auto`` or ``HOST:PORT``.
        workers: Tasks at a time; 0 takes all cores of this machine or of the cluster.
        memory: Bytes that a working process may hold.
        work: The folder for files between stages; ``output`` with ``.work`` by default. All nodes
            must see it under this name. The same call continues there after an interruption.
        restart: Removes what an earlier run left there.
        overwrite: Replaces an output that exists.
        heard: Told of stages and tasks.
        """
        self.ledger = Ledger(heard)
        self.output = self.parts = Store(str(output).rstrip("/")).anchored()
        if format_of_name(self.output.url)[0] not in (None, "parquet"):
            raise UsageError(
                f"output {output} becomes a folder of Parquet files; remove the file ending"
            )
        if self.output.is_local:
            self.parts = Store(f"{self.output.url}.parts")
        folder = Store(work or f"{self.output.url}.work").anchored()
        is_new = restart or not folder.exists("id.json")
        self.id: str = uuid.uuid4().hex if is_new else folder.read_json("id.json")
        """Of this job, however often it is continued."""
        self._check_places(is_new=is_new, overwrite=overwrite)
        self.shares = Shares.open(inputs, memory=memory, **read_options)
        sources = [item.source.identity for item in self.shares.dataset.inputs]
        if f"{folder.url}/".startswith(f"{self.output.url}/"):
            raise UsageError(f"--work {folder.url} is inside the output; choose another folder")
        if inside := [path for path in sources if path.startswith(f"{self.output.url}/")]:
            raise UsageError(f"output {output} contains the input {inside[0]}; choose another")
        description = {**about, "output": self.output.url, **self.shares.describe()}
        if folder.names("") and not folder.exists("job.json"):
            raise UsageError(f"{folder.url} is not the work folder of a job; pass another --work")
        with ExitStack() as held:
            held.enter_context(lock_job(folder.url))
            held.enter_context(lock_job(self.output.url))
            self._check_places(is_new=is_new, overwrite=overwrite)  # nobody changes them from here
            self.store = open_job(folder.url, description, restart=restart)
            if is_new:
                self.parts.remove()
                self.store.write_json("id.json", self.id)
            self.engine = open_engine(
                engine, address=address, workers=workers, memory=memory, preload=[__name__]
            )
            held.callback(self.engine.close)
            self.held = held.pop_all()
            """Its lock and its engine, until the job ends."""

    def run(self, stage: str, given: Sequence[Mapping[str, Any]], **shared: Any) -> list[Answer]:
        """The answers of a stage's tasks, one for each share."""
        shared["memory"] = self.shares.memory
        tasks = [
            Task(
                stage=stage,
                name=arguments["share"].name,
                function=f"{__name__}:{stage}",
                arguments={**shared, **arguments},
            )
            for arguments in given
        ]
        return list(run_stage(self.engine, self.store, stage, tasks, self.ledger.hear).values())

    def run_into_parts(
        self, stage: str, given: Sequence[Mapping[str, Any]], **shared: Any
    ) -> list[Answer]:
        """The last stage: its tasks write the parts named in ``given``, and the output is there
        after it."""
        is_placed = self.output is not self.parts and _job_of(self.output) == self.id
        if not is_placed:
            self.parts.write_json(_MARK, {"job": self.id, "work": self.store.url})
            written = self.parts.names("")
            for arguments in given:
                if arguments["part"] not in written:  # an answer does not outlive its file
                    self.store.remove(f"{stage}/{arguments['share'].name}.json")
        answers = self.run(stage, given, target=self.parts.url, **shared)
        place = self.output if is_placed else self.parts
        counts = [
            (arguments["part"], answer["rows"])
            for arguments, answer in zip(given, answers, strict=True)
        ]
        self._compare(place, dict(counts))
        if not self.output.is_local:
            self.output.write_json("_SUCCESS", {})
        elif not is_placed:
            for path in Path(self.parts.path("")).glob(".*"):
                path.unlink()  # what a killed task had begun
            if self.output.exists(""):
                shutil.rmtree(self.output.path(""))
            Path(self.parts.path("")).rename(self.output.path(""))
        self.store.remove()
        return answers

    def summary(self, **figures: Any) -> JobSummary:
        """What the job did."""
        read = self.shares.num_bytes
        return self.ledger.summary(outputs=(self.output.url,), bytes_in=read, **figures)

    def _check_places(self, *, is_new: bool, overwrite: bool) -> None:
        """Refuses to write where another job or somebody else has written."""
        url = self.output.url
        owner = _job_of(self.output)
        if owner == "":
            raise UsageError(
                f"output {url} already exists and was not written by such a job, so it is not "
                "replaced; choose another name, or remove it yourself"
            )
        if owner not in (None, self.id) and not overwrite:
            raise UsageError(
                f"output {url} already exists; pass overwrite=True (--overwrite) to replace it, or "
                "choose another name"
            )
        unfinished = _job_of(self.parts)
        if unfinished == "" or (unfinished not in (None, self.id) and not is_new):
            raise UsageError(
                f"{self.parts.url} holds files of another job; remove it, or pass another --output"
            )

    def _compare(self, place: Store, rows: Mapping[str, int]) -> None:
        """Every part is there, with as many rows as its task reported, and nothing else is."""

        def count(part: str) -> int:
            with place.open(part) as file:
                return int(pq.ParquetFile(file).metadata.num_rows)

        found = place.names("") - {_MARK, "_SUCCESS"}
        wrong = sorted(found ^ set(rows))
        if not wrong:
            with ThreadPoolExecutor(16) as threads:
                counted = zip(rows, threads.map(count, rows), strict=True)
                wrong = [part for part, num_rows in counted if num_rows != rows[part]]
        if wrong:
            raise DataError(
                f"{wrong[0]} is not what its task wrote ({len(wrong)} of {len(rows)} files); "
                "something else changed this folder: run again with restart=True (--restart)",
                path=place.url,
            )


def _job_of(place: Store) -> str | None:
    """The job that wrote a folder; empty where that is unknown, ``None`` where nothing is there."""
    if place.exists(_MARK):
        return str(place.read_json(_MARK)["job"])
    return "" if place.is_there() else None


def digest(
    store: Store, *, share: Share, schema: pa.Schema, columns: list[str], secret: Any, memory: int
) -> Answer:
    """Writes the digests of a share's rows, 16 bytes each."""
    if share.options.on_error == "raise":  # else a damaged column hides its row
        share = replace(share, options=replace(share.options, columns=tuple(columns)))
        schema = pa.schema([schema.field(name) for name in columns])
    num_rows, rejections = 0, list[Rejection]()
    with store.writing(f"digests/{share.name}.npy") as path, path.open("wb") as file:
        file.seek(128)  # the head of a .npy file is written last
        for rows in read_share(share, schema, memory):
            rejections += rows.rejections
            num_rows += rows.table.num_rows
            for batch in rows.table.select(columns).to_batches():
                file.write(digest_batch(batch, np.array(secret, np.uint64), 1).data)
        file.seek(0)
        head: Any = np.lib.format
        head.write_array_header_1_0(
            file, {"descr": "<u8", "fortran_order": False, "shape": (num_rows, 2)}
        )
        assert file.tell() == 128
    return {
        "rows": num_rows,
        "bytes_out": 16 * num_rows,
        "rejected": sum(item.num_rows or 0 for item in rejections),
        "rejections": _listed(rejections),
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
    keep = np.ones(rows[1] - rows[0], bool)
    if drop[1] > drop[0]:
        keep[read_array(store, "repeated.npy", np.dtype("<i8"), *drop) - rows[0]] = False
    at, held, num_held = 0, list[pa.RecordBatch](), 0
    with Store(target).writing(part) as path:
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            for found in read_share(share, schema, memory):
                for batch in found.table.to_batches():
                    held.append(take_rows(batch, np.flatnonzero(keep[at : at + batch.num_rows])))
                    at += batch.num_rows
                    num_held += held_bytes(held[-1])
                if num_held >= GROUP_BYTES:
                    writer.write_table(pa.Table.from_batches(held))
                    held, num_held = [], 0
            if held:
                writer.write_table(pa.Table.from_batches(held))
        num_bytes = path.stat().st_size
        if at != len(keep):
            raise DataError(
                f"the input had {len(keep):,} rows at the first read and {at:,} at the second: it "
                "changed; run again with restart=True (--restart)",
                path=share.files[0].source.path,
            )
    return {"rows": int(keep.sum()), "bytes_out": num_bytes}


def pack(
    store: Store,
    *,
    share: Share,
    schema: pa.Schema,
    length: int,
    long: str,
    method: Method,
    part: str,
    target: str,
    memory: int,
) -> Answer:
    """Packs the rows of a share."""
    options = replace(share.options, columns=tuple(schema.names), may_widen=True)
    share = replace(share, options=options)
    counts: Counter[str] = Counter()
    rejections: list[Rejection] = []
    names = [*schema.names, "position_ids", "lengths"]
    sequences = (
        _sequences(share, rows, schema.names, length, long, counts, rejections)
        for rows in read_share(share, schema, memory)
    )
    with Store(target).writing(part) as path:
        packed = pa.schema([(name, _TOKENS) for name in names])
        with pq.ParquetWriter(path, packed, compression="zstd") as writer:
            for table in _planned_together(sequences):
                lengths = pc.list_value_length(table.column(0)).to_numpy()
                plan = plan_packs(lengths, length, method=method)
                ordered = lengths[plan.indices]
                edges = np.append(0, np.cumsum(ordered))
                places = np.arange(edges[-1]) - np.repeat(edges[:-1], ordered)
                # Taken in the order of the plan, the tokens of a pack are neighbours.
                taken = take(table, plan.indices).columns
                flat = [pa.concat_arrays(lists.chunks).flatten() for lists in taken]
                flat += [pa.array(places, pa.int32()), pa.array(ordered, pa.int32())]
                offsets = [pa.array(edges[plan.offsets], pa.int32())] * (len(flat) - 1)
                offsets.append(pa.array(plan.offsets, pa.int32()))
                columns = map(pa.ListArray.from_arrays, offsets, flat)
                rows_in_group = max(1, _GROUP_TOKENS // length)
                writer.write_table(pa.table(list(columns), names), row_group_size=rows_in_group)
                counts.update(rows=len(plan), sequences=len(lengths), tokens=plan.total_length)
        counts["bytes_out"] = path.stat().st_size
    counts["unreadable"] = sum(item.num_rows or 0 for item in rejections)
    return {"rows": 0, **counts, "rejections": _listed(rejections)}


def _listed(rejections: Sequence[Rejection]) -> list[str]:
    """The first of them: file, place and reason."""
    return [
        f"{', '.join(filter(None, (item.path, item.place)))}: {item.reason}"
        for item in rejections[:_MOST_REJECTIONS]
    ]


def _sequences(
    share: Share,
    rows: Rows,
    columns: Sequence[str],
    length: int,
    long: str,
    counts: Counter[str],
    rejections: list[Rejection],
) -> pa.Table:
    """The rows to pack, as lists of 32-bit numbers."""
    table, lists = rows.table, list[pa.Array]()
    for name in columns:
        try:
            cast = table[name].cast(_TOKENS).chunks
            lists.append(pa.concat_arrays([pa.array([], _TOKENS), *cast]))
            if lists[-1].flatten().null_count:
                raise pa.ArrowInvalid("there are nulls")
        except pa.ArrowException as error:
            raise DataError(
                f"column {name!r} of type {table[name].type} has no 32-bit token ids "
                f"({error}); tokenise first, or pass another column",
                path=share.place(rows, 0)["path"],
            ) from None
    lengths, *others = (pc.fill_null(pc.list_value_length(item), 0).to_numpy() for item in lists)
    is_long = lengths > length
    wrong = [(is_long & (long == "error"), f"more than {length:,}; pass --long cut or --long drop")]
    for name, found in zip(columns[1:], others, strict=True):
        wrong.append((found != lengths, f"a different number of {name}; make them equal"))
    for is_wrong, reason in wrong:
        if is_wrong.any():
            row = int(np.argmax(is_wrong))
            raise DataError(
                f"the row has {lengths[row]:,} tokens, {reason}", **share.place(rows, row)
            )
    keep = (lengths > 0) & ~(is_long & (long == "drop"))
    counts["rows_in"] += table.num_rows
    rejections += rows.rejections
    counts["empty"] += int(np.count_nonzero(lengths == 0))
    counts["cut" if long == "cut" else "too long"] += int(np.count_nonzero(is_long))
    lists = [pc.list_slice(item, 0, length) for item in lists] if is_long.any() else lists
    return take(pa.table(lists, list(columns)), np.flatnonzero(keep))


def _planned_together(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows, as many at a time as are planned together, however they come."""
    held, num_rows, num_tokens = list[pa.Table](), 0, 0
    for table in tables:
        ends = np.append(0, np.cumsum(pc.list_value_length(table.column(0)).to_numpy()))
        start = 0
        while start < table.num_rows:
            room = ends[start] + _PLANNED_TOKENS - num_tokens
            stop = int(np.searchsorted(ends, room, side="right")) - 1
            stop = min(start + _PLANNED_ROWS - num_rows, max(stop, start + (not held)))
            if stop > start:
                held.append(table.slice(start, stop - start))
                num_rows += stop - start
                num_tokens += int(ends[stop] - ends[start])
                start = stop
            else:
                yield pa.concat_tables(held).combine_chunks()
                held, num_rows, num_tokens = [], 0, 0
    if held:
        yield pa.concat_tables(held).combine_chunks()


def _sum(answers: Sequence[Answer], name: str) -> int:
    return sum(int(answer.get(name, 0)) for answer in answers)
