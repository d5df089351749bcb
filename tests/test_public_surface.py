"""The names, signatures and flags that users rely on: a change here is a change of the interface.

The lists are literal on purpose. Where a change is meant, it is made here too, and is a line in the
CHANGELOG.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fast_axolotl
from fast_axolotl.measure import Meter
from fast_axolotl.reading import Reader, ReadStats, Rejection
from fast_axolotl.record import RunSummary, Verdict

ROOT = Path(__file__).parents[1] / "src" / "fast_axolotl"

NAMES = [
    "RUST_AVAILABLE",
    "CsvDialect",
    "DedupeSummary",
    "Meter",
    "PackPlan",
    "Reader",
    "RunSummary",
    "RustStreamingDataset",
    "SeenRows",
    "Verdict",
    "__version__",
    "concatenate_and_pack",
    "create_padding_mask",
    "create_rust_streaming_dataset",
    "dedupe_files",
    "deduplicate_indices",
    "detect_format",
    "get_version",
    "install",
    "is_available",
    "list_supported_formats",
    "measure",
    "open_dataset",
    "pack_sequences",
    "pad_sequences",
    "parallel_hash_rows",
    "plan_packs",
    "should_use_rust_streaming",
    "status",
    "streaming_dataset_reader",
    "uninstall",
    "unique_rows",
]

PARAMETERS = {
    "CsvDialect": "*, delimiter=None, quote='\"', escape=None, column_names=None",
    "RustStreamingDataset": "file_path, dataset_type, batch_size=1000, num_threads=4, "
    "dataset_keep_in_memory=False",
    "DedupeSummary": "*, rows_in, rows_out, duplicates, duplicates_of_others, rejected_rows, "
    "rejections, files_in, files_against, bytes_in, bytes_out, seconds, rows_per_second, "
    "state_bytes, spilled_bytes, output, report",
    "PackPlan": "*, indices, offsets, capacity, method, over_long, total_length, lower_bound, "
    "efficiency",
    "SeenRows": "num_threads=0",
    "concatenate_and_pack": "input_ids, labels, attention_masks, max_length, pad_token_id, "
    "label_pad_id=-100, *, output='lists', too_long='truncate', dtype='int64', "
    "position_ids=False, cu_seqlens=False, num_threads=0",
    "create_padding_mask": "current_length, target_length, *, output='lists'",
    "create_rust_streaming_dataset": "file_path, dataset_type, batch_size=1000, num_threads=4, "
    "dataset_keep_in_memory=False",
    "dedupe_files": "inputs, output, *, columns=None, against=None, report=None, overwrite=False, "
    "memory_budget=1073741824, num_threads=0, temp_dir=None, progress=None, **read_options",
    "deduplicate_indices": "rows, existing_hashes=None, num_threads=0",
    "detect_format": "path",
    "get_version": "",
    "install": "*, skip=()",
    "is_available": "",
    "list_supported_formats": "",
    "measure": "run_dir, *, accumulation=1, told_steps=False, rank=None, world_size=None, "
    "local_rank=None, source='loop', data_paths=(), sample_system=True, peak_tflops=None, "
    "command=None, environment=None, clock=<built-in function perf_counter>, "
    "wall_clock=<built-in function time>, events=<function find_events>, proc='/proc'",
    "open_dataset": "paths, *, format='auto', columns=None, batch_size=1000, num_threads=0, "
    "memory_budget=268435456, shard=None, shuffle=None, epoch=0, on_error='raise', "
    "on_conflict='raise', infer='auto', split=None, json_field=None, csv=None, "
    "storage_options=None",
    "pack_sequences": "sequences, max_length, pad_token_id, eos_token_id, label_pad_id=-100, *, "
    "output='lists', too_long='error', dtype='int64', position_ids=False, cu_seqlens=False, "
    "num_threads=0",
    "pad_sequences": "sequences, target_length=None, pad_value=0, padding_side='right', "
    "pad_to_multiple_of=None, *, output='lists', too_long='truncate', dtype='int64', "
    "attention_mask=False, num_threads=0",
    "parallel_hash_rows": "rows, num_threads=0",
    "plan_packs": "lengths, capacity, *, max_rows=None, method='first_fit', group_size=None",
    "should_use_rust_streaming": "file_path, dataset_config, cfg",
    "status": "",
    "streaming_dataset_reader": "file_path, dataset_type='', batch_size=1000, num_threads=4, *, "
    "output='python', columns=None",
    "uninstall": "",
    "unique_rows": "table, columns=None, seen=None",
}

RESULTS = {
    "concatenate_and_pack": "dict[str, Any]",
    "create_padding_mask": "Any",
    "create_rust_streaming_dataset": "RustStreamingDataset",
    "dedupe_files": "DedupeSummary",
    "deduplicate_indices": "tuple[list[int], list[str]]",
    "detect_format": "tuple[str, str | None]",
    "get_version": "str",
    "install": "bool",
    "is_available": "bool",
    "list_supported_formats": "list[str]",
    "measure": "Meter",
    "open_dataset": "Reader",
    "pack_sequences": "dict[str, Any]",
    "pad_sequences": "Any",
    "parallel_hash_rows": "list[str] | pa.Array | pa.ChunkedArray",
    "plan_packs": "PackPlan",
    "should_use_rust_streaming": "bool",
    "status": "Status",
    "streaming_dataset_reader": "Iterator[Any]",
    "uninstall": "bool",
    "unique_rows": "Any",
}

READER = {
    "close": "",
    "files": None,
    "load_state_dict": "state",
    "num_bytes": None,
    "schema": None,
    "set_epoch": "epoch",
    "state_dict": "",
    "stats": None,
}
"""The public methods of a reader with their parameters, and its properties."""

METER = {
    "attach_sampler": "sampler",
    "close": "reason='finished', error=''",
    "current": "",
    "exhausted": "",
    "fetch_begin": "queue_depth=None",
    "fetch_end": "batch",
    "fetch_failed": "error=None",
    "free_run": "loader, seconds=5.0",
    "go_quiet": "",
    "log": "step, values",
    "mark": "name, text=''",
    "model": "shape",
    "reason": "field, sentence",
    "see_sample": "sample",
    "settings": "**values",
    "span": "name",
    "step": "",
    "summary": "",
    "tokens": "count, *, trainable=None, padded=None",
    "watch": "iterable, *, replay=0",
    "window": "window",
}
"""The same of a meter."""

FIELDS = {
    RunSummary: [
        "run_dir",
        "started",
        "is_finished",
        "end_reason",
        "error",
        "duration_seconds",
        "verdict",
        "world_size",
        "ranks",
        "rank_skew",
        "steps",
        "fetches",
        "warmup_steps",
        "first_steady_step",
        "measured_seconds",
        "stall_fraction",
        "stall_source",
        "host_stall_fraction",
        "device_stall_fraction",
        "wait_p50_seconds",
        "wait_p95_seconds",
        "wait_p99_seconds",
        "wait_max_seconds",
        "worst_percent_share",
        "stall_pattern",
        "stall_period_fetches",
        "stall_period_rows",
        "stall_period_of",
        "cached_stall_fraction",
        "queue_depth",
        "queue_capacity",
        "queue_drift_per_step",
        "first_batch_seconds",
        "first_step_seconds",
        "span_seconds",
        "rows_per_second",
        "samples_per_second",
        "bytes_per_second",
        "free_rows_per_second",
        "deciding_rank",
        "demand_rows_per_second",
        "headroom",
        "tokens_per_second",
        "trainable_tokens_per_second",
        "padded_tokens_per_second",
        "padding_share",
        "packing_efficiency",
        "mean_attended_length",
        "steps_per_second",
        "step_p50_seconds",
        "step_p95_seconds",
        "step_p99_seconds",
        "step_max_seconds",
        "model_flops_per_token",
        "model_flops_per_second",
        "mfu",
        "hfu",
        "flops_convention",
        "peak_tflops",
        "peak_source",
        "matmul_share",
        "working_set_bytes",
        "working_set_peak_bytes",
        "rss_bytes",
        "anon_bytes",
        "file_bytes",
        "shared_bytes",
        "hwm_bytes",
        "hwm_by_phase",
        "spike_ratio",
        "limit_bytes",
        "limit_share",
        "psi_memory_full",
        "psi_io_full",
        "read_bytes_per_second",
        "read_chars_per_second",
        "disk_bytes_per_second",
        "disk_share",
        "swap_in_bytes_per_second",
        "swap_out_bytes_per_second",
        "is_swap_sustained",
        "gpu_utilization",
        "gpu_memory_bytes",
        "gpu_power_watts",
        "gpu_clock_mhz",
        "device_idle_fraction",
        "exposed_communication_fraction",
        "pure_communication_fraction",
        "overhead_seconds_per_fetch",
        "overhead_fraction",
        "settings",
        "environment",
        "reasons",
        "notes",
    ],
    Verdict: ["kind", "subtype", "headline", "evidence", "action", "seconds_needed"],
    ReadStats: ["rows", "batches", "num_bytes", "rejected_rows", "rejections", "ignored_files"],
    Rejection: ["path", "place", "reason", "num_rows"],
}

FLAGS = {
    "": ["--version"],
    "read": [
        "--batch-size",
        "--columns",
        "--format",
        "--head",
        "--infer",
        "--json",
        "--json-field",
        "--memory-budget",
        "--num-threads",
        "--on-conflict",
        "--on-error",
        "--shard",
        "--shuffle",
        "--split",
        "paths",
    ],
    "dedupe": [
        "--against",
        "--columns",
        "--format",
        "--json",
        "--json-field",
        "--memory-budget",
        "--num-threads",
        "--on-conflict",
        "--on-error",
        "--output",
        "--overwrite",
        "--report",
        "--split",
        "--temp-dir",
        "-o",
        "inputs",
    ],
    "warmup": ["--json"],
    "run": [
        "--accelerate",
        "--data-path",
        "--live",
        "--matmul",
        "--measure",
        "--output",
        "--peak-tflops",
        "--profile-steps",
        "--quiet",
        "--skip",
        "-q",
        "command",
    ],
    "watch": ["--data-path", "--json", "--output", "--seconds", "-o", "target"],
    "show": ["--json", "run"],
    "protocol": [
        "--baseline",
        "--candidate",
        "--command",
        "--data-path",
        "--drop-caches",
        "--json",
        "--keep-outputs",
        "--markdown",
        "--max-minutes",
        "--output",
        "--pairs",
        "--pin",
        "--run-minutes",
        "--sequence-len",
        "--steps",
        "--title",
        "--warmup",
        "-o",
        "config",
    ],
    "compare": ["--arm", "--fail-if", "--json", "--markdown", "--single", "first", "second"],
    "report": ["--json", "--markdown", "--output", "--png", "-o", "runs"],
    "demo": ["--axolotl", "--json", "--output", "-o"],
    "status": ["--json"],
    "bench": [],
    **{
        f"bench {name}": [
            "--json",
            "--output",
            "--peer-python",
            "--repeats",
            "--sizes",
            "--work-dir",
            "-o",
        ]
        for name in ("dedupe", "hash", "pack", "pad")
    },
    "bench advice": ["--json", "--output", "--steps", "--work-dir", "-o"],
    "bench reader": [
        "--cases",
        "--json",
        "--output",
        "--peer-python",
        "--repeats",
        "--scale",
        "--work-dir",
        "-o",
    ],
    "bench meter": [
        "--fetches",
        "--hosts",
        "--json",
        "--output",
        "--scenarios",
        "--work-dir",
        "-o",
    ],
    "bench protocol": [
        "--different",
        "--json",
        "--output",
        "--pairs",
        "--same",
        "--slower",
        "--work-dir",
        "-o",
    ],
    "bench meter-gpu": ["--json", "--output", "--work-dir", "-o"],
    "bench demo": ["--json", "--work-dir"],
    "bench axolotl": [
        "--cases",
        "--functions",
        "--json",
        "--output",
        "--repeats",
        "--rows",
        "--stream-mb",
        "--work-dir",
        "-o",
    ],
}
"""Every command with its options and arguments."""


def parameters_of(function: Any) -> str:
    """Names, kinds and defaults, without annotations."""
    signature = inspect.signature(function)
    plain = [item.replace(annotation=item.empty) for item in signature.parameters.values()]
    return re.sub(r" at 0x\w+", "", str(inspect.Signature(plain))[1:-1])


def test_the_public_names_are_frozen() -> None:
    assert sorted(fast_axolotl.__all__) == sorted(NAMES)


def test_every_public_name_resolves_and_is_offered_by_dir() -> None:
    assert [name for name in NAMES if getattr(fast_axolotl, name, None) is None] == []
    assert set(NAMES) <= set(dir(fast_axolotl))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = fast_axolotl.no_such_name


def test_the_signatures_are_frozen() -> None:
    found = {name: parameters_of(getattr(fast_axolotl, name)) for name in PARAMETERS}
    assert found == PARAMETERS
    functions = {name for name in NAMES if callable(getattr(fast_axolotl, name))}
    assert functions - {"Meter", "Reader", "RunSummary", "Verdict"} == set(PARAMETERS)


def test_the_results_are_frozen() -> None:
    found = {
        name: inspect.signature(getattr(fast_axolotl, name)).return_annotation for name in RESULTS
    }
    assert found == RESULTS


@pytest.mark.parametrize(("kind", "frozen"), [(Reader, READER), (Meter, METER)])
def test_the_members_of_a_class_are_frozen(kind: type, frozen: dict[str, str | None]) -> None:
    members = {name: getattr(kind, name) for name in vars(kind) if not name.startswith("_")}
    found = {
        name: None if isinstance(member, property) else parameters_of(member).removeprefix("self")
        for name, member in members.items()
    }
    assert {name: text and text.removeprefix(", ") for name, text in found.items()} == frozen


def test_the_fields_of_the_results_are_frozen() -> None:
    found = {kind: list(inspect.signature(kind).parameters) for kind in FIELDS}
    assert {kind: sorted(names) for kind, names in found.items()} == {
        kind: sorted(names) for kind, names in FIELDS.items()
    }


def module_names() -> Iterator[str]:
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("name", list(module_names()))
def test_every_module_lists_its_public_names(name: str) -> None:
    path = ROOT.parent.joinpath(*name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(file.read_text(encoding="utf-8")).body
    defined = {
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if not any("app.command" in ast.unparse(item) for item in node.decorator_list)
    }
    listed = next(
        (
            ast.literal_eval(node.value)
            for node in body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ),
        None,
    )
    if not defined and listed is None:
        return
    assert listed is not None, f"{name} has no __all__"
    assert defined - set(listed) == set()
    assert len(listed) == len(set(listed))
    assert set(listed) - _bound(body) == set()


def _bound(body: list[ast.stmt]) -> set[str]:
    """The names that a module defines, assigns or imports."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {item.asname or item.name for item in nodes if isinstance(item, ast.alias)}
    return names | {node.id for node in nodes if isinstance(node, ast.Name)}


def walk_commands(command: Any, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Every command with its options and arguments; ``--help`` is everywhere."""
    options = [
        text
        for item in command.params
        for text in (item.opts if item.param_type_name == "option" else [item.name])
    ]
    yield path, sorted(text for text in options if text != "--help")
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk_commands(inner, f"{path} {name}".strip())


def test_the_commands_and_their_flags_are_frozen() -> None:
    typer = importlib.import_module("typer.main")
    cli = importlib.import_module("fast_axolotl.cli")
    assert dict(walk_commands(typer.get_command(cli.app))) == FLAGS


def test_the_console_script_is_the_one_that_is_declared() -> None:
    text = (ROOT.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'fast-axolotl = "fast_axolotl.cli:main"' in text
    assert callable(importlib.import_module("fast_axolotl.cli").main)


@pytest.mark.parametrize("command", [name for name in FLAGS if name])
def test_every_command_has_help_that_names_its_flags(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fast_axolotl", *command.split(), "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", **_python_environment()},
    )
    assert done.returncode == 0, done.stderr
    flags = [flag for flag in FLAGS[command] if flag.startswith("--")]
    assert [flag for flag in flags if flag not in done.stdout] == []


def _python_environment() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT.parent)}
