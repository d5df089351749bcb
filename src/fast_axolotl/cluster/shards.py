"""The tasks of ``prepare``: tokenise rows, sort them into pieces, write the final files.

``tokenise`` makes of a unit its tokens, their digests, and the number of every row in its unit.
``deal`` sorts a unit by where each row goes, one record batch for each piece of the output;
``write`` gathers a shard piece by piece. Pieces are bounded by bytes, and so is memory, whatever
the rows. Cost of ``write``: one read from every unit for each piece.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fast_axolotl.cluster.sources import Unit
from fast_axolotl.cluster.stock import Made, open_pipeline
from fast_axolotl.cluster.store import Store
from fast_axolotl.dedupe.rows import digest_batch
from fast_axolotl.errors import DataError, FastAxolotlError
from fast_axolotl.reading.schema import schema_of

_PLACE = "__fast_axolotl_place"
_ROWS_AT_ONCE = 1000
_MOST_SLICE_ROWS = 20_000


def tokenise(
    store: Store,
    *,
    unit: Unit,
    index: int,
    pipeline: str,
    split: str,
    slice_bytes: int,
    secret: list[int] | None,
) -> dict[str, Any]:
    """A unit's rows as they will be in the prepared dataset."""
    make = partial(open_pipeline(pipeline).make, index, split)
    final = schema_of(store.read_json("types.json")["final"])
    table = unit.read(store)
    step = max(1, min(_MOST_SLICE_ROWS, len(table) * slice_bytes // max(1, table.nbytes)))
    merged = dropped = num_bytes = 0
    numbers, digests = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    with (
        store.writing(f"tokens/{unit.name}.arrow") as path,
        pa.ipc.new_file(str(path), final) as writer,
    ):
        for start in range(0, len(table), step):
            part = unit._replace(first=unit.first + start)
            made = make_rows(make, table.slice(start, step), part)
            if made.table is not None:
                kept = _conform(made.table, final, part)
                writer.write_table(kept, _ROWS_AT_ONCE)
                numbers.append(made.numbers.astype(np.int64) + merged)
                if secret is not None:
                    key = np.array(secret, np.uint64)
                    digests += [digest_batch(rows, key, 1) for rows in kept.to_batches()]
                num_bytes += kept.nbytes
            merged += made.num_merged
            dropped += made.num_dropped
        pa.default_memory_pool().release_unused()
    joined = np.concatenate(numbers)
    store.write_array(f"numbers/{unit.name}", joined)
    if secret is not None:
        store.write_array(f"digests/{unit.name}", np.concatenate(digests))
    return {
        "rows": len(table),
        "kept": len(joined),
        "merged": merged,
        "dropped": dropped,
        "bytes_out": num_bytes,
    }


def deal(store: Store, *, unit: str) -> dict[str, Any]:
    """A unit's rows in the order of the output, a record batch for each piece of it.

    The file begins with where each batch does, so that a piece is read alone.
    """
    places = store.read_array(f"places/{unit}", "<i8")
    edges = store.read_array("edges", "<i8")
    kept = np.flatnonzero(places >= 0)  # the others are repeated
    order = kept[np.argsort(places[kept])]
    cuts = np.searchsorted(places[order], edges)
    table = pa.ipc.open_file(store.read(f"tokens/{unit}.arrow")).read_all()
    begins = np.full(len(edges), edges.nbytes)
    with store.writing(f"dealt/{unit}") as path, path.open("wb") as file:
        file.write(begins.data)
        for number, (start, stop) in enumerate(pairwise(cuts.tolist()), 1):
            chosen = order[start:stop]
            found = table.take(pa.array(chosen)).append_column(_PLACE, [places[chosen]])
            for batch in found.combine_chunks().to_batches():  # none, or one
                file.write(batch.serialize())
            begins[number] = file.tell()
        file.seek(0)
        file.write(begins.data)
    return {"rows": len(order), "bytes_out": int(begins[-1])}


def write(store: Store, *, name: str, pieces: range, target: str) -> dict[str, Any]:
    """One file of the prepared dataset, piece by piece."""
    from datasets import Features
    from datasets.arrow_writer import ArrowWriter

    final = schema_of(store.read_json("types.json")["final"])
    schema = final.append(pa.field(_PLACE, pa.int64()))
    begins = {
        f"dealt/{unit}": store.read_array(f"dealt/{unit}", "<i8", pieces.start, pieces.stop + 1)
        for unit in store.read_json("dealt.json")
    }
    tokens = 0
    with Store(target).writing(name) as path:
        features = Features.from_arrow_schema(final)
        with ArrowWriter(features=features, path=str(path)) as writer:
            left = final.empty_table()
            for number in range(len(pieces)):
                batches = [
                    pa.ipc.read_record_batch(pa.py_buffer(store.read(part, *edges)), schema)
                    for part, found in begins.items()
                    if (edges := found[number : number + 2].tolist())[0] < edges[1]
                ]
                found = pa.Table.from_batches(batches)
                order = np.argsort(found.column(_PLACE).to_numpy())
                found = found.drop_columns([_PLACE]).take(pa.array(order)).combine_chunks()
                if "input_ids" in found.column_names:
                    tokens += pc.sum(pc.list_value_length(found["input_ids"])).as_py() or 0
                rows = pa.concat_tables([left, found])
                full = len(rows) - len(rows) % _ROWS_AT_ONCE
                writer.write_table(rows.slice(0, full), _ROWS_AT_ONCE)
                left = rows.slice(full)
            writer.write_table(left)
            num_rows, _ = writer.finalize()
        num_bytes = path.stat().st_size
    return {"rows": num_rows, "tokens": tokens, "bytes_out": num_bytes}


def _conform(table: pa.Table, schema: pa.Schema, unit: Unit) -> pa.Table:
    """The rows under the prepared dataset's types, missing columns filled with nulls."""
    from datasets.table import CastError, table_cast

    try:
        table = pa.concat_tables([schema.empty_table(), table], promote_options="permissive")
        return table_cast(table, schema)
    except (CastError, pa.ArrowInvalid, KeyError, TypeError) as error:
        raise DataError(
            f"dataset {unit.dataset}, from row {unit.first + 1:,}: tokenising gives other columns "
            f"or types than for the first rows: {error}"
        ) from None


def make_rows(make: Callable[[pa.Table], Made], rows: pa.Table, unit: Unit) -> Made:
    """What Axolotl makes of rows, of a unit from the first on; an error names the row it is at."""
    try:
        return make(rows)
    except FastAxolotlError:
        raise
    except Exception as error:  # noqa: BLE001  whatever a strategy raises
        reason, low, high = error, 0, len(rows)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            make(rows.slice(low, middle - low))
            low = middle
        except Exception as error:  # noqa: BLE001
            reason, high = error, middle
    raise DataError(
        f"dataset {unit.dataset}, row {unit.first + low + 1:,}: Axolotl fails on this row "
        f"({type(reason).__name__}: {reason}); correct or remove the row, or check the type and "
        "fields of this dataset"
    )
