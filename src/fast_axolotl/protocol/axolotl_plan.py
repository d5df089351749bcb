"""The variants of an Axolotl configuration: stock, accelerated and streamed.

    baseline   Axolotl as it is
    drop-in    the same configuration, our functions
    streaming  on request: our functions and our reader

Every run gets a copy of the configuration with an ``output_dir``, a ``dataset_prepared_path`` and a
cache of ``datasets`` of its own, so that all of them prepare the data from the same state. Shared
are the hub's downloads, the page cache and compiled kernels. On request dedupe is timed by itself
afterwards, on the rows of the configuration.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fast_axolotl.errors import DataError, MissingExtraError, UsageError
from fast_axolotl.protocol.plan import ArmPlan, Plan, plan_arm

COMMAND = "axolotl train {config}"
_PLUGIN = "fast_axolotl.integrations.axolotl.FastAxolotlPlugin"
_OWN_KEYS = ("fast_axolotl", "dataset_use_rust_streaming")
"""What begins so is a key of ours; stock has none of them."""
_SHORT_NAMES = {
    "num_workers": "dataloader_num_workers",
    "prefetch_factor": "dataloader_prefetch_factor",
    "pin_memory": "dataloader_pin_memory",
}
_FORMATS = {"parquet": "parquet", "csv": "csv", "arrow": "arrow", "txt": "text"}
_OWN_FOLDERS = ("output_dir", "dataset_prepared_path")
_OWN_CACHE = "HF_DATASETS_CACHE"
"""What one run has tokenised, the next would find there."""
_NOT_IN_A_TRIAL = (
    *("save_steps", "saves_per_epoch", "save_first_step", "load_best_model_at_end"),
    *("eval_steps", "evals_per_epoch", "eval_on_start", "test_datasets", "evaluation_strategy"),
    *("early_stopping_patience", "do_bench_eval", "do_causal_lm_eval", "eval_table_size"),
    *("resume_from_checkpoint", "auto_resume_from_checkpoints", "hub_model_id", "batch_size"),
    *("micro_batch_size", "gradient_accumulation_steps", "auto_find_batch_size", "profiler_steps"),
)
"""Saving, evaluation and uploads, and what a sweep sets itself."""
_TRACKERS = ("wandb_", "use_wandb", "mlflow_", "use_mlflow", "comet_", "use_comet", "swanlab_")
_SEED = 42
"""As Axolotl has it where the configuration does not say."""


def plan_axolotl(
    config_path: str | Path,
    *,
    streaming: bool = False,
    dedupe: bool = False,
    command: str = COMMAND,
    pins: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Plan:
    """The arms for one configuration; ``settings`` are more fields of the plan.

    Streaming changes the order of rows and needs ``max_steps``, so only on request.
    """
    pins = dict(pins or {})
    config = read_config(config_path, pins)
    if streaming and not any(key in config for key in _SHORT_NAMES.values()):
        # A stream's queue has torch's length, whatever Axolotl's default for the others is.
        alike = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 2}
        pins, config = pins | alike, config | alike
    words = _split(command)
    folders = tuple(key for key in _OWN_FOLDERS if key not in pins)
    pinned = ", ".join(f"{key}={value}" for key, value in pins.items())
    notes = [f"Pinned in all variants: {pinned}."] if pins else []
    stock = {key: value for key, value in config.items() if not key.startswith(_OWN_KEYS)}
    plugins = [name for name in stock.pop("plugins", None) or [] if name != _PLUGIN]
    stock |= {"plugins": plugins} if plugins else {}
    stock_arm = partial(ArmPlan, command=words, own_folders=(*folders, _OWN_CACHE))
    our_arm = partial(stock_arm, is_accelerated=True, times_decide=True)
    text = "same configuration, with Axolotl's slow functions replaced"
    arms = [
        stock_arm(name="baseline", text="stock Axolotl", config=stock),
        our_arm(name="drop-in", text=text, config=config),
    ]
    if streaming:
        streamed, changes = _streamed(config)
        text = "functions replaced, and data streamed by our reader"
        arms.append(our_arm(name="streaming", text=text, config=streamed))
        notes += changes
    entries = [*_listed(config, "datasets"), *_listed(config, "pretraining_dataset")]
    paths = [entry.get(key) for entry in entries for key in ("data_files", "path")]
    return Plan(
        title=Path(config_path).name,
        arms=tuple(arms),
        data_path=next((one for one in paths if isinstance(one, str) and Path(one).exists()), None),
        same_work=("baseline", "drop-in"),
        dedupe={"datasets": _listed(config, "datasets")} if dedupe else None,
        notes=tuple(notes),
        **settings,
    )


def plan_batches(
    config_path: str | Path, command: str | None, *, steps: int, prepared: Path
) -> tuple[ArmPlan, int]:
    """A short training whose batch sizes are left open; samples that a step of one rank has now.

    All trials share the prepared dataset: the configuration's own folder, or ``prepared``. Its name
    does not depend on the keys that are left out here.
    """
    config = read_config(config_path, {})
    keys = ("micro_batch_size", "gradient_accumulation_steps", "batch_size")
    try:
        micro_batch, accumulation, whole = (int(config.get(key) or 1) for key in keys)
    except (TypeError, ValueError):
        text = f"one of {', '.join(keys)} is not a whole number"
        raise DataError(text, path=str(config_path)) from None
    kept = {
        key: value
        for key, value in config.items()
        if key not in _NOT_IN_A_TRIAL and not key.startswith(_TRACKERS)
    }
    kept |= {"max_steps": steps, "save_strategy": "no", "eval_strategy": "no", "val_set_size": 0}
    if not (config.get("streaming") or config.get("pretraining_dataset")):
        kept["dataset_prepared_path"] = config.get("dataset_prepared_path") or str(prepared)
    arm = ArmPlan(
        name="batch",
        text=Path(config_path).name,
        command=_split(command or COMMAND),
        is_accelerated=_PLUGIN in (config.get("plugins") or ()),
        config=kept,
        own_folders=("output_dir",),
    )
    return arm, max(micro_batch * accumulation, whole)


def read_config(path: str | Path, pins: Mapping[str, Any]) -> dict[str, Any]:
    """The YAML of a configuration, with a seed, and with the keys that are pinned."""
    yaml = _import_yaml()
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"cannot be read: {reason}", path=str(path)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"not YAML: {' '.join(str(error).split())}", path=str(path)) from error
    if not isinstance(found, dict):
        raise DataError("an Axolotl configuration has keys, but this file has none", path=str(path))
    config = {"seed": _SEED, **found}
    for name, value in pins.items():
        *outer, last = name.split(".")
        place = config
        for key in outer:
            inner = place.get(key)
            if inner is not None and not isinstance(inner, Mapping):
                raise UsageError(
                    f"--pin {name}: {key} in the configuration has no keys below it; pin {key} as "
                    "a whole, or edit the configuration"
                )
            place[key] = dict(inner or {})
            place = place[key]
        place[last] = value
    return config


def _import_yaml() -> Any:
    try:
        return importlib.import_module("yaml")
    except ImportError as error:
        raise MissingExtraError(
            "reading a configuration needs PyYAML, which comes with Axolotl: pip install axolotl"
        ) from error


def parse_pins(text: str) -> dict[str, Any]:
    """``num_workers=2,betas=[0.9,0.99]``; values are read as YAML, a comma before a key parts."""
    yaml = _import_yaml()
    pins = {}
    for part in re.split(r",(?=\s*[\w.]+\s*=)", text):
        name, equals, value = part.strip(", ").partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--pin {part!r}: write KEY=VALUE, separated by commas")
        try:
            pins[_SHORT_NAMES.get(name.strip(), name.strip())] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UsageError(f"--pin {part!r}: {value!r} is not a YAML value") from None
    return pins


def _split(command: str) -> tuple[str, ...]:
    words = plan_arm("command", command).command
    if not any("{config}" in word for word in words):
        raise UsageError(f"--command {command!r} has no {{config}}; try {COMMAND!r}")
    return words


def _streamed(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The configuration that streams, and what else had to be changed for it."""
    if not config.get("max_steps"):
        raise UsageError(
            "a stream has no length, so --streaming needs max_steps: add --pin max_steps=200"
        )
    notes = []
    plugins = list(config.get("plugins") or [])
    found: dict[str, Any] = {
        **config,
        "plugins": plugins if _PLUGIN in plugins else [*plugins, _PLUGIN],
        "streaming": True,
        "dataset_use_rust_streaming": True,
    }
    if config.get("sample_packing"):
        # Axolotl streams packed rows by ``load_dataset``, which takes a format and its files.
        found["datasets"] = entries = []
        for entry in _listed(config, "datasets"):
            path = entry.get("path")
            if isinstance(path, str) and Path(path).is_file():
                kind = entry.get("ds_type") or _FORMATS.get(Path(path).suffix.lstrip("."), "json")
                entry = {**entry, "path": kind, "data_files": path}
            entries.append(dict(entry))
    for key, value in (("val_set_size", 0), ("dataset_exact_deduplication", False)):
        if config.get(key):
            found[key] = value
            notes.append(f"streaming: {key} is {value}, because Axolotl cannot stream otherwise")
    return found, notes


def _listed(config: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = config.get(key)
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, list) else []
