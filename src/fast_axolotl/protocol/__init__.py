"""A/B runs of whole commands, with an answer that separates a change from noise.

    plan → runs, A B B A, each a child process with a record → matrix → one paragraph

A plan comes from a configuration of Axolotl or from two commands. ``run_protocol`` carries it out
and can be interrupted; ``compare_folders`` compares records or protocols later.
"""

from __future__ import annotations

from fast_axolotl.protocol.axolotl_plan import parse_pins, plan_axolotl
from fast_axolotl.protocol.compare import Check, Comparison, compare_folders, parse_check
from fast_axolotl.protocol.plan import ArmPlan, Plan, plan_commands
from fast_axolotl.protocol.runner import run_protocol

__all__ = [
    "ArmPlan",
    "Check",
    "Comparison",
    "Plan",
    "compare_folders",
    "parse_check",
    "parse_pins",
    "plan_axolotl",
    "plan_commands",
    "run_protocol",
]
