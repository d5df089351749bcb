"""What a protocol is going to do: its arms, and the order of their runs.

One round runs every arm once, forwards, then backwards, then forwards: A B B A A B … What drifts on
the machine falls on all arms alike. A round gives one pair for every arm but the first.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fast_axolotl.errors import UsageError, mask_secrets, mask_words
from fast_axolotl.record.units import count_words

_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""")
_OF_A_SHELL = re.compile(r"[;<>|&]+")
_VARIABLE = re.compile(r"[A-Za-z_]\w*=.*")
_MEASURES = ("measure", "--measure", "--live", "--output", "--quiet", "-q")
"""What of ``fast-axolotl run`` and ``measure`` would take the record away from the protocol."""
_TAKE_A_VALUE = ("--skip", "--data-path", "--peak-tflops", "--profile", "--output")
"""By what they begin with."""

PAIRS = 5
"""Enough to find changes of three times the noise between runs; see ``statistics``."""
FEW_PAIRS = 3
"""Two show changes of 16 times the noise between runs, three of 5 times; see ``statistics``."""
MATTERS = 0.01
"""Share below which a change does not matter. Ours: less than quiet machines differ by."""
WARMUP = 1
"""The first run of an arm fills the page cache and compiles kernels: it does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPlan:
    """A command that is compared with the others."""

    name: str
    text: str
    """What is different about it, in a few words."""
    command: tuple[str, ...]
    """``{config}`` in it becomes the path of the run's own configuration."""
    is_accelerated: bool = False
    """Whether functions of Axolotl are replaced."""
    config: Mapping[str, Any] | None = None
    """Of Axolotl; written into the folder of every run."""
    times_decide: bool = False
    """Whether it does the baseline's work, so that the first step and the whole run decide, too."""
    own_folders: tuple[str, ...] = ()
    """Keys of the configuration that name a folder which every run has for itself."""
    own_caches: tuple[str, ...] = ()
    """Environment variables that name such a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One run in the order of all runs."""

    number: int
    """From 1."""
    arm: ArmPlan
    pair: int
    """From 0; −1 is a warm-up."""

    @property
    def folder(self) -> str:
        """Of its record, below the protocol's."""
        return f"runs/{self.number:02d}-{self.arm.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that a protocol is asked for."""

    title: str
    arms: tuple[ArmPlan, ...]
    """The first is the baseline."""
    pairs: int = PAIRS
    warmup: int = WARMUP
    """Runs of every arm before the first that counts."""
    matters: float = MATTERS
    max_minutes: float | None = None
    """After which no further round is begun."""
    run_minutes: float | None = None
    """After which a run is ended, and counts as failed."""
    drop_caches: bool = False
    data_path: str | None = None
    """The data, whose device is probed in every run."""
    profile_steps: int = 0
    """Of every run, under torch's profiler."""
    gradient_noise: bool = False
    """Whether norms of gradients are taken in every run."""
    keep_outputs: bool = False
    """Whether what Axolotl wrote stays after a run that succeeded."""
    same_work: tuple[str, str] | None = None
    """The two arms whose losses have to be equal."""
    dedupe: Mapping[str, Any] | None = None
    """The configuration whose rows are deduplicated, on their own."""
    notes: tuple[str, ...] = ()
    """What to know about the arms."""
    again: str = "the same command with"
    """The command that continues the protocol, but for ``--pairs``; empty if none can."""

    def turns(self) -> list[Turn]:
        """All runs in their order; more pairs only add to its end."""
        found: list[tuple[ArmPlan, int]] = []
        for number in range(self.warmup + self.pairs):
            arms = self.arms if number % 2 == 0 else self.arms[::-1]
            found += [(arm, max(-1, number - self.warmup)) for arm in arms]
        return [Turn(number=at, arm=arm, pair=pair) for at, (arm, pair) in enumerate(found, 1)]

    def warn_of_few_pairs(self) -> str:
        """What so few pairs cannot show; empty where there are enough."""
        if not self.arms or self.pairs >= FEW_PAIRS:
            return ""
        return (
            "One pair cannot show any change. Two pairs show only changes of 16 times the noise "
            "between runs, and five pairs 2.4 times: pass --pairs 5."
        )

    def identity(self) -> dict[str, Any]:
        """What has to stay the same for an interrupted protocol to be continued."""
        return {
            "arms": {
                arm.name: {
                    "command": list(mask_words(arm.command)),
                    "accelerated": arm.is_accelerated,
                    "config": None if arm.config is None else dict(arm.config),
                }
                for arm in self.arms
            },
            "warmup": self.warmup,
            "drop_caches": self.drop_caches,
            "data_path": self.data_path,
        }


