"""``axolotl preprocess`` in units: the same rows in the same order, whoever makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fast_axolotl.cluster.job import JobPlan, JobSummary
from fast_axolotl.cluster.tasks import Heard

__all__ = ["plan_preparation", "prepare"]


def plan_preparation(
    config: str, *, overrides: Mapping[str, Any], memory: int, output: str | None, work: str | None
) -> JobPlan:
    """What ``prepare`` would do."""
    raise NotImplementedError


def prepare(
    config: str,
    *,
    overrides: Mapping[str, Any],
    engine: str,
    address: str,
    workers: int,
    memory: int,
    output: str | None,
    work: str | None,
    heard: Heard,
) -> JobSummary:
    """Writes the prepared dataset of a configuration where ``axolotl train`` looks for it.

    Args:
        config: Axolotl's YAML file.
        overrides: Keys of the configuration that are set otherwise, as on Axolotl's command line.
        engine: ``local`` or ``ray``.
        address: Of the Ray cluster: ``auto`` or ``HOST:PORT``.
        workers: Tasks at a time; 0 takes all cores of this machine or of the cluster.
        memory: Bytes that a working process may hold.
        output: In place of the configuration's ``dataset_prepared_path``; a path or a URL.
        work: The folder for files between stages; below the output by default. All nodes must see
            it under this name.
        heard: Told of stages and tasks.
    """
    raise NotImplementedError
