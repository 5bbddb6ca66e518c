"""What a run takes of a checkpoint, variable by variable: each rank's own, or the mean of all ranks'; joined to whole
variables, and cut as the run's parts are.

A memory is carried over if it is the same one (residual, say) on both sides and keeps tensors of the gradient's shape:
then the sum over parts is what it was. What a compressor remembers (PowerSGD's factors, signum's momentum) is carried
over where neither the cut nor the method of a variable changed, and starts anew elsewhere. The memory of a
destination's answers follows the destination; that of shards goes back to residuals where the shards are others.
"""

import re
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

from grace.core.variable import equal_bounds
from grace.errors import ConfigError
from grace.kernels import kernels_of
from grace.session.shape_check import unlike, unlike_rows
from grace.session.shard_memories import added, joined
from grace.session.step_runner import StepRunner

Partition = dict[str, Any]
Partitions = dict[str, Partition]
KINDS = ("compressor", "memory", "answer_memory", "shard_memory")
"""What state may be of, in every run."""


class Misfit(ConfigError):
    """Something of a checkpoint that this run cannot take; said without how to go on."""


def bare(description: str) -> str:
    """Names of components without their parameters.

    >>> bare("allgather, topk(ratio=0.01) | qsgd(norm='l(2)'), residual")
    'allgather, topk | qsgd, residual'
    """
    while (shorter := re.sub(r"\([^()]*\)", "", description)) != description:
        description = shorter
    return description


