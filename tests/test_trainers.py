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


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


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


@needs("trl", "datasets")
def test_trl_is_measured(tmp_path: Path) -> None:
    measure(tmp_path, sys.executable, str(EXAMPLES / "trl_sft.py"), "work")


@needs("llamafactory")
def test_llama_factory_is_measured(tmp_path: Path) -> None:
    measure(tmp_path, "llamafactory-cli", "train", str(EXAMPLES / "llamafactory_sft.yaml"))


@needs("torchtune")
def test_torchtune_is_measured(tmp_path: Path) -> None:
    config = str(EXAMPLES / "torchtune_full.yaml")
    measure(tmp_path, "tune", "run", "full_finetune_single_device", "--config", config)


def test_the_page_names_every_example() -> None:
    files = [path.name for path in EXAMPLES.iterdir() if path.is_file()]
    assert [name for name in files if f"examples/{name}" not in PAGE] == []
