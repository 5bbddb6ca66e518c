"""Conversion of a checkpoint's state to a run, variable by variable: each rank's own state, or the mean over all ranks,
is joined to whole variables and cut into the run's parts.

A memory is carried over if it is the same one on both sides (residual, for instance) and keeps tensors of the
gradient's shape: then the sum over parts does not change. A compressor's state (PowerSGD's factors, signum's momentum)
is carried over if neither the cut nor the method of a variable changed, and else starts empty. The memory of a
destination's answers moves to the new destination.

Memories of shards' second compressions are added to residuals if a run has other shards, or none; memories of answers,
if it has no destination. Under scatter_reduce rank j keeps e_j, the part that was left out of its shard of the mean; a
destination keeps what was left out of the whole mean. Nothing is lost if every rank adds e = (e_0, ..., e_{W-1}) to its
own residual, because the mean over ranks then contains e once; or, if only the rank's own state is available, if rank j
adds W e_j in its shard.
"""

import math
import re
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypedDict

from grace.core.state import Value, Values
from grace.core.variable import equal_bounds
from grace.errors import ConfigError
from grace.exchange.sparse_codec import is_floating
from grace.exchange.sparse_rows import NOTHING
from grace.kernels import kernels_of
from grace.session.state_schema import SavedState, ValuesByKind, checksum
from grace.session.step_runner import StepRunner


class Partition(TypedDict):
    """Cut of a variable into shards, and by shard the methods, memories and destinations; see ``pieces`` of a state."""

    axis: int | None
    shape: list[int]
    sizes: list[int]
    methods: list[str]
    memories: list[str]
    destinations: list[int | None]


Partitions = dict[str, Partition]
KINDS = ("compressor", "memory", "answer_memory", "shard_memory")
"""Kinds of state that every run knows."""
OF_ROUNDS = ("anchor", "outer", "local", "coming")
"""Kinds of state of outer rounds (:mod:`grace.session.outer_rounds`)."""
OF_BUFFERS = ("shared_buffer", "local_buffer")
"""Kinds of state of the model's buffers, by their names."""


class Misfit(ConfigError):
    """Error of state in a checkpoint that does not fit this run; its message has no remedy yet."""


def without_parameters(description: str) -> str:
    """Return the description of components without their parameters.

    >>> without_parameters("allgather, topk(ratio=0.01) | qsgd(norm='l(2)'), residual")
    'allgather, topk | qsgd, residual'
    """
    before = ""
    while description != before:  # parentheses may be nested: remove the innermost ones until none is left
        before = description
        description = re.sub(r"\([^()]*\)", "", description)
    return description


