"""Work on rows past one machine: the same plan in local processes or on a Ray cluster.

A job is a few stages of tasks. A task reads files, writes files and answers with a small dict;
files lie in the job's folder (``store``), whole or not at all. ``engines`` are who does the work;
``job`` runs a stage, less what an earlier run has finished, and gives the output its name. Which
task does what follows from the data alone, never from the number of workers, so the result does not
depend on it either.
"""

__all__: list[str] = []
