"""Change of the plan during training: a new runner takes over the state of the former one.

All ranks switch after the same step. Memories are carried over by the rules of checkpoints
(:mod:`grace.session.checkpoint`, "keep"). Residuals that the new plan cannot keep are not lost: what they add to the
mean is added to the means of the next exchange. These are residuals of variables that change their memory
or their hierarchy, and of a destination's answers if another rank or nobody compresses answers then.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from grace.core.communicator import Communicator
from grace.core.compressor import Tensor
from grace.core.memory import ErrorFeedback, Memory
from grace.exchange.sparse_codec import RowMemory
from grace.exchange.sparse_rows import Gradient, SparseRows
from grace.kernels import kernels_of
from grace.session import checkpoint, state_schema
from grace.session.agreement import gather_or_raise
from grace.session.bucketing import make_buckets
from grace.session.exchange_plan import ExchangePlan
from grace.session.reshard import Partition, join_shards, without_parameters
from grace.session.setup import build_step_runner
from grace.session.sharding import Shard
from grace.session.state_schema import SavedState
from grace.session.step_runner import StepRunner

MEMORIES = ("memory", "answer_memory", "shard_memory")
"""Kinds of state that are residuals."""


def switch_plan(
    former: StepRunner,
    plan: ExchangePlan,
    like: Callable[[str], Tensor],
    flush: Callable[[], None],
    check: Callable[[Communicator], None] = lambda communicator: None,
    check_plan: Callable[[StepRunner], None] = lambda made: None,
    inside: Callable[[StepRunner, SavedState], SavedState] = lambda made, saved: saved,
) -> StepRunner:
    """Return the runner of a new plan for the same variables and ranks, and close the former one. Every rank must call
    it, between two steps.

    Args:
        former: the runner so far.
        plan: the new plan; if it is a strategy, rank 0's is used.
        like: returns a tensor like a variable's gradient, by name.
        flush: runs a last outer round. It is called once all ranks accept the plan.
        check, check_plan: raise an error if a communicator, or the new runner, does not suit the run.
        inside: converts the former runner's state to the tensors that the new one computes with.

    Raises:
        ConfigError: the plan does not suit this model or run; the former runner is unchanged.
        ExchangeError: a step is under way.
        RankError: another rank refuses the plan.
    """
    saved = checkpoint.save(former)
    made = build_replacement(former, plan, check)
    try:
        error = None
        try:
            check_plan(made)
        except Exception as raised:
            error = raised
        gather_or_raise(former.backend, "a plan", None, error, "refused the plan")
        if former.outer_rounds:  # a refused plan must not end a period early
            flush()
            saved = checkpoint.save(former)
        lost = _find_lost(former, made)
        saved = _without_lost(saved, former, made, lost)
        loaded = checkpoint.Loaded(None)
        try:
            loaded = checkpoint.prepare(made, saved, "keep", lambda saved: inside(made, saved))
        except Exception as raised:
            error = raised
        checkpoint.compare(former.backend, saved, "keep", error)
        # Memories that do not fit are expected: their residuals go into carried_over instead of a warning.
        loaded.dropped = []
        # Collectives: only after all ranks have agreed to switch.
        carried_over = inside(made, _lost_residuals(former, made, lost, like))
    except BaseException:
        made.close()
        raise
    checkpoint.apply(made, loaded)
    made.carry_over(carried_over)
    former.close()
    return made


def build_replacement(former: StepRunner, plan: ExchangePlan, check: Callable[[Communicator], None]) -> StepRunner:
    """Return a runner of a new plan without state, into which a checkpoint is loaded. Every rank must call it, between
    two steps; the caller closes this runner or the former one.

    Raises:
        ConfigError, RankError: see :func:`switch_plan`.
    """
    made = build_step_runner(
        lambda: former.variables,
        lambda: plan,
        former.backend,
        former.context,
        former.settings,
        check,
        hierarchical=former.all_hierarchical,
        compress_after=former.compress_after,
    )
    # What checkpoints do not hold.
    made.callbacks = former.callbacks
    made.shard_label = former.shard_label
    made.warned_own_state = former.warned_own_state
    made.traffic = former.traffic
    made.outer_rounds.model = former.outer_rounds.model
    return made


def returns_to_step(alone: Iterable[str], runner: StepRunner) -> bool:
    """Return True if a runner exchanges gradients of variables that ranks trained alone before. The states of their
    optimizers differ then, and must be made equal, or the parameters would drift apart.

    Args:
        alone: names of variables that ranks trained alone, or of parts of them.
    """
    in_step = {shard.whole.name for shard in runner.shards.values() if shard.outer is None}
    return any(name == whole or name.startswith(f"{whole}/") for name in alone for whole in in_step)


def _find_lost(former: StepRunner, made: StepRunner) -> dict[str, bool]:
    """Return the variables whose residuals the new plan cannot keep: True if it can keep none, False if it can keep all
    but those of a destination's answers."""
    then, now = checkpoint.partitions_of(former), checkpoint.partitions_of(made)
    lost = {}
    for name, parts in former.shards_of.items():
        new = made.shards_of[name]
        # The residuals of leaders have another weight in the mean than those of all ranks.
        before = {(without_parameters(s.communicator.memory.spec), s.hierarchical) for s in parts if _feedback(s)}
        after = {(without_parameters(s.communicator.memory.spec), s.hierarchical) for s in new}
        if before and before != after:  # checkpoints carry all parts' or none
            lost[name] = True
        elif before and _answers(former, parts, then[name]) not in (None, _answers(made, new, now[name])):
            lost[name] = False
    return lost


