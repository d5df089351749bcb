"""What a run leaves behind: plain data, JSON in and out, no third-party package.

A record is a folder. Every rank appends to a file of its own, and whoever watches the process tree
to another; each line is one JSON object with a ``kind``. Nothing is ever rewritten, so a run that
is killed is readable up to its last line. A summary comes from the lines alone, on any machine.
"""

from __future__ import annotations

from fast_axolotl.record.figures import NodeSummary, RankSummary, RunSummary, Verdict
from fast_axolotl.record.folder import LineWriter, RankRecord, RunRecord, SystemRecord, read_run
from fast_axolotl.record.histogram import Histogram
from fast_axolotl.record.schema import (
    SCHEMA,
    DeviceSample,
    DiskProbe,
    End,
    Log,
    Mark,
    ModelShape,
    Phase,
    ProfileWindow,
    Settings,
    SlowFetch,
    Start,
    StepBlock,
    SystemSample,
    SystemStart,
)

__all__ = [
    "SCHEMA",
    "DeviceSample",
    "DiskProbe",
    "End",
    "Histogram",
    "LineWriter",
    "Log",
    "Mark",
    "ModelShape",
    "NodeSummary",
    "Phase",
    "ProfileWindow",
    "RankRecord",
    "RankSummary",
    "RunRecord",
    "RunSummary",
    "Settings",
    "SlowFetch",
    "Start",
    "StepBlock",
    "SystemRecord",
    "SystemSample",
    "SystemStart",
    "Verdict",
    "read_run",
]
