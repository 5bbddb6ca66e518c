"""The form of a saved state, independent of the framework, and its checksums.

A state is nested dicts and lists of numbers, text and arrays of any framework; :func:`check` knows every entry. It is
sealed by a CRC-32 for each value, and one for all other entries. This costs a read of the values when they are saved
and again when they are loaded (and on a GPU a copy of each to the host).
"""

import json
import reprlib
import sys
import zlib
from collections.abc import Callable, Container, Iterator
from dataclasses import fields
from typing import Any, TypeGuard

import numpy as np

from grace.core.state import Value, Values
from grace.core.variable import unwrap_names
from grace.errors import ConfigError
from grace.kernels import kernels_of
from grace.session.settings import Settings

VERSION = 2
"""Version of the format that is saved and read."""
LARGEST = sys.float_info.max
SCALES = 2.0**-126, 2.0**127
"""Bounds of a loss scale, within which it and its reciprocal are normal float32 numbers."""
_words = reprlib.Repr()
_words.maxstring = 200
SavedState = dict[str, Any]
"""State that is saved, of the form :data:`STATE`."""
ValuesByKind = dict[str, Values]
"""Values of components by kind ("compressor", "memory", ...), and by the shard's name."""
Form = Callable[[object, str], None]
"""Function that raises ConfigError if a value, whose location in the state is given, has another form."""


def damage_error(why: str) -> ConfigError:
    """Return an error about the whole state, which the caller raises."""
    return ConfigError(f"the checkpoint's 'grace' entry is damaged: {why}")


def entry_error(where: str, should: str, value: object) -> ConfigError:
    """Return an error about one entry, which the caller raises."""
    return damage_error(f"{where or 'it'} should be {should}, and is {short(value)}")


def short(value: object) -> str:
    """Return a number or text in bounded length; for any other value the name of its type."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"about 2^{value.bit_length()}"
    written = value is None or isinstance(value, (int, float, str))
    return _words.repr(value) if written else f"a {type(value).__name__}"


def _join_path(where: str, key: str) -> str:
    return f"{where}[{short(key)}]" if where else short(key)


def _instance_of(kind: type | tuple[type, ...], should: str) -> Form:
    def form(value: object, where: str) -> None:
        if not isinstance(value, kind):
            raise entry_error(where, should, value)

    return form


def _integer(low: int = 0, high: int = 2**63) -> Form:
    def form(value: object, where: str) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value < high:
            raise entry_error(where, f"a whole number of at least {low}" if low >= 0 else "a whole number", value)

    return form


def _scale(value: object, where: str) -> None:
    if not _is_number(value) or not SCALES[0] <= value <= SCALES[1]:
        raise entry_error(where, "a number above 0, of float32's", value)


def _anything(value: object, where: str) -> None:
    """Accept a value of any form, which is checked elsewhere."""


def _or_none(form: Form) -> Form:
    return lambda value, where: None if value is None else form(value, where)


def _listed(form: Form) -> Form:
    def check(value: object, where: str) -> None:
        if not isinstance(value, (list, tuple)):
            raise entry_error(where, "a list", value)
        for i, item in enumerate(value):
            form(item, f"{where}[{i}]")

    return check


def _table(form: Form, keys: Callable[[str], bool] = lambda key: True) -> Form:
    def check(value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise entry_error(where, "a dict", value)
        for key, item in value.items():
            if not isinstance(key, str) or not keys(key):
                raise damage_error(f"{where or 'it'} holds {short(key)}, which is unknown")
            form(item, _join_path(where, key))

    return check


def _record(needed: dict[str, Form], more: dict[str, Form]) -> Form:
    forms = {**needed, **more}

    def check(value: object, where: str) -> None:
        _table(_anything, forms.__contains__)(value, where)
        assert isinstance(value, dict)
        for key, form in forms.items():
            if key in value:
                form(value[key], _join_path(where, key))
            elif key in needed:
                raise damage_error(f"{_join_path(where, key)} is missing")

    return check


def _is_number(value: object) -> TypeGuard[float]:
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST
    return whole or isinstance(value, float)


def _is_array(value: object) -> bool:
    """Return True if a value is a dense array of numbers, or of truth values, in memory."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return False
    if getattr(value, "is_meta", False) or str(getattr(value, "layout", "torch.strided")) != "torch.strided":
        return False
    try:
        return kernels_of(value).dtype(value).startswith(("float", "bfloat", "int", "uint8", "bool"))
    # Of no framework that is known, or of a dtype that no kernel has.
    except (TypeError, KeyError, AttributeError):
        return False


