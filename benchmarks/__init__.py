"""Races against peers, and proofs of the meter and the protocol. Not installed: ``make bench-…``.

Everybody gets the same input, answers are compared, and only then is it timed. Shared by all:
``result`` (what was measured, goals, tables), ``command`` (options, machine, saving), ``race``
(equality, then interleaved repeats), ``children`` (processes of our own), ``peer`` (packages that
cannot share our process). One file for each race: ``reader``, ``hash``, ``dedupe``, ``pack``,
``pad``, ``axolotl``, ``meter``, ``meter_gpu``, ``protocol``, ``advice``; beside some of them stand
their inputs and their parts. Digests, worker processes and plain Python's side are those of
``fast-axolotl bench``: ``fast_axolotl.cli.race`` and ``contenders``.
"""
