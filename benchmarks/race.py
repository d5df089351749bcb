"""Races on generated files: the contenders of ``fast-axolotl bench``, and other peers beside them.

``run_case`` gives contenders to ``fast_axolotl.cli.race.run_race``, which compares the results and
then times those that are equal, and makes a ``Case`` of what it returns. The earlier
package has our import name, so it runs in another process (``peer``) and is asked over a pipe. A
question costs about 0.1 ms, which counts as the earlier package's time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.command import Tell
from benchmarks.result import Case, Timing
from benchmarks.worker import Worker, WorkerError
from fast_axolotl.cli import race as product
from fast_axolotl.cli.bench import OURS
from fast_axolotl.cli.race import Contender, run_race
from fast_axolotl.errors import UsageError

EARLIER = "earlier package"
_PEER = Path(__file__).with_name("peer.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What the cases of one benchmark share."""

    folder: Path
    repeats: int
    tell: Tell
    peer: Worker | str
    """The process of the earlier package, or why there is none."""

    @property
    def versions(self) -> dict[str, str]:
        """Of the peer in another environment."""
        return {} if isinstance(self.peer, str) else {EARLIER: self.peer.hello["version"]}

    def earlier(
        self,
        request: Mapping[str, Any],
        operation: str,
        gives: str,
        against: str = OURS,
        **settings: Any,
    ) -> Contender:
        """The earlier package as one who may take part.

        It takes lists: the first column is written as a JSON value per line.
        """
        peer = self.peer

        @cache
        def loaded() -> Worker:
            if isinstance(peer, str):
                raise NotImplementedError(peer)
            path = request["paths"][0]
            if operation != "streaming_dataset_reader":
                values = pq.read_table(path, columns=request["columns"]).column(0).to_pylist()
                path = str(self.folder / "earlier.jsonl")
                Path(path).write_text("\n".join(map(json.dumps, values)), encoding="utf-8")
            peer.ask("load", operation=operation, path=path, settings=settings)
            return peer

        def digest(_: Any) -> str:
            return str(loaded().ask("digest")["digest"])

        return Contender(EARLIER, gives, lambda: loaded().ask("run"), against, answer=digest)


def add_race_options(parser: argparse.ArgumentParser) -> None:
    """Those that every race on generated files has."""
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats of every peer")
    parser.add_argument("--peer-python", help="python of an environment with fast-axolotl 0.2.0")


@contextmanager
def open_session(options: argparse.Namespace, folder: Path, tell: Tell) -> Iterator[Session]:
    """Starts the earlier package where there is an interpreter for it."""
    if options.repeats < 1:
        raise UsageError(f"repeats must be at least 1, not {options.repeats}")
    with ExitStack() as stack:
        peer: Worker | str = "no interpreter of its environment was given"
        if options.peer_python is not None:
            # In isolated mode it sees neither our source folder nor PYTHONPATH.
            command = [options.peer_python, "-I", str(_PEER), product.__file__]
            try:
                peer = stack.enter_context(Worker(command, folder / "earlier.txt"))
            except WorkerError as error:
                peer = str(error)
        yield Session(folder=folder, repeats=options.repeats, tell=tell, peer=peer)


def run_case(
    session: Session,
    name: str,
    text: str,
    contenders: Sequence[Contender],
    *,
    rows: int,
    num_bytes: int | None = None,
) -> Case:
    """Compares the answers of everybody who can take part, then times those that are equal."""
    libraries, left_out = run_race(
        contenders,
        repeats=session.repeats,
        progress=lambda text: session.tell(f"{name}: {text}"),
    )
    by_name = {one.name: one for one in contenders}
    rivals = {item["name"]: by_name[item["name"]].against for item in libraries}
    return Case(
        name=name,
        text=text,
        rows=rows,
        num_bytes=num_bytes,
        timings=[
            Timing(
                name=item["name"],
                version=_version(by_name[item["name"]].package),
                output=item["returns"],
                rows=rows,
                seconds=tuple(item["seconds"]),
            )
            for item in libraries
        ],
        rivals={peer: ours for peer, ours in rivals.items() if ours is not None},
        # Messages name the input; the folder it was in means nothing to a reader.
        left_out={who: why.replace(f"{session.folder}/", "") for who, why in left_out.items()},
    )


def _version(package: str | None) -> str | None:
    return None if package is None else metadata.version(package)