def _array(value: object, where: str) -> None:
    if not _is_array(value):
        raise entry_error(where, "a tensor of numbers", value)


def _leaf(value: object, where: str) -> None:
    if not _is_number(value) and not _is_array(value):
        raise entry_error(where, "a number or a tensor of numbers", value)


def _value(value: object, where: str) -> None:
    (_table(_leaf) if isinstance(value, dict) else _leaf)(value, where)


def _mean(value: object, where: str) -> None:
    (_record({"values": _array, "rows": _array}, {}) if isinstance(value, dict) else _array)(value, where)


_seed = _integer(-(2**1023), 2**1023)
_text, _yes_or_no = _instance_of(str, "text"), _instance_of(bool, "True or False")


def _all_or_some(value: object, where: str) -> None:
    (_listed(_text) if isinstance(value, (list, tuple)) else _yes_or_no)(value, where)


_state = _table(_table(_value))
_cut = {
    "axis": _or_none(_integer()),
    "shape": _listed(_integer()),
    "sizes": _listed(_integer()),
    "methods": _listed(_text),
    "memories": _listed(_text),
    "destinations": _listed(_or_none(_integer())),
}
_needed = {
    "version": _integer(),
    "id": _text,
    "components": _text,
    "step": _integer(),
    "seed": _seed,
    "loss_scale": _scale,
    "rank": _integer(),
    "size": _integer(1),
    "state": _state,
    "pieces": _table(_record(_cut, {})),
    "hierarchical": _all_or_some,
    "shared": _table(_listed(_text)),
    "pending": _listed(_table(_mean)),
    "holds": _listed(_text),
    "checksums": _listed(_integer()),
    "checksum": _integer(),
}
STATE = _record(_needed, {"ranks": _listed(_state), "plan": _text, "part": _text})
"""Form of a state."""
_spec = _or_none(_instance_of((str, dict), "a method's spec"))
_setting_forms: dict[object, Form] = {
    bool: _yes_or_no,
    int: _integer(0),
    int | None: _or_none(_integer(1)),
}
"""Forms of settings by their types. A setting of another type needs its form here."""
_options = {
    **{one.name: _setting_forms[one.type] for one in fields(Settings) if one.name != "reduction"},
    **dict.fromkeys(("compressor", "memory", "communicator", "strategy", "resources"), _spec),
    "op": _text,
    "gradient_predivide_factor": _scale,
    "seed": _seed,
    "outer": _spec,
    "period": _or_none(_integer(1)),
}


def _tensor(value: object, where: str) -> None:
    if not isinstance(value, (list, tuple)):
        raise entry_error(where, "a list", value)
    if len(value) != 3:
        raise entry_error(where, "a name, a shape and a type", str(list(value)))
    _text(value[0], f"{where}[0]")
    _listed(_integer())(value[1], f"{where}[1]")
    if value[2] not in ("float16", "bfloat16", "float32", "float64"):
        raise entry_error(f"{where}[2]", "a type of floats", value[2])


TENSORS = _listed(_listed(_tensor))
"""Form of the tensors that a communicator exchanged by hand: lists of tensors that were exchanged together."""
MODEL = _record({"options": _record({}, _options), "state": _anything}, {"slots": _listed(_listed(_array))})
"""Form of a model's file: the choices, a state, which is checked when it is loaded, and for each rank the slots of its
optimizer, if ranks train alone between outer rounds."""
BESIDE_WEIGHTS = _record({"state": _anything}, {})
"""Form of the part of a file of weights: a state, which is checked when it is loaded."""


