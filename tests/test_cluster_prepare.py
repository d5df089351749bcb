"""``prepare`` gives what ``axolotl preprocess`` gives: rows, order, types and the folder's name.

One child runs stock on every configuration, another ours; both import Axolotl once.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from benchmarks.axolotl_inputs import preprocess_config, write_config, write_model
from support.axolotl import AGAINST_AXOLOTL, run_child

pytestmark = AGAINST_AXOLOTL

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "read",
    "old",
    "books",
]

STOCK = """
import json, sys
from axolotl.cli.preprocess import do_cli
from datasets import Dataset
# Its processes would each import Axolotl again, only to write a few rows.
save = Dataset.save_to_disk
Dataset.save_to_disk = lambda *given, **how: save(*given, **{**how, "num_proc": None})
for path in json.loads(sys.argv[1]):
    do_cli(path)
"""

OURS = """
import json, sys
from fast_axolotl.cluster import prepare as module
from fast_axolotl.cluster.prepare import prepare
if __name__ == "__main__":
    # Small enough for some dozens of units, parts and pieces of a few kB.
    module._LEAST_ROOM, module._CHUNK_BYTES = 0, 20_000
    module._HOST_BYTES, module.MIB = 0, 100_000
    results = {}
    for path in json.loads(sys.argv[1]):
        summary = prepare(path, overrides={}, engine="local", address="auto", workers=2,
            memory=int(sys.argv[2]), output=None, work=None, heard=lambda event: None)
        results[path] = summary.to_json()
    print("RESULTS", json.dumps(results))
