"""A/B runs of whole commands, with an answer that separates a change from noise.

    plan → runs, A B B A, each a child process with a record → matrix → one paragraph

A plan comes from a configuration of Axolotl (``axolotl_plan``) or from two commands (``plan``).
``runner.run_protocol`` carries it out and can be interrupted; ``compare.compare_folders`` compares
records or protocols later.
"""
