"""Tokenising goes on after an interruption, with the rows that stock makes in one go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.axolotl_inputs import preprocess_config, write_config, write_model, write_rows
from benchmarks.children import offline_environment
from fast_axolotl.axolotl import tokenized_shards
from fast_axolotl.axolotl.patching import Unfamiliar
from fast_axolotl.axolotl.prompts import instruction_table, process
from fast_axolotl.axolotl.tokenized_shards import describe, note_saved, tokenize_in_shards
from support.axolotl import STOCK_AXOLOTL, Later, byte_tokenizer, run_child
from test_axolotl_prompts import STRATEGIES, alpaca, conversations, rows_for

pytestmark = STOCK_AXOLOTL


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where the work folders are; every dataset is worth one here."""
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(tokenized_shards, "_LEAST_ROWS", 1)
    yield tmp_path / "fast-axolotl"
    tokenized_shards._leave(os.getpid())


def settings(strategy: Any, num_proc: int | None) -> Any:
    return SimpleNamespace(prompt_tokenizer=strategy, process_count=num_proc, keep_in_memory=False)


def dataset_of(name: str, count: int = 5200) -> Any:
    from datasets import Dataset

    rows = [{**row, "number": number} for number, row in enumerate(rows_for(name) * 1300)]
    return Dataset.from_list(rows[:count])