def plan_commands(
    baseline: str,
    candidate: str,
    *,
    pairs: int = PAIRS,
    warmup: int = WARMUP,
    data_path: str | None = None,
) -> Plan:
    """Two commands against each other."""
    return Plan(
        title=mask_secrets(f"{baseline} vs. {candidate}"),
        arms=(plan_arm("baseline", baseline), plan_arm("candidate", candidate)),
        pairs=pairs,
        warmup=warmup,
        data_path=data_path,
        same_work=("baseline", "candidate"),
    )


def plan_arm(name: str, text: str) -> ArmPlan:
    """A command as a shell would split it; no shell runs it. ``name`` is the option's, too."""
    try:
        command = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--{name} {text!r} cannot be split into words: {error}") from None
    if not command:
        raise UsageError(f"--{name} is empty; pass a command in quotes")
    shell = _OF_A_SHELL.search(_QUOTED.sub("", text)) or _VARIABLE.match(command[0])
    if shell:
        raise UsageError(
            f"--{name}: the command contains {shell[0]!r}, but no shell runs it: quote it if it "
            "is an argument; otherwise write sh -c '…', or env NAME=VALUE before the command"
        )
    options = _options_of_run(command)
    taken = [one for one in options or () if one.partition("=")[0] in _MEASURES]
    if taken:
        raise UsageError(f"--{name}: the protocol already measures each run: remove {taken[0]}")
    is_ours = options is not None
    return ArmPlan(name=name, text=mask_secrets(text), command=command, is_accelerated=is_ours)


def plan_world_sizes(plan: Plan, sizes: str) -> Plan:
    """The one arm of a plan on several numbers of GPUs, the fewest first: ``1,2,4``."""
    try:
        counts = sorted({int(size) for size in sizes.split(",")})
    except ValueError:
        counts = []
    if len(counts) < 2 or counts[0] < 1:
        raise UsageError(f"--world-size {sizes!r}: pass two or more numbers of GPUs: 1,2,4")
    if len(plan.arms) != 1:
        raise UsageError("--world-size takes one variant of a configuration: --steps 1 or 2")
    [arm] = plan.arms
    if not any("{world_size}" in word for word in arm.command):
        raise UsageError("--world-size needs {world_size} in --command: --nproc-per-node …")
    arms = [
        replace(
            arm,
            name=count_words(count, "gpu").replace(" ", "-").replace(",", ""),
            command=tuple(word.replace("{world_size}", str(count)) for word in arm.command),
            times_decide=False,
        )
        for count in counts
    ]
    more = (
        "The variants have different numbers of GPUs: fast-axolotl scale with this folder shows "
        "the efficiency."
    )
    return replace(plan, arms=tuple(arms), same_work=None, notes=(*plan.notes, more))


def _options_of_run(command: Sequence[str]) -> list[str] | None:
    """Those of ``fast-axolotl run``, in one of its spellings; ``None`` where it is another command.

    That one does its own acceleration, and would find it switched off from outside.
    """
    for at, word in enumerate(command):
        is_module = word == "fast_axolotl" and at > 0 and command[at - 1] == "-m"
        if word == "--":
            return None
        if is_module or word.rpartition("/")[2] == "fast-axolotl":
            break
    else:
        return None
    if tuple(command[at + 1 : at + 2]) == ("measure",):
        return ["measure"]
    if tuple(command[at + 1 : at + 2]) != ("run",):
        return None
    options = []
    rest = iter(command[at + 2 :])
    for word in rest:
        if word == "--" or not word.startswith("-"):
            break
        options.append(word)
        if word.startswith(_TAKE_A_VALUE) and "=" not in word:
            next(rest, None)
    return options