class Resharding:
    """Takes what is this rank's out of a checkpoint.

    Args:
        saved: what :func:`grace.session.checkpoint.save` or ``gather`` made, under this run's names.
        now: how each variable is cut in this run, as the checkpoint's "shards" are.
        runner: of this run.
        strict: refuse what does not fit, instead of dropping it.
    """

    def __init__(self, saved: dict[str, Any], now: Partitions, runner: StepRunner, strict: bool):
        self.saved, self.now, self.runner, self.strict = saved, now, runner, strict
        self.rank, self.size = runner.backend.rank, runner.backend.size
        self.before: Partitions = saved.get("pieces") or {
            name: {"axis": None} for name in {*now, *(name for values in saved["state"].values() for name in values)}
        }
        self.everyone: list[dict[str, Any]] | None = saved.get("ranks")
        self.dropped: list[str] = []
        self.cut_anew: list[tuple[str, str]] = []
        """Kinds of shards' memories, and variables, whose shards are others in this run."""

    def values(self) -> dict[str, dict[str, Any]]:
        """The state by kind, and by this run's shards.

        Raises:
            ConfigError: (if strict) something does not fit; the message names the variable.
        """
        states = [self.saved["state"], *(self.everyone or ())]
        held = {kind: {name for state in states for name in state.get(kind, ())} for kind in self._kinds(states)}
        found: dict[str, dict[str, Any]] = {kind: {} for kind in held}
        parts_of = {name: set(_names(name, old)) for name, old in self.before.items()}
        known = set().union(*parts_of.values())
        for name in sorted(self.before.keys() & self.now.keys()) if self.strict else ():
            self._try(self._check_shape, "something", name)
        kept = {kind for shard in self.runner.shards.values() for kind in shard.communicator.stateful_parts}
        for kind, names in held.items():
            if kind.partition(".")[0] not in KINDS and kind not in kept:
                self._try(self._unknown, kind)
            for name in sorted(names - known):
                self._try(self._stranger, kind, name)
            for name, parts in parts_of.items():
                if parts & names:
                    found[kind].update(self._try(self._carry, kind, name))
        for kind, name in self.cut_anew:
            of_whole = kind.removeprefix("shard_")
            found.setdefault(of_whole, {}).update(self._try(self._given_back, kind, name, found.get(of_whole, {})))
        return found

    def pending(self) -> list[dict[str, Any]]:
        """Means that are still to be applied, cut anew.

        Raises:
            ConfigError: (if strict) one cannot be.
        """
        new: list[dict[str, Any]] = []
        known = {part for name, old in self.before.items() for part in _names(name, old)}
        for step in self.saved.get("pending", ()):
            new.append({})
            for name in sorted(step.keys() - known):
                self._try(self._stranger, "mean", name)
            for name, old in self.before.items():
                if any(part in step for part in _names(name, old)):
                    new[-1].update(self._try(self._pending_of, name, old, step))
        return new

    def _try(self, take: Callable[..., dict[str, Any]], *what: Any) -> dict[str, Any]:
        try:
            return take(*what)
        except Misfit as why:
            if self.strict:
                raise ConfigError(f"{why}, {self.runner.context.api_names.otherwise}") from None
            self.dropped.append(str(why))
            return {}

    @staticmethod
    def _kinds(states: list[dict[str, Any]]) -> list[str]:
        return list(dict.fromkeys(kind for state in states for kind in state))

    def _unknown(self, kind: str) -> dict[str, Any]:
        raise Misfit(f"the checkpoint holds what it calls {kind!r}, which nothing in this run keeps")

    def _stranger(self, kind: str, name: str) -> dict[str, Any]:
        raise Misfit(
            f"the checkpoint holds the {kind} of {name!r}, which this run does not exchange. Give the "
            "parameters the names that they were saved with"
        )

    def _carry(self, kind: str, name: str) -> dict[str, Any]:
        """One kind of state of one variable."""
        if name not in self.now:
            self._stranger(kind, name)
        old, cut, base = self.before[name], self.now[name], kind.partition(".")[0]
        self._check_shape(f"the {kind}", name)
        if base in ("memory", "answer_memory", "shard_memory"):
            self._check_memory(kind, name, old, cut)
        if base == "answer_memory":
            values = self._answers(kind, name, old, cut)
        elif base == "memory":
            values = {part: self._picked(kind, part) for part in _names(name, old)}
            values = {part: value for part, value in values.items() if value is not None}
            if not _same(old, cut, "axis", "sizes"):
                values = _carried(name, old, cut, values, f"the {kind}")
        elif base == "shard_memory" and not self._same_shards(old, cut):
            self.cut_anew.append((kind, name))
            return {}
        elif not _same(old, cut, "axis", "sizes", "methods", "destinations"):
            self.dropped.append(f"the {kind} of {name!r}, whose parts or method are others now")
            return {}
        else:
            values = {part: self._picked(kind, part) for part in _names(name, old)}
        fitting = {part: value for part, value in values.items() if value is not None and self._fits(kind, part, value)}
        return fitting

    def _same_shards(self, old: Partition, cut: Partition) -> bool:
        """Whether a variable's shards lie where they did."""
        return self.saved["size"] == self.size and _same(old, cut, "axis", "sizes", "methods", "destinations")

    def _given_back(self, kind: str, name: str, kept: dict[str, Any]) -> dict[str, Any]:
        """What shards' memories held of one variable, added to what this rank keeps of it."""
        old, cut = self.before[name], self.now[name]
        of_whole, wholes, size = kind.removeprefix("shard_"), dict[str, Any](), self.saved["size"]
        shape = list(cut["shape"])
        for i, part in enumerate(_names(name, old)):
            own = self._picked(kind, part) if self.everyone is None else None
            alone = [own if rank == self.rank else None for rank in range(size)]
            shards = alone if self.everyone is None else [one.get(kind, {}).get(part) for one in self.everyone]
            if all(value is None for value in shards):
                continue
            axis = old["axis"]
            of_part = shape if axis is None else [*shape[:axis], old["sizes"][i], *shape[axis + 1 :]]
            wholes[part] = joined(shards, of_part, 1.0 if self.everyone else size)
            if wholes[part] is None or self.saved.get("hierarchical"):
                raise Misfit(
                    f"the checkpoint holds memories of shards of {part!r}, of the second compression of "
                    f"scatter_reduce, which are not those of {size} ranks. Resume as it was saved"
                )
        values = wholes if _same(old, cut, "axis", "sizes") else _carried(name, old, cut, wholes, f"the {kind}")
        fitting = {part: value for part, value in values.items() if self._fits(of_whole, part, value)}
        sums = {part: added(kept.get(part), value) for part, value in fitting.items()}
        if any(value is None for value in sums.values()):
            raise Misfit(f"the checkpoint's memories of {name!r} and of its shards were kept at other learning rates")
        return sums

    def _check_shape(self, what: str, name: str) -> dict[str, Any]:
        old, cut = self.before[name].get("shape"), self.now[name]["shape"]
        if old is not None and list(old) != cut:
            raise Misfit(
                f"the checkpoint holds {what} of {name!r} as a variable of shape {list(old)}, and in this run it has "
                f"the shape {cut}"
            )
        return {}

    def _check_memory(self, kind: str, name: str, old: Partition, cut: Partition) -> None:
        same = (lambda a, b: a == b) if self.strict else (lambda a, b: bare(a) == bare(b))
        states, unchanged = self.everyone or [self.saved["state"]], _same(old, cut, "axis", "sizes")
        for i, (part, spec) in enumerate(zip(_names(name, old), old.get("memories") or (), strict=False)):
            held = any(part in state.get(kind, ()) for state in states)
            for other in cut["memories"][i : i + 1] if unchanged else cut["memories"]:
                if held and not same(spec, other):
                    raise Misfit(
                        f"the checkpoint holds what the memory {spec} kept of {name!r}, and this run gives it the "
                        f"memory {other}. Give it {spec}"
                    )

    def _picked(self, kind: str, part: str) -> Any:
        """What this rank takes of a shard as it was cut: its own, what all ranks share, or the mean."""
        own = self.saved["state"].get(kind, {}).get(part)
        if self._is_shared(kind, part):
            return own
        if self.everyone is None:
            rank, size = self.saved["rank"], self.saved["size"]
            if own is not None and (rank, size) != (self.rank, self.size):
                raise Misfit(
                    f"the checkpoint holds the {kind} of {part!r} of rank {rank} of {size}, this is rank "
                    f"{self.rank} of {self.size}. Save one file per rank, or save "
                    f"{self.runner.context.api_names.save_all}, which holds all ranks and loads on any number of them"
                )
            return own
        if len(self.everyone) == self.size:
            return self.everyone[self.rank].get(kind, {}).get(part)
        values = [state[kind][part] for state in self.everyone if part in state.get(kind, {})]
        return _mean_value(values, len(self.everyone), f"the {kind} of {part!r}") if values else None

    def _is_shared(self, kind: str, part: str) -> bool:
        if "shared" in self.saved:
            return part in self.saved["shared"].get(kind, ())
        shard = self.runner.shards.get(part)  # saved by an earlier version
        return (
            shard is not None
            and kind in shard.communicator.stateful_parts
            and shard.communicator.stateful_parts[kind].shared_state
        )

    def _fits(self, kind: str, part: str, value: Any) -> bool:
        """Whether a value is what the component keeps; False if it is not because the method's parameters changed."""
        shard = self.runner.shards[part]
        component = shard.communicator.stateful_parts.get(kind)
        if component is None or not getattr(component, "stateful", True):
            raise Misfit(f"the checkpoint holds the {kind} of {part!r}, and {shard.communicator.describe()} has none")
        shape = shard.variable.shape
        if kind.startswith("shard_memory"):
            here = shard.communicator.context
            a, b = equal_bounds(shard.variable.numel, here.size)[here.rank]
            shape = (b - a,)
        why = unlike(value, component.keeps(shape))
        if not why:
            return True
        whole = shard.whole.name
        if kind.startswith("compressor") and self.before[whole].get("methods") != self.now[whole]["methods"]:
            self.dropped.append(f"the {kind} of {part!r}, which {why} for {component.spec}")
            return False
        raise Misfit(f"the checkpoint holds the {kind} of {part!r}, which {why}")

    def _answers(self, kind: str, name: str, old: Partition, cut: Partition) -> dict[str, Any]:
        """What this rank, a destination, kept of its answers; another rank may have been the destination before."""
        parts = _names(name, old)
        if self.everyone is None:
            if not _same(old, cut, "axis", "sizes", "destinations"):
                raise Misfit(
                    f"the checkpoint holds what this rank kept of its answers for {name!r}, which another rank reduces "
                    "now, or in other parts. Save "
                    f"{self.runner.context.api_names.save_all}, which holds all ranks"
                )
            return {part: value for part in parts if (value := self._picked(kind, part)) is not None}
        kept = {part: value for one in self.everyone for part, value in one.get(kind, {}).items() if part in parts}
        if not any(root is not None for root in cut["destinations"]):
            self.dropped.append(f"the {kind} of {name!r}, which no destination reduces now")
            return {}
        whole = kept if _same(old, cut, "axis", "sizes") else _carried(name, old, cut, kept, f"the {kind}")
        mine = {part for part, root in zip(_names(name, cut), cut["destinations"], strict=True) if root == self.rank}
        return {part: value for part, value in whole.items() if part in mine}

    def _pending_of(self, name: str, old: Partition, step: dict[str, Any]) -> dict[str, Any]:
        """What is still to be applied to one variable."""
        if name not in self.now:
            self._stranger("mean", name)
        cut = self.now[name]
        self._check_shape("a mean", name)
        if _same(old, cut, "axis", "sizes"):
            values = {part: step[part] for part in _names(name, old) if part in step}
        elif any(isinstance(step.get(part), dict) for part in _names(name, old)):
            raise Misfit(
                f"the checkpoint holds rows of {name!r} that were still to be applied, and this run cuts it "
                "otherwise. Use the same partition for it"
            )
        else:
            values = _carried(name, old, cut, step, "a mean")
        for part, value in values.items():
            variable = self.runner.shards[part].variable
            why = unlike_rows(value, variable.shape) if variable.sparse else unlike(value, variable.shape, None)
            if why:
                raise Misfit(f"the checkpoint holds a mean of {part!r} that was still to be applied, which {why}")
        return values