class Resharding:
    """Conversion of a checkpoint to the state of one rank of this run.

    Args:
        saved: the state that :func:`grace.session.checkpoint.save` or ``gather`` made, under this run's names.
        now: the partition of each variable in this run; see :func:`grace.session.checkpoint.partitions_of`.
        runner: the runner of this run.
        strict: True to refuse state that does not fit; False to drop it.

    Attributes:
        before: the partition of each variable in the checkpoint.
        everyone: the states of all ranks; None if the checkpoint holds one rank's.
        dropped: descriptions of the state that was dropped.
    """

    def __init__(self, saved: SavedState, now: Partitions, runner: StepRunner, strict: bool):
        self.saved = saved
        self.now = now
        self.runner = runner
        self.strict = strict
        self.rank = runner.backend.rank
        self.size = runner.backend.size
        self.before: Partitions = saved["pieces"]
        self.everyone: list[ValuesByKind] | None = saved.get("ranks")
        self.dropped: list[str] = []
        self.returned: list[tuple[str, str]] = []
        """Pairs of a kind of memory of means, and a variable whose shards or destinations changed: it is added to
        residuals."""

    def values(self) -> ValuesByKind:
        """Return the state by kind and by this run's shards.

        Raises:
            ConfigError: (if strict) state does not fit; the message names the variable.
        """
        # A variable of another shape is refused even if it has no state yet.
        for name in sorted(self.before.keys() & self.now.keys()) if self.strict else ():
            self._convert_or_drop(self._check_shape, "something", name)
        names_of: dict[str, set[str]] = {}
        for state in [self.saved["state"], *(self.everyone or ())]:
            for kind, values in state.items():
                names_of.setdefault(kind, set()).update(values)
        found: ValuesByKind = {}
        for kind, names in names_of.items():
            found[kind] = self._convert_buffers(kind, names) if kind in OF_BUFFERS else self._convert_kind(kind, names)
        # After all residuals are converted, to which these are added.
        for kind, name in self.returned:
            residuals = found.setdefault(_kind_of_residuals(kind), {})
            residuals.update(self._convert_or_drop(self._return_to_residuals, kind, name, residuals))
        return found

    def _convert_kind(self, kind: str, names: set[str]) -> Values:
        """Return one kind of state of all variables, by this run's parts; ``names`` are the saved parts that have
        it."""
        kept = {kind for shard in self.runner.shards.values() for kind in self.runner.stateful_parts(shard)}
        if kind.partition(".")[0] not in KINDS and kind not in kept:
            self._raise_or_drop(f"the checkpoint has state of the kind {kind!r}, which no part of this run uses")
        parts_of = {name: set(shard_names(name, partition)) for name, partition in self.before.items()}
        for unknown in sorted(names.difference(*parts_of.values())):
            self._raise_or_drop(_unknown_name(kind, unknown))
        found: Values = {}
        for name, parts in parts_of.items():
            if parts & names:
                found.update(self._convert_or_drop(self._convert, kind, name))
        return found

    def pending_means(self) -> list[Values]:
        """Return the means that are still to be applied, cut into this run's parts, oldest step first.

        Raises:
            ConfigError: (if strict) a mean does not fit.
        """
        new: list[Values] = []
        known = {part for name, before in self.before.items() for part in shard_names(name, before)}
        for step in self.saved["pending"]:
            new.append({})
            for name in sorted(step.keys() - known):
                self._raise_or_drop(_unknown_name("mean", name))
            for name, before in self.before.items():
                if any(part in step for part in shard_names(name, before)):
                    new[-1].update(self._convert_or_drop(self._convert_pending, name, before, step))
        return new

    def _convert_or_drop(self, convert: Callable[..., Values], *what: object) -> Values:
        """Return the result of a conversion. If it does not fit, raise ConfigError if strict, else drop the state."""
        try:
            return convert(*what)
        except Misfit as why:
            self._raise_or_drop(str(why))
            return {}

    def _raise_or_drop(self, why: str) -> None:
        """Raise ConfigError for state that does not fit if strict, else note that it is dropped."""
        if self.strict:
            raise ConfigError(f"{why}, {self.runner.context.api_names.otherwise}") from None
        self.dropped.append(why)

    def _convert(self, kind: str, name: str) -> Values:
        """Return one kind of state of one variable, by this run's parts."""
        if name not in self.now:
            raise Misfit(_unknown_name(kind, name))
        before, now, base = self.before[name], self.now[name], kind.partition(".")[0]
        self._check_shape(f"the {kind}", name)
        if base in ("memory", "answer_memory", "shard_memory"):
            self._check_memory(kind, name, before, now)
        if base == "answer_memory":
            values = self._answer_memory(kind, name, before, now)
        elif base in ("memory", *OF_ROUNDS):
            values = self._values_of(kind, name)
            values = _repartition(name, before, now, values, f"the {kind}", base in OF_ROUNDS)
        elif base == "shard_memory" and not self._same_shards(before, now):
            self.returned.append((kind, name))
            return {}
        elif not _exchanged_alike(before, now):
            self.dropped.append(f"the {kind} of {name!r}, whose parts or method are others now")
            return {}
        else:
            values = self._values_of(kind, name)
        return {part: value for part, value in values.items() if self._fits(kind, part, value)}

    def _values_of(self, kind: str, name: str) -> Values:
        """Return this rank's state of one variable, by the checkpoint's parts that have any."""
        values = {part: self._value_of(kind, part) for part in shard_names(name, self.before[name])}
        return {part: value for part, value in values.items() if value is not None}

    def _convert_buffers(self, kind: str, names: set[str]) -> Values:
        """Return the model's buffers that this run has, too. Each rank's own need as many ranks: all others start from
        those of the last round."""
        if kind == "local_buffer" and self.everyone is not None and len(self.everyone) != self.size:
            return {}
        now = self.runner.outer_rounds.model.read_buffers()
        found: Values = {}
        for name in sorted(names):
            value = self._value_of(kind, name)
            if value is None:
                continue
            known = name in now
            why = describe_mismatch(value, tuple(now[name].shape), None) if known else "this run does not average"
            if why:
                self.dropped.append(f"the {kind} {name!r}, which {why}")
            else:
                found[name] = value
        return found

    def _same_shards(self, before: Partition, now: Partition) -> bool:
        """Return True if a variable's shards are on the same ranks as in the checkpoint."""
        return self.saved["size"] == self.size and _exchanged_alike(before, now)

    def _return_to_residuals(self, kind: str, name: str, kept: Values) -> Values:
        """Return the sums of a variable's residuals and of its memories of means, by this run's parts.

        Args:
            kind: the kind of the memory of shards, or of answers.
            name: the variable.
            kept: residuals of this rank, by part.
        """
        of_whole = _kind_of_residuals(kind)
        if kind.startswith("answer_memory"):
            destinations = zip(shard_names(name, self.now[name]), self.now[name]["destinations"], strict=True)
            nowhere = {part for part, root in destinations if root is None}
            values = {part: value for part, value in self._answers_of_all(kind, name).items() if part in nowhere}
        else:
            values = self._shards_of_means(kind, name)
        fitting = {part: value for part, value in values.items() if self._fits(of_whole, part, value)}
        sums = {part: add_values(kept.get(part), value) for part, value in fitting.items()}
        if any(value is None for value in sums.values()):
            raise Misfit(f"the checkpoint's memories of {name!r} and of its means were kept at other learning rates")
        return sums

    def _shards_of_means(self, kind: str, name: str) -> Values:
        """Return what shards' memories of a variable add to each rank's residual, by this run's parts."""
        before, now = self.before[name], self.now[name]
        wholes, size = Values(), self.saved["size"]
        shape = list(now["shape"])
        for i, part in enumerate(shard_names(name, before)):
            own = self._value_of(kind, part) if self.everyone is None else None
            alone = [own if rank == self.rank else None for rank in range(size)]
            shards = alone if self.everyone is None else [one.get(kind, {}).get(part) for one in self.everyone]
            if all(value is None for value in shards):
                continue
            axis = before["axis"]
            of_part = shape if axis is None else [*shape[:axis], before["sizes"][i], *shape[axis + 1 :]]
            # Without the others' shards this rank's is weighted by their number, by which the mean divides it.
            wholes[part] = join_shards(shards, of_part, 1.0 if self.everyone else size)
            if wholes[part] is None or self.saved["hierarchical"]:
                raise Misfit(
                    f"the checkpoint holds memories of shards of {part!r}, of the second compression of "
                    f"scatter_reduce, which are not those of {size} ranks. Resume as it was saved"
                )
        return _repartition(name, before, now, wholes, f"the {kind}")

    def _check_shape(self, what: str, name: str) -> Values:
        before, now = self.before[name]["shape"], self.now[name]["shape"]
        if list(before) != now:
            raise Misfit(
                f"the checkpoint holds {what} of {name!r} as a variable of shape {list(before)}, and in this run it "
                f"has the shape {now}"
            )
        return {}

    def _check_memory(self, kind: str, name: str, before: Partition, now: Partition) -> None:
        # With memory="keep" a memory may have other parameters now.
        same = (lambda a, b: a == b) if self.strict else (lambda a, b: without_parameters(a) == without_parameters(b))
        states, unchanged = self.everyone or [self.saved["state"]], _cut_alike(before, now)
        for i, (part, spec) in enumerate(zip(shard_names(name, before), before["memories"], strict=True)):
            held = any(part in state.get(kind, ()) for state in states)
            # A part that is cut anew may get values of every part of the checkpoint.
            for other in now["memories"][i : i + 1] if unchanged else now["memories"]:
                if held and not same(spec, other):
                    raise Misfit(
                        f"the checkpoint has the state of the memory {spec} for {name!r}, and this run uses the memory "
                        f"{other}. Use {spec}"
                    )

    def _value_of(self, kind: str, part: str) -> Value | None:
        """Return the state of one saved part for this rank: the rank's own, the one that all ranks share, or the mean
        over ranks."""
        own = self.saved["state"].get(kind, {}).get(part)
        if part in self.saved["shared"].get(kind, ()):
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
            # As many ranks as before: each goes on with its own state, bit for bit.
            return self.everyone[self.rank].get(kind, {}).get(part)
        values = [state[kind][part] for state in self.everyone if part in state.get(kind, {})]
        anchor = self.saved["state"].get("anchor", {}).get(part)
        if kind == "local" and values and anchor is not None:  # ranks without parameters of their own have the anchor
            k = kernels_of(anchor)
            values += [k.cast(anchor, k.dtype(values[0]))] * (len(self.everyone) - len(values))
        return _mean_value(values, len(self.everyone), f"the {kind} of {part!r}") if values else None

    def _fits(self, kind: str, part: str, value: Value) -> bool:
        """Return True if a value has the form that the component keeps; False, and drop the value, if it has not
        because the method's parameters changed.

        Raises:
            Misfit: the value does not fit for another reason.
        """
        shard = self.runner.shards[part]
        component = self.runner.stateful_parts(shard).get(kind)
        if component is None or not getattr(component, "stateful", True):
            raise Misfit(f"the checkpoint holds the {kind} of {part!r}, and {shard.communicator.describe()} has none")
        shape = shard.variable.shape
        if kind.startswith("shard_memory"):
            # The second compression keeps state of this rank's equal part of the flat shard.
            here = shard.communicator.context
            a, b = equal_bounds(shard.variable.numel, here.size)[here.rank]
            shape = (b - a,)
        why = describe_mismatch(value, component.keeps(shape), None if kind in OF_ROUNDS else "float32")
        if not why:
            return True
        whole = shard.whole.name
        if kind.startswith("compressor") and self.before[whole]["methods"] != self.now[whole]["methods"]:
            self.dropped.append(f"the {kind} of {part!r}, which {why} for {component.spec}")
            return False
        raise Misfit(f"the checkpoint holds the {kind} of {part!r}, which {why}")

    def _answer_memory(self, kind: str, name: str, before: Partition, now: Partition) -> Values:
        """Return the memory for the answers of this rank, if it is a destination. Another rank may have been the
        destination in the checkpoint."""
        if self.everyone is None:
            if not _cut_alike(before, now) or before["destinations"] != now["destinations"]:
                raise Misfit(
                    f"the checkpoint has this rank's memory of its answers for {name!r}, which another rank reduces "
                    "now, or in other parts. Save "
                    f"{self.runner.context.api_names.save_all}, which has the state of all ranks"
                )
            return self._values_of(kind, name)
        whole = self._answers_of_all(kind, name)
        destinations = dict(zip(shard_names(name, now), now["destinations"], strict=True))
        if any(destinations[part] is None for part in whole):
            if self.saved["hierarchical"]:
                self.dropped.append(f"the {kind} of {name!r}, which no destination reduces now")
            else:
                self.returned.append((kind, name))
        return {part: value for part, value in whole.items() if destinations[part] == self.rank}

    def _answers_of_all(self, kind: str, name: str) -> Values:
        """Return the memories of a variable's answers on all ranks, each of which one destination has, by this run's
        parts."""
        before, now = self.before[name], self.now[name]
        parts = shard_names(name, before)
        states = self.everyone or ()
        whole = {part: value for one in states for part, value in one.get(kind, {}).items() if part in parts}
        return _repartition(name, before, now, whole, f"the {kind}")

    def _convert_pending(self, name: str, before: Partition, step: Values) -> Values:
        """Return the means of one variable that are still to be applied, by this run's parts."""
        if name not in self.now:
            raise Misfit(_unknown_name("mean", name))
        now = self.now[name]
        self._check_shape("a mean", name)
        values = {part: step[part] for part in shard_names(name, before) if part in step}
        if not _cut_alike(before, now) and any(isinstance(value, dict) for value in values.values()):
            raise Misfit(
                f"the checkpoint holds rows of {name!r} that were still to be applied, and this run cuts it "
                "otherwise. Use the same partition for it"
            )
        values = _repartition(name, before, now, values, "a mean", any_dtype=True)
        for part, value in values.items():
            variable = self.runner.shards[part].variable
            if variable.sparse:
                why = describe_row_mismatch(value, variable.shape)
            else:
                why = describe_mismatch(value, variable.shape, None)
            if why:
                raise Misfit(f"the checkpoint holds a mean of {part!r} that was still to be applied, which {why}")
        return values


