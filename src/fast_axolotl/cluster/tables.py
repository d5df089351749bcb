"""``dedupe --engine``: a whole dataset without its repeated rows, in tasks.

A share is a run of neighbouring units of the input, over several files where they are small. Where
it is cut follows from the files alone. It carries what a process needs to open its files, and opens
no others. CSV and compressed files are not cut: a share takes them whole. The types of JSON and CSV
are found before, by a scan in the process that deals out the shares.

Stage ``digest`` digests the rows of every share, ``first_rows`` finds the repeated ones, and stage
``write`` reads again and writes the others: the rows of ``dedupe_files``, in a folder of Parquet
files. A share of repeated rows alone is not read again.

The output appears whole: a local one is renamed at the end, in an object store the file
``_SUCCESS`` comes last. The file ``_fast-axolotl`` in it names the job that wrote it. A folder
without that file is somebody else's and is never replaced, and before a job ends it compares every
file with what its task reported.
"""

from __future__ import annotations

import os
import shutil
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fast_axolotl.cluster.engines import open_engine
from fast_axolotl.cluster.first_rows import Part, find_repeated, read_array, write_array
from fast_axolotl.cluster.job import JobSummary, Ledger, lock_job, open_job
from fast_axolotl.cluster.store import Store
from fast_axolotl.cluster.tasks import Answer, Heard, Task, run_stage
from fast_axolotl.dedupe.output import ParquetWriter
from fast_axolotl.dedupe.rows import digest_batch, take_rows
from fast_axolotl.dedupe.seen import fresh_secret
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.reading import Rejection, format_of_name, open_dataset
from fast_axolotl.reading.blocks import Dataset, InputFile, ReadOptions, Unit
from fast_axolotl.reading.formats import FormatWarning, open_files
from fast_axolotl.reading.order import Piece, Position, Span
from fast_axolotl.reading.reader import LEAST_MEMORY_BUDGET, dataset_of
from fast_axolotl.reading.rows import Rows, read_rows
from fast_axolotl.reading.unify_types import Known

_MIB = 1024 * 1024
_SHARES = 256
"""Data is cut into about so many shares, as long as they are not too small or too large."""

_LEAST_BYTES, _MOST_BYTES = 4 * _MIB, 256 * _MIB
_MEMORY_SHARE = 8
"""Of a process's memory, this part is for reading ahead."""

_MARK = "_fast-axolotl"
"""The file of an output that names its job. Readers of Parquet folders skip it."""

