"""The plugin: our keys in Axolotl's schema, and what they switch; see ``test_axolotl_cli``, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fast_axolotl
from fast_axolotl.integrations.launch import Order
from support.axolotl import AGAINST_AXOLOTL, PLUGIN, TOLD_LESS
from support.children import run_python

Import = Callable[[str], Any]

pytestmark = AGAINST_AXOLOTL


def test_without_axolotl_the_plugin_says_what_is_missing() -> None:
    code = (
        "import sys\nsys.modules['axolotl'] = None\n"
        "from fast_axolotl.errors import MissingExtraError\n"
        "from fast_axolotl.integrations import axolotl\n"
        "try:\n    axolotl.FastAxolotlPlugin\n"
        "except MissingExtraError as error:\n    print(error)\n"
    )
    assert "pip install axolotl" in run_python(code).stdout


@pytest.fixture
def manager(stock: Import, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    base = stock("axolotl.integrations.base")
    monkeypatch.setattr(base.PluginManager, "_instance", None)
    monkeypatch.setattr(base.PluginManager, "plugins", {})
    yield base.PluginManager.get_instance()
    fast_axolotl.uninstall()


@pytest.fixture
def plugin(manager: Any) -> Any:
    manager.register(PLUGIN)
    return manager.plugins[PLUGIN]


@pytest.fixture
def config(stock: Import) -> Callable[..., Any]:
    dict_default = stock("axolotl.utils.dict").DictDefault
    always = {
        "base_model": "model",
        "datasets": [{"path": "rows.jsonl", "type": "alpaca"}],
        "learning_rate": 1e-4,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
    }
    return lambda **keys: dict_default({**always, **keys})


def test_wrong_types_are_refused_by_name(
    stock: Import, plugin: Any, config: Callable[..., Any]
) -> None:
    for key, value in (
        ("dataset_use_rust_streaming", "perhaps"),
        ("fast_axolotl_buffer_bytes", 0),
        ("fast_axolotl_skip", "save"),
    ):
        with pytest.raises(ValueError, match=key):
            stock("axolotl.utils.config").validate_config(config(plugins=[PLUGIN], **{key: value}))


def test_registering_installs_or_turns_off_and_tells_on_the_first_rank(
    plugin: Any, config: Callable[..., Any], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.register(config(fast_axolotl_skip=["save"]))
    assert fast_axolotl.status().installed
    line = capsys.readouterr().err
    assert line.startswith(("fast-axolotl: Axolotl ", TOLD_LESS))
    assert "1 switched off" in line
    plugin.register(config(fast_axolotl=False))
    assert not fast_axolotl.status().installed
    assert "fast_axolotl: false" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "1")
    plugin.register(config())
    assert "fast-axolotl:" not in capsys.readouterr().err


def test_our_keys_and_nothing_else_bring_the_plugin_along_and_survive_validation(
    stock: Import, manager: Any, config: Callable[..., Any]
) -> None:
    module = stock("axolotl.cli.config")
    fast_axolotl.install()
    without = config()
    module.prepare_plugins(without)
    assert not without.plugins
    assert not manager.plugins
    keys = {"dataset_use_rust_streaming": True, "fast_axolotl_buffer_bytes": 1024}
    keys |= {"fast_axolotl_skip": ["save"]}
    written = config(**keys)
    module.prepare_plugins(written)
    assert written.plugins == [PLUGIN]
    checked = stock("axolotl.utils.config").validate_config(written)
    assert {key: checked[key] for key in keys} == keys


@pytest.mark.parametrize("is_plugin_alone", [False, True])
def test_misspelt_keys_are_named_once_with_the_known_ones(
    stock: Import, manager: Any, config: Callable[..., Any], is_plugin_alone: bool, capsys: Any
) -> None:
    from fast_axolotl.integrations import axolotl_plugin

    axolotl_plugin._NAMED.clear()
    meant = dict.fromkeys(("fast_axolotl_mesure", "fast-axolotl-skip", "fastaxolotl_buffer_bytes"))
    module = stock("axolotl.cli.config")
    if not is_plugin_alone:
        fast_axolotl.install()
    plugins = {"plugins": [PLUGIN]} if is_plugin_alone else {"fast_axolotl_measure": False}
    for _ in range(2):
        module.prepare_plugins(config(**meant, **plugins))
    found = [line for line in capsys.readouterr().err.splitlines() if " not a key " in line]
    for line, key in zip(found, meant, strict=True):
        assert line.startswith(f"fast-axolotl: the configuration has {key}, which is not a key")
        assert "; the known keys are fast_axolotl, fast_axolotl_skip, " in line
    own = stock("axolotl.utils.schemas.config").AxolotlInputConfig
    axolotl_plugin.name_unknown_keys(own.model_fields)
    assert capsys.readouterr().err == ""


def test_the_plugin_takes_to_workers_of_ray_what_the_environment_asks_for(
    stock: Import, manager: Any, config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
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


def test_the_folder_is_the_key_s_unless_the_command_line_gave_one() -> None:
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