def check(saved: object) -> None:
    """Refuse a state that Grace cannot have saved.

    Raises:
        ConfigError: the message names the entry.
    """
    if not isinstance(saved, dict):
        raise entry_error("", "a dict", saved)
    version = saved.get("version")
    # Before the form, which another version may have changed.
    if not _is_number(version) or version != VERSION:
        raise ConfigError(f"the checkpoint's format is version {short(version)}, this Grace reads {VERSION}")
    STATE(saved, "")
    if saved["rank"] >= saved["size"]:
        raise entry_error("'rank'", f"below its size, {saved['size']}", saved["rank"])
    if "ranks" in saved and len(saved["ranks"]) != saved["size"]:
        raise damage_error(f"{saved['size']} ranks saved it, and it has the state of {len(saved['ranks'])}")
    for name, cut in saved["pieces"].items():
        _check_cut(cut, _join_path("'pieces'", name))
    if len(saved["holds"]) != len(saved["checksums"]):
        raise damage_error("'checksums' does not have one checksum for each value")


def check_facts(saved: SavedState) -> None:
    """Refuse a state, which :func:`check` accepted, if entries other than its values differ from the saved ones."""
    if saved["checksum"] != _checksum_of_facts(saved):
        raise damage_error("its steps, ranks and variables are not what was saved (its checksum differs)")


def _check_cut(cut: dict[str, Any], where: str) -> None:
    axis, shape, sizes = cut["axis"], cut["shape"], cut["sizes"]
    if axis is not None:
        if axis >= len(shape):
            raise entry_error(f"{where}['axis']", f"one of {len(shape)} dimensions", axis)
        if not sizes or sum(sizes) != shape[axis]:
            raise entry_error(f"{where}['sizes']", "the parts of its dimension", str(list(sizes)))
    for key in ("sizes", "methods", "memories", "destinations"):
        if len(cut[key]) != (len(sizes) if axis is not None else 1):
            raise entry_error(f"{where}[{key!r}]", "one for each part", str(list(cut[key])))


# -- the values ----------------------------------------------------------------------------------------------


def items(saved: SavedState) -> Iterator[tuple[str, Value]]:
    """Yield the values with a description of each."""
    states = [("", saved["state"]), *((f" of rank {i}", one) for i, one in enumerate(saved.get("ranks", ())))]
    for whose, state in states:
        for kind, values in state.items():
            yield from ((f"the {kind} of {name!r}{whose}", value) for name, value in values.items())
    for i, step in enumerate(saved["pending"]):
        yield from ((f"mean {i} of {name!r}", value) for name, value in step.items())


def describe_unsaveable(value: Value) -> str:
    """Return what it is in a component's value that a checkpoint would be refused for; empty if it can be loaded.

    >>> describe_unsaveable({"step": 1, "mask": np.ones(2, bool)}), describe_unsaveable(None)
    ('', 'None')
    """
    for key, item in value.items() if isinstance(value, dict) else [("", value)]:
        if not isinstance(key, str):
            return f"the key {short(key)}"
        if not _is_number(item) and not _is_array(item):
            kind = ", ".join(str(getattr(item, name)) for name in ("dtype", "layout") if hasattr(item, name))
            return f"{short(item)} ({kind})" if kind else short(item)
        if not _finite(item):
            return "a number that is not finite"
    return ""


def seal(saved: SavedState) -> SavedState:
    """Return the state with a list of its values, and checksums."""
    held = dict(items(saved))
    saved = {**saved, "holds": list(held), "checksums": [checksum(value) for value in held.values()]}
    return {**saved, "checksum": _checksum_of_facts(saved)}


def damaged_values(saved: SavedState, partial: str = "") -> dict[str, str]:
    """Return the values that are missing, damaged or not finite, each with the reason, of a state that :func:`check`
    accepted.

    Args:
        saved: the state.
        partial: sentence for messages on how values may be missing.
    """
    held = dict(items(saved))
    why = {}
    for what, crc in zip(saved["holds"], saved["checksums"], strict=True):
        if what not in held:
            why[what] = f"the checkpoint should hold {what}, and does not. {partial}"
        elif crc != checksum(held[what]):
            why[what] = f"the checkpoint is damaged: {what} is not what was saved (its checksum differs)"
    known = set(saved["holds"])
    for what, value in held.items():
        # A mean that is still to be applied may be an overflow, which the step that applies it handles. A buffer may be
        # a mask of infinities.
        exempt = what.startswith(("mean ", "the shared_buffer ", "the local_buffer "))
        if what not in why and not exempt and not _finite(value):
            why[what] = f"the checkpoint holds {what}, which is not finite"
        elif what not in known:
            why[what] = f"the checkpoint holds {what}, which was not saved with it"
    return why


