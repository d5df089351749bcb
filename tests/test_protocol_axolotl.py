"""The arms of a configuration of Axolotl; and dedupe on its own, against the real one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.protocol.axolotl_plan import parse_pins, plan_axolotl
from fast_axolotl.protocol.plan import Plan, plan_commands
from fast_axolotl.protocol.runner import run_protocol
from support.axolotl import AGAINST_AXOLOTL
from support.protocol import FakeLaunch, folder_of, run_fake

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")

PLUGIN = "fast_axolotl.integrations.axolotl.FastAxolotlPlugin"


def write(folder: Path, **keys: Any) -> Path:
    data = folder / "rows.jsonl"
    data.write_text('{"text": "a"}\n')
    config = {
        "base_model": "model",
        "datasets": [{"path": str(data), "type": "completion"}],
        "output_dir": "out",
        "learning_rate": 0.00001,
        "sequence_len": 2048,
        **keys,
    }
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def configs(plan: Plan) -> dict[str, Mapping[str, Any]]:
    return {arm.name: arm.config or {} for arm in plan.arms}


def test_the_arms_are_stock_which_has_none_of_our_keys_and_the_drop_in(tmp_path: Path) -> None:
    plan = plan_axolotl(write(tmp_path))
    assert [arm.name for arm in plan.arms] == ["baseline", "drop-in"]
    assert [arm.is_accelerated for arm in plan.arms] == [False, True]
    found = configs(plan)
    assert found["baseline"] == found["drop-in"]
    assert found["baseline"]["seed"] == 42
    assert plan.same_work == ("baseline", "drop-in")
    assert plan.data_path == str(tmp_path / "rows.jsonl")
    assert plan.dedupe is None
    plan = plan_axolotl(write(tmp_path), dedupe=True)
    assert plan.dedupe == {"datasets": found["baseline"]["datasets"]}
    path = write(
        tmp_path,
        plugins=[PLUGIN, "other.Plugin"],
        fast_axolotl_skip=["save"],
        dataset_use_rust_streaming=True,
        seed=7,
    )
    found = configs(plan_axolotl(path))
    assert found["baseline"]["plugins"] == ["other.Plugin"]
    assert not [key for key in found["baseline"] if "fast_axolotl" in key or "rust" in key]
    assert found["drop-in"]["fast_axolotl_skip"] == ["save"]
    assert found["baseline"]["seed"] == 7


def test_streaming_is_an_arm_on_request(tmp_path: Path) -> None:
    path = write(tmp_path, max_steps=50, val_set_size=0.1, dataset_exact_deduplication=True)
    plan = plan_axolotl(path, streaming=True)
    streamed = configs(plan)["streaming"]
    assert streamed["streaming"] is streamed["dataset_use_rust_streaming"] is True
    assert streamed["plugins"] == [PLUGIN]
    assert streamed["val_set_size"] == 0
    assert streamed["dataset_exact_deduplication"] is False
    told = " ".join(plan.notes)
    assert "val_set_size is 0" in told
    # All arms load alike.
    loading = ("dataloader_num_workers", "dataloader_prefetch_factor")
    assert {tuple(map(config.get, loading)) for config in configs(plan).values()} == {(1, 2)}
    assert "Pinned in all variants: dataloader_num_workers=1" in told
    own = plan_axolotl(write(tmp_path, max_steps=50, dataloader_num_workers=3), streaming=True)
    assert {tuple(map(config.get, loading)) for config in configs(own).values()} == {(3, None)}
    assert [arm.times_decide for arm in own.arms] == [False, True, True]
    assert not set(loading) & set(configs(plan_axolotl(write(tmp_path)))["drop-in"])
    # Packed ones name a format and its files.
    path = write(tmp_path, max_steps=50, sample_packing=True)
    [entry] = configs(plan_axolotl(path, streaming=True))["streaming"]["datasets"]
    assert (entry["path"], entry["data_files"]) == ("json", str(tmp_path / "rows.jsonl"))
    with pytest.raises(UsageError, match="--pin max_steps=200"):
        plan_axolotl(write(tmp_path), streaming=True)


def test_pins_are_in_every_arm_by_short_or_full_name(tmp_path: Path) -> None:
    pins = parse_pins("num_workers=2, prefetch_factor=4,accelerator_config.dispatch_batches=false")
    path = write(tmp_path, accelerator_config={"split_batches": True})
    plan = plan_axolotl(path, pins=pins)
    for config in configs(plan).values():
        assert config["dataloader_num_workers"] == 2
        assert config["dataloader_prefetch_factor"] == 4
        assert config["accelerator_config"] == {"split_batches": True, "dispatch_batches": False}
    assert "dataloader_num_workers=2" in " ".join(plan.notes)
    # A prepared dataset that is pinned is shared.
    plan = plan_axolotl(write(tmp_path), pins={"dataset_prepared_path": "ready"})
    assert {arm.own_folders for arm in plan.arms} == {("output_dir", "HF_DATASETS_CACHE")}


def test_a_list_can_be_pinned_and_pins_that_are_none_are_refused() -> None:
    pins = parse_pins("lora_target_modules=[q_proj, k_proj],max_steps=60, a.b='x, y',")
    assert pins == {"lora_target_modules": ["q_proj", "k_proj"], "max_steps": 60, "a.b": "x, y"}
    assert parse_pins("a=[[1, 2], [3]],b={c: [4, 5]}") == {"a": [[1, 2], [3]], "b": {"c": [4, 5]}}
    for words, texts in {
        "KEY=VALUE": ("num_workers", "=2"),
        "is not a YAML value": ("a={1: 2: 3}", "a=[1", "a='x, y"),
    }.items():
        for text in texts:
            with pytest.raises(UsageError, match=words):
                parse_pins(text)


def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.yml: cannot be read: No such file"):
        plan_axolotl(tmp_path / "nothing.yml")
    (tmp_path / "bad.yml").write_text("a: [")
    with pytest.raises(DataError, match="not YAML"):
        plan_axolotl(tmp_path / "bad.yml")
    (tmp_path / "list.yml").write_text("- a")
    with pytest.raises(DataError, match="has keys"):
        plan_axolotl(tmp_path / "list.yml")
    with pytest.raises(UsageError, match=r"\{config\}"):
        plan_axolotl(write(tmp_path), command="axolotl train")
    with pytest.raises(UsageError, match="datasets in the configuration has no keys"):
        plan_axolotl(write(tmp_path), pins={"datasets.path": "b"})
    with pytest.raises(UsageError, match="cannot be split into words"):
        plan_axolotl(write(tmp_path), command="axolotl 'train {config}")


def test_each_run_has_a_configuration_and_folders_of_its_own(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Launch(FakeLaunch):
        def __call__(self, command: Sequence[str], environment: Any, *rest: Any) -> int:
            config = yaml.safe_load(Path(command[-1]).read_text())
            for folder in (config["output_dir"], environment["HF_DATASETS_CACHE"]):
                Path(folder).mkdir()
            seen.append({**config, "cache": environment["HF_DATASETS_CACHE"]})
            return super().__call__(command, environment, *rest)

    launch = Launch()
    plan = plan_axolotl(write(tmp_path), pairs=1, warmup=0)
    found = run_fake(plan, tmp_path / "p", launch)
    for name in ("output_dir", "dataset_prepared_path", "cache"):
        assert len({config[name] for config in seen}) == 2
    # A float stays one: JSON's 1e-05 would be a text in YAML.
    assert [config["learning_rate"] for config in seen] == [0.00001] * 2
    assert sorted(("measure" in call) for call in launch.calls) == [False, True]
    # What Axolotl wrote is removed, the records stay.
    assert not list((tmp_path / "p").rglob("output_dir"))
    assert (folder_of(launch.calls[0]) / "rank-0.jsonl").exists()
    assert found.arms[1].command == ("axolotl", "train", "{config}")


def try_dedupe(folder: Path, answer: dict[str, Any] | None, code: int = 0) -> dict[str, Any]:
    def launch(command: Sequence[str], environment: Mapping[str, str], log: Path, tick: Any) -> int:
        if "fast_axolotl.axolotl.data" not in command:
            return 1  # a run of an arm
        assert environment["FAST_AXOLOTL"] == "0"
        log.write_text("ImportError: no axolotl\n")
        if answer is not None:
            Path(command[-1]).write_text(json.dumps(answer))
        return code

    plan = plan_commands("a", "b", pairs=1, warmup=0, dedupe={"datasets": []})
    return run_protocol(plan, folder, environment={}, launch=launch, clock=lambda: 0.0).dedupe


def test_dedupe_on_its_own_has_an_interval_or_says_why_not(tmp_path: Path) -> None:
    seconds = {"stock_seconds": [1.0, 1.1, 0.9], "our_seconds": [0.1, 0.1, 0.1]}
    found = try_dedupe(tmp_path, {"rows": 2000, "kept": 1600, **seconds})
    assert found["speed_up"] == pytest.approx(9.97, abs=0.01)
    assert found["speed_up_low"] < 9.97 < found["speed_up_high"]
    assert "2,000 rows, same 1,600 kept: 10.0× the speed" in found["sentence"]
    # One that failed is tried again.
    failed = try_dedupe(tmp_path / "new", None, 1)
    assert "exit code 1" in failed["sentence"]
    assert "ImportError" in failed["log_tail"]
    other = try_dedupe(tmp_path / "new", {"reason": "the results differ from stock Axolotl"})
    assert "differ from stock Axolotl" in other["sentence"]


@AGAINST_AXOLOTL[0]
@AGAINST_AXOLOTL[1]
def test_dedupe_keeps_the_rows_that_axolotl_keeps(
    tmp_path: Path, stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fast_axolotl.axolotl import data as dedupe_trial

    monkeypatch.setattr(stock("datasets").config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(dedupe_trial, "_TRIAL_REPEATS", 2)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "{number % 7}"}}\n' for number in range(50)))
    given = {"datasets": [{"path": str(rows), "ds_type": "json", "type": "completion"}]}
    found = dedupe_trial.try_dedupe(given)
    assert (found["rows"], found["kept"]) == (50, 7)
    assert len(found["stock_seconds"]) == len(found["our_seconds"]) == 2
    assert "reason" in dedupe_trial.try_dedupe({"datasets": []})
