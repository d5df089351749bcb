"""``python -m fast_axolotl`` is ``fast-axolotl``."""

from fast_axolotl.cli import main

if __name__ == "__main__":
    main()
