"""The thresholds of verdicts, with unit and origin."""

from __future__ import annotations

LEAST_FETCHES = 200
"""Fetches. Ours: the worst 1 % of them is then two fetches, not one."""
LEAST_FETCHES_SECONDS = 2.0
"""Seconds that these fetches must have taken. Ours: a hiccup of the machine is a tenth of one."""
LEAST_SECONDS = 60.0
"""Seconds. Ours: enough for slow steps, and for a periodic wait to show."""

LEAST_SETTLED_SECONDS = 8.0
"""Seconds in which nothing was waited for, to say that nothing will be. Ours: eight times the
longest queue that a loader fills by itself."""

DATA_STALL = 0.10
"""Share of steady time. MLPerf Storage passes a run at 90 % accelerator utilisation: the rest."""
FREE_STALL = 0.05
"""Share of steady time. Ours: half of MLPerf Storage's line is out of its reach."""
HIDDEN_WAIT = 0.05
"""Points by which the host's wait exceeds the device's, to be worth a line. Ours."""
LEAST_FALL_BATCHES = 2.0
"""Batches by which a ready queue falls to be emptying. Ours: less is noise."""
DRAINED_BATCHES, DRAINED_SHARE = 1.0, 0.02
"""Batches, or share of capacity (at most one for each worker), below which a ready queue has run
dry. Ours: no batch is ready, but for those that lie about between the workers and the loop."""
MOST_WAITING = 0.5
"""Share of all waiting that one cause must have to be named as the cause. Ours: the larger part."""

DISK_NEAR, DISK_FULL = 0.70, 0.90
"""Share of capacity. Queueing (M/M/1): a request takes 1 ÷ (1 − share) as long as on an idle disk,
3 times at 70 %, 10 times at 90 %."""
PRESSURE_MEMORY = 0.01
"""Share of time. Linux PSI ``full``: no task made progress for want of memory; a healthy machine
shows 0, and 1 % is well above the noise."""
BOUND_PRESSURE = 0.10
"""Share of time in which no task made progress for want of memory, to be the limit. Ours: the line
of a stall."""
PRESSURE_IO = 0.10
"""Share of time. Linux PSI ``full``: no task made progress for want of a disk; as much as the line
of a stall."""
SMALL_REQUEST_BYTES = 128 * 1024
"""Mean read request of a device below which it is read at random. Linux reads ahead 128 KiB in
order."""
MEMORY_NEAR = 0.80
"""Of the memory that may be taken, by a run that was killed. Ours: the sample before the kill is up
to a second old, and what the kernel itself takes is not in it."""
LEAST_GROWTH_BYTES = 32e6
"""Of a part of the memory, from the second third of the steady phase on, to be growth. Ours:
allocators and caches settle with less."""
FULL_SECONDS = 24 * 3600.0
"""Until memory that grows is full, to be what limits a run. Ours: runs of a day are common."""
SWAP_RATE = 1e6
"""Bytes per second swapped in. Ours: less than any swap device would notice."""
PROCESS_SWAP_BYTES = 64e6
"""Of a run in swap, to be what is swapped in. Ours: pages that a program never uses are less."""
CPU_LOST = 0.10
"""Share of the processor time that was refused or stolen; share of the processors that other
programs take; share of time spent waiting for one. Ours: as much as the line of a stall."""
LEAST_OWN_CORES = 0.2
"""Processors that a run uses itself, to be held up by others. Ours."""
SMALL_MEMORY_SHARE = 0.5
"""Of the memory that may be taken. Ours: a run that took less is not what fills it."""

BUSY_CPU = 0.10
"""Share of the processors that other programs use. Ours: a quiet machine stays below 2 %."""
TAKEN_CPU = 0.05
"""Share of the time that a hypervisor or a quota takes away. Ours: several times the noise between
runs."""

BOUND_COMMUNICATION = 0.20
"""Share of the profiled time. Ours: twice the line of data, since some exposure is unavoidable."""
FREE_COMMUNICATION = 0.10
"""Share of the profiled time. Ours: half of the above."""
LEAST_SKEW_SHARE = 0.5
"""Of communication, to be waiting for a slow rank. Ours: the larger part of it."""

MOST_COMPUTE = 0.5
"""Share of a step in forward, backward and optimizer, for the model to be the limit. Ours: the
larger part."""
LOST_TIME = 0.10
"""Share of the wall clock, for evaluation, checkpoints, start-up and resume. Ours: the line of
data."""
LEAST_STARTUP_SECONDS = 60.0
"""Seconds. Ours: a short trial always has a large start-up."""

MUCH_PADDING = 0.10
"""Share of positions. Ours: below it packing gains little."""
MUCH_IDLE = 0.20
"""Share of the profiled time in which the device idles though data is there. Ours."""
LOW_MFU = 0.30
"""Ours: published dense runs reach 0.35 to 0.55."""


def is_long_enough(fetches: int, seconds: float) -> bool:
    """Whether so much of a steady phase can be judged."""
    is_many = fetches >= LEAST_FETCHES and seconds >= LEAST_FETCHES_SECONDS
    return is_many or seconds >= LEAST_SECONDS
