"""What a saved state looks like, in no framework's terms, and whether it still is what was saved.

A state is nested dicts and lists of numbers, text and arrays, of whatever framework; :func:`check` knows every entry of
it. It is sealed by a CRC-32 for each value, and one for all the rest: that costs a read of the values when they are
saved and again when they are loaded (and on a GPU a copy of each to the host).
"""

import json
import reprlib
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from grace.core.variable import unwrap_names
from grace.errors import ConfigError
from grace.kernels import kernels_of

VERSION = 2
"""Of what is saved; 1 had no id and no checksums."""
READ = (1, 2)
LARGEST = sys.float_info.max
SCALES = 2.0**-126, 2.0**127
"""Between which a loss scale is a normal float32, and so is its reciprocal."""
_words = reprlib.Repr()
_words.maxstring = 200
Form = Callable[[Any, str], None]
"""Raises if a value, whose place is given, is not of the form."""


def damaged(why: str) -> ConfigError:
    """An error about the state as a whole, to be raised by the caller."""
    return ConfigError(f"the checkpoint's 'grace' entry is damaged: {why}")


def refuse(where: str, should: str, value: Any) -> ConfigError:
    """An error about one entry, to be raised by the caller."""
    return damaged(f"{where or 'it'} should be {should}, and is {short(value)}")


def short(value: Any) -> str:
    """A number or text as it is written, of bounded length; of anything else what it is."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"about 2^{value.bit_length()}"
    written = value is None or isinstance(value, (int, float, str))
    return _words.repr(value) if written else f"a {type(value).__name__}"


def _at(where: str, key: str) -> str:
    return f"{where}[{short(key)}]" if where else short(key)


def _is(kind: Any, should: str) -> Form:
    def form(value: Any, where: str) -> None:
        if not isinstance(value, kind):
            raise refuse(where, should, value)

    return form


def _whole(low: int = 0, high: int = 2**63) -> Form:
    def form(value: Any, where: str) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value < high:
            raise refuse(where, f"a whole number of at least {low}" if low >= 0 else "a whole number", value)

    return form


def _scale(value: Any, where: str) -> None:
    if not _is_number(value) or not SCALES[0] <= value <= SCALES[1]:
        raise refuse(where, "a number above 0, of float32's", value)


def _or_none(form: Form) -> Form:
    return lambda value, where: None if value is None else form(value, where)


def _listed(form: Form) -> Form:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, (list, tuple)):
            raise refuse(where, "a list", value)
        for i, item in enumerate(value):
            form(item, f"{where}[{i}]")

    return check


def _table(form: Form, keys: Callable[[str], bool] = lambda key: True) -> Form:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise refuse(where, "a dict", value)
        for key, item in value.items():
            if not isinstance(key, str) or not keys(key):
                raise damaged(f"{where or 'it'} holds {short(key)}, which is unknown")
            form(item, _at(where, key))

    return check


def _record(needed: dict[str, Form], more: dict[str, Form]) -> Form:
    forms = {**needed, **more}

    def check(value: Any, where: str) -> None:
        _table(lambda item, where: None, forms.__contains__)(value, where)
        for key, form in forms.items():
            if key in value:
                form(value[key], _at(where, key))
            elif key in needed:
                raise damaged(f"{_at(where, key)} is missing")

    return check


def _is_number(value: Any) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST
    return whole or isinstance(value, float)


def _is_array(value: Any) -> bool:
    """Whether this is a plain array of numbers, in memory."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return False
    if getattr(value, "is_meta", False) or str(getattr(value, "layout", "torch.strided")) != "torch.strided":
        return False
    try:
        return kernels_of(value).dtype(value).startswith(("float", "bfloat", "int"))
    except (TypeError, KeyError, AttributeError):
        return False


def _array(value: Any, where: str) -> None:
    if not _is_array(value):
        raise refuse(where, "a tensor of numbers", value)


def _leaf(value: Any, where: str) -> None:
    if not _is_number(value) and not _is_array(value):
        raise refuse(where, "a number or a tensor of numbers", value)


def _value(value: Any, where: str) -> None:
    (_table(_leaf) if isinstance(value, dict) else _leaf)(value, where)


def _mean(value: Any, where: str) -> None:
    (_record({"values": _array, "rows": _array}, {}) if isinstance(value, dict) else _array)(value, where)


_seed = _whole(-(2**1023), 2**1023)
_text, _yes_or_no = _is(str, "text"), _is(bool, "True or False")


def _all_or_some(value: Any, where: str) -> None:
    (_listed(_text) if isinstance(value, (list, tuple)) else _yes_or_no)(value, where)


