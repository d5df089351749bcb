"""Copy a prepared dataset so that every batch is as long as the longest one.

A training that runs out of memory does so on its longest batch, hours after the start. Without
packing that is the longest rows side by side; with it, full packs: the longest rows end to end, cut
at ``sequence_len``. One pass over the offsets of the Arrow files finds them; other tokens are not
read. The copy has the name of the original, under which Axolotl looks for it.
"""

from __future__ import annotations

import heapq
import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fast_axolotl.errors import DataError

_STATE, _INFO, _FILE = "state.json", "dataset_info.json", "data-00000-of-00001.arrow"


def copy_longest(
    config: Mapping[str, Any], log: Path, target: Path, rows: int, repeats: int
) -> int:
    """Write the longest ``rows`` again and again, or as many full packs; the tokens of the longest.

    ``log`` is of a run that used the dataset, whose name it holds.
    """
    prepared = Path(config.get("dataset_prepared_path") or target)
    datasets = [path.parent for path in sorted(prepared.glob(f"*/{_STATE}"))]
    if len(datasets) > 1:
        # Long lines of a log may be broken anywhere.
        text = "".join(log.read_text(encoding="utf-8", errors="replace").split())
        datasets = [path for path in datasets if path.name in text]
    if len(datasets) != 1:
        raise DataError("there is no single prepared dataset of this run here", path=str(prepared))
    [dataset] = datasets
    full = int(config.get("sequence_len") or 0) if config.get("sample_packing") else None
    try:
        state: dict[str, Any] = json.loads((dataset / _STATE).read_text(encoding="utf-8"))
        info = (dataset / _INFO).read_text(encoding="utf-8")
        found: list[tuple[int, pa.RecordBatch]] = []
        for item in state["_data_files"]:
            for batch in pa.ipc.open_stream(pa.memory_map(str(dataset / item["filename"]))):
                lengths = pc.list_value_length(batch.column("input_ids"))
                top = pc.select_k_unstable(lengths, rows, [("length", "descending")]).to_pylist()
                found += [(lengths[at].as_py() or 0, batch.slice(at, 1)) for at in top]
                found = heapq.nlargest(rows, found, key=lambda one: one[0])
    except (OSError, KeyError, ValueError, pa.ArrowInvalid) as error:
        text = f"this is not a tokenised dataset prepared by Axolotl: {error}"
        raise DataError(text, path=str(dataset)) from error
    if not found or not found[0][0]:
        raise DataError("the dataset has no row with tokens", path=str(dataset))
    table, longest = pa.Table.from_batches([batch for _, batch in found]), found[0][0]
    if full:
        tokens, longest = sum(length for length, _ in found), full
        pack: dict[str, Any] = {}
        for name, column in zip(table.column_names, table.columns, strict=True):
            pack[name] = full if name == "length" else column[0].as_py()
            is_list = isinstance(column.type, pa.ListType | pa.LargeListType)
            values = pc.list_flatten(column) if is_list else column
            if len(values) == tokens:
                # Positions begin anew at each row, as in a pack of Axolotl's.
                pack[name] = (values.to_pylist() * -(-full // tokens))[:full]
        table = pa.Table.from_pylist([pack], schema=table.schema)
    folder = target / dataset.name
    folder.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_stream(str(folder / _FILE), table.schema) as file:
        for _ in range(rows * repeats if full else repeats):
            file.write_table(table)
    (folder / _INFO).write_text(info, encoding="utf-8")
    # By another name, so that nothing that was cached of the original is taken for the copy.
    state |= {"_data_files": [{"filename": _FILE}], "_fingerprint": uuid.uuid4().hex[:16]}
    (folder / _STATE).write_text(json.dumps(state), encoding="utf-8")
    return longest
