"""The losses of a run: those of one rank, the same for everything that tells of them."""

from __future__ import annotations

from fast_axolotl.record.folder import RunRecord
from fast_axolotl.record.lines import Log

__all__ = ["find_losses"]


def find_losses(record: RunRecord) -> list[Log]:
    """The lines with a loss, of the first rank that logged any.

    Trainers log on one rank, or the same on all. Which rank decides about the data does not matter
    here: it is another one from run to run, and losses of two runs are to be compared.
    """
    for number in sorted(record.ranks):
        logs = [line for line in record.ranks[number].logs if "loss" in line.values]
        if logs:
            return logs
    return []
