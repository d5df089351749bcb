"""The plugin for Axolotl's YAML: replacements, meter, and our keys in its schema.

Axolotl drops keys that its schema does not know, without a word. ``FastAxolotlArgs`` makes ours
known and has their types checked. A plugin is loaded after most of Axolotl, so functions that were
imported by name are swept; see ``patching``.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from fast_axolotl.axolotl import (
    RUN,
    SWITCH,
    install,
    names_to_skip,
    status,
    status_line,
    uninstall,
)
from fast_axolotl.axolotl.patching import NotAsked
from fast_axolotl.errors import MissingExtraError
from fast_axolotl.integrations.launch import Order, order

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel, Field
except ImportError as error:
    raise MissingExtraError(
        "the plugin needs Axolotl in the same environment: pip install axolotl"
    ) from error

PLUGIN = "fast_axolotl.integrations.axolotl.FastAxolotlPlugin"
"""What stands under ``plugins:``."""

_RECORDED = (
    *("adapter", "attn_implementation", "base_model", "context_parallel_size"),
    *("dataset_prepared_path", "dataset_use_rust_streaming", "gradient_accumulation_steps"),
    *("micro_batch_size", "pad_to_sequence_len", "pretraining_dataset", "sample_packing"),
    *("sequence_len", "sequence_parallel_degree", "streaming", "streaming_multipack_buffer_size"),
    *("tensor_parallel_size", "torch_compile"),
)
"""Keys that decide how fast the data comes and how long a step takes, beside what every trainer of
transformers says."""


class FastAxolotlArgs(BaseModel):
    """The keys that this package adds to Axolotl's configuration."""

    fast_axolotl: bool | None = Field(
        default=None, description="Set to false to run stock Axolotl. Default: true."
    )
    fast_axolotl_skip: list[str] | None = Field(
        default=None,
        description="Replacements to skip, by the names in `fast-axolotl status`.",
    )
    fast_axolotl_measure: bool | str | None = Field(
        default=None,
        description="Measure the training and write the record to this folder; true writes to "
        "fast-axolotl-measure in output_dir. Key figures also appear in the trainer's logs; "
        "`fast-axolotl show FOLDER` prints all.",
    )
    dataset_use_rust_streaming: bool | None = Field(
        default=None,
        description="Streamed files: bounded buffers, and a resume that continues where the "
        "checkpoint was written. Default: false.",
    )
    fast_axolotl_buffer_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Size limit of a streaming buffer in bytes of text, for any number of rows. "
        "Default: 67108864 (64 MiB).",
    )


KEYS = tuple(FastAxolotlArgs.model_fields)
"""The keys, in the order of the schema."""


class FastAxolotlPlugin(BasePlugin):
    """``plugins: [fast_axolotl.integrations.axolotl.FastAxolotlPlugin]``"""

    def get_input_args(self) -> str:
        """Where Axolotl finds the schema of our keys."""
        return f"{__name__}.FastAxolotlArgs"

    def register(self, cfg: Any) -> None:
        """Install the replacements if the configuration allows it; a line on stderr says so."""
        name_unknown_keys(cfg)
        if cfg.get("fast_axolotl") is False:
            uninstall()
            _say("stock Axolotl runs: the configuration has fast_axolotl: false")
            return
        install(skip=cfg.get("fast_axolotl_skip") or ())
        # Under ``fast-axolotl run`` the line has been printed.
        if os.environ.get(RUN) != "1" or os.environ.get(SWITCH) == "0":
            _say(status_line(os.environ, status().patches))

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """The meter, if the configuration asks for it."""
        wanted = measure_order(cfg, order())
        if wanted is None:
            return []
        from fast_axolotl.integrations.transformers_meter import MeterCallback

        return [MeterCallback(**asdict(wanted), settings=recorded_settings(cfg))]

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        """The callback that writes where a stream of ours is into checkpoints."""
        states = {patch.state for patch in status().patches if patch.name == "resume"}
        if not cfg.get("dataset_use_rust_streaming") or not states <= {"active", "check"}:
            return []
        from fast_axolotl.axolotl.resume import StreamCheckpoint, bounded_dataset

        dataset = getattr(trainer, "train_dataset", None)
        return [] if bounded_dataset(dataset) is None else [StreamCheckpoint(trainer)]


def recorded_settings(cfg: Any) -> dict[str, Any]:
    """What of a configuration a record holds, and whether its rows are prepared on disk."""
    prepared = cfg.get("dataset_prepared_path")
    return {
        "config": {key: cfg[key] for key in _RECORDED if cfg.get(key) is not None},
        "dataset_is_prepared": bool(prepared)
        and not cfg.get("streaming")
        and Path(prepared).is_dir()
        and any(Path(prepared).iterdir()),
    }


def measure_order(cfg: Any, asked: Order | None) -> Order | None:
    """What to measure: as ``fast-axolotl run --measure`` asked, else as the configuration does."""
    wanted = cfg.get("fast_axolotl_measure")
    if asked is not None or not wanted:
        return asked
    own = Path(cfg["output_dir"], "fast-axolotl-measure") if wanted is True else Path(wanted)
    return Order(run_dir=str(own))


def prepare_plugins(cfg: Any) -> NoReturn:
    """Before Axolotl's ``prepare_plugins``: our plugin, where the configuration has keys of ours.

    Someone who imports ``fast_axolotl`` or uses ``fast-axolotl run`` may set our keys without
    naming the plugin; Axolotl would drop them. With ``use_ray`` it always comes, with what the
    environment asks for: workers of a running cluster get the configuration, not the environment.
    """
    name_unknown_keys(cfg)
    if cfg.get("use_ray"):
        skip = [*(cfg.get("fast_axolotl_skip") or ()), *names_to_skip()]
        cfg["fast_axolotl_skip"] = list(dict.fromkeys(filter(None, skip))) or None
        if cfg.get("fast_axolotl_measure") is None and (asked := order()):
            cfg["fast_axolotl_measure"] = asked.run_dir
    listed = list(cfg.get("plugins") or [])
    has_keys = any(cfg.get(key) is not None for key in KEYS)
    if PLUGIN not in listed and (has_keys or cfg.get("use_ray")):
        cfg["plugins"] = [*listed, PLUGIN]
    raise NotAsked


def name_unknown_keys(cfg: Any) -> None:
    """Say of keys that are meant for this package and that it does not know; once each."""
    for key in map(str, cfg):
        plain = key.lower().replace("-", "_")
        is_meant = plain.startswith(("fast_axolotl", "fastaxolotl", "dataset_use_rust"))
        if is_meant and key not in {*KEYS, *_NAMED}:
            _NAMED.add(key)
            known = f"the known keys are {', '.join(KEYS)}"
            _say(f"the configuration has {key}, which is not a key of fast-axolotl; {known}")


_NAMED: set[str] = set()


def _say(line: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"fast-axolotl: {line}", file=sys.stderr)
