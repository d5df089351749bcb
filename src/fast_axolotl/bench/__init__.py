"""Benchmarks: each case reads the same input with every reader at hand, checks rows, then times.

Reading order: ``corpus`` makes the inputs; ``peers`` and ``earlier`` are the other readers;
``fingerprint`` says whether two readers gave the same rows; ``timing`` repeats them interleaved;
``memory`` measures one reader in a fresh process; ``goals`` holds the targets; ``reader`` runs the
cases and ``demo`` a few small ones; ``matrix`` is the result, as JSON and as rows to print.
"""
