"""Setting up: each rank checks what it was given, and either all of them start or none."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from grace.core.backend import Backend
from grace.core.communicator import Communicator
from grace.core.context import Context
from grace.core.transactional_dict import StatefulComponent
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.session.agreement import agree
from grace.session.momentum import owners
from grace.session.plan import ExchangePlan
from grace.session.step_runner import StepRunner


def build_step_runner(
    variables: Callable[[], Sequence[Variable]],
    choose: Callable[[], ExchangePlan],
    backend: Backend,
    context: Context,
    settings: Sequence[tuple[str, str]] = (),
    check: Callable[[Communicator], None] = lambda communicator: None,
    later: bool = False,
    hierarchical: bool = False,
    compress_after: int = 0,
) -> StepRunner:
    """Check everything on this rank, then compare it with the others: either every rank goes on or none.

    Args:
        variables: lists the variables, or raises what is wrong with them.
        choose: what the user chose, or raises why it cannot be.
        check: raises if this communicator does not suit the run.
        later: no collective now; the ranks compare when somebody calls the runner's ``agree()``.
        hierarchical: the ranks of a node reduce among themselves first.
        compress_after: steps that are exchanged uncompressed first, where the plan does not say it.
        settings: further (what, value) facts that all ranks must share.

    Raises:
        ConfigError: this rank's choices or variables are wrong.
        RankError: another rank's are, or they differ.
    """
    runner: StepRunner | None = None
    plan: ExchangePlan | None = None
    found: list[Variable] = []
    error: Exception | None = None
    try:
        plan = choose()
        found = list(variables())
    except Exception as raised:
        error = raised
    if plan is not None:
        found = plan.hand_out(found, backend, error, later)
    try:
        if error is not None or plan is None:
            raise error or AssertionError
        shards = plan.shards(found, 1 if later or hierarchical else backend.size)
        if hierarchical:
            shards = [replace(shard, hierarchical=True) for shard in shards]
        for communicator in {id(shard.communicator): shard.communicator for shard in shards}.values():
            communicator.check_world(backend.size)
            _begin_after(communicator, compress_after)
            check(communicator)
        runner = StepRunner(found, shards, backend, context, plan.name)
        runner.claim_components()
        for communicator in runner.communicators:
            for part in communicator.named_components().values():
                if isinstance(part, StatefulComponent):
                    part.record_attributes()
        _check_delays(runner, later)
        runner.settings, runner.compress_after = list(settings), compress_after
    except Exception as raised:
        if runner is not None:
            runner.close()
        if not later:
            agree(backend, [], raised)
        raise
    if not later:
        try:
            runner.agree()
        except BaseException:
            runner.close()
            raise
    return runner


def _begin_after(communicator: Communicator, compress_after: int) -> None:
    """Let a communicator compress after so many steps, unless its plan has said after how many.

    Raises:
        ConfigError: it applies momentum, which the optimizer then does not.
    """
    exact = communicator.compressor.traits.exact and not communicator.memory.stateful
    communicator.compress_after = 0 if exact else communicator.compress_after or compress_after
    parts = owners([communicator]) if communicator.compress_after else []
    if parts:
        raise ConfigError(
            f"compress_after={communicator.compress_after}: the {parts[0].kind} {parts[0].spec} replaces the "
            "optimizer's momentum, which the steps before would not have. Leave compress_after out, or choose another "
            "method"
        )


def _check_delays(runner: StepRunner, later: bool) -> None:
    """Refuse what cannot be delayed."""
    delayed = [shard for shard in runner.shards.values() if shard.communicator.delayed]
    delayed = [shard for shard in delayed if later or shard.hierarchical]
    if delayed:
        where = "in elastic mode" if later else "with hierarchical reduction"
        what = delayed[0].communicator.choice
        raise ConfigError(f"{what} applies means in later steps, which is not possible {where}")
    if later and runner.hierarchical:
        raise ConfigError("hierarchical reduction is not possible in elastic mode")
    if runner.hierarchical and runner.backend.pairs_by_name:
        some = runner.hierarchical
        who = f"variable {some[0]!r}: " if isinstance(some, list) else ""
        raise ConfigError(
            f"{who}hierarchical reduction is not for Horovod, whose ranks exchange in any order. Set "
            "HOROVOD_HIERARCHICAL_ALLREDUCE=1 for sums, or use torch.distributed or MPI"
        )
