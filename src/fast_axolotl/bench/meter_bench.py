"""``fast-axolotl bench meter``: is what the meter reports true?

``meter_cells`` says which waits are injected, ``meter_worker`` runs them and knows the truth,
``meter_scenarios`` makes a machine that is short of memory, of disk or of a fast rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fast_axolotl.bench.axolotl_runs import child_environment
from fast_axolotl.bench.machine import describe_machine
from fast_axolotl.bench.matrix import Machine, Table, machine_notes, save_json
from fast_axolotl.bench.meter_cells import TOLERANCE, Group, groups
from fast_axolotl.bench.meter_scenarios import SCENARIOS, run_scenario
from fast_axolotl.bench.reader import scratch_folder
from fast_axolotl.errors import UsageError

__all__ = ["MeterResult", "meter_tables", "run_meter_bench"]

_FETCHES = 640
"""Five times a period of 1,000 rows, and a little."""
_SIDE_BY_SIDE = 3
"""Groups at a time: they sleep nearly always."""
_CELL_SECONDS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterResult:
    """What was reported, beside the truth."""

    machine: Machine
    date: str
    command: str
    tolerance: float
    cells: tuple[dict[str, Any], ...]
    scenarios: tuple[dict[str, Any], ...]
    left_out: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def save(self, path: Path) -> None:
        """Writes the JSON; a file that is there already is refused."""
        save_json(self.to_json(), path)


def run_meter_bench(
    *,
    hosts: Sequence[str] = (),
    scenarios: Sequence[str] = (),
    fetches: int = _FETCHES,
    work_dir: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> MeterResult:
    """Runs the cells of some hosts, and scenarios; all of both where none is named."""
    _check_names("host", hosts, ("loop", "loader", "trainer"))
    _check_names("scenario", scenarios, SCENARIOS)
    machine = describe_machine()
    is_all = not hosts and not scenarios
    chosen = [group for group in groups() if is_all or group.host in hosts]
    names = list(SCENARIOS) if is_all else list(scenarios)
    left_out = _left_out(chosen)
    chosen = [group for group in chosen if _is_possible(group)]
    with scratch_folder(work_dir) as folder:
        cells = list(_run_groups(chosen, folder, fetches, progress))
        found = []
        for name in names:
            progress(f"scenario {name}")
            found.append(run_scenario(name, folder / f"scenario-{name}"))
    return MeterResult(
        machine=machine,
        date=datetime.now(timezone.utc).date().isoformat(),
        command=_command(hosts, scenarios, fetches),
        tolerance=TOLERANCE,
        cells=tuple(cells),
        scenarios=tuple(found),
        left_out=tuple(left_out),
    )


def meter_tables(result: MeterResult) -> list[Table]:
    """What is wrong, the cells by host and pattern, the scenarios."""
    tables = []
    if result.cells:
        tables.append(_cell_table(result))
    if result.scenarios:
        rows = tuple(
            (item["name"], item["expected"], item["verdict"] or "–", item["note"])
            for item in result.scenarios
        )
        tables.append(
            Table(
                title="bench meter: machines and loops made short of something",
                header=("scenario", "made to be", "verdict", ""),
                rows=rows,
                notes=(),
            )
        )
    return tables


def _cell_table(result: MeterResult) -> Table:
    rows = []
    for key, cells in _by_row(result.cells).items():
        worst = max(abs(cell["stall_fraction"] - cell["true_stall"]) for cell in cells)
        wrong = [f"{cell['planned_share']:.0%}: {', '.join(cell['wrong'])}" for cell in cells]
        wrong = [text for text, cell in zip(wrong, cells, strict=True) if cell["wrong"]]
        true = " ".join(f"{100 * cell['true_stall']:.1f}" for cell in cells)
        told = " ".join(f"{100 * cell['stall_fraction']:.1f}" for cell in cells)
        rows.append((*key, true, told, f"{100 * worst:.2f}", "; ".join(wrong) or "all right"))
    right = sum(not cell["wrong"] for cell in result.cells)
    header = ("host", "workers", "accum.", "waits", "true stall %", "reported %", "worst", "")
    return Table(
        title=f"bench meter: {right} of {len(result.cells)} cells right",
        header=header,
        rows=tuple(rows),
        notes=(
            f"right: within {100 * TOLERANCE:.1f} points, and the verdict, the pattern and its "
            "period as made; on a threshold, within the tolerance, either verdict is right",
            *result.left_out,
            *machine_notes(result.machine),
        ),
    )


def _by_row(cells: Sequence[dict[str, Any]]) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    rows: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        names = ("host", "workers", "accumulation", "pattern")
        rows.setdefault(tuple(str(cell[name]) for name in names), []).append(cell)
    return rows


def _run_groups(
    chosen: Sequence[Group], folder: Path, fetches: int, progress: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    def run(number: int) -> list[dict[str, Any]]:
        return _run_group(chosen[number], folder / f"group-{number}", fetches)

    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
        for group, cells in zip(chosen, pool.map(run, range(len(chosen))), strict=True):
            progress(f"{group.host}, {group.workers} workers, accumulation {group.accumulation}")
            yield from cells


def _run_group(group: Group, folder: Path, fetches: int) -> list[dict[str, Any]]:
    folder.mkdir(parents=True)
    given = {"group": asdict(group), "folder": str(folder), "fetches": fetches}
    done = subprocess.run(
        [sys.executable, "-m", "fast_axolotl.bench.meter_worker", json.dumps(given)],
        capture_output=True,
        text=True,
        timeout=_CELL_SECONDS * 16,
        check=False,
        env=child_environment(folder, folder),
    )
    if done.returncode:
        raise RuntimeError(f"{group}: {done.stderr.strip().splitlines()[-1:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


def _check_names(what: str, names: Sequence[str], known: Iterable[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"no {what} is named {unknown[0]!r}; there are {', '.join(known)}")


def _left_out(chosen: Sequence[Group]) -> list[str]:
    hosts = dict.fromkeys(group.host for group in chosen if not _is_possible(group))
    return [f"{host}: {_NEEDS[host]} is not installed" for host in hosts]


_NEEDS = {"loader": "torch", "trainer": "transformers"}


def _is_possible(group: Group) -> bool:
    needed = _NEEDS.get(group.host)
    return needed is None or find_spec(needed) is not None


def _command(hosts: Sequence[str], scenarios: Sequence[str], fetches: int) -> str:
    parts = ["fast-axolotl bench meter"]
    parts += [f"--hosts {','.join(hosts)}"] if hosts else []
    parts += [f"--scenarios {','.join(scenarios)}"] if scenarios else []
    parts += [f"--fetches {fetches}"] if fetches != _FETCHES else []
    return " ".join(parts)
