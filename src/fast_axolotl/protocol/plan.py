"""The variants of a protocol, the order of their runs, and how many are done.

One round runs every arm once, forwards or backwards: A B, or B A. A round gives one pair for every
arm but the first. The order is drawn by chance, in blocks of four rounds of which two go forwards:
A B A B B A B A, A B B A B A A B, and their mirrors. In each of them, a drift of the machine or a
disturbance of every second or fourth run falls on all arms alike.
"""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fast_axolotl.errors import UsageError, mask_secrets, mask_words
from fast_axolotl.record.protocol_result import ArmRun
from fast_axolotl.record.units import count_words

_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""")
_OF_A_SHELL = re.compile(r"[;<>|&]+")
_VARIABLE = re.compile(r"[A-Za-z_]\w*=.*")

STATE_SCHEMA = 1

PAIRS = 10
"""At most: four of five protocols then find a change of twice the noise between runs."""
_BLOCKS = tuple(tuple(sign == "+" for sign in block) for block in ("++--", "+--+", "--++", "-++-"))
"""Rounds that go forwards."""


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
    """Keys of the configuration, and variables of the environment (in capitals), that name a folder
    which every run has for itself."""


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
    """The first is the baseline, with which the others are compared."""
    pairs: int = PAIRS
    """At most: it ends earlier when the answer is clear."""
    seed: int | None = None
    """Of the order of the runs; ``None``: drawn when the protocol begins."""
    warmup: int = 1
    """Runs of every arm before the first that counts: they fill the page cache, compile kernels."""
    matters: float = 0.01
    """Share below which a change does not matter. Ours: less than quiet machines differ by."""
    max_minutes: float | None = None
    """After which no further round is begun."""
    data_path: str | None = None
    """The data, whose device is probed in every run."""
    profile_steps: int = 0
    """Of every run, under torch's profiler."""
    same_work: tuple[str, str] | None = None
    """The two arms whose losses have to be equal."""
    dedupe: Mapping[str, Any] | None = None
    """The configuration whose rows are deduplicated, on their own."""
    notes: tuple[str, ...] = ()
    """What to know about the arms."""

    def turns(self) -> list[Turn]:
        """All runs in their order; more pairs only add to its end."""
        chosen = random.Random(self.seed)
        drawn = [way for _ in range(0, self.pairs, 4) for way in chosen.choice(_BLOCKS)]
        rounds = [(-1, number % 2 == 0) for number in range(self.warmup)]
        rounds += enumerate(drawn[: self.pairs])
        arms = {True: self.arms, False: self.arms[::-1]}
        found = [(arm, pair) for pair, is_forwards in rounds for arm in arms[is_forwards]]
        return [Turn(number=at, arm=arm, pair=pair) for at, (arm, pair) in enumerate(found, 1)]

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
            # Pairs that are added after an unclear answer find what is not there.
            "--pairs": self.pairs,
            "data_path": self.data_path,
        }


@dataclass(slots=True, kw_only=True)
class State:
    """The runs made so far."""

    schema: int = STATE_SCHEMA
    identity: dict[str, Any]
    started: float
    """Seconds since 1970."""
    seed: int
    """Of the order of the runs."""
    runs: dict[int, ArmRun] = field(default_factory=dict)
    """By the number of the turn."""
    dedupe: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """That all runs took, over all sessions."""
        return sum(run.seconds or 0.0 for run in self.runs.values())


def plan_commands(baseline: str, candidate: str, **settings: Any) -> Plan:
    """Two commands against each other; ``settings`` are more fields of the plan."""
    arms = plan_arm("baseline", baseline), plan_arm("candidate", candidate)
    return Plan(
        title=" vs. ".join(arm.text for arm in arms),
        arms=arms,
        same_work=("baseline", "candidate"),
        **settings,
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
    # A command that begins with ``fast-axolotl run`` does its own acceleration, and would find it
    # switched off from outside.
    own = command[: command.index("--")] if "--" in command else command
    programs = [word.rpartition("/")[2].replace("_", "-") == "fast-axolotl" for word in own]
    words = list(own[programs.index(True) + 1 :]) if any(programs) else []
    is_ours = words[:1] == ["run"]
    for word in ("measure", "--measure"):
        # It would take the record away from the protocol.
        if word in words[: 1 + is_ours]:
            raise UsageError(f"--{name}: the protocol already measures each run: remove {word}")
    return ArmPlan(name=name, text=mask_secrets(text), command=command, is_accelerated=is_ours)


def plan_world_sizes(plan: Plan, counts: Collection[int]) -> Plan:
    """The baseline of a plan on several numbers of GPUs, the fewest first."""
    if len(set(counts)) < 2:
        raise UsageError("--world-size: pass two or more numbers of GPUs: 1,2,4")
    arm = plan.arms[0]
    if not any("{world_size}" in word for word in arm.command):
        raise UsageError("--world-size needs {world_size} in --command: --nproc-per-node …")
    arms = [
        replace(
            arm,
            name=count_words(count, "gpu").replace(" ", "-").replace(",", ""),
            command=tuple(word.replace("{world_size}", str(count)) for word in arm.command),
        )
        for count in sorted(set(counts))
    ]
    return replace(plan, arms=tuple(arms), same_work=None)
