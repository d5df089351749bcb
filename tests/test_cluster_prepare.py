"""``prepare`` gives what ``axolotl preprocess`` gives: rows, order, types and the folder's name,
also when processes and people fail.

One child runs stock on every configuration; one process of ours does all preparations, in tiny
units. Faults come from inside a task, when its first file is written and has no name yet, so that
they hit the stage they are meant for.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from benchmarks.axolotl_inputs import DATASETS, preprocess_config, write_config, write_model
from fast_axolotl import cluster
from fast_axolotl.cluster.sources import cut
from fast_axolotl.cluster.stock import Pipeline, load_configuration, open_pipeline
from fast_axolotl.cluster.store import Store
from fast_axolotl.errors import DataError
from support.axolotl import AGAINST_AXOLOTL, run_child
from support.cluster import Driver
from support.files import compress, write_jsonl
from support.http_site import s3_bucket

pytestmark = AGAINST_AXOLOTL

STAGES = ["tokenise", "deal", "write"]
BUCKET = "prepared"
BAD = 600
"""The line of the second file that is wrong where one is."""

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


def rows_of(kind: str, seed: int, count: int) -> list[Any]:
    return list(islice(DATASETS[kind][0](random.Random(seed)), count))


def repeating(kind: str, seed: int, count: int) -> list[Any]:
    """So many rows with about a third of them again, somewhere."""
    rows, source = rows_of(kind, seed, count), random.Random(seed)
    return source.sample([*rows, *source.choices(rows, k=count // 2)], count * 3 // 2)


def write_lines(path: Path, rows: list[Any]) -> str:
    return str(write_jsonl(path, rows))


def datasets_of(folder: Path) -> dict[str, dict[str, Any]]:
    """What each configuration changes of the usual one."""
    chat = {"type": "chat_template", "field_messages": "messages", "ds_type": "json"}
    first = write_lines(folder / "chat-1.jsonl", repeating("chat", 1, 400))
    others = rows_of("chat", 2, 100) + rows_of("chat", 1, 50)
    second = str(compress(write_jsonl(folder / "chat-2.jsonl", others), "gzip"))
    tables = folder / "alpaca.parquet"
    rows = pa.Table.from_pylist(repeating("alpaca", 3, 300))
    pq.write_table(rows, tables, row_group_size=40)
    pacsv.write_csv(pa.concat_tables([rows.slice(0, 40), rows]), folder / "alpaca.csv")
    (folder / "chats").mkdir()
    for number in (1, 2):
        write_lines(folder / "chats" / f"{number}.jsonl", repeating("chat", number, 120))
    texts = write_lines(folder / "texts.jsonl", repeating("completion", 5, 150))
    preferences = write_lines(folder / "pairs.jsonl", repeating("dpo", 6, 200))
    return {
        "chat": {
            "datasets": [{"path": first, **chat}, {"path": second, **chat}],
            "test_datasets": [{"path": second, **chat, "split": "train"}],
            "sequence_len": 150,
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
            "sequence_len": 280,
        },
        "completion": {
            "datasets": [{"path": texts, "ds_type": "json", "type": "completion"}],
            "sequence_len": 128,
            "num_dataset_shards_to_save": 3,
        },
        "dpo": {
            "datasets": [
                {"path": preferences, "ds_type": "json", "type": "chatml.default", "split": "train"}
            ],
            "rl": "dpo",
            "sample_packing": False,
            "sequence_len": 160,
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


class Made:
    """Configurations, the process that prepares them, and what one gives when nothing fails."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.driver = folder, Driver()
        write_model(folder / "model")
        chat = {"type": "chat_template", "field_messages": "messages", "ds_type": "json"}
        alpaca = {"type": "alpaca", "ds_type": "json"}
        first = write_lines(folder / "usual-1.jsonl", repeating("alpaca", 7, 300))
        second = write_lines(folder / "usual-2.jsonl", repeating("chat", 8, 500))
        self.datasets = [{"path": first, **alpaca}, {"path": second, **chat}]
        self.config = self.write("usual", self.datasets)
        self.wanted: dict[str, str] = {}

    def write(self, name: str, datasets: list[dict[str, Any]]) -> Path:
        usual = preprocess_config(self.folder / "model", self.folder / "x", self.folder / "y")
        keys = {"datasets": datasets, "num_dataset_shards_to_save": 6}
        return write_config({**usual, **keys}, self.folder / f"{name}.yml")

    def prepare(self, name: str, config: Path | None = None, **more: Any) -> Any:
        """A preparation that succeeds, and leaves nothing but the wanted files."""
        output = self.folder / "out" / name
        answer = self.driver.prepare(config or self.config, str(output), **more)
        assert "summary" in answer, answer
        assert files_of(output) == self.wanted
        return answer


