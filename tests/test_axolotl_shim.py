"""The shim: virtual modules, lent names, and an Axolotl that works with and without them.

A small ``axolotl`` is laid out on disk and imported in a fresh interpreter, where warnings are
errors: what counts is the import system as a user meets it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fast_axolotl
from fast_axolotl.axolotl.startup import command, kernels_to_compile
from support.axolotl import run_child
from support.children import python_output

FILES = {
    "axolotl/__init__.py": "__version__ = '0'\n",
    "axolotl/cli.py": "import axolotl.utils.data\nANSWER = 42\n",
    "axolotl/utils/__init__.py": "",
    "axolotl/utils/data/__init__.py": "from axolotl.utils.data.utils import md5\n",
    "axolotl/utils/data/utils.py": "def md5(text): return text\n",
    "axolotl/utils/collators/__init__.py": "OWN = 'own'\n",
}

OURS_FIRST = "import fast_axolotl\nimport axolotl.cli\nimport axolotl.utils.collators\n"
OURS_LAST = "import axolotl.cli\nimport axolotl.utils.collators\nimport fast_axolotl\n"

Run = Callable[..., str]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.fixture
def run(package: Path) -> Run:
    def run_python(code: str, **environment: str) -> str:
        command = (sys.executable, "-W", "error", "-c", code)
        done = run_child(*command, folders=(package,), **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run_python


@pytest.mark.parametrize("imports", [OURS_FIRST, OURS_LAST])
def test_axolotl_works_has_our_names_and_is_left_as_it_was(run: Run, imports: str) -> None:
    run(
        f"""
import sys
{imports}
assert axolotl.cli.ANSWER == 42 and axolotl.__version__ == '0'
data, collators = axolotl.utils.data, axolotl.utils.collators
assert data.fast_parallel_hash_rows is fast_axolotl.parallel_hash_rows
assert data.fast_deduplicate_indices is fast_axolotl.deduplicate_indices
assert collators.fast_pad_sequences is fast_axolotl.pad_sequences
assert collators.fast_create_padding_mask is fast_axolotl.create_padding_mask
assert data.md5("x") == "x" and collators.OWN == "own"

from axolotl.utils.data import rust_streaming, rust_wrapper
from axolotl.rust_ext import axolotl_ext
assert rust_streaming is sys.modules["axolotl.utils.data.rust_streaming"]
assert rust_wrapper is axolotl.utils.data.rust_wrapper
assert axolotl_ext is axolotl.rust_ext.axolotl_ext
assert rust_streaming.RUST_EXTENSION_AVAILABLE is True
assert rust_streaming.get_rust_extension_status() is True
assert rust_wrapper.is_rust_streaming_available() is True
reader = fast_axolotl.streaming_dataset_reader
assert axolotl_ext.streaming_dataset_reader is rust_streaming.streaming_dataset_reader is reader
assert rust_wrapper.load_dataset_with_rust_streaming is reader
for name in ("RustStreamingDataset", "create_rust_streaming_dataset", "should_use_rust_streaming"):
    assert getattr(rust_wrapper, name) is getattr(fast_axolotl, name)

NAMES = ("axolotl", "axolotl.utils", "axolotl.utils.data", "axolotl.utils.collators")
assert fast_axolotl.uninstall() is True
assert fast_axolotl.uninstall() is False
for name in NAMES:
    left = [key for key in vars(sys.modules[name]) if key.startswith(("fast_", "rust_"))]
    assert left == [], (name, left)
assert not [name for name in sys.modules if "rust" in name and name.startswith("axolotl")]
"""
    )


def test_hooks_are_inert_after_uninstall_and_live_after_reinstall(run: Run) -> None:
    run(
        """
import fast_axolotl, importlib.util
assert importlib.util.find_spec("axolotl") is not None
virtual = fast_axolotl.status().virtual_modules
assert virtual == ("axolotl.rust_ext", *(f"axolotl.{name}" for name in (
    "rust_ext.axolotl_ext", "utils.data.rust_streaming", "utils.data.rust_wrapper"
)))
fast_axolotl.uninstall()
assert fast_axolotl.status().reason == "uninstall() was called"
import axolotl.utils.data
assert not hasattr(axolotl.utils.data, "fast_parallel_hash_rows")
assert fast_axolotl.install() is True and fast_axolotl.install() is False
status = fast_axolotl.status()
assert (status.installed, status.reason) == (True, "")
assert set(virtual) - set(status.virtual_modules) == set()
assert hasattr(axolotl.utils.data, "fast_parallel_hash_rows")
import axolotl.utils.collators
assert hasattr(axolotl.utils.collators, "fast_pad_sequences")
"""
    )


def test_importing_loads_nothing_heavy_and_makes_up_no_parent_package(run: Run) -> None:
    run(
        """
