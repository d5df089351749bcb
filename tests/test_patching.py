"""Replacing a host's functions: guards, fall-back, sweep and the way back.

A small host package is laid out on disk, imported and patched in this process.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import logging
import os
import pickle
import random
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from fast_axolotl.axolotl import patching
from fast_axolotl.axolotl.patching import (
    ABSENT,
    Ledger,
    NotAsked,
    Patchwork,
    Replacement,
    Unfamiliar,
    fingerprint,
    mismatch,
)
from fast_axolotl.axolotl.trial import run_both

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


@shout
def decorated(value):
    return value


@functools.lru_cache(
    maxsize=3,
)
@shout
def twice_decorated(value):
    return value


class Box:
    size = 3

    def fill(self, value):
        return [value] * self.size

    @classmethod
    def make(cls, value):
        return (cls.__name__, value)
''',
    "patchhost/user.py": (
        "from patchhost.work import double, helper, Box\nalias = double\n\n\n"
        "def use(value):\n    return helper(value)\n"
    ),
}

OURS = """
from fast_axolotl.axolotl.patching import Final, NotAsked, Unfamiliar


def use(value):
    return "ours"


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
    name="box", target="patchhost.work:Box.fill", ours="patchhost_ours:fill_alike", is_pure=True
)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    for name, text in {**HOST, "patchhost_ours.py": OURS}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    fingerprint.cache_clear()
    patching._lines.cache_clear()
    patching._definition.cache_clear()
    yield importlib.import_module
    for name in [name for name in sys.modules if name.startswith("patchhost")]:
        del sys.modules[name]
    fingerprint.cache_clear()
    patching._definition.cache_clear()


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


def test_a_definition_is_the_text_that_inspect_shows(work: ModuleType) -> None:
    for name, value in [
        ("double", work.double),
        ("Box.fill", work.Box.fill),
        ("Box.make", work.Box.__dict__["make"].__func__),
        ("decorated", work.decorated),
        ("twice_decorated", work.twice_decorated),
        ("Box", work.Box),
    ]:
        found = "".join(patching._definition(f"patchhost.work:{name}"))
        assert found.rstrip() == inspect.getsource(value).rstrip(), name


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
    for cached in (patching._lines, patching._definition, patching.fingerprint):
        cached.cache_clear()
    assert (fingerprint("patchhost.work:double") == before) is is_same


def test_fingerprints_are_read_without_importing(host: Callable[[str], ModuleType]) -> None:
    assert fingerprint("patchhost.work:double")
    assert "patchhost" not in sys.modules
    assert "patchhost.work" not in sys.modules


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("patchhost.work:no_such", ABSENT),
        ("patchhost.work:Box.no_such", ABSENT),
        ("patchhost.work:double.fill", ABSENT),
        ("patchhost.no_such:double", ""),
        ("no_such_package:double", ""),
        ("math:floor", ""),
    ],
)
def test_what_has_no_source_has_no_fingerprint(work: ModuleType, name: str, wanted: str) -> None:
    assert fingerprint(name) == wanted


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


def test_ours_answers_and_is_counted(work: ModuleType) -> None:
    patchwork = patched(work)
    assert work.double(4, scale=5) == ("ours", 4, 5)
    assert work.Box().fill(1) == ("ours", 3, 1)
    assert work.Box.make(1) == ("ours", "Box", 1)
    assert [patch.calls for patch in patchwork.patches()] == [1, 1, 1]
    assert set(states(patchwork).values()) == {"active"}


def test_a_subclass_meets_ours_as_it_would_meet_stock(work: ModuleType) -> None:
    patched(work)

    class Crate(work.Box):  # type: ignore[name-defined, misc]
        size = 9

    assert Crate().fill(0) == ("ours", 9, 0)
    assert Crate.make(0) == ("ours", "Crate", 0)


