"""Replacing a host's functions: guards, fall-back, sweep and the way back.

A small host package is laid out on disk, imported and patched in this process.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import pickle
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fast_axolotl.axolotl import fingerprints, patching
from fast_axolotl.axolotl.fingerprints import ABSENT, fingerprint, mismatch
from fast_axolotl.axolotl.patching import Patchwork, Replacement, Unfamiliar
from fast_axolotl.axolotl.self_check import Check, Different
from support.files import lay_out

HOST = {
    "patchhost/__init__.py": "",
    "patchhost/work.py": '''
import functools


def shout(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner


def double(value, *, scale=2):
    """Stock."""
    return helper(value) * scale


def helper(value):
    return value


class Box:
    size = 3

    def fill(self, value):
        return [value] * self.size

    @classmethod
    def make(cls, value):
        return (cls.__name__, value)
''',
    "patchhost/user.py": ("from patchhost.work import double, helper, Box\nalias = double\n"),
}

OURS = """
from fast_axolotl.axolotl.patching import Final, NotAsked, Unfamiliar


def double(value, *, scale=2):
    if value == "odd":
        raise Unfamiliar("an odd value")
    if value == "plain":
        raise NotAsked
    if value == "late":
        raise Final(OSError("half done"))
    if value == "bug":
        raise RuntimeError("a bug of ours")
    return ("ours", value, scale)


def fill(self, value):
    return ("ours", self.size, value)


def make(cls, value):
    return ("ours", cls.__name__, value)


calls = []


def fill_alike(self, value):
    calls.append(value)
    if value == "odd":
        raise Unfamiliar("an odd value")
    if value == "late":
        raise Final(OSError("half done"))
    return ["wrong" if value == "fail" else value] * self.size
