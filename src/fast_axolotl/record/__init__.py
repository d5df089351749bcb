"""What a run leaves behind: plain data, JSON in and out.

A record is a folder. Every rank appends to a file of its own, and whoever watches the process tree
to another; each line is one JSON object with a ``kind``. Nothing is ever rewritten, so a run that
is killed is readable up to its last line. A summary comes from the lines alone, on any machine.
"""

from __future__ import annotations

from fast_axolotl.record.figures import Growth as Growth
from fast_axolotl.record.figures import RunSummary as RunSummary
from fast_axolotl.record.figures import Verdict as Verdict
from fast_axolotl.record.folder import LineWriter as LineWriter
from fast_axolotl.record.folder import RankRecord as RankRecord
from fast_axolotl.record.folder import RunRecord as RunRecord
from fast_axolotl.record.folder import SystemRecord as SystemRecord
from fast_axolotl.record.folder import read_run as read_run
from fast_axolotl.record.histogram import Histogram as Histogram
from fast_axolotl.record.schema import DeviceSample as DeviceSample
from fast_axolotl.record.schema import End as End
from fast_axolotl.record.schema import Log as Log
from fast_axolotl.record.schema import Mark as Mark
from fast_axolotl.record.schema import ModelShape as ModelShape
from fast_axolotl.record.schema import ProfileWindow as ProfileWindow
from fast_axolotl.record.schema import Settings as Settings
from fast_axolotl.record.schema import StackLine as StackLine
from fast_axolotl.record.schema import Stacks as Stacks
from fast_axolotl.record.schema import Start as Start
from fast_axolotl.record.schema import StepBlock as StepBlock
from fast_axolotl.record.schema import SystemSample as SystemSample
from fast_axolotl.record.schema import SystemStart as SystemStart
