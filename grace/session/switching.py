"""Change of the plan during training: a new runner takes over the state of the former one.

All ranks switch after the same step. Memories are carried over by the rules of checkpoints
(:mod:`grace.session.checkpoint`, "keep"). Residuals that the new plan has no memory for are not lost: their mean over
ranks is added to the means of the next exchange.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from grace.core.communicator import Communicator
from grace.core.compressor import Tensor
from grace.core.memory import ErrorFeedback
from grace.kernels import kernels_of
from grace.session import checkpoint
from grace.session.exchange_plan import ExchangePlan
from grace.session.reshard import without_parameters
from grace.session.setup import build_step_runner
from grace.session.sharding import Shard, make_buckets
from grace.session.state_schema import SavedState
from grace.session.step_runner import StepRunner


def switch_plan(
    former: StepRunner,
    plan: ExchangePlan,
    like: Callable[[str], Tensor],
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
        loaded = checkpoint.Loaded(None)
        try:
            check_plan(made)
            loaded = checkpoint.prepare(made, saved, "keep", lambda saved: inside(made, saved))
        except Exception as raised:
            error = raised
        checkpoint.compare(former.backend, saved, "keep", error)
        # Memories that do not fit are expected: their residuals go into carried_over instead of a warning.
        loaded.dropped = []
        # Collectives: only after all ranks have agreed to switch.
        carried_over = inside(made, _lost_residuals(former, made, like))
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


def _lost_residuals(former: StepRunner, made: StepRunner, like: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Return the means over ranks of residuals that the new plan has no memory for, by its shards."""
    lost: dict[str, list[Shard]] = {}
    for name, parts in former.shards_of.items():
        before = {without_parameters(memory.spec) for memory in map(_feedback, parts) if memory is not None}
        after = {without_parameters(shard.communicator.memory.spec) for shard in made.shards_of[name]}
        if before and before != after and not parts[0].variable.sparse:  # checkpoints carry all parts' or none
            own = [shard for shard in made.shards_of[name] if shard.outer is None]
            lost.update({name: own} if own else {})
    whole = [dataclasses.replace(former.shards_of[name][0].whole, dtype="float32") for name in lost]
    found: dict[str, Tensor] = {}
    for bucket in make_buckets([Shard(variable, variable, made.averaging) for variable in whole]):
        values = [_residual(former.shards_of[name], like(name)) for name in bucket.names]
        found.update(zip(bucket.names, made.mean(bucket, values), strict=True))
    return {shard.variable.name: shard.slice_of(found[name]) for name, shards in lost.items() for shard in shards}


def _feedback(shard: Shard) -> ErrorFeedback | None:
    memory = shard.communicator.memory
    # what is left of drifts is no part of a gradient
    return memory if isinstance(memory, ErrorFeedback) and shard.outer is None else None


def _residual(shards: Sequence[Shard], like: Tensor) -> Tensor:
    """Return the residual that a whole variable's next compensation would add; zeros if there is none."""
    k = kernels_of(like)
    parts = []
    for shard in shards:
        memory = _feedback(shard)
        factor, residual, _ = (1.0, None, 1.0) if memory is None else memory.recall(shard.variable.name)
        empty = k.zeros(shard.variable.shape, "float32", like)
        parts.append(empty if residual is None else residual * factor)
    return parts[0] if shards[0].axis is None else k.concat(parts, shards[0].axis)