def _unknown_name(kind: str, name: str) -> str:
    """Return the reason why state of a name that this run does not have does not fit."""
    return (
        f"the checkpoint holds the {kind} of {name!r}, which this run does not exchange. Give the parameters the names "
        "that they were saved with"
    )


def _kind_of_residuals(kind: str) -> str:
    """Return the kind of the residuals to which a memory of shards' or answers' means is added.

    >>> _kind_of_residuals("shard_memory")
    'memory'
    """
    return kind.removeprefix("shard_").removeprefix("answer_")


def _cut_alike(before: Partition, now: Partition) -> bool:
    """Return True if a variable is cut into the same parts on both sides, or into none."""
    return before["axis"] == now["axis"] and (now["axis"] is None or before["sizes"] == now["sizes"])


def _exchanged_alike(before: Partition, now: Partition) -> bool:
    """Return True if also the methods and destinations of the parts are the same. Parameters of methods may differ."""
    methods = [list(map(without_parameters, side["methods"])) for side in (before, now)]
    return _cut_alike(before, now) and methods[0] == methods[1] and before["destinations"] == now["destinations"]


def shard_names(name: str, partition: Partition) -> list[str]:
    """Return the names of a variable's shards."""
    return [name] if partition["axis"] is None else [f"{name}/part_{i}" for i in range(len(partition["sizes"]))]