"""


def text(source: random.Random, most: int = 30) -> str:
    return " ".join(source.choices(WORDS, k=source.randint(1, most)))


def repeating(rows: list[Any], seed: int) -> list[Any]:
    """The rows with about a third of them again, somewhere."""
    source = random.Random(seed)
    return source.sample([*rows, *source.choices(rows, k=len(rows) // 2)], len(rows) * 3 // 2)


def write_lines(path: Path, rows: list[Any]) -> str:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def chats(seed: int, count: int) -> list[Any]:
    source = random.Random(seed)
    turns = [("user", 20), ("assistant", 60)]
    return [
        {
            "messages": [
                {"role": role, "content": text(source, most)}
                for role, most in turns * source.randint(1, 3)
            ]
        }
        for _ in range(count)
    ]


def alpacas(seed: int, count: int) -> list[Any]:
    source = random.Random(seed)
    names = ("instruction", "input", "output")
    return [{name: text(source) for name in names} for _ in range(count)]


def pairs(seed: int, count: int) -> list[Any]:
    source = random.Random(seed)
    names = ("system", "question", "chosen", "rejected")
    return [{name: text(source) for name in names} for _ in range(count)]


def datasets_of(folder: Path) -> dict[str, dict[str, Any]]:
    """What each configuration changes of the usual one."""
    chat = {"type": "chat_template", "field_messages": "messages", "ds_type": "json"}
    first = write_lines(folder / "chat-1.jsonl", repeating(chats(1, 400), 1))
    second = write_lines(folder / "chat-2.jsonl.gz", chats(2, 100) + chats(1, 50))
    tables = folder / "alpaca.parquet"
    rows = pa.Table.from_pylist(repeating(alpacas(3, 300), 3))
    pq.write_table(rows, tables, row_group_size=40)
    pacsv.write_csv(pa.Table.from_pylist(alpacas(4, 80) + alpacas(3, 40)), folder / "alpaca.csv")
    (folder / "chats").mkdir()
    for number in (1, 2):
        write_lines(folder / "chats" / f"{number}.jsonl", repeating(chats(number, 120), number))
    long = [{"text": text(random.Random(seed), 400)} for seed in range(150)]
    texts = write_lines(folder / "texts.jsonl", repeating(long, 5))
    preferences = write_lines(folder / "pairs.jsonl", repeating(pairs(6, 200), 6))
    return {
        "chat": {
            "datasets": [{"path": first, **chat}, {"path": second, **chat}],
            "test_datasets": [{"path": second, **chat, "split": "train"}],
            "sequence_len": 256,
        },
        "chat-in-order": {
            "datasets": [{"path": first, **chat}, {"path": second, **chat}],
            "shuffle_merged_datasets": False,
            "sample_packing": False,
        },
        "alpaca": {
            "datasets": [
                {"path": str(tables), "type": "alpaca"},
                {"path": str(folder / "alpaca.csv"), "ds_type": "csv", "type": "alpaca"},
            ],
            "shuffle_before_merging_datasets": True,
            "sequence_len": 400,
        },
        "completion": {
            "datasets": [{"path": texts, "ds_type": "json", "type": "completion"}],
            "sequence_len": 128,
            "num_dataset_shards_to_save": 3,
        },
        "dpo": {
            "datasets": [
                {"path": preferences, "ds_type": "json", "type": "chatml.intel", "split": "train"}
            ],
            "rl": "dpo",
            "sample_packing": False,
            "sequence_len": 250,
        },
        "folder": {
            "datasets": [{**chat, "path": str(folder / "chats"), "ds_type": None}],
            "sample_packing": False,
        },
        "sharded": {
            "datasets": [{"path": first, **chat, "shards": 3, "shards_idx": 1}],
            "dataset_exact_deduplication": False,
        },
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("prepare")
    write_model(folder / "model")
    paths: dict[str, list[str]] = {"stock": [], "ours": []}
    for name, keys in datasets_of(folder).items():
        for side, configs in paths.items():
            usual = preprocess_config(folder / "model", folder / "x", folder / side / name)
            config = {**usual, "dataset_exact_deduplication": True, **keys}
            configs.append(str(write_config(config, folder / f"{side}-{name}.yml")))
    stock = run_child(sys.executable, "-c", STOCK, json.dumps(paths["stock"]), FAST_AXOLOTL="0")
    assert stock.returncode == 0, stock.stderr[-3000:]
    program = folder / "ours.py"
    program.write_text(OURS)
    ours = run_child(sys.executable, str(program), json.dumps(paths["ours"]), "320000")
    assert ours.returncode == 0, ours.stderr[-3000:]
    [line] = [line for line in ours.stdout.splitlines() if line.startswith("RESULTS ")]
    results = json.loads(line.removeprefix("RESULTS "))
    return {"folder": folder, "results": {Path(key).stem: it for key, it in results.items()}}


@pytest.mark.parametrize(
    "name", ["chat", "chat-in-order", "alpaca", "completion", "dpo", "folder", "sharded"]
)
def test_the_prepared_dataset_is_that_of_axolotl(made: dict[str, Any], name: str) -> None:
    from datasets import load_from_disk

    sides = {}
    for side in ("stock", "ours"):
        found = (made["folder"] / side / name).iterdir()
        sides[side] = {path.name: path for path in found if path.is_dir()}
    assert sides["stock"].keys() == sides["ours"].keys()
    assert len(sides["ours"]) == (2 if name == "chat" else 1)
    for folder in sides["stock"]:
        wanted, got = (load_from_disk(str(sides[side][folder])) for side in ("stock", "ours"))
        assert got.features == wanted.features
        assert got.data.schema.equals(wanted.data.schema, check_metadata=True)
        assert got[:] == wanted[:]
    summary = made["results"][f"ours-{name}"]
    stages = {stage["name"]: stage["tasks"] for stage in summary["stages"]}
    kept = summary["rows_in"] - sum(summary["dropped"].values()) - summary["duplicates"]
    if name in ("chat", "chat-in-order", "alpaca", "dpo", "folder"):
        assert kept == summary["rows_out"]
        assert stages["tokenise"] >= 3
    assert (summary["duplicates"] > 0) == (name != "sharded")
