"""Another plan in the middle of training: a new runner goes on from what the former one remembers.

All ranks switch after the same step. Memories go along by the rules of checkpoints (:mod:`grace.session.checkpoint`,
"keep"). What a residual holds that the new plan has no place for is not lost: its mean over ranks is added to what the
next exchange brings.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from grace.core.communicator import Communicator
from grace.core.memory import ErrorFeedback
from grace.exchange.sparse_rows import add
from grace.kernels import kernels_of
from grace.session import checkpoint
from grace.session.plan import ExchangePlan
from grace.session.reshard import bare
from grace.session.setup import build_step_runner
from grace.session.sharding import Shard, bucketed
from grace.session.step_runner import StepRunner

FOLLOWED = ("hyperparameters", "planned", "follows_scaler", "computing", "told", "traffic")
"""What a runner takes over from the former one, beside what checkpoints hold."""


def switched(
    former: StepRunner,
    plan: ExchangePlan,
    like: Callable[[str], Any],
    check: Callable[[Communicator], None] = lambda communicator: None,
    check_plan: Callable[[StepRunner], None] = lambda made: None,
    inside: Callable[[StepRunner, Any], Any] = lambda made, saved: saved,
) -> StepRunner:
    """The runner of the plan, for the same variables and ranks; the former one is closed. Every rank must call it,
    between two steps.

    Args:
        plan: rank 0's counts, where it is a strategy.
        like: a tensor like a variable's gradient, by name.
        check, check_plan: raise if a communicator, or what is made of the plan, does not suit the run.
        inside: what the former one remembers, as the new one computes with it.

    Raises:
        ConfigError: the plan does not suit this model or run; the former runner goes on as if nothing had been.
        ExchangeError: a step is under way.
        RankError: another rank refuses it.
    """
    saved = checkpoint.save(former)
    made = replaced(former, plan, check)
    try:
        error = None
        loaded = checkpoint.Loaded(None)
        try:
            check_plan(made)
            loaded = checkpoint.prepare(made, saved, "keep", lambda saved: inside(made, saved))
        except Exception as raised:
            error = raised
        checkpoint.compare(former.backend, saved, "keep", error)
        loaded.dropped = []
        owed = inside(made, _left(former, made, like, made.mean))
    except BaseException:
        made.close()
        raise
    checkpoint.apply(made, loaded)
    for name, value in owed.items():
        made.owed[name] = add(made.owed[name], value) if name in made.owed else value
    former.close()
    return made


def replaced(former: StepRunner, plan: ExchangePlan, check: Callable[[Communicator], None]) -> StepRunner:
    """The runner of a plan that remembers nothing, beside the former one: for a checkpoint to be loaded into. Every
    rank must call it, between two steps; the caller closes one of the two.

    Raises:
        ConfigError, RankError: as :func:`switched`.
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
    for name in FOLLOWED:
        setattr(made, name, getattr(former, name))
    return made


def _left(
    former: StepRunner, made: StepRunner, like: Callable[[str], Any], mean: Callable[..., list[Any]]
) -> dict[str, Any]:
    """Means over ranks of what residuals hold that the new plan has no place for, by its shards."""
    lost: dict[str, list[Shard]] = {}
    for name, parts in former.shards_of.items():
        before = {bare(memory.spec) for memory in map(_feedback, parts) if memory is not None}
        after = {bare(shard.communicator.memory.spec) for shard in made.shards_of[name]}
        if before and before != after and not parts[0].variable.sparse:  # checkpoints carry all parts' or none
            own = [shard for shard in made.shards_of[name] if not shard.period]
            lost.update({name: own} if own else {})
    whole = [dataclasses.replace(former.shards_of[name][0].whole, dtype="float32") for name in lost]
    found: dict[str, Any] = {}
    for bucket in bucketed([Shard(variable, variable, made.averaging) for variable in whole]):
        values = [_residual(former.shards_of[name], like(name)) for name in bucket.names]
        means = mean(dataclasses.replace(bucket, communicator=made.averaging), values)
        found.update(zip(bucket.names, means, strict=True))
    return {shard.variable.name: shard.of(found[name]) for name, shards in lost.items() for shard in shards}


def _feedback(shard: Shard) -> ErrorFeedback | None:
    memory = shard.communicator.memory
    return memory if isinstance(memory, ErrorFeedback) else None


def _residual(shards: Sequence[Shard], like: Any) -> Any:
    """What a variable's next compensation would add, of a whole variable; zeros where nothing is kept."""
    k = kernels_of(like)
    parts = []
    for shard in shards:
        memory = _feedback(shard)
        factor, residual, _ = (1.0, None, 1.0) if memory is None else memory.recall(shard.variable.name)
        empty = k.zeros(shard.variable.shape, "float32", like)
        parts.append(empty if residual is None else residual * factor)
    return parts[0] if shards[0].axis is None else k.concat(parts, shards[0].axis)
