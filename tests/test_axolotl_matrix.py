"""The table of releases in the docs is that of the newest result."""

from __future__ import annotations

import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools.axolotl_matrix import NEEDS_A_GPU, PAGE, newest_result, requirements, update

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


@pytest.mark.parametrize("kind", ["whl", "tar.gz"])
def test_pins_are_read_from_wheels_and_source_distributions(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"axolotl-1.0.{kind}"
    pins = ["torch>=2.6.0", "torchao==0.17.0", "transformers==5.5.0"]
    if kind == "whl":
        lines = [*pins, 'vllm==0.14.0; extra == "vllm"']
        with zipfile.ZipFile(path, "w") as wheel:
            text = "Name: axolotl\n" + "".join(f"Requires-Dist: {line}\n" for line in lines)
            wheel.writestr("axolotl-1.0.dist-info/METADATA", text)
    else:
        (tmp_path / "requirements.txt").write_text("--extra-index-url x\n# a\n\n" + "\n".join(pins))
        with tarfile.open(path, "w:gz") as archive:
            archive.add(tmp_path / "requirements.txt", "axolotl-1.0/requirements.txt")
    assert requirements(path) == pins
    assert [line for line in pins if not NEEDS_A_GPU.match(line)] == pins[1:]
