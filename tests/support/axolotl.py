"""What tests that call the real Axolotl share."""

from __future__ import annotations

import importlib.util

import pytest

AGAINST_AXOLOTL = [
    pytest.mark.skipif(
        importlib.util.find_spec("axolotl") is None,
        reason="Axolotl is not installed: pip install axolotl==0.19.0",
    ),
    # Axolotl and what it imports warn as they please; forking after threads warns as well.
    pytest.mark.filterwarnings("default"),
]
"""Marks for tests that call the real Axolotl."""
