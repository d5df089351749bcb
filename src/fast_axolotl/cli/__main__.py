"""``python -m fast_axolotl.cli``."""

from fast_axolotl.cli import main

__all__: list[str] = []

main()