def _layout(value: Value) -> object:
    """Return the names, types and shapes in a value."""
    if isinstance(value, dict):
        return {key: _layout(item) for key, item in value.items()}
    return (kernels_of(value).dtype(value), *value.shape) if hasattr(value, "shape") else "a number"


def _mean_value(values: list[Value], count: int, what: str) -> Value:
    """Return the mean of values over ``count`` ranks; a rank without a value counts as zero."""
    if any(_layout(value) != _layout(values[0]) for value in values):
        raise Misfit(f"{what} has other shapes on other ranks of the checkpoint")
    if isinstance(values[0], dict):
        return {key: _mean_value([value[key] for value in values], count, what) for key in values[0]}
    if hasattr(values[0], "shape") and not is_floating(kernels_of(values[0]).dtype(values[0])):
        if len(values) < count or len(set(map(checksum, values))) > 1:
            raise Misfit(f"{what} holds whole numbers or truth values that differ by rank, which have no mean")
        return values[0]
    if isinstance(values[0], (int, float)):
        # A number (a learning rate) that all ranks share stays exact; their sum may round.
        return values[0] if len(set(values)) == 1 else sum(values) / len(values)
    return sum(values[1:], start=values[0]) / count


def _repartition(
    name: str, before: Partition, now: Partition, values: Values, what: str, any_dtype: bool = False
) -> Values:
    """Return values of a variable's parts in the checkpoint as values of its parts in this run, which may be the same.

    Raises:
        Misfit: a value that is to be cut anew has not the form of its part.
    """
    if _cut_alike(before, now):
        return values
    parts = shard_names(name, before)
    kept = [values.get(part) for part in parts]
    if all(value is None for value in kept):
        return {}
    shape, some = list(now["shape"]), next(value for value in kept if value is not None)
    nested, dtype = isinstance(some, dict), kernels_of(some).dtype(some) if any_dtype else "float32"
    for part, value, n in zip(parts, kept, before["sizes"] or [0], strict=False):
        own = shape if before["axis"] is None else [*shape[: before["axis"]], n, *shape[before["axis"] + 1 :]]
        wanted = {key: own if hasattr(one, "shape") else float for key, one in some.items()} if nested else own
        why = "" if value is None else describe_mismatch(value, wanted, dtype)
        if why:
            raise Misfit(f"the checkpoint holds {what} of {part!r}, which {why}")
    whole = join_parts(kept, before["axis"], before["sizes"])
    if now["axis"] is None:
        return {name: whole}
    ends = pairwise(accumulate(now["sizes"], initial=0))
    return {part: _slice(whole, now["axis"], a, b) for part, (a, b) in zip(shard_names(name, now), ends, strict=True)}