def test_a_refusal_and_a_bug_of_ours_end_in_the_stock_function(
    work: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    patchwork = patched(work)
    with caplog.at_level(logging.WARNING, logger="fast_axolotl"):
        assert work.double("odd") == "oddodd"
        assert work.double("odd") == "oddodd"
        assert work.double("bug", scale=1) == "bug"
    [patch, *_] = patchwork.patches()
    assert dict(patch.fallbacks) == {"an odd value": 2, "RuntimeError: a bug of ours": 1}
    assert patch.calls == 0
    assert caplog.text.count("an odd value") == 1


def test_what_was_not_asked_for_is_not_told_and_an_error_past_return_is_the_caller_s(
    work: ModuleType,
) -> None:
    patchwork = patched(work, DOUBLE)
    assert work.double("plain") == "plainplain"
    with pytest.raises(OSError, match="half done"):
        work.double("late")
    [patch] = patchwork.patches()
    assert (patch.calls, patch.fallbacks) == (0, ())


def test_a_wrapper_that_someone_kept_steps_aside_after_removal(work: ModuleType) -> None:
    patchwork = patched(work, DOUBLE)
    kept = functools.partial(work.double, 2)
    patchwork.remove()
    assert kept() == 4
    patchwork.apply(work)
    assert kept() == 4
    assert work.double(2) == ("ours", 2, 2)


def test_a_helper_replaced_where_it_is_used_sends_calls_to_stock(
    host: Callable[[str], ModuleType], work: ModuleType
) -> None:
    user = host("patchhost.user")
    item = Replacement(
        name="use",
        target="patchhost.user:use",
        ours="patchhost_ours:use",
        relies_on=("patchhost.work:helper",),
    )
    patchwork = patched(user, item)
    assert user.use(2) == "ours"
    user.helper = lambda value: 10  # type: ignore[attr-defined]
    assert user.use(2) == 10
    assert work.helper(2) == 2
    [patch] = patchwork.patches()
    assert patch.calls == 1


def test_an_error_of_the_stock_function_has_no_trace_of_ours(work: ModuleType) -> None:
    patched(work)
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
    assert len(patch.fallbacks) == 21
    assert dict(patch.fallbacks)["other reasons"] == 30
    assert len(caplog.records) == 5


def test_modules_that_imported_by_name_are_swept_and_every_original_comes_back(
    host: Callable[[str], ModuleType], work: ModuleType
) -> None:
    user = host("patchhost.user")
    stock, before = work.double, [vars(work.Box)[name] for name in ("fill", "make")]
    patchwork = patched(work)
    assert user.double is user.alias is work.double is not stock
    patchwork.remove()
    assert user.double is user.alias is work.double is stock
    assert [vars(work.Box)[name] for name in ("fill", "make")] == before
    assert vars(work.Box)["make"] is before[1]
    assert set(states(patchwork).values()) == {"waiting"}


def test_a_wrong_fingerprint_disables_exactly_one_replacement(
    work: ModuleType,
) -> None:
    known = {**familiar(*ALL), "patchhost.work:Box.fill": ("0" * 16,)}
    patchwork = Patchwork(ALL, known)
    assert not patchwork.apply(work)
    assert states(patchwork) == {
        "patchhost.work:double": "active",
        "patchhost.work:Box.fill": "skipped",
        "patchhost.work:Box.make": "active",
    }
    assert work.Box().fill(1) == [1, 1, 1]
    assert patchwork.patches()[1].reason == "patchhost.work:Box.fill has unknown source code"


def test_a_changed_helper_takes_the_replacement_out(work: ModuleType) -> None:
    known = {**familiar(*ALL), "patchhost.work:helper": ("0" * 16,)}
    assert "patchhost.work:helper" in mismatch(DOUBLE.relies_on, known)
    patchwork = Patchwork(ALL, known)
    patchwork.apply(work)
    assert states(patchwork)["patchhost.work:double"] == "skipped"
    assert work.double(2) == 4


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_helper_that_someone_else_replaces_sends_calls_to_stock(
    work: ModuleType, is_wrapped: bool, is_late: bool
) -> None:
    patchwork = patched(work, DOUBLE)
    if is_late:
        assert work.double(2) == ("ours", 2, 2)
    stock = work.helper

    def theirs(value: Any) -> int:
        return 10

    work.helper = functools.wraps(stock)(theirs) if is_wrapped else theirs  # type: ignore[attr-defined]
    assert work.double(2) == 20
    [patch] = patchwork.patches()
    assert dict(patch.fallbacks) == {"patchhost.work:helper was replaced by other code": 1}
    work.helper = stock  # type: ignore[attr-defined]
    assert work.double(2) == ("ours", 2, 2)


def test_a_helper_that_we_replace_ourselves_is_no_reason(work: ModuleType) -> None:
    helper = Replacement(
        name="helper", target="patchhost.work:helper", ours="patchhost_ours:double"
    )
    patchwork = patched(work, DOUBLE, helper)
    assert work.double(2) == ("ours", 2, 2)
    patchwork.switch_off(["helper"])
    assert work.double(2) == ("ours", 2, 2)


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


def test_a_reload_is_noticed_and_mended(work: ModuleType) -> None:
    patchwork = patched(work)
    importlib.reload(work)
    assert set(states(patchwork).values()) == {"lost"}
    assert work.double(2) == 4
    patchwork.apply(work, is_late=True)
    assert set(states(patchwork).values()) == {"active"}
    assert work.double(2) == ("ours", 2, 2)
    patchwork.remove()
    assert work.double(2) == 4


def test_switched_off_stays_off(work: ModuleType) -> None:
    patchwork = patched(work)
    patchwork.switch_off(["box"])
    assert work.Box().fill(1) == [1, 1, 1]
    assert work.double(1) == ("ours", 1, 2)
    patchwork.apply(work)
    assert states(patchwork)["patchhost.work:Box.make"] == "off"
    assert work.Box.make(1) == ("Box", 1)


def test_the_check_from_files_agrees_with_what_happens(work: ModuleType) -> None:
    known = {**familiar(*ALL), "patchhost.work:Box.fill": ("0" * 16,)}
    patchwork = Patchwork(ALL, known)
    assert [patch.state for patch in patchwork.check()] == ["ready", "skipped", "ready"]


def test_a_wrapper_looks_like_the_original_and_pickles_by_name(work: ModuleType) -> None:
    stock = work.double
    patched(work)
    assert inspect.signature(work.double) == inspect.signature(stock)
    assert work.double.__doc__ == "Stock."
    assert work.double.__wrapped__ is stock
    assert pickle.loads(pickle.dumps(work.double)) is work.double
    assert pickle.loads(pickle.dumps(functools.partial(work.double, scale=3)))(1)[0] == "ours"
    assert getattr(work.double, patching.MARK) == "double"


def test_ours_that_cannot_be_imported_leaves_stock_at_work(work: ModuleType) -> None:
    broken = Replacement(
        name="double", target="patchhost.work:double", ours="patchhost_missing:double"
    )
    patchwork = patched(work, broken)
    assert work.double(3) == 6
    [patch] = patchwork.patches()
    assert "patchhost_missing" in patch.fallbacks[0][0]


def on_trial(work: ModuleType, trial: str = "") -> Patchwork:
    patchwork = Patchwork([ALIKE], {} if trial != "1" else familiar(ALIKE), trial=trial)
    patchwork.apply(work)
    work.Box.size = 40
    return patchwork


@pytest.mark.parametrize("trial", ["", "1"])
def test_unfamiliar_code_is_tried_and_ours_goes_on_once_it_was_equal(
    work: ModuleType, trial: str
) -> None:
    patchwork = on_trial(work, trial)
    box, ours = work.Box(), importlib.import_module("patchhost_ours")
    for number in range(3):
        [patch] = patchwork.patches()
        assert (patch.state, patch.calls) == ("trial", 0)
        assert box.fill(number) == [number] * 40
    assert box.fill(9) == [9] * 40
    assert ours.calls == [0, 1, 2, 9]
    [patch] = patchwork.patches()
    unfamiliar = "" if trial else "patchhost.work:Box.fill has unknown source code; "
    assert patch.state == "active"
    assert patch.reason == f"{unfamiliar}trial: results equal in 3 calls"
    assert (patch.calls, patch.fallbacks, patch.trial) == (
        1,
        (("on trial", 3),),
        "results equal in 3 calls",
    )
    # What is unfamiliar in a call still goes to stock, as does all once it is removed.
    assert box.fill("odd") == ["odd"] * 40
    patchwork.remove()
    assert box.fill("fail") == ["fail"] * 40


@pytest.mark.parametrize("before", [0, 2])
def test_one_difference_ends_a_trial_for_good_and_is_never_returned(
    work: ModuleType, before: int, caplog: pytest.LogCaptureFixture
) -> None:
    patchwork = on_trial(work)
    box = work.Box()
    for value in [*range(before), "fail", "fail", *range(5)]:
        assert box.fill(value) == [value] * 40
    [patch] = patchwork.patches()
    assert patch.state == "skipped"
    assert patch.trial == "results differ: result[0] is fail in stock and wrong in fast-axolotl"
    assert caplog.text.count("please report this") == 1
    assert importlib.import_module("patchhost_ours").calls == [*range(before), "fail"]


def test_calls_that_show_nothing_do_not_count_in_a_trial(
    work: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    patchwork = on_trial(work)
    box, ours = work.Box(), importlib.import_module("patchhost_ours")
    generator = (number for number in range(3))
    for value in ["odd", "odd", generator, generator]:
        assert box.fill(value) == [value] * 40
    box.size = 0
    for value in range(5):
        assert box.fill(value) == []
    thread = threading.Thread(target=box.fill, args=("in a thread",))
    thread.start()
    thread.join()
    assert "in a thread" not in ours.calls
    box.size = 1
    for value in range(10):
        box.fill(value)
    [patch] = patchwork.patches()
    assert (patch.state, patch.calls) == ("trial", 0)
    reasons = dict(patch.fallbacks)
    assert reasons.pop("an odd value") == 2
    assert reasons.pop("on trial") == 15
    [(reason, count)] = reasons.items()
    assert count == 2
    assert "cannot be copied for a trial" in reason
    monkeypatch.setattr(patching, "_TRIAL_MOST_CALLS", 1)
    box.fill("odd")
    assert patchwork.patches()[0].trial == "too little to compare in 20 calls"


@pytest.mark.parametrize("why", ["off", "effects", "missing", "replaced"])
def test_what_may_not_be_tried_is_refused(work: ModuleType, why: str) -> None:
    item = ALIKE
    if why == "effects":
        item = Replacement(name="box", target=ALIKE.target, ours=ALIKE.ours)
    elif why == "missing":
        item = Replacement(
            name="box",
            target=ALIKE.target,
            ours=ALIKE.ours,
            relies_on=("patchhost.work:helper", "patchhost.work:gone"),
            is_pure=True,
        )
    elif why == "replaced":
        work.Box.fill = lambda self, value: "theirs"
    patchwork = Patchwork([item], {}, trial="0" if why == "off" else "")
    assert [patch.state for patch in patchwork.check()] == [
        "trial" if why == "replaced" else "skipped"
    ]
    before = work.Box.fill
    assert patchwork.apply(work) is False
    assert work.Box.fill is before
    assert states(patchwork) == {ALIKE.target: "skipped"}


class Thing:
    """An object with one attribute."""

    def __init__(self, value: Any) -> None:
        self.value = value


ONE = [1]
TABLE = pa.table({"a": [1]})


def raising(error: Exception) -> Callable[[Any], Any]:
    def function(value: Any) -> Any:
        raise error

    return function


@pytest.mark.parametrize(
    ("stock", "ours"),
    [
        (lambda v: [1, 2], lambda v: [1, 3]),
        (lambda v: [1, 2], lambda v: [1]),
        (lambda v: [1], lambda v: [True]),
        (lambda v: [1], lambda v: (1,)),
        (lambda v: [0.0], lambda v: [-0.0]),
        (lambda v: {1}, lambda v: {2}),
        (lambda v: {"a": 1, "b": 2}, lambda v: {"b": 2, "a": 1}),
        (lambda v: {"a": 1}, lambda v: defaultdict(list, a=1)),
        (lambda v: defaultdict(list, a=1), lambda v: defaultdict(int, a=1)),
        (lambda v: np.array([1]), lambda v: np.array([1], np.int32)),
        (lambda v: np.array([[1]]), lambda v: np.array([1])),
        (lambda v: np.array(["a", None]), lambda v: np.array(["b", None])),
        (lambda v: np.int64(1), lambda v: np.int64(2)),
        (lambda v: torch.tensor([1]), lambda v: torch.tensor([1], dtype=torch.int32)),
        (lambda v: torch.tensor([1.0]), lambda v: torch.tensor([1.0], requires_grad=True)),
        (lambda v: torch.tensor([0.0]), lambda v: torch.tensor([-0.0])),
        (lambda v: TABLE, lambda v: TABLE.replace_schema_metadata({"k": "v"})),
        (lambda v: Thing([1]), lambda v: Thing([2])),
        (lambda v: Thing, lambda v: dict),
        (lambda v: [ONE, ONE], lambda v: [[1], [1]]),
        (lambda v: [[1], [1]], lambda v: [ONE, ONE]),
        (lambda v: v, lambda v: list(v)),
        (lambda v: v.append(1), lambda v: None),
        (lambda v: random.random() and 1, lambda v: 1),
        (lambda v: 1, lambda v: np.random.random() and 1),
        (lambda v: int(torch.rand(1).item()), lambda v: 0),
        (raising(ValueError("no")), lambda v: 1),
        (raising(ValueError("no")), lambda v: None),
    ],
)
def test_a_trial_sees_every_difference_and_leaves_the_world_as_stock_does(
    stock: Callable[..., Any], ours: Callable[..., Any]
) -> None:
    def world(function: Callable[[Any], Any]) -> Any:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        value = [5, "text"]
        outcome: Any = None
        try:
            outcome = function(value)
        except ValueError as error:
            outcome = error
        states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        return value, repr(outcome).partition(" object at")[0], *states[:2], states[2].tolist()

    seen = []

    def both(value: Any) -> Any:
        seen.append(run_both(stock, ours, (value,), {}))
        if seen[0].error is not None:
            raise seen[0].error
        return seen[0].result

    assert world(both) == world(stock)
    [outcome] = seen
    assert outcome.difference
    assert outcome.refusal is None
    assert outcome.num_values == 0


@pytest.mark.parametrize(
    ("make", "num_values"),
    [
        (lambda v: [1, "a", None, True, float("nan")], 5),
        (lambda v: {"a": [[1, 2], [3]], "b": [b"x"]}, 4),
        (lambda v: np.full((2, 3), np.nan), 6),
        (lambda v: torch.full((2, 3), np.nan, dtype=torch.bfloat16), 6),
        (lambda v: [pa.table({"a": [1, 2]}), *map(np.int64, range(300))], None),
        (lambda v: Thing(Thing({"a": defaultdict(list, b=[1])})), None),
        (lambda v: [v[0], v[1], v, random.random(), np.random.random(), torch.rand(2)], None),
        (lambda v: v.append(v) or v, None),
        (lambda v: [], 0),
        (lambda v: {"input_ids": [], "labels": []}, 0),
        (lambda v: defaultdict(list), 0),
        (lambda v: np.array([]), 0),
        (lambda v: None, 0),
    ],
)
def test_a_trial_counts_the_values_of_equal_results(
    make: Callable[[Any], Any], num_values: int | None
) -> None:
    twin = copy.copy(make)
    outcome = run_both(make, twin, ([Thing(2), SimpleNamespace(a=1)],), {})
    assert (outcome.difference, outcome.refusal, outcome.error) == ("", None, None)
    assert outcome.num_values == num_values or (num_values is None and outcome.num_values)


def test_ours_starts_a_trial_where_stock_did_and_is_not_heard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.enable_padding(length=2)

    def function(tokenizer: Any, *, more: list[int]) -> list[int]:
        logging.getLogger("x").warning("said")
        more.append(tokenizer.padding["length"])
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_length=len(more))
        return more

    more: list[int] = []
    for ours in (function, raising(NotAsked())):
        tokenizer.enable_padding(length=2)
        outcome = run_both(function, ours, (tokenizer,), {"more": more})
        assert outcome.difference == ""
        assert tokenizer.padding is None
    assert more == [2, 2]
    assert tokenizer.truncation["max_length"] == 2
    assert isinstance(outcome.refusal, NotAsked | TypeError)
    assert len(caplog.records) == 2


def test_a_ledger_reads_what_forked_workers_wrote_and_tells_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ledger = Ledger()
    folder = Path(ledger.share("inherited by nobody"))
    ledger.add("calls", "a")
    assert not folder.exists()
    for number in range(3):
        worker = os.fork()
        if worker == 0:
            try:
                for _ in range(number + 1):
                    ledger.add("calls", "a")
                    ledger.add("fallbacks", "b", "a\nreason", 2)
                grandchild = os.fork()
                if grandchild == 0:
                    ledger.add("calls", "a", count=100)
                    os._exit(0)
                os.waitpid(grandchild, 0)
            finally:
                os._exit(0)
        os.waitpid(worker, 0)
    assert ledger.read() == {("calls", "a", ""): 307, ("fallbacks", "b", "a reason"): 12}
    ledger.add("fallbacks", "b", "a reason")
    assert caplog.records == []
    # A line that is being written is not read.
    file = next(folder.glob("*.counts"))
    file.write_bytes(file.read_bytes().rstrip(b"\0")[:-1])
    assert sum(ledger.read().values()) < 320
    ledger.clear()
    assert not folder.exists()
    assert ledger.read() == {}


def test_a_ledger_that_cannot_write_counts_on(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.share(None)
    ledger.is_worker, ledger._folder = True, tmp_path / "no" / "such"
    ledger.add("fallbacks", "a", "reason")
    ledger.add("calls", "a")
    assert sum(ledger.read().values()) == 2
