"""The examples for other trainers run as docs/guides/trainers.md shows them, and are measured."""

from __future__ import annotations

import importlib.util
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from fast_axolotl.record.folder import read_run
from support.axolotl import run_child

EXAMPLES = Path(__file__).parents[1] / "examples"
PAGE = (EXAMPLES.parent / "docs" / "guides" / "trainers.md").read_text()

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install torch"
)


TUNED = ("full_finetune_single_device", "--config")


def measure(folder: Path, *command: str) -> None:
    """Run an example in a folder with the tiny model, and see that its steps were recorded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tiny_model.py", str(folder / "work")])
        runpy.run_path(str(EXAMPLES / "tiny_model.py"), run_name="__main__")
    shutil.copy(EXAMPLES / "llamafactory_dataset_info.json", folder / "work" / "dataset_info.json")
    inside = f"import os, sys; os.chdir({str(folder)!r}); from fast_axolotl.cli import main; main()"
    done = run_child(
        *(sys.executable, "-c", inside, "measure", "--quiet", "--output", "record", "--"),
        *command,
        folders=(EXAMPLES,),
        HF_HOME=str(folder / "cache"),
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    (rank,) = read_run(folder / "record").ranks.values()
    assert sum(block.steps for block in rank.blocks) >= 15


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("trl", (sys.executable, str(EXAMPLES / "trl_sft.py"), "work")),
        ("llamafactory", ("llamafactory-cli", "train", str(EXAMPLES / "llamafactory_sft.yaml"))),
        ("torchtune", ("tune", "run", *TUNED, str(EXAMPLES / "torchtune_full.yaml"))),
    ],
)
def test_an_example_is_measured(module: str, command: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip(module, reason=f"not installed: {module}")
    measure(tmp_path, *command)


def test_the_page_names_every_example() -> None:
    files = [path.name for path in EXAMPLES.iterdir() if path.is_file()]
    assert [name for name in files if f"examples/{name}" not in PAGE] == []
