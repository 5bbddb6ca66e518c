"""Nested dicts and lists that are damaged: every place of them, and strategies that draw from these; and a run whose
state has something of every kind."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st

import grace
from grace.session import state_schema

WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 2**70, 10**400, -5.5, 1e300, math.nan, math.inf, "", "w", "topk", b"x"),
    *([], [0], [[[]]], ["w"], {}, {"w": 1}, {"w": {"w": {"w": 0}}}, {1: 2}, (), {3}, object, np.float32(1)),
    *(np.zeros(()), np.zeros((1,), np.float32), np.array(["w"]), np.array([None]), np.zeros(2, np.complex64)),
)
"""Values that most places must not hold."""
Path = tuple[Any, ...]


def places(value: Any, at: Path = ()) -> Iterator[Path]:
    """The paths to everything in nested dicts and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in items:
        yield (*at, key)
        yield from places(item, (*at, key))


def at(value: Any, path: Path) -> Any:
    """Return the value at a path."""
    for key in path:
        value = value[key]
    return value


def changed(value: Any, path: Path, change: Callable[[Any, Any], None]) -> Any:
    """A copy of the containers, and ``change(container, key)`` called where the path leads."""
    if not path:
        return value
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1:
        change(copy, path[0])
    else:
        copy[path[0]] = changed(copy[path[0]], path[1:], change)
    return copy


def bent(array: Any, how: str) -> Any:
    """An array of another shape or type, or with other numbers; of the same framework."""
    make = type(array) is np.ndarray and (lambda x: x)
    if not make:
        import torch

        make = torch.from_numpy
    x = np.array(np.asarray(array), order="C")
    if how == "bits" and x.size:
        x.reshape(-1).view(np.uint8)[-1] ^= 0x40
    elif how in ("nan", "inf") and x.size and x.dtype.kind == "f":
        x.flat[-1] = float(how)
    elif how == "one":
        x = np.ones(1, x.dtype)
    elif how == "row":
        x = x[:1]
    elif how == "more":
        x = x[None]
    elif how == "flat":
        x = x.reshape(-1)
    elif how == "turned":
        x = np.ascontiguousarray(x.T)
    elif how == "empty":
        x = x[:0] if x.ndim else x.reshape(1)[:0]
    else:
        x = x.astype({"double": np.float64, "half": np.float16, "whole": np.int64}.get(how, np.bool_))
    return make(x)


BENT = ("bits", "nan", "inf", "one", "row", "more", "flat", "turned", "empty", "double", "half", "whole", "bool")


def each(value: Any) -> Iterator[Any]:
    """Every place with every wrong thing in it, without it, and with something unknown beside it."""
    for path in places(value):
        for wrong in WRONG:
            yield changed(value, path, lambda box, key, wrong=wrong: box.__setitem__(key, wrong))
        yield changed(value, path, lambda box, key: box.__delitem__(key))
        if isinstance(at(value, path), dict):
            for key in ("unknown", 7, ""):
                yield changed(value, (*path, key), lambda box, key: box.__setitem__(key, 0))
        if hasattr(at(value, path), "shape"):
            for how in BENT:
                yield changed(value, path, lambda box, key, how=how: box.__setitem__(key, bent(box[key], how)))


@st.composite
def mutated(draw: st.DrawFn, value: Any) -> Any:
    """The value, damaged in one to three places."""
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(value)) or [()]))
        if not path:
            return draw(st.sampled_from(WRONG))
        there = at(value, path)
        ways = ["wrong", "gone", "other's"] + ["added"] * isinstance(there, dict) + ["bent"] * hasattr(there, "shape")
        way = draw(st.sampled_from(ways))
        if way == "wrong":
            new = draw(st.one_of(st.sampled_from(WRONG), st.integers(), st.floats(), st.text(max_size=8)))
        elif way == "other's":
            new = at(value, draw(st.sampled_from(list(places(value)))))
        elif way == "bent":
            new = bent(there, draw(st.sampled_from(BENT)))
        elif way == "added":
            path, new = (*path, draw(st.text(max_size=3))), draw(st.sampled_from(WRONG))
        if way == "gone":
            value = changed(value, path, lambda box, key: box.__delitem__(key))
        else:
            value = changed(value, path, lambda box, key, new=new: box.__setitem__(key, new))
    return value


def resealed(saved: Any) -> Any:
    """Return a state with checksums that are right, where it has a form that has any."""
    with contextlib.suppress(Exception):
        return state_schema.seal(saved)
    return saved


def asked(saved: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """The state that a checkpoint asks for in a run of one rank, in its units; None where it is a mean over ranks."""
    found = {}
    shared, ranks = saved.get("shared", {}), saved.get("ranks", ())
    for kind, values in saved["state"].items():
        found.update({(kind, n): v for n, v in values.items() if not ranks or n in shared.get(kind, ())})
    for own in ranks:
        for kind, values in own.items():
            for name, value in values.items():
                found.setdefault((kind, name), value if len(ranks) == 1 else None)
    return found


def loads_or_changes_nothing(
    load: Callable[[Any], None], saved: Any, bits: Callable[[], Any], state: Callable[[], Any]
):
    """Load a damaged state: it is refused by name, or becomes what the run remembers.

    Args:
        load: it may raise.
        bits: of everything that loading changes.
        state: what the run remembers, by kind and name.
    """
    before, refused = bits(), None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            load(saved)
        except grace.GraceError as error:
            refused = str(error)
    if refused is not None:
        assert bits() == before, f"changed something, and was refused: {refused}"
        assert len(refused) < 1500, refused
        return False
    wanted, now = asked(saved), state()
    found = {(kind, name): value for kind, values in now.items() for name, value in values.items()}
    assert found.keys() <= wanted.keys()
    assert said or found.keys() in (wanted.keys(), set()), (found.keys(), wanted.keys())
    for key, value in found.items():
        leaves, others = (value, wanted[key]) if isinstance(value, dict) else ({"": value}, {"": wanted[key]})
        for name, leaf in leaves.items():
            here = np.asarray(leaf, np.float64)
            assert np.isfinite(here).all(), key
            if wanted[key] is None:
                continue
            there = np.asarray(others[name], np.float64)
            units = (1, np.float32(saved["loss_scale"]))  # what is no gradient's has none
            assert any(np.allclose(here, there / unit, 1e-6, 0) for unit in units), key
    return True