@pytest.mark.parametrize("name", ["completion", "chat", "alpaca"])
def test_what_is_missing_is_made_again_by_any_number_of_processes(
    name: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a row: several, a conversation, a text, a pair; all others are in the tests of prompts."""
    dataset = dataset_of(name)
    strategy = STRATEGIES[name](byte_tokenizer(adds_bos=True), 64)
    want = Later("axolotl.datasets").TokenizedPromptDataset.process(settings(strategy, 2), dataset)
    dataset = dataset.select(range(len(dataset)))  # another object, another fingerprint
    for num_proc, lost in ((3, None), (None, 2), (2, 4), (2, 0)):
        if lost is not None:
            shards = sorted(root.glob("*/*.arrow"))
            assert len(shards) == 6
            for path in shards[:lost]:
                path.unlink()
            # Half of a file, as after a loss of power, and what a killed worker had begun.
            os.truncate(shards[lost], shards[lost].stat().st_size // 2)
            (shards[0].parent / "tmp123").write_bytes(b"begun")
            tokenized_shards._leave(os.getpid())
        fresh = STRATEGIES[name](byte_tokenizer(adds_bos=True), 64)
        got = process(settings(fresh, num_proc), dataset)
        assert got.features == want.features
        assert got.data.table.equals(want.data.table)
        assert not list(root.glob("*/tmp*"))
        told = capsys.readouterr().err
        assert ("tokenising resumes after" in told) == (lost is not None)
    assert len(list(root.iterdir())) == 1


def test_rows_that_changed_are_all_that_is_made_again(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from datasets import concatenate_datasets

    dataset = dataset_of("alpaca")
    run = partial(process, settings(alpaca(byte_tokenizer(), 64), 2))
    run(dataset)
    other = dataset.select(range(4000, 5200)).map(lambda row: {"output": row["output"] + "!"})
    changed = concatenate_datasets([dataset.select(range(4000)), other])
    before = {path: path.stat().st_mtime_ns for path in root.glob("*/*.arrow")}
    run(changed)
    assert "after 4,000 of 5,200 rows" in capsys.readouterr().err
    after = {path: path.stat().st_mtime_ns for path in root.glob("*/*.arrow")}
    assert before.items() < after.items()
    assert len(after) == len(before) + 2


def user_defined(tokenizer: Any, form: str) -> Any:
    module = Later("axolotl.prompt_strategies.user_defined")
    wanted = module.UserDefinedDatasetConfig(format=form)
    return module.load(tokenizer, SimpleNamespace(train_on_inputs=False, sequence_len=8), wanted)


def with_template(tokenizer: Any, template: str) -> Any:
    strategy = conversations(tokenizer, 8)
    strategy.prompter.chat_template = template
    return strategy


DIFFERENT: dict[str, Callable[[], Any]] = {
    "alpaca": lambda: alpaca(byte_tokenizer(), 8),
    "length": lambda: alpaca(byte_tokenizer(), 9),
    "inputs": lambda: alpaca(byte_tokenizer(), 8, True),
    "vocabulary": lambda: alpaca(byte_tokenizer(adds_bos=True), 8),
    "special token": lambda: alpaca(byte_tokenizer(pad_token="<|im_end|>"), 8),
    "side": lambda: alpaca(byte_tokenizer(truncation_side="left"), 8),
    "class": lambda: STRATEGIES["with system"](byte_tokenizer(), 8),
    "user-defined": lambda: user_defined(byte_tokenizer(), "{instruction}: {input}"),
    "other format": lambda: user_defined(byte_tokenizer(), "{instruction}; {input}"),
    "chat": lambda: conversations(byte_tokenizer(), 8),
    "template": lambda: with_template(byte_tokenizer(), "{{ messages }}"),
}


def descriptions() -> list[str]:
    import hashlib

    texts = (describe(partial(instruction_table, strategy=make())) for make in DIFFERENT.values())
    return [hashlib.sha256(text.encode()).hexdigest() for text in texts]


def test_what_behaves_differently_has_another_key_and_the_same_one_in_every_process() -> None:
    here = descriptions()
    assert len(set(here)) == len(DIFFERENT)
    command = (
        "import os, sys; os.environ['PYTEST_CURRENT_TEST'] = '1'; import test_tokenized_shards as t"
        "; print(*t.descriptions())"
    )
    folders = (Path(__file__).parent, Path(__file__).parents[1])
    there = run_child(
        sys.executable, "-c", command, folders=folders, FAST_AXOLOTL="0", PYTHONHASHSEED="7"
    )
    assert there.stdout.split()[-len(here) :] == here, there.stderr
    used = alpaca(byte_tokenizer(), 8)
    used.tokenizer("a text", truncation=True, max_length=5)  # leaves the Rust tokenizer truncating
    assert describe(used) == describe(alpaca(byte_tokenizer(), 8))
    used.prompter.secret = object()
    with pytest.raises(Unfamiliar):
        describe(used)


def fails(batch: Any, how: str = "", **_: Any) -> Any:
    if batch["number"][0] >= 3000:
        if how == "dies":
            os._exit(3)
        raise ValueError("row 3,000")
    return {"input_ids": [[1]] * len(batch["number"])}


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_worker_that_fails_ends_the_whole_and_leaves_what_is_finished(
    how: str, root: Path
) -> None:
    wanted = "row 3,000" if how == "raises" else "exit code 3"
    with pytest.raises((ValueError, RuntimeError), match=wanted):
        tokenize_in_shards(
            dataset_of("alpaca"), partial(fails, how=how), num_proc=1, keep_in_memory=False
        )
    assert len(list(root.glob("*/*.arrow"))) == 3


def test_folders_go_when_nobody_needs_them(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, made = dataset_of("alpaca"), alpaca(byte_tokenizer(), 64)
    process(settings(made, 2), dataset)
    [folder] = root.iterdir()
    lock = tokenized_shards._held.pop(folder)
    # Another process has it: this one goes without, as it would if the key could not be made.
    rows = process(settings(made, 2), dataset)
    assert rows.cache_files == []
    tokenized_shards._held[folder] = lock
    process(settings(made, 2), dataset)
    tokenized_shards._leave(os.getpid())
    assert folder.exists(), "it was not saved"
    process(settings(made, 2), dataset)
    note_saved()
    process(settings(made, 2), dataset)  # used once more
    tokenized_shards._leave(os.getpid())
    assert folder.exists(), "what was made since is not saved"
    process(settings(made, 2), dataset)
    note_saved()
    assert folder.exists(), "its files are in use"
    tokenized_shards._leave(os.getpid())
    assert not folder.exists()
    left = [root / name for name in ("old", "young")]
    for path in left:
        path.mkdir()
        (path / "a.arrow").touch()
    os.utime(left[0] / "a.arrow", (0, 0))
    os.utime(left[0], (0, 0))
    process(settings(made, 2), dataset)
    assert [path.exists() for path in left] == [False, True]


def test_a_killed_preprocess_continues(tmp_path: Path) -> None:
    model, data = tmp_path / "model", write_rows(tmp_path / "chat.jsonl", 8000)
    write_model(model)
    path = write_config(preprocess_config(model, data, tmp_path / "prepared"), tmp_path / "a.yml")

    def start() -> subprocess.Popen[str]:
        run = (sys.executable, "-m", "fast_axolotl", "run", "--skip", "dedupe", "--")
        return subprocess.Popen(
            (*run, sys.executable, "-m", "axolotl.cli.main", "preprocess", str(path)),
            env=offline_environment(tmp_path, tmp_path / "kernels"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    folder = tmp_path / "huggingface" / "datasets" / "fast-axolotl"
    killed = start()
    while len(list(folder.glob("*/*.arrow"))) < 2 and killed.poll() is None:
        time.sleep(0.005)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert 2 <= len(list(folder.glob("*/*.arrow"))) < 8
    told = start().communicate()[1]
    assert "fast-axolotl: tokenising resumes after " in told, told[-2000:]
    assert len(list((tmp_path / "prepared").glob("*/data-*.arrow"))) > 0
    assert not list(folder.iterdir())