import sys, fast_axolotl
heavy = {"numpy", "numba", "pyarrow", "torch", "wrapt", "axolotl"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from axolotl.utils.data.rust_wrapper import is_rust_streaming_available
assert is_rust_streaming_available()
assert not {"axolotl", "axolotl.utils", "axolotl.utils.data"} & set(sys.modules)
import axolotl.utils.data
import axolotl.utils.data.rust_streaming
assert axolotl.utils.data.rust_streaming.RUST_EXTENSION_AVAILABLE
import axolotl.rust_ext.axolotl_ext as extension
assert extension.__name__ == "axolotl.rust_ext.axolotl_ext"
assert axolotl.utils.data.md5("x") == "x"
"""
    )


def test_two_threads_that_look_for_hosts_at_once_set_the_hooks_once(run: Run) -> None:
    run(
        """
import threading
from fast_axolotl import axolotl as shim
hooked, hook, barrier = [], shim._hook_all, threading.Barrier(4)
shim._hook_all = lambda: (hooked.append(1), hook())
def look(name):
    barrier.wait()
    shim._TRIGGER.find_spec(name)
threads = [threading.Thread(target=look, args=(name,)) for name in ("axolotl", "trl") * 2]
[thread.start() for thread in threads] and [thread.join() for thread in threads]
assert hooked == [1] and not shim.status().patches[0].state == "failed"
"""
    )


def test_a_plain_import_tells_of_an_axolotl_that_ours_does_not_fit(run: Run) -> None:
    code = "import fast_axolotl, axolotl.utils.data"
    output = run(code)
    assert "replacements are active on Axolotl" in output
    assert " inactive" in output
    for quiet in ({"FAST_AXOLOTL_RUN": "1"}, {"RANK": "1"}, {"FAST_AXOLOTL": "0"}):
        assert "replacements are active" not in run(code, **quiet)


def test_the_last_line_has_what_was_counted_and_workers_do_not_print_one(
    run: Run, package: Path
) -> None:
    # As in a user's script: spawned workers import it again.
    (package / "script.py").write_text("""
import multiprocessing, warnings
warnings.simplefilter("ignore")
import axolotl, fast_axolotl
from fast_axolotl.axolotl.patching import tally

def work():
    tally("tokenize", "conversations have tools", 2)

if __name__ == "__main__":
    tally("tokenize", "conversations have tools", 1)
    for method in ("fork", "spawn"):
        worker = multiprocessing.get_context(method).Process(target=work)
        worker.start()
        worker.join()
        assert worker.exitcode == 0
""")
    script = str(package / "script.py")
    code = f"import runpy; runpy.run_path({script!r}, run_name='__main__')"
    output = run(code)
    last = "fast-axolotl: accelerated calls: none; stock calls: tokenize ×1 rows ("
    assert output.count(last + "conversations have tools)\n") == 1
    assert output.count("accelerated calls:") == 1
    # A forked worker inherits what was said.
    assert output.count("the stock Axolotl function handles some rows of tokenize") == 2
    assert "calls:" not in run(code, LOCAL_RANK="1")


def test_without_axolotl_its_import_still_says_so(run: Run, package: Path) -> None:
    (package / "axolotl").rename(package / "elsewhere")
    run(
        """
import sys
sys.path = [folder for folder in sys.path if "site-packages" not in folder]
import fast_axolotl, importlib.util
for attempt in range(2):
    assert importlib.util.find_spec("axolotl") is None
    try:
        import axolotl
    except ModuleNotFoundError as error:
        assert str(error) == "No module named 'axolotl'"
    else:
        raise AssertionError
"""
    )


def test_what_axolotl_has_of_its_own_is_not_replaced(run: Run, package: Path) -> None:
    data = package / "axolotl/utils/data/__init__.py"
    data.write_text("fast_parallel_hash_rows = 'own'\n")
    (package / "axolotl/utils/data/rust_wrapper.py").write_text("OWN = True\n")
    run(
        """
import axolotl.utils.data.rust_wrapper
import fast_axolotl
wrapper = axolotl.utils.data.rust_wrapper
assert wrapper.OWN and axolotl.utils.data.fast_parallel_hash_rows == "own"
assert "axolotl.utils.data.rust_wrapper" not in fast_axolotl.status().virtual_modules
fast_axolotl.uninstall()
assert axolotl.utils.data.rust_wrapper is wrapper
assert axolotl.utils.data.fast_parallel_hash_rows == "own"
"""
    )


def test_a_failing_hook_leaves_axolotl_working_and_tells(run: Run) -> None:
    output = run(
        f"""
import sys
sys.modules["fast_axolotl.dedupe"] = None
{OURS_FIRST}
assert axolotl.cli.ANSWER == 42
assert hasattr(axolotl.utils.collators, "fast_pad_sequences")
[patch] = [patch for patch in fast_axolotl.status().patches if patch.state == "failed"]
assert patch.name == "axolotl.utils.data" and "fast_axolotl.dedupe" in patch.reason
assert fast_axolotl.status().installed
"""
    )
    assert output.count("fast-axolotl did not change axolotl.utils.data") == 1


def test_the_environment_switches_the_install_off(run: Run) -> None:
    run(
        OURS_LAST
        + """
import sys
status = fast_axolotl.status()
assert not status.installed and status.reason == "FAST_AXOLOTL=0 is set"
assert status.virtual_modules == () and "axolotl.rust_ext" not in sys.modules
assert not hasattr(axolotl.utils.data, "fast_parallel_hash_rows")
assert fast_axolotl.install() is False and fast_axolotl.uninstall() is False
""",
        FAST_AXOLOTL="0",
    )


def test_a_virtual_module_looks_like_a_module_and_the_earlier_names_are_there() -> None:
    wrapper = sys.modules["axolotl.utils.data.rust_wrapper"]
    assert repr(wrapper) == "<module 'axolotl.utils.data.rust_wrapper' (fast_axolotl)>"
    assert getattr(wrapper.__spec__, "parent", "") == "axolotl.utils.data"
    with pytest.raises(AttributeError, match=r"'axolotl\.utils\.data\.rust_wrapper' has no .*'x'"):
        _ = wrapper.x
    assert fast_axolotl.__version__ in fast_axolotl.get_version()
    assert fast_axolotl.is_available() is True
    assert fast_axolotl.RUST_AVAILABLE is True


def test_a_preprocess_alone_collects_rarely() -> None:
    for line in (
        "/bin/python /bin/axolotl preprocess a.yml",
        "python -m axolotl.cli.main preprocess a.yml",
        "python -m axolotl.cli.preprocess a.yml",
        "python /x/axolotl/cli/preprocess.py a.yml",
    ):
        for name in ("preprocess", "train"):
            assert command(line.replace("preprocess", name).split()) == name
    for line in ("python /bin/axolotl merge-lora train", "python -c preprocess"):
        assert command(line.split()) == ""
    program = """
import gc, sys
from fast_axolotl.axolotl import startup
for command in ("merge-lora", "train", "preprocess"):
    sys.orig_argv = ["python", "-m", "axolotl.cli.main", command]
    print(startup.begin(), gc.get_threshold()[0] > 700, end=" ")
"""
    wanted = "False False True True True True"
    assert python_output("-c", program).split() == wanted.split()


def test_a_first_run_compiles_beside_its_imports_what_its_configuration_asks_for(
    tmp_path: Path,
) -> None:
    path, cache = tmp_path / "a.yml", tmp_path / "cache"
    line, environment = ["axolotl", "train", str(path)], {"NUMBA_CACHE_DIR": str(cache)}
    assert kernels_to_compile(line, environment) == []
    path.write_text("sample_packing: true")
    needed = kernels_to_compile(line, environment)
    assert needed == ["binpack.first_fit", "binpack.collect"]
    assert kernels_to_compile(line, {**environment, "RANK": "1"}) == []
    program = f"""
import sys, time
sys.orig_argv = {line!r}
from fast_axolotl.axolotl import startup
startup.begin()
while startup.kernels_to_compile(sys.orig_argv, startup.os.environ):
    time.sleep(0.1)
"""
    assert run_child(sys.executable, "-c", program, **environment).returncode == 0