def join_parts(values: list[Value], axis: int | None, sizes: list[int]) -> Value:
    """Return the parts of a tensor, or of dicts of tensors, joined along the axis; None counts as zeros."""
    if axis is None:
        return values[0]
    some = next(value for value in values if value is not None)
    if isinstance(some, dict):
        return {
            key: join_parts([None if v is None else v[key] for v in values], axis, sizes)
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


def _slice(value: Value, axis: int, start: int, stop: int) -> Value:
    if isinstance(value, dict):
        return {key: _slice(item, axis, start, stop) for key, item in value.items()}
    if not getattr(value, "shape", ()):
        return value
    k = kernels_of(value)
    shard = value[(slice(None),) * axis + (slice(start, stop),)]
    return k.reshape(k.flat(shard), tuple(shard.shape))


def describe_mismatch(value: Value, wanted: Any, dtype: str | None = "float32") -> str:
    """Return the difference between a value and its wanted form (see ``Component.keeps``) as text; empty if there is
    none.

    Args:
        value: the value.
        wanted: the form; None if any value fits.
        dtype: the dtype of tensors; None for any type of floats.
    """
    if wanted is None:
        return ""
    if isinstance(wanted, dict):
        if not isinstance(value, dict) or value.keys() != wanted.keys():
            return f"should be {' and '.join(wanted)}, and is not"
        differences = (describe_mismatch(value[key], one, dtype) for key, one in wanted.items())
        return next(filter(None, differences), "")
    if wanted is float:
        return "" if isinstance(value, (int, float)) else f"should be a number, and is a {type(value).__name__}"
    if not hasattr(value, "shape"):
        return f"should be a tensor, and is a {type(value).__name__}"
    if tuple(value.shape) != tuple(wanted):
        return f"should have the shape {list(wanted)}, and has {list(value.shape)}"
    kind = kernels_of(value).dtype(value)
    right = kind == dtype if dtype else is_floating(kind)
    return "" if right else f"should be {dtype or 'of floats'}, and is {kind}"


def describe_row_mismatch(value: Value, shape: tuple[int, ...]) -> str:
    """Return the difference between a value and distinct rows of a variable as text; empty if there is none."""
    if not isinstance(value, dict):
        return "should be rows and their values, and is not"
    rows, values = value["rows"], value["values"]
    why = describe_mismatch(values, (values.shape[0] if len(values.shape) else 0, *shape[1:]), None)
    if why or len(rows.shape) != 1 or not kernels_of(rows).dtype(rows).startswith("int"):
        return why or "should have one whole number for each row, and has not"
    numbers = kernels_of(rows).to_list(rows)
    if len(numbers) != values.shape[0] or not (numbers == [NOTHING] or all(0 <= n < shape[0] for n in numbers)):
        return f"should have row numbers below {shape[0]}, one for each of its {values.shape[0]} rows, and has not"
    return ""


def join_shards(kept: Sequence[Value], shape: Sequence[int], weight: float = 1.0) -> Value:
    """Return the value of a whole tensor from the ranks' values of its shards; None if the shards are cut otherwise.

    Args:
        kept: values by rank: a tensor, or a dict of tensors and numbers; None for zeros, or an unknown value.
        shape: the shape of the whole tensor.
        weight: factor of the values.

    >>> import numpy as np
    >>> join_shards([np.float32([1, 2]), None], (3,), weight=2.0)
    array([2., 4., 0.], dtype=float32)
    """
    some = next(value for value in kept if value is not None)
    if isinstance(some, dict):
        found = {}
        for key, one in some.items():
            each = [None if value is None else value.get(key) for value in kept]
            found[key] = join_shards(each, shape, weight) if hasattr(one, "shape") else one
        return None if any(value is None for value in found.values()) else found
    k = kernels_of(some)
    pieces = []
    for value, (a, b) in zip(kept, equal_bounds(math.prod(shape), len(kept)), strict=True):
        if value is None:
            pieces.append(k.zeros((b - a,), "float32", some))
        elif tuple(value.shape) == (b - a,):
            pieces.append(value * weight)
        else:
            return None
    return k.reshape(k.join(pieces), tuple(shape))


def add_values(own: Value, more: Value) -> Value:
    """Return the sum of two values of a memory; None if they hold numbers that differ.

    >>> add_values({"residual": 1.0, "lr": 0.5}, {"residual": 2.0, "lr": 0.25}) is None
    True
    """
    if own is None:
        return more
    if not isinstance(own, dict):
        return own + more
    sums = {key: own[key] + one if hasattr(one, "shape") else one for key, one in more.items()}
    return sums if all(hasattr(one, "shape") or one == own[key] for key, one in more.items()) else None
