"""Races against peers, and proofs of the meter and the protocol. Not installed: ``make bench-…``.

Everybody gets the same input, answers are compared, and only then is it timed. Shared by all:
``result`` (what was measured, goals, tables), ``command`` (options, machine, saving), ``children``
and ``worker`` (processes). ``reader`` and ``operations`` race the contenders of ``fast-axolotl
bench`` on generated files (``race``), with the earlier package in a process of its own (``peer``).
"""
