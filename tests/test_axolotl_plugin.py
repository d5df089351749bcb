"""The plugin: our keys in Axolotl's schema, and what the configuration switches."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fast_axolotl
from support.axolotl import AGAINST_AXOLOTL

PLUGIN = "fast_axolotl.integrations.axolotl.FastAxolotlPlugin"


def test_without_axolotl_the_plugin_says_what_is_missing() -> None:
    code = (
        "import sys\nsys.modules['axolotl'] = None\n"
        "from fast_axolotl.errors import MissingExtraError\n"
        "from fast_axolotl.integrations import axolotl\n"
        "try:\n    axolotl.FastAxolotlPlugin\n"
        "except MissingExtraError as error:\n    print(error)\n"
    )
    source = str(Path(fast_axolotl.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "pip install axolotl" in done.stdout


class TestAgainstAxolotl:
    pytestmark = AGAINST_AXOLOTL

    @pytest.fixture
    def manager(
        self, stock: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Any]:
        base = stock("axolotl.integrations.base")
        monkeypatch.setattr(base.PluginManager, "_instance", None)
        monkeypatch.setattr(base.PluginManager, "plugins", {})
        yield base.PluginManager.get_instance()
        fast_axolotl.uninstall()

    @pytest.fixture
    def config(self, stock: Callable[[str], Any]) -> Callable[..., Any]:
        dict_default = stock("axolotl.utils.dict").DictDefault

        def make(**keys: Any) -> Any:
            return dict_default(
                {
                    "base_model": "model",
                    "datasets": [{"path": "rows.jsonl", "type": "alpaca"}],
                    "learning_rate": 1e-4,
                    "micro_batch_size": 1,
                    "gradient_accumulation_steps": 1,
                    **keys,
                }
            )

        return make

    def test_keys_of_ours_survive_validation(
        self, stock: Callable[[str], Any], manager: Any, config: Callable[..., Any]
    ) -> None:
        keys = {
            "dataset_use_rust_streaming": True,
            "fast_axolotl_streaming_force": True,
            "fast_axolotl_memory_budget": 1024,
            "fast_axolotl_skip": ["save"],
        }
        given = config(plugins=[PLUGIN], **keys)
        stock("axolotl.cli.config").prepare_plugins(given)
        checked = stock("axolotl.utils.config").validate_config(given)
        assert {key: checked[key] for key in keys} == keys
        assert not checked.fast_axolotl_buffer_tokens

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("dataset_use_rust_streaming", "perhaps"),
            ("fast_axolotl_memory_budget", "much"),
            ("fast_axolotl_memory_budget", 0),
            ("fast_axolotl_skip", "save"),
        ],
    )
    def test_wrong_types_are_refused_by_name(
        self,
        stock: Callable[[str], Any],
        manager: Any,
        config: Callable[..., Any],
        key: str,
        value: object,
    ) -> None:
        given = config(plugins=[PLUGIN], **{key: value})
        manager.register(PLUGIN)
        with pytest.raises(ValueError, match=key):
            stock("axolotl.utils.config").validate_config(given)

    def test_registering_installs_and_tells(
        self, manager: Any, config: Callable[..., Any], capsys: pytest.CaptureFixture[str]
    ) -> None:
        manager.register(PLUGIN)
        manager.plugins[PLUGIN].register(config(fast_axolotl_skip=["save"]))
        assert fast_axolotl.status().installed
        line = capsys.readouterr().err
        assert line.startswith("fast-axolotl: Axolotl ")
        assert "switched off: save" in line

    def test_false_in_the_configuration_turns_everything_off(
        self, manager: Any, config: Callable[..., Any], capsys: pytest.CaptureFixture[str]
    ) -> None:
        fast_axolotl.install()
        manager.register(PLUGIN)
        manager.plugins[PLUGIN].register(config(fast_axolotl=False))
        assert not fast_axolotl.status().installed
        assert "fast_axolotl: false" in capsys.readouterr().err

    def test_other_ranks_are_silent(
        self,
        manager: Any,
        config: Callable[..., Any],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("LOCAL_RANK", "1")
        manager.register(PLUGIN)
        manager.plugins[PLUGIN].register(config())
        assert "fast-axolotl:" not in capsys.readouterr().err

    def test_our_keys_bring_the_plugin_along(
        self, stock: Callable[[str], Any], manager: Any, config: Callable[..., Any]
    ) -> None:
        module = stock("axolotl.cli.config")
        fast_axolotl.install()
        given = config(dataset_use_rust_streaming=True)
        module.prepare_plugins(given)
        assert given.plugins == [PLUGIN]
        checked = stock("axolotl.utils.config").validate_config(given)
        assert checked.dataset_use_rust_streaming is True

    def test_without_keys_of_ours_the_plugins_stay_as_they_are(
        self, stock: Callable[[str], Any], manager: Any, config: Callable[..., Any]
    ) -> None:
        module = stock("axolotl.cli.config")
        fast_axolotl.install()
        given = config()
        module.prepare_plugins(given)
        assert not given.plugins
        assert not manager.plugins
