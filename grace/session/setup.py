"""Setup of a step runner: each rank checks its variables and choices, then all compare them; if one fails, all
raise."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from grace.core.backend import Backend
from grace.core.communicator import Communicator
from grace.core.component import ComponentOwner
from grace.core.context import Context
from grace.core.transactional_dict import StatefulComponent
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.session.agreement import compare_facts
from grace.session.exchange_plan import ExchangePlan
from grace.session.hyperparameters import momentum_owners
from grace.session.settings import checked_seed
from grace.session.step_runner import StepRunner


def build_step_runner(
    variables: Callable[[], Sequence[Variable]],
    choose: Callable[[], ExchangePlan],
    backend: Backend,
    context: Context,
    settings: Sequence[tuple[str, str]] = (),
    check: Callable[[Communicator], None] = lambda communicator: None,
    elastic: bool = False,
    hierarchical: bool = False,
    compress_after: int = 0,
) -> StepRunner:
    """Build a runner: check everything on this rank, then compare it with the others. Either all ranks succeed or none.

    Args:
        variables: returns the variables, or raises an error.
        choose: returns the plan of the user's choice, or raises an error.
        backend: the ranks.
        context: the context that all components share.
        settings: further (what, value) facts that must be equal on all ranks.
        check: raises an error if a communicator does not suit the run.
        elastic: True if ranks may join and leave: no collective runs now, and the caller runs the runner's ``agree()``
            later.
        hierarchical: True to reduce over the ranks of a node first.
        compress_after: number of first steps that are exchanged uncompressed, unless the plan sets it.

    Raises:
        ConfigError: choices or variables of this rank are wrong.
        RankError: choices or variables of another rank are wrong, or they differ between ranks.
    """
    owner = ComponentOwner()
    runner: StepRunner | None = None
    plan: ExchangePlan | None = None
    found: list[Variable] = []
    error: Exception | None = None
    # An error is kept until a collective below, in which the other ranks hear of it.
    try:
        plan = choose()
        found = list(variables())
    except Exception as raised:
        error = raised
    if plan is not None:
        # A collective: every rank runs it, also with an error, so that no rank waits in vain.
        found = plan.broadcast_plan(found, backend, error, elastic)
    try:
        if error is not None or plan is None:
            raise error or AssertionError
        context.seed = checked_seed(context.seed)
        # An elastic run's size may change, and under a hierarchy not all ranks exchange: assume nothing of it.
        shards = plan.shards(found, 1 if elastic or hierarchical else backend.size)
        if hierarchical:
            shards = [replace(shard, hierarchical=True) for shard in shards]
        communicators = list({id(shard.communicator): shard.communicator for shard in shards}.values())
        for communicator in communicators:
            communicator.check_world(backend.size)
        owner.claim(communicators)  # those of another run must not be changed
        for communicator in communicators:
            _set_compress_after(communicator, compress_after)
            check(communicator)
        runner = StepRunner(found, shards, backend, context, plan.name, owner)
        for communicator in runner.communicators:
            for part in communicator.named_components().values():
                if isinstance(part, StatefulComponent):
                    part.record_attributes()
        _check_elastic_and_hierarchical(runner, elastic)
        runner.settings = list(settings)
        runner.compress_after = compress_after
        runner.all_hierarchical = hierarchical
    except Exception as raised:
        if runner is not None:
            runner.close()
        owner.release()
        if not elastic:
            compare_facts(backend, [], raised)  # the other ranks wait here for this one: pass them its error
        raise
    if not elastic:
        try:
            runner.agree()
        except BaseException:
            runner.close()
            raise
    return runner


def _set_compress_after(communicator: Communicator, compress_after: int) -> None:
    """Set the number of uncompressed steps of a communicator, unless its plan has set it.

    Raises:
        ConfigError: a part applies momentum, which the uncompressed steps would lack.
    """
    exact = communicator.compressor.traits.exact and not communicator.memory.stateful
    communicator.compress_after = 0 if exact else communicator.compress_after or compress_after
    parts = momentum_owners([communicator]) if communicator.compress_after else []
    if parts:
        raise ConfigError(
            f"compress_after={communicator.compress_after}: the {parts[0].kind} {parts[0].spec} replaces the "
            "optimizer's momentum, which the steps before would not have. Leave compress_after out, or choose another "
            "method"
        )


def _check_elastic_and_hierarchical(runner: StepRunner, elastic: bool) -> None:
    """Refuse delayed means, and hierarchical reduction, in runs that do not support them."""
    delayed = [shard for shard in runner.shards.values() if shard.communicator.delayed]
    delayed = [shard for shard in delayed if elastic or shard.hierarchical]
    if delayed:
        where = "in elastic mode" if elastic else "with hierarchical reduction"
        what = delayed[0].communicator.choice
        raise ConfigError(f"{what} applies means in later steps, which is not possible {where}")
    if elastic and runner.hierarchical:
        raise ConfigError("hierarchical reduction is not possible in elastic mode")
    if runner.hierarchical and runner.backend.pairs_by_name:
        some = runner.hierarchical
        who = f"variable {some[0]!r}: " if isinstance(some, list) else ""
        raise ConfigError(
            f"{who}hierarchical reduction is not for Horovod, whose ranks exchange in any order. Set "
            "HOROVOD_HIERARCHICAL_ALLREDUCE=1 for sums, or use torch.distributed or MPI"
        )