_MOST_REJECTIONS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one task reads."""

    name: str
    files: tuple[InputFile, ...]
    units: tuple[Unit, ...]
    """Each one counts its file among ``files``."""
    format: str
    options: ReadOptions


def dedupe_on(
    inputs: Any,
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
    format: str = "auto",
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
        format: As for ``open_dataset``, like ``read_options``: ``split``, ``on_error``, ….
    """
    ledger = Ledger(heard)
    place = _Output(output, work=work, restart=restart, overwrite=overwrite)
    listed = [inputs] if isinstance(inputs, str | Path) else inputs
    # Other processes have other working directories.
    paths = [str(p) if "://" in str(p) else os.path.abspath(p) for p in listed]  # noqa: PTH100
    budget = max(LEAST_MEMORY_BUDGET, memory // _MEMORY_SHARE)
    reader = open_dataset(paths, format=format, memory_budget=budget, infer="scan", **read_options)
    dataset, schema = dataset_of(reader), reader.schema
    sources = [item.source for item in dataset.inputs]
    if inside := [one.identity for one in sources if one.identity.startswith(f"{place.url}/")]:
        raise UsageError(f"output {output} contains the input {inside[0]}; choose another")
    names = list(schema.names if columns is None else columns)
    if not names or not set(names) <= set(schema.names) or len(set(names)) != len(names):
        raise UsageError(f"columns must be among {', '.join(schema.names)}, not {names}")
    options = asdict(dataset.options)
    del options["block_bytes"]
    description = {
        "job": "dedupe",
        "columns": names,
        "output": place.url,
        "inputs": [[one.identity, one.num_bytes, one.version] for one in sources],
        "format": format,
        "options": options,
    }
    with ExitStack() as held:
        store = place.open(description, held)
        crew = open_engine(
            engine, address=address, workers=workers, memory=memory, preload=[__name__]
        )
        held.callback(crew.close)
        if not store.exists("secret.json"):
            store.write_json("secret.json", fresh_secret().tolist())
        cut = _cut(dataset, format)

        def run(stage: str, given: Sequence[Mapping[str, Any]], **alike: Any) -> list[Answer]:
            """The answers of a stage's tasks, one for each share."""
            tasks = [
                Task(
                    stage=stage,
                    name=arguments["share"].name,
                    function=f"{__name__}:{stage}",
                    arguments={"schema": schema, "memory": memory, **alike, **arguments},
                )
                for arguments in given
            ]
            return list(run_stage(crew, store, stage, tasks, ledger.hear).values())

        secret = store.read_json("secret.json")
        digests = run("digest", [{"share": share} for share in cut], columns=names, secret=secret)
        ends = np.cumsum([0, *(answer["rows"] for answer in digests)]).tolist()
        parts = [
            Part(name=share.name, num_rows=answer["rows"], first_place=start)
            for share, start, answer in zip(cut, ends, digests, strict=False)
        ]
        repeated = find_repeated(crew, store, parts, memory=memory, heard=ledger.hear)
        write_array(store, "repeated.npy", repeated)
        drops = np.searchsorted(repeated, ends).tolist()
        given: list[dict[str, Any]] = []
        for number, share in enumerate(cut):
            rows, drop = ends[number : number + 2], drops[number : number + 2]
            has_rows = rows[1] - rows[0] > drop[1] - drop[0]
            if has_rows or (share is cut[-1] and not given):  # without rows there is a schema
                part = f"part-{len(given):05d}.parquet"
                given.append({"share": share, "rows": rows, "drop": drop, "part": part})
        place.forget_missing("write", {one["share"].name: one["part"] for one in given})
        written = run("write", given, target=place.parts.url)
        place.finish({one["part"]: a["rows"] for one, a in zip(given, written, strict=True)})
    rejections = [item for answer in digests for item in answer["rejections"]]
    unreadable = sum(answer["rejected"] for answer in digests)
    return ledger.summary(
        outputs=(place.url,),
        rows_in=ends[-1],
        dropped={"unreadable": unreadable} if rejections else {},
        duplicates=len(repeated),
        rows_out=ends[-1] - len(repeated),
        tokens=0,
        bytes_in=sum(one.num_bytes for one in sources),
        bytes_out=sum(answer["bytes_out"] for answer in written),
        extra={"rejections": rejections[:_MOST_REJECTIONS]} if rejections else {},
    )


class _Output:
    """The folder that a job writes, and its work folder, from the first look until it is there."""

    def __init__(self, output: str, *, work: str | None, restart: bool, overwrite: bool) -> None:
        self._final = self.parts = Store(str(output).rstrip("/")).anchored()
        self.url = self._final.url
        if format_of_name(self.url)[0] not in (None, "parquet"):
            raise UsageError(
                f"output {output} becomes a folder of Parquet files; remove the file ending"
            )
        if self._final.is_local:
            self.parts = Store(f"{self.url}.parts")
        self._work = Store(work or f"{self.url}.work").anchored()
        if f"{self._work.url}/".startswith(f"{self.url}/"):
            raise UsageError(f"--work {self._work.url} is inside the output; choose another folder")
        self._restart, self._overwrite = restart, overwrite
        self._is_new = restart or not self._work.exists("id.json")
        self._id = uuid.uuid4().hex if self._is_new else str(self._work.read_json("id.json"))
        """Of the job, however often it is continued."""
        self._check_places()

    def open(self, description: dict[str, Any], held: ExitStack) -> Store:
        """The job's work folder; it and the output are locked for as long as ``held`` is."""
        work = self._work.url
        if self._work.names("") and not self._work.exists("job.json"):
            raise UsageError(f"{work} is not the work folder of a job; pass another --work")
        held.enter_context(lock_job(work))
        held.enter_context(lock_job(self.url))
        self._check_places()  # nobody changes them from here
        open_job(work, description, restart=self._restart)
        if self._is_new:
            self.parts.remove()
            self._work.write_json("id.json", self._id)
        return self._work

    @property
    def _is_placed(self) -> bool:
        """Whether the output has its name already: a run was interrupted after that."""
        return self._final is not self.parts and _job_of(self._final) == self._id

    def forget_missing(self, stage: str, parts: Mapping[str, str]) -> None:
        """No answer of a task outlives the file that the task wrote."""
        if not self._is_placed:
            self.parts.write_json(_MARK, {"job": self._id, "work": self._work.url})
            written = self.parts.names("")
            for task, part in parts.items():
                if part not in written:
                    self._work.remove(f"{stage}/{task}.json")

    def finish(self, rows: Mapping[str, int]) -> None:
        """The output is there after this, with so many rows in each part."""
        is_placed = self._is_placed
        _compare(self._final if is_placed else self.parts, rows)
        if not self._final.is_local:
            self._final.write_json("_SUCCESS", {})
        elif not is_placed:
            for path in Path(self.parts.path("")).glob(".*"):
                path.unlink()  # what a killed task had begun
            if self._final.exists(""):
                shutil.rmtree(self._final.path(""))
            Path(self.parts.path("")).rename(self._final.path(""))
        self._work.remove()

    def _check_places(self) -> None:
        """Refuses to write where another job or somebody else has written."""
        owner = _job_of(self._final)
        if owner == "":
            raise UsageError(
                f"output {self.url} already exists and was not written by such a job, so it is not "
                "replaced; choose another name, or remove it yourself"
            )
        if owner not in (None, self._id) and not self._overwrite:
            raise UsageError(
                f"output {self.url} already exists; pass overwrite=True (--overwrite) to replace "
                "it, or choose another name"
            )
        unfinished = _job_of(self.parts)
        if unfinished == "" or (unfinished not in (None, self._id) and not self._is_new):
            raise UsageError(
                f"{self.parts.url} holds files of another job; remove it, or pass another --output"
            )


def _compare(place: Store, rows: Mapping[str, int]) -> None:
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


def _cut(dataset: Dataset, format: str) -> list[Share]:
    """All units of a dataset in shares, in order."""
    units = dataset.units()
    total = sum(unit.num_bytes for unit in units)
    share_bytes = max(_LEAST_BYTES, min(total // _SHARES, _MOST_BYTES))
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
            files=tuple(dataset.inputs[file] for file in files),
            units=tuple(replace(unit, file=files[unit.file]) for unit in group),
            format=format,
            options=dataset.options,
        )
        shares.append(share)
    return shares


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
        "rejections": [
            f"{', '.join(filter(None, (item.path, item.place)))}: {item.reason}"
            for item in rejections[:_MOST_REJECTIONS]
        ],
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
    at = 0
    with Store(target).writing(part) as path:
        writer = ParquetWriter(path, schema)
        for found in read_share(share, schema, memory):
            for batch in found.table.to_batches():
                writer.write(take_rows(batch, np.flatnonzero(keep[at : at + batch.num_rows])))
                at += batch.num_rows
        writer.close()
        num_bytes = path.stat().st_size
        if at != len(keep):
            raise DataError(
                f"the input had {len(keep):,} rows at the first read and {at:,} at the second: it "
                "changed; run again with restart=True (--restart)",
                path=share.files[0].source.path,
            )
    return {"rows": int(keep.sum()), "bytes_out": num_bytes}


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
