"""The table of releases in the docs is that of the newest result."""

from __future__ import annotations

import json

from tools.axolotl_matrix import PAGE, newest_result, update


def test_the_docs_show_the_newest_result() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert update(page) == page, "run python tools/axolotl_matrix.py"


def test_most_is_active_and_nothing_fails_on_the_releases_that_are_promised() -> None:
    path = newest_result()
    assert path is not None
    stacks = {item["stack"]: item for item in json.loads(path.read_text())["stacks"]}
    least = {"0.19.0": 21, "0.19.0+transformers+datasets": 21}
    for name in ("0.18.0", "0.17.0", "0.16.1", *least):
        stack = stacks[name]
        assert len(stack["active"]) >= least.get(name, 20)
        ran = [stack[key] for key in ("tests", "preprocess_and_train") if stack[key] is not None]
        assert not any(result["failed"] for result in ran)