def _same(old: Partition, cut: Partition, *keys: str) -> bool:
    """Whether a variable is cut and exchanged alike, but for methods' parameters."""
    if old.get("axis") is None and cut["axis"] is None:
        keys = tuple(key for key in keys if key != "sizes")
    pairs = [(old.get(key, cut[key]), cut[key]) for key in keys if key != "methods"]
    if "methods" in keys:
        before, after = old.get("methods") or cut["methods"], cut["methods"]
        pairs.append(([bare(method) for method in before], [bare(method) for method in after]))
    return all(a == b for a, b in pairs)


def _names(name: str, cut: Partition) -> list[str]:
    return [name] if cut["axis"] is None else [f"{name}/part_{i}" for i in range(len(cut["sizes"]))]


def _layout(value: Any) -> Any:
    """The names, types and shapes in a value."""
    if isinstance(value, dict):
        return {key: _layout(item) for key, item in value.items()}
    return (kernels_of(value).dtype(value), *value.shape) if hasattr(value, "shape") else "a number"


def _mean_value(values: list[Any], count: int, what: str) -> Any:
    """The mean over ranks; a rank without a value counts as zero."""
    if any(_layout(value) != _layout(values[0]) for value in values):
        raise Misfit(f"{what} has other shapes on other ranks of the checkpoint")
    if isinstance(values[0], dict):
        return {key: _mean_value([value[key] for value in values], count, what) for key in values[0]}
    if isinstance(values[0], (int, float)):
        return values[0] if len(set(values)) == 1 else sum(values) / len(values)
    return sum(values[1:], start=values[0]) / count


