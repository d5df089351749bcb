"""Arrays in, arrays out: the loops that are too slow in Python, compiled by numba.

Every kernel releases the GIL, so that ``threads`` can run it on several processors; none uses
numba's own threads, whose OpenMP layer dies in a forked process, and loaders fork. ``jit`` compiles
a kernel on its first call and keeps the result on disk. Importing this package loads nothing.
"""
