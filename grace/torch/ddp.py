"""Compressed exchange as a communication hook of DistributedDataParallel."""

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from grace.backends.runtime import check_group
from grace.backends.torch_distributed import TorchBackend
from grace.core.communicator import Communicator, CommunicatorArg, CompressorArg, MemoryArg
from grace.core.context import Context
from grace.core.variable import Variable
from grace.core.waits import Wait, waits
from grace.errors import ConfigError, ExchangeError, PayloadError, StepError
from grace.exchange.bucket import Bucket, Contribution, Outcome, Traffic
from grace.exchange.header import digest, resolve_headers
from grace.exchange.round_trip import AnyRoundTrip, advance_all
from grace.exchange.tracing import recorder
from grace.session import checkpoint
from grace.session.agreement import gather_or_raise
from grace.session.bucketing import cut_into_buckets
from grace.session.hierarchy import advise_hierarchy
from grace.session.hyperparameters import hyperparameter_facts, momentum_owners
from grace.session.metrics import metrics
from grace.session.settings import check_integer
from grace.session.setup import build_step_runner
from grace.session.sharding import Shard
from grace.session.state_schema import SavedState
from grace.session.step_runner import StepRunner
from grace.session.versions import public
from grace.strategy.choices import Choices
from grace.strategy.execution import StrategyArg
from grace.torch.ddp_buckets import (
    bucket_gradients,
    bucket_limits,
    check_all_reduced,
    check_dense,
    check_frozen,
    frozen_parameters,
    gradient_to_send,
    trainable_parameters,
)
from grace.torch.fsdp_layout import subscribe_to_steps
from grace.torch.gradient_uses import GradientUses
from grace.torch.parameters import (
    check_momentum,
    check_not_delayed,
    check_optimizer,
    hyperparameters,
    make_variables,
    scaler_enabled,
)
from grace.torch.pickling import InertCopies, InertState
from grace.torch.python_reducer import PythonReducer
from grace.torch.state_dict import check_not_saved_directly, move_to_devices, pack_state, unpack_state
from grace.torch.step_hooks import around_steps
from grace.torch.wrappers import check_no_join, check_not_sharded, check_unwrapped, unwrap_compiled


class EarlyState(InertCopies):
    """Stand-in for a hook's state, which a framework registers before ``register_ddp_hook`` is called for the model."""

    state: "DDPState | None" = None


def grace_hook(state, bucket):  # DDP checks the annotations, which must be real types or absent
    """Exchange a bucket of DistributedDataParallel. This is its communication hook, for a state or a stand-in.

    Raises:
        ConfigError: the stand-in was never given a state.
    """
    if isinstance(state, EarlyState):
        if state.state is None:
            raise ConfigError(
                "the model has Grace's hook without its state: call grace.torch.register_ddp_hook for it (under "
                "Lightning, give the Trainer callbacks=[callback] as well as the hook)"
            )
        state = state.state
    if isinstance(bucket, tuple):  # from the Python reducer, whose gradients the parameters' hooks exchange
        return None
    return state.exchange(bucket)


def check_no_hook(model: DistributedDataParallel) -> None:
    """Refuse a model that has a communication hook, of which DDP takes one.

    Raises:
        ConfigError: the model has a hook, of Grace's or another one.
    """
    for hook, state in model._comm_hooks:
        waits = isinstance(state, EarlyState) and (state.state is None or state.state.closed)
        if not waits and not isinstance(state, InertState):  # torch copies the list, and no hooks
            name = "Grace's hook" if hook is grace_hook else f"the hook {getattr(hook, '__name__', hook)}"
            raise ConfigError(
                f"the model has {name} already, and DistributedDataParallel takes one communication hook. "
                "Register Grace's alone, once; for other choices, call close() of the former state, and wrap "
                "model.module anew"
            )


def fill_early_states(model: DistributedDataParallel, state: "DDPState") -> bool:
    """Give the state to the stand-ins that the model was registered with; return True if there are any."""
    stand_ins = [hook_state for _, hook_state in model._comm_hooks if isinstance(hook_state, EarlyState)]
    for stand_in in stand_ins:
        stand_in.state = state
    return bool(stand_ins)


class BucketTrips(NamedTuple):
    """The round trips of one bucket of DDP's.

    Attributes:
        views: views of the bucket's gradients, by variable, which the means are written to.
        buffer: the bucket's buffer.
        wait_key: the key of its entry in ``waits``.
    """

    trips: list[AnyRoundTrip]
    views: dict[str, torch.Tensor]
    buffer: torch.Tensor
    wait_key: tuple[int, int]


