"""Copy a prepared dataset so that every batch is as long as the longest one.

A training that runs out of memory does so on its longest batch, hours after the start. Without
packing that is the longest rows side by side; with it, full packs: the longest rows end to end, cut
at ``sequence_len``. The offsets of the Arrow files tell them; other tokens are not read. The copy
has the name of the original, under which Axolotl looks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fast_axolotl.errors import DataError


def copy_longest(
    config: Mapping[str, Any], log: Path, target: Path, rows: int, repeats: int
) -> int:
    """Write the longest ``rows`` again and again, or as many full packs; the tokens of the longest.

    ``log`` is of a run that used the dataset, whose name it holds.
    """
    from datasets import Dataset, concatenate_datasets, disable_progress_bars, load_from_disk

    prepared = Path(config.get("dataset_prepared_path") or target)
    folders = [path.parent for path in sorted(prepared.glob("*/state.json"))]
    if len(folders) > 1:
        # Long lines of a log may be broken anywhere.
        text = "".join(log.read_text(encoding="utf-8", errors="replace").split())
        folders = [path for path in folders if path.name in text]
    if len(folders) != 1:
        raise DataError("there is no single prepared dataset of this run here", path=str(prepared))
    [folder] = folders
    try:
        dataset = load_from_disk(str(folder))
        lengths = pc.list_value_length(dataset.data.column("input_ids")).fill_null(0)
        places = pc.select_k_unstable(lengths, rows, [("", "descending")]).to_pylist()
    except (OSError, KeyError, ValueError, pa.ArrowInvalid) as error:
        text = f"this is not a tokenised dataset prepared by Axolotl: {error}"
        raise DataError(text, path=str(folder)) from error
    counts = [lengths[place].as_py() for place in places]
    if not any(counts):
        raise DataError("the dataset has no row with tokens", path=str(folder))
    chosen, longest = dataset.select(places), counts[0]
    full = int(config.get("sequence_len") or 0) if config.get("sample_packing") else None
    if full:
        pack: dict[str, Any] = {}
        for name, values in chosen[:].items():
            pack[name] = full if name == "length" else values[0]
            tokens = [*chain(*values)] if isinstance(values[0], list) else values
            if len(tokens) == sum(counts):
                # Positions begin anew at each row, as in a pack of Axolotl's.
                pack[name] = (tokens * -(-full // len(tokens)))[:full]
        chosen, longest = Dataset.from_list([pack], features=dataset.features), full
    disable_progress_bars()
    copies = concatenate_datasets([chosen] * (rows * repeats if full else repeats))
    copies.save_to_disk(str(target / folder.name))
    return int(longest)