_state = _table(_table(_value))
_axis = {"axis": _or_none(_whole())}
_cut = {
    "shape": _listed(_whole()),
    "sizes": _listed(_whole()),
    "methods": _listed(_text),
    "memories": _listed(_text),
    "destinations": _listed(_or_none(_whole())),
}
_always = {
    "version": _whole(),
    "components": _text,
    "step": _whole(),
    "seed": _seed,
    "loss_scale": _scale,
    "rank": _whole(),
    "size": _whole(1),
    "state": _state,
}
_since_1 = {
    "hierarchical": _all_or_some,
    "shared": _table(_listed(_text)),
    "pending": _listed(_table(_mean)),
    "holds": _listed(_text),
}
_seal: dict[str, Form] = {"id": _text, "checksums": _listed(_whole()), "checksum": _whole()}
_ranks = {"ranks": _listed(_state), "plan": _text}
FORMS = {
    1: _record(_always, {**_since_1, **_ranks, "pieces": _table(_record(_axis, _cut))}),
    2: _record({**_always, **_since_1, **_seal, "pieces": _table(_record({**_axis, **_cut}, {}))}, _ranks),
}
"""By the version of the format."""
_spec = _or_none(_is((str, dict), "a method's spec"))
_options = {
    **dict.fromkeys(("compressor", "memory", "communicator", "strategy", "resources"), _spec),
    **dict.fromkeys(("sparse_as_dense", "broadcast", "hierarchical"), _yes_or_no),
    "op": _text,
    "gradient_predivide_factor": _scale,
    "seed": _seed,
    **dict.fromkeys(("bucket_bytes", "group_bytes"), _or_none(_whole(1))),
    "compress_after": _whole(0),
}


def _tensor(value: Any, where: str) -> None:
    _listed(lambda value, where: None)(value, where)
    if len(value) != 3:
        raise refuse(where, "a name, a shape and a type", str(list(value)))
    _text(value[0], f"{where}[0]")
    _listed(_whole())(value[1], f"{where}[1]")
    if value[2] not in ("float16", "bfloat16", "float32", "float64"):
        raise refuse(f"{where}[2]", "a type of floats", value[2])


TENSORS = _listed(_listed(_tensor))
"""Of the tensors that a communicator exchanged by hand: lists of those that came together."""
MODEL = _record({"options": _record({}, _options), "state": lambda value, where: value}, {})
"""Of what a model's file holds: the choices, and a state that is checked where it is loaded."""


def check(saved: Any) -> None:
    """Refuse what no Grace has saved.

    Raises:
        ConfigError: the message names the entry.
    """
    if not isinstance(saved, dict):
        raise refuse("", "a dict", saved)
    version = saved.get("version")
    if not _is_number(version) or version not in READ:
        raise ConfigError(
            f"the checkpoint's format is version {short(version)}, this Grace reads {' and '.join(map(str, READ))}"
        )
    FORMS[version](saved, "")
    if saved["rank"] >= saved["size"]:
        raise refuse("'rank'", f"below its size, {saved['size']}", saved["rank"])
    if "ranks" in saved and len(saved["ranks"]) != saved["size"]:
        raise damaged(f"it is of {saved['size']} ranks and holds {len(saved['ranks'])}")
    for name, cut in saved.get("pieces", {}).items():
        _check_cut(cut, _at("'pieces'", name))
    if version > 1 and len(saved["holds"]) != len(saved["checksums"]):
        raise damaged("'checksums' should have one for each value that it holds, and has not")


def check_facts(saved: dict[str, Any]) -> None:
    """Refuse a state, which was checked, if anything but its values is not what was saved."""
    if saved["version"] > 1 and saved["checksum"] != _of_facts(saved):
        raise damaged("what it says of steps, ranks and variables is not what was saved (its checksum differs)")


def _check_cut(cut: dict[str, Any], where: str) -> None:
    axis, shape, sizes = cut["axis"], cut.get("shape"), cut.get("sizes", ())
    if axis is not None:
        if shape is not None and axis >= len(shape):
            raise refuse(f"{where}['axis']", f"one of {len(shape)} dimensions", axis)
        if not sizes or (shape is not None and sum(sizes) != shape[axis]):
            raise refuse(f"{where}['sizes']", "the parts of its dimension", str(list(sizes)))
    for key in ("sizes", "methods", "memories", "destinations"):
        if key in cut and len(cut[key]) != (len(sizes) if axis is not None else 1):
            raise refuse(f"{where}[{key!r}]", "one for each part", str(list(cut[key])))


# -- the values ----------------------------------------------------------------------------------------------