"""

DOUBLE = Replacement(
    name="double",
    target="patchhost.work:double",
    ours="patchhost_ours:double",
    relies_on=("patchhost.work:helper",),
)
FILL = Replacement(name="box", target="patchhost.work:Box.fill", ours="patchhost_ours:fill")
MAKE = Replacement(name="box", target="patchhost.work:Box.make", ours="patchhost_ours:make")
ALL = (DOUBLE, FILL, MAKE)
ALIKE = Replacement(
    name="box",
    target="patchhost.work:Box.fill",
    ours="patchhost_ours:fill_alike",
    relies_on=("patchhost.work:helper",),
    check="call",
)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    lay_out(tmp_path, {**HOST, "patchhost_ours.py": OURS})
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield importlib.import_module
    for name in [name for name in sys.modules if name.startswith("patchhost")]:
        del sys.modules[name]
    forget()


def forget() -> None:
    """What was read of files that a test writes."""
    for cached in (fingerprint, fingerprints._parse):
        cached.cache_clear()


@pytest.fixture
def work(host: Callable[[str], ModuleType]) -> ModuleType:
    return host("patchhost.work")


def familiar(*items: Replacement) -> dict[str, tuple[str, ...]]:
    names = {name for item in items for name in (item.target, *item.relies_on)}
    return {name: (fingerprint(name),) for name in names}


def patched(module: ModuleType, *items: Replacement) -> Patchwork:
    patchwork = Patchwork(items or ALL, familiar(*(items or ALL)))
    patchwork.apply(module, is_late=True)
    return patchwork


def states(patchwork: Patchwork) -> dict[str, str]:
    return {patch.target: patch.state for patch in patchwork.patches()}


@pytest.mark.parametrize(
    ("edit", "is_same"),
    [
        (('"""Stock."""', '"""Another\n\nword."""\n    # and a comment'), True),
        (("value, *, scale=2", "value: int, *, scale: float = 2"), True),
        (("scale=2):", "scale=2\n) -> int:"), True),
        (('"""Stock."""', 'LOG.warning("a line %s", value)'), True),
        (("* scale", "* (scale)"), True),
        (("scale=2", "scale=3"), False),
        (("* scale", "* scale * 1"), False),
        (('"""Stock."""', "print(value)"), False),
        (("def double", "@shout\ndef double"), False),
    ],
)
def test_a_fingerprint_is_of_what_a_function_does(
    work: ModuleType, edit: tuple[str, str], is_same: bool
) -> None:
    before = fingerprint("patchhost.work:double")
    file = Path(str(work.__file__))
    text = file.read_text()
    assert edit[0] in text
    head, _, tail = text.partition("def double")
    file.write_text(head + ("def double" + tail).replace(*edit, 1))
    forget()
    assert (fingerprint("patchhost.work:double") == before) is is_same


@pytest.mark.usefixtures("host")
def test_what_has_no_source_has_no_fingerprint_and_nothing_is_imported() -> None:
    for name in ("no_such", "Box.no_such", "double.fill"):
        assert fingerprint(f"patchhost.work:{name}") == ABSENT
    for name in ("patchhost.no_such:double", "no_such_package:double", "math:floor"):
        assert fingerprint(name) == ""
    assert fingerprint("patchhost.work:double")
    assert "patchhost.work" not in sys.modules


def test_a_function_that_some_releases_do_not_have_may_be_relied_on(work: ModuleType) -> None:
    newer = "patchhost.work:helper_of_the_next_release"
    item = replace(DOUBLE, relies_on=("patchhost.work:helper", newer))
    assert mismatch(item.relies_on, familiar(DOUBLE)) == f"{newer} is missing"
    patched(work, item)
    assert work.double(4, scale=5) == ("ours", 4, 5)
    gone = replace(DOUBLE, target=newer)
    assert Patchwork([gone], {}).check()[0].reason == f"{newer} is missing"
    [absent] = Patchwork([gone], familiar(gone)).check()
    assert (absent.state, absent.reason) == ("absent", f"{newer} does not exist in this release")


def test_ours_answers_is_counted_and_looks_like_the_original(work: ModuleType) -> None:
    stock = work.double
    patchwork = patched(work)

    class Crate(work.Box):  # type: ignore[name-defined, misc]
        size = 9

    assert work.double(4, scale=5) == ("ours", 4, 5)
    assert (work.Box().fill(1), Crate().fill(0)) == (("ours", 3, 1), ("ours", 9, 0))
    assert (work.Box.make(1), Crate.make(0)) == (("ours", "Box", 1), ("ours", "Crate", 0))
    assert [patch.calls for patch in patchwork.patches()] == [1, 2, 2]
    assert set(states(patchwork).values()) == {"active"}
    assert inspect.signature(work.double) == inspect.signature(stock)
    assert work.double.__doc__ == "Stock."
    assert work.double.__wrapped__ is stock
    assert pickle.loads(pickle.dumps(work.double)) is work.double
    assert pickle.loads(pickle.dumps(functools.partial(work.double, scale=3)))(1)[0] == "ours"
    assert getattr(work.double, patching.MARK) == "double"


def test_what_ours_refuses_or_fails_on_ends_in_the_stock_function_and_late_errors_do_not(
    work: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    patchwork = patched(work)
    with caplog.at_level(logging.WARNING, logger="fast_axolotl"):
        assert work.double("odd") == "oddodd"
        assert work.double("odd") == "oddodd"
        assert work.double("bug", scale=1) == "bug"
        assert work.double("plain") == "plainplain"
    with pytest.raises(OSError, match="half done"):
        work.double("late")
    [patch, *_] = patchwork.patches()
    assert dict(patch.fallbacks) == {"an odd value": 2, "RuntimeError: a bug of ours": 1}
    assert patch.calls == 0
    assert caplog.text.count("an odd value") == 1
    patchwork.remove()
    patchwork = patched(work, replace(DOUBLE, ours="patchhost_missing:double"))
    assert work.double(3) == 6
    assert "patchhost_missing" in patchwork.patches()[0].fallbacks[0][0]
    # An error of the stock function has no trace of ours.
    with pytest.raises(TypeError, match=r"unsupported|can't multiply") as caught:
        work.double("odd", scale={})
    assert caught.value.__context__ is None


def test_reasons_and_warnings_are_bounded(
    work: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    patchwork = patched(work, DOUBLE)
    ours = importlib.import_module("patchhost_ours")

    def refuse(value: Any, *, scale: int = 2) -> None:
        raise Unfamiliar(f"value {value}")

    monkeypatch.setattr(ours, "double", refuse)
    for value in range(50):
        work.double(value)
    [patch] = patchwork.patches()
    assert len(patch.fallbacks) == 11
    assert sum(dict(patch.fallbacks).values()) == 50
    assert dict(patch.fallbacks)["other reasons"] == 40
    assert len(caplog.records) == 10


def test_modules_that_imported_by_name_are_swept_and_every_original_comes_back(
    host: Callable[[str], ModuleType], work: ModuleType
) -> None:
    user = host("patchhost.user")
    stock, before = work.double, [vars(work.Box)[name] for name in ("fill", "make")]
    patchwork = patched(work)
    assert user.double is user.alias is work.double is not stock
    kept = functools.partial(work.double, 2)
    patchwork.remove()
    assert kept() == 4
    assert user.double is user.alias is work.double is stock
    assert [vars(work.Box)[name] for name in ("fill", "make")] == before
    assert vars(work.Box)["make"] is before[1]
    assert set(states(patchwork).values()) == {"waiting"}
    patchwork.apply(work)
    assert (kept(), work.double(2)) == (4, ("ours", 2, 2))
    assert set(states(patchwork).values()) == {"active"}


def test_a_wrong_fingerprint_of_a_function_or_a_helper_disables_exactly_one_replacement(
    work: ModuleType,
) -> None:
    wrong = dict.fromkeys(("patchhost.work:Box.fill", "patchhost.work:helper"), ("0" * 16,))
    for name, wanted in zip(wrong, (["active", "skipped"], ["skipped", "active"]), strict=True):
        patchwork = Patchwork(ALL, {**familiar(*ALL), name: wrong[name]})
        ready = ["ready" if state == "active" else state for state in wanted]
        assert [patch.state for patch in patchwork.check()] == [*ready, "ready"]
        assert not patchwork.apply(work)
        assert list(states(patchwork).values()) == [*wanted, "active"]
        reasons = [patch.reason for patch in patchwork.patches() if patch.reason]
        assert reasons == [f"{name} has unknown source code"]
        assert (work.double(2) == 4) == (wanted[0] == "skipped")
        assert (work.Box().fill(1) == [1, 1, 1]) == (wanted[1] == "skipped")
        patchwork.remove()


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_function_that_someone_else_replaced_is_left_alone(
    work: ModuleType, is_wrapped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def theirs(value: Any) -> str:
        return "theirs"

    stock = work.double
    work.double = theirs = functools.wraps(stock)(theirs) if is_wrapped else theirs  # type: ignore[attr-defined]
    patchwork = patched(work)
    assert work.double is theirs
    [patch, *_] = patchwork.patches()
    assert patch.state == "skipped"
    assert "other code" in patch.reason
    [record] = caplog.records
    assert (record.levelno, "other code" in record.getMessage()) == (logging.WARNING, True)


def test_switched_off_stays_off_and_a_helper_that_we_replace_ourselves_is_no_reason(
    work: ModuleType,
) -> None:
    target = "patchhost.work:helper"
    helper = Replacement(name="helper", target=target, ours="patchhost_ours:double")
    patchwork = patched(work, *ALL, helper)
    assert work.double(1) == ("ours", 1, 2)
    patchwork.switch_off(["box", "helper"])
    assert work.Box().fill(1) == [1, 1, 1]
    assert work.double(1) == ("ours", 1, 2)
    patchwork.apply(work)
    assert states(patchwork)["patchhost.work:Box.make"] == "off"
    assert work.Box.make(1) == ("Box", 1)


def to_check(work: ModuleType, *, is_known: bool = False) -> Patchwork:
    patchwork = Patchwork([ALIKE], familiar(ALIKE) if is_known else {})
    patchwork.apply(work)
    return patchwork


def test_unknown_code_is_compared_first_and_ours_goes_on_where_it_was_equal(
    work: ModuleType,
) -> None:
    patchwork = to_check(work)
    box, ours = work.Box(), importlib.import_module("patchhost_ours")
    assert [patch.state for patch in (*patchwork.check(), *patchwork.patches())] == ["check"] * 2
    # What cannot be compared is left to stock, and decides nothing.
    for value in ("odd", "late"):
        assert box.fill(value) == [value] * 3
    box.size = None
    with pytest.raises(TypeError, match="multiply"):  # stock's, on these rows as on the whole
        box.fill(0)
    del box.size
    assert patchwork.patches()[0].state == "check"
    ours.calls.clear()
    for number in range(70):
        assert box.fill(number) == [number] * 3
    # The first of these was compared, and the 65th.
    assert len(ours.calls) == 72
    [patch] = patchwork.patches()
    assert (patch.state, patch.calls) == ("active", 70)
    assert patch.reason.startswith("patchhost.work:Box.fill has unknown source code; equal")
    failed = [
        f"it cannot be compared: {why}" for why in ("half done", "stock fails on rows of this call")
    ]
    assert dict(patch.fallbacks) == dict.fromkeys(["an odd value", *failed], 1)


@pytest.mark.parametrize("before", [0, 64])
def test_one_difference_ends_the_use_of_ours_and_is_never_returned(
    work: ModuleType, before: int, caplog: pytest.LogCaptureFixture
) -> None:
    patchwork = to_check(work)
    box = work.Box()
    for value in [*range(before), "fail", "fail", *range(5)]:
        assert box.fill(value) == [value] * 3
    [patch] = patchwork.patches()
    assert (patch.state, patch.calls) == ("skipped", before)
    assert "'fail', 'fail', 'fail'] in stock and" in patch.reason.replace('"', "")
    assert caplog.text.count("please report this") == 1
    assert importlib.import_module("patchhost_ours").calls == [
        *[0] * (before > 0),
        *range(before),
        "fail",
    ]


@pytest.mark.parametrize("check", ["call", ""])
@pytest.mark.parametrize("relied_on", ["patchhost.work:helper", "patchhost.work"])
def test_a_helper_that_other_code_has_replaced_counts_as_unknown(
    work: ModuleType, relied_on: str, check: str
) -> None:
    item = replace(ALIKE, relies_on=(relied_on,), check=check)
    patchwork = patched(work, item)
    assert states(patchwork) == {item.target: "active"}
    work.helper = lambda value: value  # type: ignore[attr-defined]
    assert work.Box().fill(1) == [1] * 3
    [patch] = patchwork.patches()
    assert patch.state == ("active" if check else "skipped")
    assert patch.reason.startswith(f"{relied_on} was replaced by other code")
    assert importlib.import_module("patchhost_ours").calls == [1, 1] * bool(check)


class Thing:
    """An object with one attribute."""

    def __init__(self, value: Any) -> None:
        self.value = value


def pair(
    stock: Callable[..., Any], ours: Callable[..., Any], how: str, *args: Any
) -> tuple[list[Any], str]:
    """What both functions were called with, and the difference."""
    seen: list[Any] = []

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            seen.append(args)
            return function(*args)

        return call

    try:
        Check(how, wrap(stock)).before(wrap(ours), args, {})
    except Different as difference:
        return seen, str(difference)
    return seen, ""


@pytest.mark.parametrize(
    ("stock", "ours"),
    [
        (lambda rows: [1, 2], lambda rows: [1, 3]),
        (lambda rows: [1, 2], lambda rows: [1]),
        (lambda rows: [1], lambda rows: [True]),
        (lambda rows: [1], lambda rows: [1.0]),
        (lambda rows: [0.0], lambda rows: [-0.0]),
        (lambda rows: [1], lambda rows: (1,)),
        (lambda rows: {"a": 1, "b": 2}, lambda rows: {"b": 2, "a": 1}),
        (lambda rows: np.ones(2, np.int32), lambda rows: np.ones(2, np.int64)),
        (lambda rows: np.ones((2, 1)), lambda rows: np.ones((1, 2))),
        (lambda rows: np.int64(1), lambda rows: 1),
        (lambda rows: torch.ones(2), lambda rows: torch.tensor([1.0, 2.0])),
        (lambda rows: [torch.ones(1)], lambda rows: [torch.ones(1).double()]),
        (lambda rows: rows.append(1), lambda rows: None),
        (lambda rows: random.random() and 1, lambda rows: 1),
        (lambda rows: 1, lambda rows: np.random.random() and 1),
        (lambda rows: int(torch.rand(1).item()), lambda rows: 0),
    ],
)
def test_every_difference_is_seen_and_nothing_is_left_behind(
    stock: Callable[..., Any], ours: Callable[..., Any]
) -> None:
    rows = [[5, "text"], [7]]

    def world() -> list[Any]:
        numpy_state: Any = np.random.get_state()
        return [random.getstate(), numpy_state[1].tolist(), torch.get_rng_state().tolist()]

    before = world()
    assert pair(stock, ours, "rows:rows", rows)[1]
    assert pair(stock, stock, "rows:rows", rows)[1] == ""
    assert (world(), rows) == (before, [[5, "text"], [7]])


def test_a_check_takes_the_first_rows_the_longest_ones_and_repeated_ones() -> None:
    rows = [[0] * (90 if place == 300 else 1) for place in range(400)]
    seen, difference = pair(lambda rows: rows, lambda rows: rows[:], "rows:rows", rows)
    assert difference == ""
    [(sample,), (other,)] = seen
    assert sample == other
    assert len(sample) == 36
    assert max(map(len, sample)) == 90
    columns = {"a": rows, "b": list(range(400))}
    [(sample,), _] = pair(lambda rows: 0, lambda rows: 0, "rows:rows", columns)[0]
    assert sample["b"][:8] == [*range(8)]
    assert sample["b"][-4:] == [*range(4)]
    assert 300 in sample["b"]


def test_a_sampler_is_compared_on_a_copy_and_equal_results_of_many_kinds_are_equal() -> None:
    def make(rows: Any) -> Any:
        nested = {"a": [[1, 2], [None]]}
        return [float("nan"), nested, np.full(2, np.nan), Thing(1), random.random()]

    assert pair(make, make, "rows:rows", [1])[1] == ""

    def stock(self: Any) -> int:
        self.value = 3
        return 1

    thing = Thing(2)
    assert pair(stock, stock, "state:self", thing)[1] == ""
    assert "value" in pair(stock, lambda self: 1, "state:self", thing)[1]
    assert thing.value == 2


def test_what_a_seeded_sampler_draws_and_counts_is_compared_and_put_back() -> None:
    """As accelerate's, which the trainer puts below Axolotl's: it counts the epochs itself."""
    below = SimpleNamespace(generator=torch.Generator(), epoch=2)
    thing = Thing(0)
    thing.sampler = below  # type: ignore[attr-defined]

    def draw(self: Any) -> Any:
        self.sampler.epoch += 1
        return torch.rand(1, generator=self.sampler.generator)

    def count_twice(self: Any) -> Any:
        self.sampler.epoch += 1
        return draw(self)

    before = below.generator.get_state().tolist()
    assert pair(draw, draw, "state:self", thing)[1] == ""
    assert "3" in pair(draw, count_twice, "state:self", thing)[1]
    assert (below.epoch, below.generator.get_state().tolist()) == (2, before)


def test_written_files_are_compared_in_a_folder_that_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def write(cfg: dict[str, Any], rows: Any) -> None:
        seen.append(len([*tmp_path.iterdir()]))
        Path(cfg["dataset_prepared_path"], "a").write_text(repr(rows))

    seen: list[int] = []
    assert pair(write, write, "folder:rows", {}, [1])[1] == ""
    assert (seen, [*tmp_path.iterdir()]) == ([1, 1], [])


def test_datasets_are_compared_in_every_call_and_rows_far_into_them_later() -> None:
    from datasets import Dataset

    dataset = Dataset.from_dict({"a": list(range(200_000))})

    def double(self: Any, dataset: Any) -> Any:
        calls.append(len(dataset))
        return Dataset.from_dict({"a": np.array(dataset["a"][:]) * 2})

    calls: list[int] = []
    check = Check("in order:dataset", double)
    # Axolotl's dataset tokenises in its ``__init__``, when it has no rows of its own yet.
    args = (Dataset.__new__(Dataset), dataset)
    for _ in range(2):
        check.before(double, args, {})
        check.after(double(*args), args, {})
    assert calls == [36, 36, 200_000, 12] * 2
    numbers = np.arange(200_000) * 2
    numbers[64_003] = 7
    with pytest.raises(Different):
        check.after(Dataset.from_dict({"a": numbers}), (None, dataset), {})
