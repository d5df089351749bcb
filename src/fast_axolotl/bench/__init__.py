"""Benchmarks: everybody gets the same input, answers are compared, and only then is it timed.

Reading order. The reader: ``corpus`` makes the inputs; ``peers`` and ``earlier`` are the other
readers; ``fingerprint`` says whether two gave the same rows; ``timing`` repeats them interleaved;
``memory`` measures one in a fresh process; ``goals`` holds the targets; ``reader`` runs the cases;
``matrix`` is the result, as JSON and as rows to print.

The operations: ``workloads`` makes the inputs; ``plain`` is plain Python; ``answers`` says whether
two gave the same; ``contest`` brings whoever is installed to ``timing``; ``hashing``, ``deduping``,
``packing`` and ``padding`` are the cases, ``tokens`` what the last two share; ``peaks`` measures
memory; ``operation_goals`` holds the targets, ``operation_result`` the result; ``operations`` runs
it all. ``demo`` is a little of everything.

The real Axolotl, as it is and accelerated: ``axolotl_bench``, which tells where to read on.

Peers that cannot share our process are asked over a pipe (``peer_process``): ``earlier_worker`` and
``axolotl_worker``, which ``serve`` there.
"""