def items(saved: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values, with what each is, in words."""
    states = [("", saved["state"]), *((f" of rank {i}", one) for i, one in enumerate(saved.get("ranks", ())))]
    for whose, state in states:
        for kind, values in state.items():
            yield from ((f"the {kind} of {name!r}{whose}", value) for name, value in values.items())
    for i, step in enumerate(saved.get("pending", ())):
        yield from ((f"mean {i} of {name!r}", value) for name, value in step.items())


def seal(saved: dict[str, Any]) -> dict[str, Any]:
    """The same with a list of what it holds, and checksums."""
    held = dict(items(saved))
    saved = {**saved, "holds": list(held), "checksums": [checksum(value) for value in held.values()]}
    return {**saved, "checksum": _of_facts(saved)}


def spoilt(saved: dict[str, Any], partial: str = "") -> dict[str, str]:
    """Values that are missing, damaged or not finite, with why they cannot be loaded; of a state that was checked.
    ``partial`` says how values may be missing."""
    held, why, listed = dict(items(saved)), {}, saved.get("holds", ())
    for what, crc in zip(listed, saved.get("checksums") or [None] * len(listed), strict=True):
        if what not in held:
            why[what] = f"the checkpoint should hold {what}, and does not. {partial}"
        elif crc is not None and crc != checksum(held[what]):
            why[what] = f"the checkpoint is damaged: {what} is not what was saved (its checksum differs)"
    known = set(saved.get("holds", held))
    for what, value in held.items():
        if what not in why and not what.startswith("mean ") and not _finite(value):  # an overflow may be on its way
            why[what] = f"the checkpoint holds {what}, which is not finite"
        elif what not in known:
            why[what] = f"the checkpoint holds {what}, which was not saved with it"
    return why


def without(saved: dict[str, Any], left_out: Any) -> dict[str, Any]:
    """The same without these values."""

    def rest(state: dict[str, Any], whose: str) -> dict[str, Any]:
        return {
            kind: {n: v for n, v in values.items() if f"the {kind} of {n!r}{whose}" not in left_out}
            for kind, values in state.items()
        }

    new = {**saved, "state": rest(saved["state"], "")}
    if "ranks" in saved:
        new["ranks"] = [rest(one, f" of rank {i}") for i, one in enumerate(saved["ranks"])]
    steps = enumerate(saved.get("pending", ()))
    new["pending"] = [{n: v for n, v in step.items() if f"mean {i} of {n!r}" not in left_out} for i, step in steps]
    return new


def renamed(saved: dict[str, Any], now: list[str]) -> dict[str, Any]:
    """Return a state under this run's names, where they differ only by what wrappers put into them."""
    shards = saved.get("pieces") or {}
    before = list(shards) or list(dict.fromkeys(name for values in saved["state"].values() for name in values))
    ours = dict(zip(unwrap_names(now), now, strict=True))
    unwrapped = zip(before, unwrap_names(before), strict=True)
    new = {old: old if old in now else ours.get(name, old) for old, name in unwrapped}
    if all(old == name for old, name in new.items()) or len(set(new.values())) != len(new):
        return saved
    names = {f"{old}/part_{i}": f"{new[old]}/part_{i}" for old in shards for i in range(len(shards[old]["sizes"]))}
    called: Callable[[dict[str, Any]], dict[str, Any]] = lambda values: {  # noqa: E731
        {**new, **names}.get(name, name): value for name, value in values.items()
    }
    renamed = {**saved, "pieces": called(shards), "pending": [called(step) for step in saved.get("pending", ())]}
    for key in ("state", "shared"):
        if key in saved:
            renamed[key] = {
                kind: called(values) if isinstance(values, dict) else list(called(dict.fromkeys(values)))
                for kind, values in saved[key].items()
            }
    if isinstance(some := saved.get("hierarchical"), list):
        renamed["hierarchical"] = list(called(dict.fromkeys(some)))
    if "ranks" in saved:
        renamed["ranks"] = [{kind: called(values) for kind, values in one.items()} for one in saved["ranks"]]
    return renamed


def _finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    return abs(value) < SCALES[1] if _is_number(value) else bool(kernels_of(value).all_finite(value))


def checksum(value: Any, crc: int = 0) -> int:
    """CRC-32 of a number, a tensor (its type, shape and bytes), or a dict of those."""
    if isinstance(value, dict):
        for key in sorted(value):
            crc = checksum(value[key], zlib.crc32(key.encode("utf-8", "surrogatepass"), crc))
        return crc
    if _is_number(value):
        return zlib.crc32(repr(value).encode(), crc)
    value = getattr(value, "detach", lambda: value)()
    k = kernels_of(value)
    raw = k.to_bytes(value)
    host: Any = np.asarray(raw.cpu() if hasattr(raw, "cpu") else raw)
    return zlib.crc32(host, zlib.crc32(f"{k.dtype(value)}{list(map(int, value.shape))}".encode(), crc))


def _of_facts(saved: dict[str, Any]) -> int:
    """Of all but the values, which have theirs among it."""
    facts = {key: value for key, value in saved.items() if key not in ("state", "ranks", "pending", "checksum")}
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())
