"""Memories under another strategy: joined to whole variables, and cut as the new parts are.

A memory is carried over if it is the same one (residual, say) on both sides and keeps tensors of the gradient's shape:
then the sum over parts is what it was. What a compressor remembers (PowerSGD's factors, signum's momentum) is carried
over where neither the cut nor the method of a variable changed, and starts anew elsewhere. The memory of a
destination's answers follows the destination.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

from grace.errors import ConfigError
from grace.kernels import kernels_of

Cut = dict[str, Any]
Cuts = dict[str, Cut]
RESET = "or call load_state_dict(state, memory='reset') to start with empty memories"


def recut(saved: dict[str, Any], now: Cuts, rank: int) -> dict[str, Any]:
    """A checkpoint's state as a run needs it whose variables are cut otherwise.

    Args:
        saved: what :func:`grace.checkpoint.save` or ``gather`` made.
        now: how each variable is cut in this run, as the checkpoint's "pieces" are.
        rank: this rank.

    Raises:
        ConfigError: a memory cannot be carried over; the message names the variable.
    """
    before: Cuts = saved.get("pieces") or {name: {"axis": None} for name in now}
    ranks = saved.get("ranks")
    new = {**saved, "state": _state(saved["state"], before, now, rank, ranks)}
    new["pending"] = _pending(saved.get("pending", []), before, now)
    if ranks is not None:
        new["ranks"] = [_state(one, before, now, i, ranks) for i, one in enumerate(ranks)]
    return new


def _pending(steps: list[dict[str, Any]], before: Cuts, now: Cuts) -> list[dict[str, Any]]:
    """Means that are still to be applied, cut anew."""
    new: list[dict[str, Any]] = []
    for step in steps:
        new.append({})
        for name, cut in now.items():
            old = before[name]
            if (old["axis"], old.get("sizes")) == (cut["axis"], cut["sizes"]):
                new[-1].update({part: step[part] for part in _names(name, cut) if part in step})
            elif any(isinstance(step.get(part), dict) for part in _names(name, old)):
                raise ConfigError(
                    f"the checkpoint holds rows of {name!r} that were still to be applied, and this run cuts it "
                    f"otherwise. Use the same partition for it, {RESET}"
                )
            else:
                new[-1].update(_carried(name, old, cut, step))
    return new


def _state(
    state: dict[str, dict[str, Any]], before: Cuts, now: Cuts, rank: int, ranks: list[Any] | None
) -> dict[str, dict[str, Any]]:
    new: dict[str, dict[str, Any]] = {kind: {} for kind in state}
    for name, cut in now.items():
        old = before[name]
        unchanged = old == cut
        for kind, values in state.items():
            if unchanged and (kind != "answer_memory" or ranks is None):
                names = _names(name, cut)
                new[kind].update({part: values[part] for part in names if part in values})
            elif kind == "memory":
                _check(name, old, cut, values)
                new[kind].update(_carried(name, old, cut, values))
            elif kind == "answer_memory":
                new[kind].update(_answers(name, old, cut, values, rank, ranks))
            elif kind == "shard_memory" and any(part in values for part in _names(name, old)):
                raise ConfigError(
                    f"the checkpoint holds memories of {name!r} for the second compression of scatter_reduce, and this "
                    f"run exchanges it otherwise. Use the same strategy for it, {RESET}"
                )
    return new


def _names(name: str, cut: Cut) -> list[str]:
    return [name] if cut["axis"] is None else [f"{name}/part_{i}" for i in range(len(cut["sizes"]))]


def _check(name: str, old: Cut, cut: Cut, values: dict[str, Any]) -> None:
    for part, spec in zip(_names(name, old), old.get("memories") or cut["memories"], strict=False):
        if part in values and set(cut["memories"]) != {spec}:
            other = next(other for other in cut["memories"] if other != spec)
            raise ConfigError(
                f"the checkpoint holds what the memory {spec} kept of {name!r}, and this run gives it the memory "
                f"{other}. Give it {spec}, {RESET}"
            )


def _answers(
    name: str, old: Cut, cut: Cut, values: dict[str, Any], rank: int, ranks: list[Any] | None
) -> dict[str, Any]:
    """What this rank, a destination, kept of its answers; another rank may have been the destination before."""
    if ranks is None:
        if any(part in values for part in _names(name, old)) and (old["axis"], old["sizes"], old["destinations"]) != (
            cut["axis"],
            cut["sizes"],
            cut["destinations"],
        ):
            raise ConfigError(
                f"the checkpoint holds what this rank kept of its answers for {name!r}, which another rank reduces "
                f"now, or in other parts. Save full_state_dict(), which holds all ranks, {RESET}"
            )
        everyone = values
    else:
        everyone = {part: value for one in ranks for part, value in one.get("answer_memory", {}).items()}
    whole = _carried(name, old, cut, everyone)
    mine = {part for part, root in zip(_names(name, cut), cut["destinations"], strict=True) if root == rank}
    return {part: value for part, value in whole.items() if part in mine}


def _carried(name: str, old: Cut, cut: Cut, values: dict[str, Any]) -> dict[str, Any]:
    parts = _names(name, old)
    kept = [values.get(part) for part in parts]
    if all(value is None for value in kept):
        return {}
    whole = _joined(kept, old["axis"], old.get("sizes", []))
    if cut["axis"] is None:
        return {name: whole}
    bounds = pairwise(accumulate(cut["sizes"], initial=0))
    return {part: _slice(whole, cut["axis"], a, b) for part, (a, b) in zip(_names(name, cut), bounds, strict=True)}


def _joined(values: list[Any], axis: int | None, sizes: list[int]) -> Any:
    """Parts of one tensor, or of dicts of tensors, along the axis; None is zeros."""
    if axis is None:
        return values[0]
    some = next(value for value in values if value is not None)
    if isinstance(some, dict):
        keys = list(some)
        return {key: _joined([None if v is None else v[key] for v in values], axis, sizes) for key in keys}
    k = kernels_of(some)
    shape = list(some.shape)
    shape[axis] = sum(sizes)
    parts = [
        k.zeros((*shape[:axis], n, *shape[axis + 1 :]), k.dtype(some), some) if value is None else value
        for n, value in zip(sizes, values, strict=True)
    ]
    return k.concat(parts, axis)


def _slice(value: Any, axis: int, start: int, stop: int) -> Any:
    if isinstance(value, dict):
        return {key: _slice(item, axis, start, stop) for key, item in value.items()}
    if not getattr(value, "shape", ()):
        return value
    k = kernels_of(value)
    piece = value[(slice(None),) * axis + (slice(start, stop),)]
    return k.reshape(k.flat(piece), tuple(piece.shape))
