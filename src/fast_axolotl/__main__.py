"""``python -m fast_axolotl`` is ``fast-axolotl``."""

from fast_axolotl.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