def files_of(output: Path) -> dict[str, str]:
    """The digests of all that is in a folder of prepared datasets, hidden files included.

    The state has a fingerprint that follows from the path, and the mark names the job.
    """
    [folder] = output.iterdir()
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name not in ("state.json", "_fast-axolotl")
    }


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A server whose address is in the environment before anybody starts."""
    with s3_bucket(BUCKET) as (filesystem, options), pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
        environment.setenv("AWS_ACCESS_KEY_ID", options["key"])
        environment.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield filesystem


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, s3: Any) -> Iterator[Made]:
    it = Made(tmp_path_factory.mktemp("prepare"))
    answer = it.driver.prepare(it.config, str(it.folder / "out" / "first"))
    assert "summary" in answer, answer
    assert list(answer["stages"]) == STAGES
    assert min(stage["tasks"] for stage in answer["stages"].values()) >= 2, answer
    assert answer["summary"]["duplicates"] >= 350
    it.wanted = files_of(it.folder / "out" / "first")
    assert len(it.wanted) == 7
    yield it
    it.driver.end()


def test_the_prepared_datasets_are_those_of_axolotl(made: Made) -> None:
    from datasets import load_from_disk

    paths: dict[str, list[str]] = {"stock": [], "ours": []}
    keys_of = datasets_of(made.folder)
    for name, keys in keys_of.items():
        for side, configs in paths.items():
            usual = preprocess_config(
                made.folder / "model", made.folder / "x", made.folder / side / name
            )
            config = {**usual, "dataset_exact_deduplication": True, **keys}
            configs.append(str(write_config(config, made.folder / f"{side}-{name}.yml")))
    stock = run_child(sys.executable, "-c", STOCK, json.dumps(paths["stock"]), FAST_AXOLOTL="0")
    assert stock.returncode == 0, stock.stderr[-3000:]
    for name, config in zip(keys_of, paths["ours"], strict=True):
        answer = made.driver.prepare(Path(config), None)
        assert "summary" in answer, answer
        sides = {
            side: {
                path.name: path for path in (made.folder / side / name).iterdir() if path.is_dir()
            }
            for side in paths
        }
        assert sides["stock"].keys() == sides["ours"].keys()
        assert len(sides["ours"]) == (2 if name == "chat" else 1)
        for folder in sides["stock"]:
            wanted, got = (load_from_disk(str(sides[side][folder])) for side in paths)
            assert got.features == wanted.features, name
            assert got.data.schema.equals(wanted.data.schema, check_metadata=True), name
            assert got[:] == wanted[:], name
        summary = answer["summary"]
        kept = summary["rows_in"] - sum(summary["dropped"].values()) - summary["duplicates"]
        if name not in ("completion", "sharded"):
            assert kept == summary["rows_out"]
            assert answer["stages"]["tokenise"]["tasks"] >= 2
        assert (summary["duplicates"] > 0) == (name != "sharded")


def test_a_dry_run_counts_rows_and_refuses_more_than_the_memory_of_the_machine(
    made: Made,
) -> None:
    output = made.folder / "out" / "dry"
    summary = made.driver.prepare(made.config, str(output), dry_run=True)["summary"]
    assert summary["stages"] == []
    assert summary["rows_in"] == 1200
    answer = made.driver.prepare(made.config, str(output), dry_run=True, row_bytes=10**12)
    assert re.search(r"1,200 rows need .* GB of memory .* per row", answer["error"])


def test_a_worker_killed_in_each_stage_loses_nothing(made: Made) -> None:
    faults = [{"stage": stage, "mark": str(made.folder / f"mark-{stage}")} for stage in STAGES]
    answer = made.prepare("worker", faults=faults)
    for stage in STAGES:
        assert answer["stages"][stage]["retried"] == 1


def test_a_job_that_is_stopped_in_any_stage_continues_there(made: Made) -> None:
    output = made.folder / "out" / "stopped"
    for stage in STAGES:
        answer = made.driver.prepare(made.config, str(output), stop=stage)
        assert answer["error"] == "stopped"
    stages = made.prepare("stopped")["stages"]
    assert [stage["done_before"] for stage in stages.values()][:-1] == [
        stage["tasks"] for stage in stages.values()
    ][:-1]
    assert 1 <= stages["write"]["done_before"] < stages["write"]["tasks"]


def test_a_folder_that_was_half_removed_is_not_taken_up(made: Made) -> None:
    [name] = (path.name for path in (made.folder / "out" / "first").iterdir())
    Store(str(made.folder / "out" / "half" / f".{name}.work")).write_json("types.json", {})
    made.prepare("half")


def write_bad(made: Made, line: Any, number: int = BAD) -> tuple[Path, str]:
    """The usual configuration with one bad line in another file; that file, and what was good."""
    good = Path(made.datasets[1]["path"]).read_text()
    lines = good.splitlines(keepends=True)
    lines[number - 1] = f"{line if isinstance(line, str) else json.dumps(line)}\n"
    path = made.folder / "bad.jsonl"
    path.write_text("".join(lines))
    made.write("bad", [made.datasets[0], {**made.datasets[1], "path": str(path)}])
    return path, good


def test_a_bad_row_is_named_and_what_was_done_is_kept(made: Made) -> None:
    config, output = made.folder / "bad.yml", str(made.folder / "out" / "bad")
    for line, told in (
        ("{no JSON", f", line {BAD}, cannot be loaded: JSON parse error"),
        ({"messages": 7}, f", row {BAD}: Axolotl fails on this row"),
        ({"messages": None}, f", row {BAD}: Axolotl fails on this row"),
    ):
        path, good = write_bad(made, line)
        answer = made.driver.prepare(config, output)
        assert re.search(f"^DataError: dataset {path}{told}", answer["error"]), answer
    path.write_text(good)
    answer = made.prepare("bad", config=config)
    assert answer["stages"]["tokenise"]["done_before"] >= 1


def test_rows_go_to_an_object_store(made: Made, s3: Any) -> None:
    answer = made.driver.prepare(made.config, f"s3://{BUCKET}/out", memory=1_600_000)
    assert "summary" in answer, answer
    output = made.folder / "downloaded"
    s3.invalidate_cache()
    s3.get(f"s3://{BUCKET}/out", str(output), recursive=True)
    assert files_of(output) == made.wanted


def test_nothing_is_unpickled(made: Made) -> None:
    """The pipeline goes to other processes as JSON; a tokenizer that differs there is an error."""
    cfg, tokenizer = load_configuration(str(made.config))
    text = Pipeline(cfg, tokenizer, cfg.datasets).to_text()
    opened = open_pipeline(text)
    assert opened.configs == cfg.datasets
    assert {**opened.cfg, "torch_dtype": 0} == {**cfg, "torch_dtype": 0}
    with pytest.raises(DataError, match=r"the tokenizer .* is another one"):
        open_pipeline(json.dumps({**json.loads(text), "tokenizer": "other"}))
    with pytest.raises(DataError, match="the tokenizer /nowhere cannot be loaded on this node"):
        open_pipeline(text.replace(str(made.folder / "model"), "/nowhere"))
    package = Path(cluster.__file__).parent
    assert not [path for path in package.glob("*.py") if "pickle" in path.read_text()]


def test_units_follow_from_the_data_and_the_memory_of_a_task(tmp_path: Path) -> None:
    from datasets import Dataset

    store = Store(str(tmp_path / "work"))
    lines = [f"{n:080d}" * (50 if n > 55_000 else 1) for n in range(60_000)]
    dataset = Dataset.from_dict({"n": range(60_000), "text": lines})
    for room, least in ((64 << 20, 25), (4 << 20, 100)):
        units = cut(dataset, "rows", room=room, store=store, name="0")
        assert least <= len(units) <= 3 * least
        tables = [unit.read(store) for unit in units]
        assert max(table.nbytes for table in tables) <= 2 * (room // 16)
        assert [unit.first for unit in units] == [table["n"][0].as_py() for table in tables]
        assert pa.concat_tables(tables)["n"].to_pylist() == list(range(60_000))
    lines[30_000] = "corrected"
    changed = Dataset.from_dict({"n": range(60_000), "text": lines})
    again = cut(changed, "rows", room=room, store=store, name="0")
    assert len({unit.name for unit in units} - {unit.name for unit in again}) == 1
