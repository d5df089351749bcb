"""The plugin: our keys in Axolotl's schema, what they switch, and the meter in real trainings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fast_axolotl
from benchmarks.axolotl_inputs import (
    preprocess_config,
    train_config,
    write_config,
    write_model,
    write_rows,
)
from fast_axolotl.integrations.launch import Order
from fast_axolotl.record import RunRecord, read_run
from support.axolotl import AGAINST_AXOLOTL, ON_A_PROCESSOR, TOLD_LESS
from support.children import FAST_AXOLOTL, clean_environment, run_child, run_python
from support.hosts import end_of, total

PLUGIN = "fast_axolotl.integrations.axolotl.FastAxolotlPlugin"
STEPS = 8

Import = Callable[[str], Any]


def test_without_axolotl_the_plugin_says_what_is_missing() -> None:
    code = (
        "import sys\nsys.modules['axolotl'] = None\n"
        "from fast_axolotl.errors import MissingExtraError\n"
        "from fast_axolotl.integrations import axolotl\n"
        "try:\n    axolotl.FastAxolotlPlugin\n"
        "except MissingExtraError as error:\n    print(error)\n"
    )
    assert "pip install axolotl" in run_python(code).stdout


class TestKeys:
    pytestmark = AGAINST_AXOLOTL

    @pytest.fixture
    def manager(self, stock: Import, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        base = stock("axolotl.integrations.base")
        monkeypatch.setattr(base.PluginManager, "_instance", None)
        monkeypatch.setattr(base.PluginManager, "plugins", {})
        yield base.PluginManager.get_instance()
        fast_axolotl.uninstall()

    @pytest.fixture
    def plugin(self, manager: Any) -> Any:
        manager.register(PLUGIN)
        return manager.plugins[PLUGIN]

    @pytest.fixture
    def config(self, stock: Import) -> Callable[..., Any]:
        dict_default = stock("axolotl.utils.dict").DictDefault
        always = {
            "base_model": "model",
            "datasets": [{"path": "rows.jsonl", "type": "alpaca"}],
            "learning_rate": 1e-4,
            "micro_batch_size": 1,
            "gradient_accumulation_steps": 1,
        }
        return lambda **keys: dict_default({**always, **keys})

    def test_keys_of_ours_survive_validation(
        self, stock: Import, manager: Any, config: Callable[..., Any]
    ) -> None:
        keys = {
            "dataset_use_rust_streaming": True,
            "fast_axolotl_buffer_bytes": 1024,
            "fast_axolotl_skip": ["save"],
        }
        written = config(plugins=[PLUGIN], **keys)
        stock("axolotl.cli.config").prepare_plugins(written)
        checked = stock("axolotl.utils.config").validate_config(written)
        assert {key: checked[key] for key in keys} == keys

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("dataset_use_rust_streaming", "perhaps"),
            ("fast_axolotl_buffer_bytes", "much"),
            ("fast_axolotl_buffer_bytes", 0),
            ("fast_axolotl_skip", "save"),
        ],
    )
    def test_wrong_types_are_refused_by_name(
        self, stock: Import, plugin: Any, config: Callable[..., Any], key: str, value: object
    ) -> None:
        with pytest.raises(ValueError, match=key):
            stock("axolotl.utils.config").validate_config(config(plugins=[PLUGIN], **{key: value}))

    def test_registering_installs_and_tells_on_the_first_rank(
        self,
        plugin: Any,
        config: Callable[..., Any],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        plugin.register(config(fast_axolotl_skip=["save"]))
        assert fast_axolotl.status().installed
        line = capsys.readouterr().err
        assert line.startswith(("fast-axolotl: Axolotl ", TOLD_LESS))
        assert "switched off: save" in line
        monkeypatch.setenv("LOCAL_RANK", "1")
        plugin.register(config())
        assert "fast-axolotl:" not in capsys.readouterr().err

    def test_false_in_the_configuration_turns_everything_off(
        self, plugin: Any, config: Callable[..., Any], capsys: pytest.CaptureFixture[str]
    ) -> None:
        fast_axolotl.install()
        plugin.register(config(fast_axolotl=False))
        assert not fast_axolotl.status().installed
        assert "fast_axolotl: false" in capsys.readouterr().err

    def test_our_keys_and_nothing_else_bring_the_plugin_along(
        self, stock: Import, manager: Any, config: Callable[..., Any]
    ) -> None:
        module = stock("axolotl.cli.config")
        fast_axolotl.install()
        without = config()
        module.prepare_plugins(without)
        assert not without.plugins
        assert not manager.plugins
        written = config(dataset_use_rust_streaming=True)
        module.prepare_plugins(written)
        assert written.plugins == [PLUGIN]
        checked = stock("axolotl.utils.config").validate_config(written)
        assert checked.dataset_use_rust_streaming is True

    @pytest.mark.parametrize("is_plugin_alone", [False, True])
    def test_misspelt_keys_are_named_once_with_the_nearest_known(
        self,
        stock: Import,
        manager: Any,
        config: Callable[..., Any],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        is_plugin_alone: bool,
    ) -> None:
        from fast_axolotl.integrations import axolotl_plugin

        monkeypatch.setattr(axolotl_plugin, "_NAMED", set())
        meant = {
            "fast_axolotl_mesure": "did you mean fast_axolotl_measure?",
            "fast-axolotl-skip": "did you mean fast_axolotl_skip?",
            "fastaxolotl_buffer_bytes": "did you mean fast_axolotl_buffer_bytes?",
            "dataset_use_rust": "did you mean dataset_use_rust_streaming?",
            "fast_axolotl_x1y2z3_x1y2z3_x1y2z3": "the known keys are fast_axolotl, ",
        }
        module = stock("axolotl.cli.config")
        if not is_plugin_alone:
            fast_axolotl.install()
        plugins = {"plugins": [PLUGIN]} if is_plugin_alone else {"fast_axolotl_measure": False}
        for _ in range(2):
            module.prepare_plugins(config(**meant, **plugins))
        found = [line for line in capsys.readouterr().err.splitlines() if " not a key " in line]
        for line, (key, text) in zip(found, meant.items(), strict=True):
            assert line.startswith(f"fast-axolotl: the configuration has {key}, which is not a key")
            assert text in line
        # Keys of Axolotl's own are none of ours.
        axolotl_plugin.name_unknown_keys(
            stock("axolotl.utils.schemas.config").AxolotlInputConfig.model_fields
        )
        assert capsys.readouterr().err == ""

    def test_the_plugin_takes_to_workers_of_ray_what_the_environment_asks_for(
        self,
        stock: Import,
        manager: Any,
        config: Callable[..., Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        fast_axolotl.install()
        written = config(use_ray=True)
        stock("axolotl.cli.config").prepare_plugins(written)
        assert (written.plugins, written.fast_axolotl_skip) == ([PLUGIN], None)
        monkeypatch.setenv("FAST_AXOLOTL_SKIP", "dedupe,save")
        monkeypatch.setenv("FAST_AXOLOTL_MEASURE", "/record")
        written = config(use_ray=True, fast_axolotl_skip=["save"])
        stock("axolotl.cli.config").prepare_plugins(written)
        assert written.fast_axolotl_skip == ["save", "dedupe"]
        assert written.fast_axolotl_measure == "/record"

    def test_the_folder_is_the_key_s_unless_the_command_line_gave_one(self) -> None:
        from fast_axolotl.integrations.axolotl_plugin import FastAxolotlArgs, measure_order

        config = {"output_dir": "out"}
        assert measure_order(config, None) is None
        assert measure_order({**config, "fast_axolotl_measure": False}, None) is None
        for value, folder in ((True, "out/fast-axolotl-measure"), ("runs/a", "runs/a")):
            checked = FastAxolotlArgs(fast_axolotl_measure=value).fast_axolotl_measure
            found = measure_order({**config, "fast_axolotl_measure": checked}, None)
            assert found == Order(run_dir=folder)
            asked = Order(run_dir="elsewhere", profile_steps=3)
            assert measure_order({**config, "fast_axolotl_measure": checked}, asked) == asked


class Trainings:
    """A model and data, and trainings of Axolotl on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_model(folder / "model")
        self.data = write_rows(folder / "chat.jsonl", 400)

    def train(self, name: str, *before: str, **keys: Any) -> subprocess.CompletedProcess[str]:
        prepare = preprocess_config(self.folder / "model", self.data, self.folder / "prepared")
        config = {
            **train_config(prepare, self.folder / name),
            "sequence_len": 512,
            **ON_A_PROCESSOR,
        }
        config |= {"max_steps": STEPS, "save_steps": STEPS, "dataloader_num_workers": 1}
        config |= {"gradient_accumulation_steps": 2, "num_epochs": 4, **keys}
        path = write_config(config, self.folder / f"{name}.yml")
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        command = (*before, "axolotl", "train", str(path), "--launcher", "python")
        done = run_child(*command, environment=clean_environment(PATH=programs), timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    def last_log(self, name: str) -> dict[str, Any]:
        [state] = (self.folder / name).glob("checkpoint-*/trainer_state.json")
        history: list[dict[str, Any]] = json.loads(state.read_text())["log_history"]
        return [entry for entry in history if "loss" in entry][-1]


class TestMeter:
    pytestmark = AGAINST_AXOLOTL

    @pytest.fixture(scope="class")
    def trainings(self, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
        return Trainings(tmp_path_factory.mktemp("axolotl"))

    def check(self, record: RunRecord) -> None:
        assert list(record.ranks) == [0]
        rank = record.ranks[0]
        assert rank.start.source == "axolotl"
        assert (total(rank, "steps"), total(rank, "fetches")) == (STEPS, 2 * STEPS + 1)
        assert total(rank, "trainable_tokens") > 0
        assert total(rank, "rows") > total(rank, "samples")  # packed
        assert rank.values["num_workers"] == 1
        assert rank.values["gradient_accumulation"] == 2
        assert rank.values["sample_packing"] is True
        assert rank.values["config"]["sequence_len"] == 512
        [shape] = rank.models
        assert (shape.layers, shape.is_packed, shape.sequence_len) == (2, True, 512)
        assert end_of(Path(record.path)) == ("finished", "")
        assert record.system is not None
        assert any(sample.pss_bytes for sample in record.system.samples)

    def test_a_key_of_the_yaml_measures_the_training(self, trainings: Trainings) -> None:
        trainings.train("plugin", plugins=[PLUGIN], fast_axolotl_measure=True)
        record = read_run(trainings.folder / "plugin" / "fast-axolotl-measure")
        self.check(record)
        assert {"collators", "sampler"} <= set(record.ranks[0].values["replacements"])
        [path] = record.ranks[0].values["data_paths"]
        assert str(trainings.folder / "prepared") in path
        last = trainings.last_log("plugin")
        for name in ("stall_fraction", "tokens_per_second", "working_set_gb"):
            assert last[f"fast_axolotl/{name}"] >= 0

    def test_measure_leaves_axolotl_as_it_is(self, trainings: Trainings) -> None:
        folder = trainings.folder / "record"
        command = (*FAST_AXOLOTL, "measure", "--output", str(folder), "--")
        # The plugin in the configuration does not change that.
        done = trainings.train("stock", *command, plugins=[PLUGIN])
        self.check(read_run(folder))
        assert read_run(folder).ranks[0].values["replacements"] == []
        assert "replaced    none" in done.stderr
        assert "accelerated calls" not in done.stderr
        assert "Inconclusive" in done.stderr
        assert "fast_axolotl/stall_fraction" in trainings.last_log("stock")
