"""How a setting is called where it is set: in Axolotl's YAML, HF's arguments, or torch's loader."""

from __future__ import annotations

from typing import Any

__all__ = ["name_accumulation", "name_batch_size", "name_loader", "name_setting"]


def name_setting(source: str, name: str, value: str) -> str:
    """One that Axolotl and HF's trainer call alike; elsewhere it stands as HF calls it."""
    if source == "axolotl":
        return f"{name}: {value}"
    shown = value.capitalize() if value in ("true", "false") else value
    return f"TrainingArguments({name}={shown})"


def name_loader(source: str, **values: int | bool) -> str:
    """Settings of the loader: ``num_workers``, ``prefetch_factor``, ``persistent_workers``."""
    if source == "axolotl":
        return " and ".join(f"dataloader_{name}: {_yaml(value)}" for name, value in values.items())
    prefix = "dataloader_" if source == "transformers" else ""
    joined = ", ".join(f"{prefix}{name}={value}" for name, value in values.items())
    return f"{'TrainingArguments' if prefix else 'DataLoader'}({joined})"


def name_accumulation(source: str, count: int) -> str:
    """Micro-batches of an optimizer step."""
    if source in ("axolotl", "transformers"):
        return f"Set {name_setting(source, 'gradient_accumulation_steps', str(count))}"
    if source == "lightning":
        return f"Set Trainer(accumulate_grad_batches={count})"
    return f"Call optimizer.step() every {count} batches, with model.no_sync() between"


def name_batch_size(source: str) -> str:
    """Samples of a batch."""
    names = {"axolotl": "micro_batch_size", "transformers": "per_device_train_batch_size"}
    return names.get(source, "DataLoader(batch_size=…)")


def _yaml(value: Any) -> str:
    return str(value).lower()
