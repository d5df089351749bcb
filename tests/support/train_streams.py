"""Trains with Axolotl on several configurations, one after the other, in one process.

    python -m support.train_streams RESULT config.yml ... "remove PATH" ...

Importing Axolotl takes longer than a training of a tiny model. The first rank writes the logged
losses of each training, with step and epoch, and the lines that this package logged.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import fast_axolotl  # noqa: F401 - the replacements
from support.axolotl import log_lines


def train(config: str) -> dict[str, Any]:
    import axolotl.train
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets

    # The next training goes on with the same process group.
    axolotl.train.cleanup_distributed = lambda: None
    # Axolotl collects garbage at every checkpoint, and would go through all that was imported.
    gc.freeze()
    cfg = load_cfg(config)
    with log_lines("axolotl.utils.data.sft") as lines:
        _, _, trainer = axolotl.train.train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg))
    said = [line.partition("fast-axolotl: ")[2] for _, line in lines if "fast-axolotl: " in line]
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses = [[entry["step"], entry["epoch"], entry["loss"], entry["grad_norm"]] for entry in logs]
    return {"losses": losses, "said": said, "is_first": trainer.args.process_index == 0}


if __name__ == "__main__":
    import torch

    load = torch.load
    # Ranks on a processor would load an optimizer to a device cpu:0, which torch does not know.
    torch.load = lambda *args, **options: load(*args, **{**options, "map_location": "cpu"})
    found = []
    for argument in sys.argv[2:]:
        if argument.startswith("remove "):
            Path(argument.partition(" ")[2]).unlink()
        else:
            found.append(train(argument))
    if found[0].pop("is_first"):
        Path(sys.argv[1]).write_text(json.dumps(found))