def without_values(saved: SavedState, left_out: Container[str]) -> SavedState:
    """Return the state without these values.

    Args:
        saved: the state.
        left_out: descriptions of the values; see :func:`items`.
    """

    def remaining(state: ValuesByKind, whose: str) -> ValuesByKind:
        return {
            kind: {n: v for n, v in values.items() if f"the {kind} of {n!r}{whose}" not in left_out}
            for kind, values in state.items()
        }

    new = {**saved, "state": remaining(saved["state"], "")}
    if "ranks" in saved:
        new["ranks"] = [remaining(one, f" of rank {i}") for i, one in enumerate(saved["ranks"])]
    steps = enumerate(saved["pending"])
    new["pending"] = [{n: v for n, v in step.items() if f"mean {i} of {n!r}" not in left_out} for i, step in steps]
    return new


def rename_variables(saved: SavedState, now: list[str]) -> SavedState:
    """Return a state under this run's names, if names differ only by the parts that torch's wrappers add."""
    shards = saved["pieces"]
    before = list(shards)
    ours = dict(zip(unwrap_names(now), now, strict=True))
    unwrapped = zip(before, unwrap_names(before), strict=True)
    new = {old: old if old in now else ours.get(name, old) for old, name in unwrapped}
    # Two names would become one: leave all as they are, as unwrap_names() does.
    if all(old == name for old, name in new.items()) or len(set(new.values())) != len(new):
        return saved
    names = {f"{old}/part_{i}": f"{new[old]}/part_{i}" for old in shards for i in range(len(shards[old]["sizes"]))}
    names = {**new, **names}

    def rename_keys(values: Values) -> Values:
        return {names.get(name, name): value for name, value in values.items()}

    new_state = {**saved, "pieces": rename_keys(shards)}
    new_state["pending"] = [rename_keys(step) for step in saved["pending"]]
    new_state["state"] = {kind: rename_keys(values) for kind, values in saved["state"].items()}
    new_state["shared"] = {kind: list(rename_keys(dict.fromkeys(some))) for kind, some in saved["shared"].items()}
    led = saved["hierarchical"]
    if isinstance(led, list):
        new_state["hierarchical"] = list(rename_keys(dict.fromkeys(led)))
    if "ranks" in saved:
        ranks = saved["ranks"]
        new_state["ranks"] = [{kind: rename_keys(values) for kind, values in state.items()} for state in ranks]
    return new_state


def _finite(value: Value) -> bool:
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    return abs(value) < SCALES[1] if _is_number(value) else bool(kernels_of(value).all_finite(value))


def checksum(value: Value, crc: int = 0) -> int:
    """Return the CRC-32 of a number, a tensor (its type, shape and bytes), or a dict of those."""
    if isinstance(value, dict):
        for key in sorted(value):
            crc = checksum(value[key], zlib.crc32(key.encode("utf-8", "surrogatepass"), crc))
        return crc
    if _is_number(value):
        return zlib.crc32(repr(value).encode(), crc)
    # The bytes of a torch tensor that requires grad cannot be read.
    value = getattr(value, "detach", lambda: value)()
    k = kernels_of(value)
    raw = k.to_bytes(value)
    host: Any = np.asarray(raw.cpu() if hasattr(raw, "cpu") else raw)
    return zlib.crc32(host, zlib.crc32(f"{k.dtype(value)}{list(map(int, value.shape))}".encode(), crc))


def _checksum_of_facts(saved: SavedState) -> int:
    """Return the CRC-32 of all entries except the values, whose checksums are among these entries."""
    facts = {key: value for key, value in saved.items() if key not in ("state", "ranks", "pending", "checksum")}
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())