def _future(buffer: torch.Tensor) -> torch.futures.Future:
    """Return a future that may hold a tensor of this one's device."""
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])


class DDPState(InertCopies):
    """The state of the hook between steps, keyed by the parameters' names, and its traffic.

    DDP passes buckets to the hook, and rebuilds them after the first step. The compressed and the dense variables of a
    bucket are exchanged in as many collectives as ``bucket_limits`` allows, so that encoded parts travel while the rest
    is encoded. All ranks start the collectives in the same order. Reductions that depend on each other (PowerSGD's) are
    awaited inside the hook, except for the last one. Under ``no_sync()`` DDP does not call the hook, and nothing is
    exchanged.

    A step ends otherwise than under ``DistributedOptimizer``: the callback of a future writes the means, and no code of
    ours runs after the last one. So headers are read, and state is committed, when the next step begins
    (:meth:`close_step`); until then an overflow is a NaN in the means. ``GradientUses`` finds means that no ``step()``
    used.
    """

    registered_by = "register_ddp_hook"
    shared = True
    """True if gradients share the memory that means are written to."""
    model: weakref.ref[DistributedDataParallel]
    """The model. DDP's C++ reducer refers to the state, a cycle that Python could not collect."""
    frozen: Mapping[str, torch.nn.Parameter] = {}
    """Parameters of a DistributedDataParallel model that required no gradients when the hook was registered."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        runner: StepRunner,
        optimizer: Any,
        grad_scaler: torch.amp.GradScaler | None,
        bucket_bytes: int | None,
    ):
        self.runner = runner
        self.optimizer = optimizer
        self.grad_scaler = grad_scaler
        self.limits = bucket_limits(runner, bucket_bytes)
        runner.callbacks.follows_scaler = partial(scaler_enabled, grad_scaler)
        self.names = {p: name for name, p in parameters.items()}
        self.plans: dict[tuple[bool, tuple[str, ...]], list[Bucket]] = {}
        self.trips: list[AnyRoundTrip] = []
        """Round trips of this step; their headers hold the ranks' step stamps."""
        self.begun: list[tuple[torch.futures.Future, BucketTrips]] = []
        """Buckets of this step that :meth:`_finish_begun` finishes, if nodes reduce first."""
        self.changes = -1
        """Sum of the parameters' version counters at the last step; -1 before the first."""
        self.outcomes: list[Outcome] = []
        self.momenta = momentum_owners(runner.communicators)
        self.open = False
        """True if gradients were exchanged whose changes to state are not committed yet."""
        self.closed = False
        self.watched: list[RemovableHandle] = []
        """Handles of the parameters' hooks that record arriving gradients; empty with the Python reducer."""
        self.uses = GradientUses(parameters, optimizer, self.registered_by)
        self.python_reducer: PythonReducer | None = None
        """Exchange of gradients one by one, where there are no buckets of DDP's."""
        self.unhook = subscribe_to_steps(self, parameters.values())
        me = weakref.proxy(self)
        # A compiled graph may call the hook, which cannot be traced; the state must not refer to itself.
        self.exchange = torch.compiler.disable(lambda bucket: me.exchange_bucket(bucket))
        self.hooks = [] if optimizer is None else around_steps(optimizer, None, self._after_step)
        self.hyperparameters = () if optimizer is None else hyperparameters(optimizer)
        runner.callbacks.hyperparameters = self._describe_hyperparameters
        runner.context.lr = self.lr

    def _compared_settings(self) -> object:
        """Return the settings of the last step, whose digest the ranks compare."""
        return self.hyperparameters

    def _describe_hyperparameters(self) -> list[tuple[str, str]]:
        """Return the hyperparameters of the last step, as facts for the ranks to compare."""
        return hyperparameter_facts(type(self.optimizer).__name__, self.hyperparameters)

    @property
    def traffic(self) -> Traffic:
        """The traffic counted so far. Read it between steps."""
        if not self.in_progress:
            self.close_step()
        return self.runner.traffic

    def metrics(self) -> dict[str, float]:
        """Return numbers of this rank for a logger, since the last call; see :mod:`grace.session.metrics`. No
        collective.

        DDP waits for the collectives that Grace has begun, and not Grace: ``seconds_wait`` is NaN.
        """
        return metrics(self.runner, self.traffic, waits=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that this rank's memories and compressors hold.

        Raises:
            ExchangeError: an optimizer may still use the gradients that were exchanged.
        """
        self._close_settled_step()
        check_not_saved_directly(self.runner, "the hook's state")
        checkpoint.warn_own_state(self.runner, "state.state_dict()", "state.full_state_dict()")
        return checkpoint.save(self.runner)

    def full_state_dict(self, packed: bool = False) -> SavedState | bytes:
        """Return the state of all ranks' memories and compressors. Every rank must call it. If ``packed``, the result
        is one value, bytes, which ``torch.distributed.checkpoint`` loads whole."""
        saved = checkpoint.gather(self.runner, self._close_settled_step)
        return pack_state(saved) if packed else saved

    def load_state_dict(self, state: SavedState | bytes | None, memory: str = "strict") -> None:
        """Restore a saved state; :mod:`grace.session.checkpoint` documents the rules and the values of ``memory``.
        Every rank must call it."""
        parameters = {name: p for p, name in self.names.items()}

        def read() -> SavedState | None:
            """Return the state to load, unpacked."""
            self._close_settled_step()
            return unpack_state(state)

        checkpoint.load(self.runner, read, memory, lambda saved: move_to_devices(saved, parameters))

    def _close_settled_step(self) -> None:
        """Commit the last step, so that its state can be saved or loaded; refuse in the middle of a step."""
        name = self.uses.undecided
        shape = name and tuple(self.uses.parameters[name].shape)  # two models may have parameters of one name
        checkpoint.check_settled(self, name and f": no optimizer has used the gradient of {name!r}, of shape {shape}")
        self.close_step()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer is about to use the gradients. Called before its ``step()``. With the Python
        reducer, the next gradient then begins another step."""
        self.uses.begin_step(optimizer)
        if self.python_reducer is not None:
            self.python_reducer.begin_step()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer has used the gradients. Called after its ``step()``."""
        self.uses.end_step(optimizer)

    def _after_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object], inner: bool
    ) -> None:
        """Update the counters and the digest of hyperparameters that the next exchange compares."""
        if inner:  # a step() that calls super().step() is one step
            return
        context = self.runner.context
        context.updates += 1
        self.hyperparameters = hyperparameters(self.optimizer)
        context.hyperparameter_digest = digest(self._compared_settings())

    @property
    def context(self) -> Context:
        """The exchange's context."""
        return self.runner.context

    def _count_updates(self) -> None:
        """Count an update if parameters changed since the last step, by torch's version counters. Needed where the
        optimizer is not known."""
        changes = sum(p._version for p in self.names)
        if self.optimizer is None and self.changes not in (-1, changes):
            self.runner.context.updates += 1
        self.changes = changes

    @property
    def in_progress(self) -> bool:
        """True if a step is in progress that may still be dropped: no optimizer has used its gradients yet."""
        if self.runner.in_progress or not self.open or not self.runner.stateful:
            return self.runner.in_progress
        return bool(self.uses.undecided) and not self._overflowed()

    def _overflowed(self) -> bool:
        """Return True if a gradient of the step in progress overflowed on any rank."""
        resolve_headers(self.trips)
        return any([outcome.overflow for outcome in self.outcomes])

    def close(self) -> None:
        """End the exchange. Compressors and memories given by you may serve another one afterwards. Every rank must
        call it.

        DDP cannot remove a hook: from now on the model raises in backward. Delete it, and wrap ``model.module`` anew.
        """
        self.close_step()
        self.closed = True
        self.unhook()
        for hook in [*self.watched, *self.hooks]:  # not DDP's own, which cannot be removed
            hook.remove()
        self.runner.close()

    def close_step(self) -> None:
        """Commit the last step, whose futures DDP has awaited at the end of backward. Changes by gradients that were
        discarded are rolled back.

        Raises:
            PayloadError: a rank could not decode a payload, as headers say that were not read before.
            StepError: the ranks' optimizers had different hyperparameters.
        """
        if not self.open:
            return
        outcomes, self.outcomes = self.outcomes, []
        trips, self.trips = self.trips, []
        self.open = False
        try:
            resolve_headers(trips)
            self.runner.check_step_stamps(trips, self.runner.channel)
        except (PayloadError, StepError):
            self._discard_step()
            raise
        nothing_kept = not self._has_state() or any([outcome.overflow for outcome in outcomes])
        discarded = self.uses.end_exchange(nothing_kept)
        for outcome in outcomes if discarded else ():
            if self.runner.shards[outcome.variable.name].whole.name in discarded:
                outcome.value = None  # end_step() then rolls back what the gradient changed
        self.runner.commit_or_roll_back(outcomes)

    def _missing_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> set[str]:
        """Return the names of parameters for which this rank has no gradient. DDP passes zeros for them, or the tensor
        that an earlier step left in ``p.grad``."""
        model = self.model()
        assert model is not None  # whose backward pass calls this
        skips = model.find_unused_parameters or model.static_graph  # otherwise a backward pass reaches all parameters
        arrived = self.uses.arrived
        names = ((self.names[p], p) for p in parameters) if self.watched else ()
        return {name for name, p in names if p.grad is None or (skips and name not in arrived)}

    def _discard_step(self) -> None:
        """Discard all results of this step."""
        self.runner.abort()
        self.uses.end_exchange(nothing_kept=True)
        self.outcomes = []
        self.trips = []
        self.begun = []
        self.open = False

    def lr(self, name: str) -> float:
        """Return the learning rate of a variable, for memories that follow it."""
        whole = self.runner.shards[name].whole.name
        for group in self.optimizer.param_groups:
            if any(self.names.get(p) == whole for p in group["params"]):
                return float(group["lr"])
        raise ConfigError(f"the optimizer does not hold the parameter {whole!r}")

    def buckets(self, names: tuple[str, ...], first: bool) -> list[Bucket]:
        """Return Grace's buckets for one of DDP's: compressed variables, and dense ones by dtype. A bucket of DDP's
        first one carries the ranks' step stamps."""
        if (first, names) not in self.plans:  # DDP rebuilds its buckets after the first step
            kinds: dict[tuple[int, str], list[Shard]] = {}
            for name in names:
                for shard in self.runner.shards_of[name]:
                    kinds.setdefault((id(shard.communicator), shard.variable.dtype), []).append(shard)
            buckets: list[Bucket] = []
            for shards in kinds.values():
                # the order of buckets is the same on all ranks, so that their collectives pair
                for part in cut_into_buckets(shards, self.limits[id(shards[0].communicator)], first=False):
                    variables = [shard.variable for shard in part]
                    buckets.append(
                        Bucket(len(buckets), part[0].communicator, variables, carries_stamps=first and not buckets)
                    )
            self.plans[first, names] = buckets
        return [bucket.at_step(self.runner.context.step) for bucket in self.plans[first, names]]

    def _begin_step(self) -> None:
        """Begin a step, before its first gradient is exchanged."""
        check_momentum(self.momenta, self.optimizer, later=True)  # a schedule may have switched it on
        self._count_updates()
        self.open = True
        if self.grad_scaler is not None and self.runner.callbacks.follows_scaler():
            self.runner.rescale(self.grad_scaler.get_scale())

    def _has_state(self) -> bool:
        """Return True if state is kept between steps, so that an overflow must be found wherever state would keep
        it."""
        return self.runner.stateful

    def _start_trips(
        self, gradients: Mapping[str, torch.Tensor], first: bool, missing: Collection[str] = ()
    ) -> tuple[list[AnyRoundTrip], dict[str, torch.Tensor]]:
        """Start the round trips of gradients that the framework hands over together.

        Args:
            gradients: the gradients by parameter name, as views of the framework's buffer.
            first: True if they are the first of a step.
            missing: names of parameters for which this rank has no gradient.

        Returns:
            the round trips, and the views of their gradients, by variable.
        """
        if recorder.run is not None:
            recorder.run.gradient()
        shards = [shard for name in gradients for shard in self.runner.shards_of[name]]
        views = {shard.variable.name: shard.slice_of(gradients[shard.whole.name]) for shard in shards}
        absent = {shard.variable.name for shard in shards if shard.whole.name in missing}
        finds_overflow = self._has_state()
        trips: list[AnyRoundTrip] = []
        for bucket in self.buckets(tuple(gradients), first):
            sent = [gradient_to_send(views[name], name in absent) for name in bucket.names]
            present = [name not in absent for name in bucket.names]
            trip = self.runner.make_round_trip(Contribution(bucket, sent, present, finds_overflow, self.runner.traffic))
            trip.start()
            # Reading headers would wait for the device: they are read when the step is closed.
            trip.defers_headers = trip.headers_after_use = True
            trips.append(trip)
        return trips, views

    @torch.no_grad()
    def exchange_bucket(self, grad_bucket: Any) -> torch.futures.Future:
        """Start the exchange of a bucket of DDP's; return the future of its buffer. This is the work of the
        communication hook."""
        if self.closed:
            raise ExchangeError(
                "the state of this DistributedDataParallel model's hook was closed, and DDP cannot take a hook off: "
                "delete the model and make a new DistributedDataParallel(model.module)"
            )
        if grad_bucket.index() == 0:  # DDP's first bucket begins a step, and its futures of the last step are done
            model = self.model()
            assert model is not None  # whose backward pass calls this
            check_no_join(model)
            check_frozen(self.frozen)
            self.close_step()
            self._begin_step()
        names = tuple(self.names[p] for p in grad_bucket.parameters())
        gradients = dict(zip(names, bucket_gradients(grad_bucket), strict=True))
        missing = self._missing_gradients(grad_bucket.parameters())
        self.uses.record_exchange(names)
        if grad_bucket.is_last():
            self.uses.arrived.clear()
        trips, views = self._start_trips(gradients, grad_bucket.index() == 0, missing)
        exchange = BucketTrips(trips, views, grad_bucket.buffer(), (id(self), grad_bucket.index()))
        # Messages say where this rank waits until the futures are done.
        waits[exchange.wait_key] = Wait(trips[0].describe_wait)
        self.trips += trips
        if self.runner.hierarchy is not None:
            future = _future(exchange.buffer)
            self.begun.append((future, exchange))
            if grad_bucket.is_last():
                self._finish_begun()
            return future
        for trip in trips:
            while trip.advance():  # legs that need the result of an earlier one wait for it here
                pass
        works: list[dist.Work] = [work for trip in trips for work in trip.engine_works()]
        complete = partial(self._complete_bucket, exchange)
        if not works:
            done = _future(exchange.buffer)
            done.set_result(None)
            return done.then(complete)
        return torch.futures.collect_all([work.get_future() for work in works]).then(complete)

    def _finish_begun(self) -> None:
        """Finish the buckets of a step whose nodes reduce first, once the last one has begun, in their order: leaders
        hand on means in collectives, which no thread of the engine may start. Leaders exchange meanwhile."""
        begun = self.begun
        self.begun = []
        trips = [trip for _, exchange in begun for trip in exchange.trips]
        try:
            advance_all(trips)
            for future, exchange in begun:
                future.set_result(self._write_bucket(exchange))
        finally:
            for _, exchange in begun:
                waits.pop(exchange.wait_key, None)

    def _complete_bucket(self, exchange: BucketTrips, done: torch.futures.Future) -> torch.Tensor:
        """Write the means into a bucket of DDP's when its collectives are done, and return the bucket's buffer.

        Args:
            done: the future of the collectives.

        Raises:
            ExchangeError: a collective failed; or see :meth:`_write_bucket`.
        """
        try:
            done.value()  # raises if a collective failed: then nothing that arrived may be decoded
        except Exception as error:
            raise exchange.trips[0].failure(error) from error
        finally:  # failure() reads from `waits` where each rank is, this one too
            waits.pop(exchange.wait_key, None)
        return self._write_bucket(exchange)

    def _write_bucket(self, exchange: BucketTrips) -> torch.Tensor:
        """Write the means into a bucket of DDP's, and return the bucket's buffer.

        Raises:
            ExchangeError: a payload cannot be decoded.
            StepError: the ranks are at different steps.
        """
        try:
            for trip in exchange.trips:
                self._write(trip, exchange.views)
                if trip.header.out_of_step:
                    raise StepError(trip.header.out_of_step)
        except (PayloadError, StepError):
            self._discard_step()
            raise
        return exchange.buffer

    @torch.no_grad()
    def _write(self, trip: AnyRoundTrip, views: dict[str, torch.Tensor]) -> None:
        """Finish a round trip, and write its means into the views of the bucket."""
        exact = trip.communicator.compressor.traits.exact
        outs = []
        for variable in trip.bucket.variables:
            view = views[variable.name]
            # aggregates are float32, or exact in the gradient's dtype; all others are copied below
            outs.append(view if view.is_contiguous() and (exact or view.dtype == torch.float32) else None)
        # Without a hierarchy this runs in a callback of the last collective's future: there is nothing to wait for.
        outcomes = trip.finish(outs, wait=self.runner.hierarchy is not None)
        if self.runner.has_carried_over:
            # The framework may ignore a mean for a gradient that no rank has, so these wait for a later step.
            self.runner.add_carried_over([outcome for outcome in outcomes if outcome.value is not None])
        for outcome in outcomes:
            view = views[outcome.variable.name]
            if outcome.value is not None and outcome.value is not view:
                view.copy_(outcome.value)
            name = self.runner.shards[outcome.variable.name].whole.name
            self.uses.record_mean(name, outcome.value, self.shared and self.runner.stateful)
        self.outcomes += outcomes


class RoundsError(ConfigError):
    """Refusal of a strategy with outer rounds, which a hook cannot run."""


def build_hook_runner(
    list_variables: Callable[[], list[Variable]],
    choices: Choices,
    backend: TorchBackend,
    context: Context,
    facts: Sequence[tuple[str, str]],
    *,
    hook: str,
    wrapper: str,
    optimizer: torch.optim.Optimizer | None,
    grad_scaler: torch.amp.GradScaler | None,
    compress_after: int,
    hierarchical: bool = False,
    instead: str = "",
) -> StepRunner:
    """Build the runner of a hook, which exchanges gradients in every step.

    Args:
        list_variables: returns the variables, or raises an error.
        facts: further facts that must be equal on all ranks.
        hook: the hook, for messages.
        wrapper: name of the part of torch that makes the buckets, and waits for them.
        instead: advice for methods that apply means in later steps, for messages.

    Raises:
        ConfigError: the arguments cannot work; see :func:`build_step_runner`.
        RoundsError: the strategy lets ranks train variables alone between outer rounds.
    """

    def checked_variables() -> list[Variable]:
        """Check the arguments and list the variables to exchange."""
        check_integer("compress_after", compress_after, low=0)
        return list_variables()

    def check(communicator: Communicator) -> None:
        """Refuse a communicator that does not go with the optimizer or the hook."""
        check_optimizer(communicator, optimizer)
        check_not_delayed(communicator, f"{hook} cannot{instead}")

    compared = [
        ("torch", public(torch.__version__)),
        ("the buckets of", wrapper),
        *facts,
        ("compress_after", str(compress_after)),
        ("grad_scaler", "none" if grad_scaler is None else "given"),
        *([] if optimizer is None else hyperparameter_facts(type(optimizer).__name__, hyperparameters(optimizer))),
    ]
    runner = build_step_runner(
        checked_variables,
        lambda: choices.plan_for_hook(hook),
        backend,
        context,
        compared,
        check,
        hierarchical=hierarchical,
        compress_after=compress_after,
    )
    alone = [name for name, shard in runner.shards.items() if shard.period]
    if alone:
        runner.close()
        raise RoundsError(
            f"the strategy lets ranks train {alone[0]!r} alone between outer rounds (outer, none(period)), and {hook} "
            "exchanges in every step: give grace.DistributedOptimizer the plain model, or leave it out of the strategy"
        )
    recorder.note(waits=wrapper)  # traces: this part of torch waits for the exchange, and not Grace
    return runner


def check_holds_parameters(
    runner: StepRunner, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> None:
    """Refuse an optimizer that lacks parameters whose memories follow its learning rate. Every rank must call it.

    Raises:
        ConfigError: the optimizer of this rank lacks one; the runner is closed.
        RankError: that of another rank does.
    """
    follows = {shard.whole.name: shard for shard in runner.shards.values() if shard.communicator.memory.needs_lr}
    if not follows:
        return
    assert optimizer is not None  # check_optimizer() asks for it
    held = {p for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name in follows if parameters[name] not in held]
    error = None
    if missing:
        memory = follows[missing[0]].communicator.memory
        error = ConfigError(
            f"the optimizer does not hold the parameter {missing[0]!r}, whose memory {memory.spec} follows its "
            "learning rate: give one optimizer that holds all parameters that train, or choose the memory residual"
        )
    try:
        gather_or_raise(runner.backend, "the optimizers' parameters", None, error, "cannot exchange")
    except BaseException:
        runner.close()
        raise


def register_ddp_hook(
    model: DistributedDataParallel,
    compressor: CompressorArg | None = None,
    memory: MemoryArg | None = None,
    communicator: CommunicatorArg | None = None,
    *,
    strategy: StrategyArg | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    hierarchical: bool = False,
    compress_after: int = 0,
    seed: int = 0,
    bucket_bytes: int | None = None,
) -> DDPState:
    """Compress the gradient exchange of a DistributedDataParallel model.

    Args:
        model: the ``torch.nn.parallel.DistributedDataParallel`` model, before its first backward; compiled or not.
        compressor, memory, communicator, strategy, hierarchical: the same as for :func:`grace.DistributedOptimizer`,
            but not ``strategy="auto"``. With ``hierarchical`` a node's leader exchanges during backward, and hands the
            means on at its end.
        optimizer: the optimizer whose ``step()`` uses the gradients. If gradients are cleared instead, their
            residuals are rolled back. Needed by memories that follow the learning rate (efsignsgd), and where a
            memory (dgc) or compressor (signum) applies momentum, which the optimizer's must not double.
        grad_scaler: the ``torch.amp.GradScaler`` in use, so that memories follow the loss scale.
        compress_after: steps that are exchanged uncompressed first, as with PowerSGDState's ``start_powerSGD_iter``;
            memories begin with the compression.
        seed: seed of the random numbers of stochastic methods; the same on all ranks.
        bucket_bytes: bytes on the wire that a collective carries; if left out, the best number that
            :class:`~grace.session.bucket_limits.Limits` finds, or one of DDP's buckets if that is less.

    Returns:
        The hook's state, with ``state_dict()``, ``full_state_dict()``, ``load_state_dict()``, ``traffic``.

    Raises:
        ConfigError: the arguments cannot work.
        RankError: the ranks' arguments differ, or another rank's cannot work.

    Example::

        model = torch.nn.parallel.DistributedDataParallel(model)
        state = grace.torch.register_ddp_hook(model, compressor="topk(ratio=0.01)")
    """
    model = unwrap_compiled(model)
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        if isinstance(model, torch.nn.Module):
            inside = [name for name, module in model.named_modules() if isinstance(module, DistributedDataParallel)]
            if inside:
                raise ConfigError(
                    f"register_ddp_hook needs a DistributedDataParallel model itself, and this {type(model).__name__} "
                    f"holds one as {inside[0]!r}: call register_ddp_hook(model.{inside[0]}, ...), once for each such "
                    "model"
                )
            check_not_sharded(dict(model.named_parameters()))
            check_unwrapped(dict(model.named_parameters()))
        raise ConfigError(
            f"register_ddp_hook needs a DistributedDataParallel model, not {type(model).__name__}: wrap it first, "
            "torch.nn.parallel.DistributedDataParallel(model), or use grace.DistributedOptimizer with the plain model"
        )

    def list_variables() -> list[Variable]:
        """List the variables to exchange; refuse sparse gradients, other hooks, and a wrong size of buckets."""
        if bucket_bytes is not None:
            check_integer("bucket_bytes", bucket_bytes)
        check_no_hook(model)
        check_all_reduced(model)
        parameters = trainable_parameters(model)
        check_dense(parameters)
        return make_variables(parameters)

    check_group(TorchBackend())
    runner = build_hook_runner(
        list_variables,
        Choices(compressor, memory, communicator, strategy),
        TorchBackend(model.process_group),
        Context(seed=seed),
        [("bucket_bytes", str(bucket_bytes)), ("hierarchical", str(hierarchical))],
        hook="DDP's hook",
        wrapper="DistributedDataParallel",
        optimizer=optimizer,
        grad_scaler=grad_scaler,
        compress_after=compress_after,
        hierarchical=hierarchical,
        instead=": use grace.DistributedOptimizer",
    )
    advise_hierarchy(runner)
    parameters = trainable_parameters(model)
    check_holds_parameters(runner, parameters, optimizer)
    state = DDPState(parameters, runner, optimizer, grad_scaler, bucket_bytes)
    state.model = weakref.ref(model)
    state.frozen = frozen_parameters(model)
    if getattr(model, "_use_python_reducer", False):
        state.python_reducer = PythonReducer(model, parameters, state.uses, state.exchange)
        state.python_reducer.register_hooks()
    else:
        state.watched = state.uses.register_arrival_hooks()
        state.shared = model.gradient_as_bucket_view
    if not fill_early_states(model, state):
        model.register_comm_hook(state, grace_hook)
    return state
