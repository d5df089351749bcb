"""The table of releases in the docs is that of the newest result."""

from __future__ import annotations

import json

from tools.axolotl_matrix import PAGE, newest_result, update

STOCK_FAILS = {"tests.test_trl::test_preferences_in_axolotl_train_to_the_same_losses"}
"""Without us, too: with the newest huggingface_hub ``axolotl train`` cannot import trackio."""


def test_the_docs_show_the_newest_result() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert update(page) == page, "run python tools/axolotl_matrix.py"


def test_most_is_active_and_nothing_fails_on_the_releases_that_are_promised() -> None:
    path = newest_result()
    assert path is not None
    stacks = {item["stack"]: item for item in json.loads(path.read_text())["stacks"]}
    for name in ("0.19.0", "0.18.0", "0.17.0", "0.19.0+transformers+datasets"):
        stack = stacks[name]
        assert len(stack["active"]) >= 15
        ran = [stack[key] for key in ("tests", "preprocess_and_train") if stack[key] is not None]
        failed = {test for result in ran for test in result["failed"]}
        assert failed <= (STOCK_FAILS if "transformers" in name else set())