def _carried(name: str, old: Partition, cut: Partition, values: dict[str, Any], what: str) -> dict[str, Any]:
    parts = _names(name, old)
    kept = [values.get(part) for part in parts]
    if all(value is None for value in kept):
        return {}
    shape, some = list(cut["shape"]), next(value for value in kept if value is not None)
    nested, dtype = isinstance(some, dict), kernels_of(some).dtype(some) if what == "a mean" else "float32"
    for part, value, n in zip(parts, kept, old.get("sizes") or [0], strict=False):
        own = shape if old["axis"] is None else [*shape[: old["axis"]], n, *shape[old["axis"] + 1 :]]
        wanted = {key: own if hasattr(one, "shape") else float for key, one in some.items()} if nested else own
        why = "" if value is None else unlike(value, wanted, dtype)
        if why:
            raise Misfit(f"the checkpoint holds {what} of {part!r}, which {why}")
    whole = _joined(kept, old["axis"], old.get("sizes", []))
    if cut["axis"] is None:
        return {name: whole}
    ends = pairwise(accumulate(cut["sizes"], initial=0))
    return {part: _slice(whole, cut["axis"], a, b) for part, (a, b) in zip(_names(name, cut), ends, strict=True)}


def _joined(values: list[Any], axis: int | None, sizes: list[int]) -> Any:
    """Parts of one tensor, or of dicts of tensors, along the axis; None is zeros."""
    if axis is None:
        return values[0]
    some = next(value for value in values if value is not None)
    if isinstance(some, dict):
        return {
            key: _joined([None if v is None else v[key] for v in values], axis, sizes)
            if hasattr(some[key], "shape")
            else some[key]
            for key in some
        }
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
    shard = value[(slice(None),) * axis + (slice(start, stop),)]
    return k.reshape(k.flat(shard), tuple(shard.shape))