def _without_lost(saved: SavedState, former: StepRunner, made: StepRunner, lost: dict[str, bool]) -> SavedState:
    """Return the former runner's state without the residuals that are lost. Residuals of variables that come under a
    hierarchy, or leave it, are among these; so all that is left fits the new hierarchy."""
    shards = [s.variable.name for s in former.shards.values() if lost.get(s.whole.name) and s.outer is None]
    left_out = {f"the {kind} of {name!r}" for kind in MEMORIES for name in shards}
    return state_schema.seal({**state_schema.without_values(saved, left_out), "hierarchical": made.hierarchical})


def _lost_residuals(
    former: StepRunner, made: StepRunner, lost: dict[str, bool], like: Callable[[str], Tensor]
) -> dict[str, Gradient]:
    """Return the means over ranks of residuals that the new plan cannot keep, by its shards."""
    shards = [shard for name in lost for shard in made.shards_of[name] if shard.outer is None]
    taken = {shard.whole.name: dataclasses.replace(shard.whole, dtype="float32", sparse=False) for shard in shards}
    found: dict[str, Tensor] = {}
    for bucket in make_buckets([Shard(variable, variable, made.averaging) for variable in taken.values()]):
        values = [
            _residual(former.shards_of[name], like(name), former.backend.size, lost[name]) for name in bucket.names
        ]
        found.update(zip(bucket.names, made.mean(bucket, values), strict=True))
    means = {shard.variable.name: (shard, shard.slice_of(found[shard.whole.name])) for shard in shards}
    return {name: _rows_of(mean) if shard.whole.sparse else mean for name, (shard, mean) in means.items()}


def _answers(runner: StepRunner, shards: Sequence[Shard], partition: Partition) -> tuple[object, ...] | None:
    """Return the parts of a variable whose destinations keep residuals of their answers, and these destinations; None
    if no part has any."""
    kept = ["answer_memory" in runner.stateful_parts(shard) and shard.outer is None for shard in shards]
    return (kept, partition["axis"], partition["sizes"], partition["destinations"]) if any(kept) else None


def _feedback(shard: Shard) -> ErrorFeedback | RowMemory | None:
    memory = shard.communicator.memory
    # what is left of drifts is no part of a gradient
    return memory if isinstance(memory, ErrorFeedback | RowMemory) and shard.outer is None else None


def _residual(shards: Sequence[Shard], like: Tensor, size: int, of_gradients: bool) -> Tensor:
    """Return a tensor whose mean over ranks is what a whole variable's next compensations would add to its mean.

    Args:
        shards: the former shards of the variable.
        like: a tensor like the variable's gradient.
        size: the number of ranks.
        of_gradients: False for residuals of means alone.
    """
    k = kernels_of(like)
    parts = []
    for shard in shards:
        name, shape, communicator = shard.variable.name, shard.variable.shape, shard.communicator
        total, memory, context = k.zeros(shape, "float32", like), _feedback(shard), communicator.context
        own = None if memory is None or not of_gradients else _recalled(memory, name)
        if own is not None:
            # Under a hierarchy only the leaders of nodes have residuals, which are averaged over nodes.
            total = k.combine(size / context.size if shard.hierarchical else 1.0, own, 1.0, total)
        of_means = None if memory is None else communicator.mean_compression
        if of_means is not None:
            communicator.rescale_mean_memory(context.loss_scale)
            own = _recalled(of_means.memory, name)
            if own is not None and communicator.piecewise:  # this rank's shard of the mean
                own = join_shards([own if rank == context.rank else None for rank in range(context.size)], shape)
            if own is not None:  # one rank alone has it
                total = k.combine(float(size), own, 1.0, total)
        parts.append(total)
    return parts[0] if shards[0].axis is None else k.concat(parts, shards[0].axis)


def _recalled(memory: Memory, name: str) -> Tensor | None:
    """Return what a memory would add to a variable's next gradient, or to its next mean; None if that is nothing."""
    if isinstance(memory, RowMemory):
        return memory.state[name] * memory.inner.beta if name in memory.state else None
    factor, residual, _ = memory.recall(name) if isinstance(memory, ErrorFeedback) else (1.0, None, 1.0)
    return None if residual is None else residual * factor


def _rows_of(mean: Tensor) -> SparseRows:
    """Return the rows of a mean that are not zero; NaN is no row of its own."""
    k = kernels_of(mean)
    rows, _ = k.distinct(k.above(k.flat(mean), 0.0) // max(1, math.prod(mean.shape[1:])))
    return SparseRows(k.take_rows(mean, rows), rows)
