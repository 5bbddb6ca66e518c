"""The same exchange as a DistributedDataParallel communication hook."""

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from grace.backends.runtime import check_group
from grace.backends.torch_distributed import TorchBackend
from grace.core.context import Context
from grace.core.waits import Wait, waits
from grace.errors import ConfigError, ExchangeError, PayloadError, StepError
from grace.exchange.bucket import Bucket, Contribution, Outcome, Traffic
from grace.exchange.header import resolve
from grace.exchange.round_trip import RoundTrip, start_round_trip
from grace.exchange.step_stamp import digest
from grace.exchange.tracing import recorder
from grace.session import checkpoint
from grace.session.hyperparameters import facts as in_words
from grace.session.metrics import metrics
from grace.session.momentum import momentum_owners
from grace.session.plan import UniformPlan
from grace.session.settings import check_integer
from grace.session.setup import build_step_runner
from grace.session.sharding import Shard, cut_into_buckets
from grace.session.step_runner import StepRunner
from grace.session.versions import public
from grace.strategy.choices import STRATEGY
from grace.torch.ddp_buckets import check_no_join, gradients_of, limits_of, to_send, trainable
from grace.torch.fsdp_layout import before_steps
from grace.torch.parameters import check_momentum, check_optimizer, check_prompt, hyperparameters, variables
from grace.torch.python_reducer import OneByOne
from grace.torch.state_dict import check_not_saved_directly, on_devices, packed_up, unpacked
from grace.torch.step_hooks import around_steps
from grace.torch.uses import GradientUses
from grace.torch.wrappers import bare, check_unwrapped, check_whole


class EarlyState:
    """A stand-in for a hook's state, registered by a framework before ``register_ddp_hook`` is called for the model."""

    state: Any = None


def grace_hook(state, bucket):  # DDP inspects the names and annotations, and wants real types or none
    """Exchange a bucket of DistributedDataParallel's: its communication hook, for a state or a stand-in.

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
    return None if isinstance(bucket, tuple) else state.exchange(bucket)  # one by one: the parameters' own hooks do it


def given_to_early(model: Any, state: Any) -> bool:
    """Give the state to the stand-ins that the model was registered with; return True if there are any."""
    early = [given for _, given in model._comm_hooks if isinstance(given, EarlyState)]
    for given in early:
        given.state = state
    return bool(early)


class DDPState(OneByOne):
    """What the hook keeps between steps, keyed by the parameters' names, and its traffic.

    DDP hands over buckets, and rebuilds them after the first step; the compressed and the dense variables of each are
    exchanged in as many collectives as ``limits_of`` says, so that what is encoded travels while the rest is encoded,
    started in an order that is the same on all ranks. Dependent reductions (PowerSGD's) are awaited inside the hook but
    for the last.
    """

    registered_by = "register_ddp_hook"
    shared = True
    """True where gradients lie in the memory that means are written to."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        runner: StepRunner,
        optimizer: Any,
        grad_scaler: Any,
        bucket_bytes: int | None,
    ):
        self.runner, self.optimizer, self.grad_scaler = runner, optimizer, grad_scaler
        self.limits = limits_of(runner, bucket_bytes)
        runner.follows_scaler = lambda: grad_scaler is not None and grad_scaler.is_enabled()
        self.names = {p: name for name, p in parameters.items()}
        self.plans: dict[tuple[bool, tuple[str, ...]], list[Bucket]] = {}
        self.trips: list[RoundTrip] = []
        """The round trips of this step, whose headers tell where the ranks are."""
        self.changes = -1
        self.outcomes: list[Outcome] = []
        self.momenta = momentum_owners(runner.communicators)
        self.open, self.closed = False, False
        self.watched: list[Any] = []
        """Hooks of the parameters that tell when gradients arrive; none where they come one by one."""
        self.uses = GradientUses(parameters, optimizer, self.registered_by)
        self.seen: set[str] = set()
        """Of those that come one by one, or by modules: which came in this step."""
        self.unhook = before_steps(self, parameters.values())
        me = weakref.proxy(self)
        self.exchange = torch.compiler.disable(lambda bucket: me.exchange_bucket(bucket))  # it may be called in one
        self.hooks = [] if optimizer is None else around_steps(optimizer, None, self._after_step)
        self.hyperparameters = () if optimizer is None else hyperparameters(optimizer)
        runner.hyperparameters = lambda: in_words(type(optimizer).__name__, self.hyperparameters)

    @property
    def traffic(self) -> Traffic:
        """What was exchanged so far, counted; read it between steps."""
        if not self.begun:
            self.close_step()
        return self.runner.traffic

    def metrics(self) -> dict[str, float]:
        """Numbers of this rank for a logger, since the last call; see :mod:`grace.session.metrics`. No collective.

        DDP waits for what Grace has begun, and not Grace: ``seconds_wait`` is NaN.
        """
        return metrics(self.runner, self.traffic, waits=False)

    def state_dict(self) -> dict[str, Any]:
        """What this rank remembers.

        Raises:
            ExchangeError: an optimizer may still use the gradients that were exchanged.
        """
        self._settle()
        check_not_saved_directly(self.runner, "the hook's state")
        checkpoint.warn_own_state(self.runner, "state.state_dict()", "state.full_state_dict()")
        return checkpoint.save(self.runner)

    def full_state_dict(self, packed: bool = False) -> Any:
        """What all ranks remember; every rank must call it. If ``packed``, as one value, bytes, which
        ``torch.distributed.checkpoint`` loads whole."""
        saved = checkpoint.gather(self.runner, self._settle)
        return packed_up(saved) if packed else saved

    def load_state_dict(self, state: Any, memory: str = "strict") -> None:
        """Restore; :mod:`grace.session.checkpoint` has the rules, and says what ``memory`` may be. Every rank must call
        it."""
        parameters = {name: p for p, name in self.names.items()}

        def read() -> Any:
            self._settle()
            return unpacked(state)

        checkpoint.load(self.runner, read, memory, lambda saved: on_devices(saved, parameters))

    def _settle(self) -> None:
        checkpoint.check_settled(self)
        self.close_step()

    def before_step(self, optimizer: Any) -> None:
        """An optimizer is about to use the gradients that came: of those that come one by one the next one begins
        another step."""
        self.uses.step_begins(optimizer)
        self.seen.clear()

    def after_step(self, optimizer: Any) -> None:
        """An optimizer has used the gradients."""
        self.uses.step_ends(optimizer)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any, inner: bool) -> None:
        if inner:
            return
        context = self.runner.context
        context.updates += 1
        self.hyperparameters = hyperparameters(self.optimizer)
        context.settings = digest(self.hyperparameters)

    def _count_updates(self) -> None:
        """Without the optimizer: whether the parameters changed since the last step, by torch's own counts."""
        changes = sum(p._version for p in self.names)
        if self.optimizer is None and self.changes not in (-1, changes):
            self.runner.context.updates += 1
        self.changes = changes

    @property
    def begun(self) -> bool:
        """Whether a step is under way that may still be dropped: an optimizer has not used its gradients yet."""
        if self.runner.begun or not self.open or not self.runner.stateful:
            return self.runner.begun
        return self.uses.undecided and not self._overflowed()

    def _overflowed(self) -> bool:
        """Whether a gradient of the step under way did, on any rank."""
        resolve(self.trips)
        return any([outcome.overflow for outcome in self.outcomes])

    def close(self) -> None:
        """End the exchange: compressors and memories given by you may serve another one. Every rank must call it.

        DDP cannot take a hook off: from now on the model raises in backward. Delete it, and wrap ``model.module`` anew.
        """
        self.close_step()
        self.closed = True
        self.unhook()
        for hook in [*self.watched, *self.hooks]:
            hook.remove()
        self.runner.close()

    def close_step(self) -> None:
        """Commit the last step, whose futures DDP has awaited at the end of backward. What was exchanged of gradients
        that were thrown away changes nothing.

        Raises:
            StepError: the ranks' optimizers had different hyperparameters.
        """
        if self.open:
            self.open, outcomes, trips = False, self.outcomes, self.trips
            self.outcomes, self.trips = [], []
            try:
                self.runner.check_step_stamps(trips, self.runner.channel)
            except StepError:
                self.runner.abandon()
                self.uses.end(overflowed=True)
                raise
            thrown = self.uses.end(any([outcome.overflow for outcome in outcomes]))
            for outcome in outcomes if thrown else ():
                if self.runner.shards[outcome.variable.name].whole.name in thrown:
                    outcome.value = None
            self.runner.commit_or_roll_back(outcomes)

    def _without_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> set[str]:
        """The names of those for which this rank has no gradient: DDP gives zeros for them, or what is left in
        ``p.grad`` of an earlier step."""
        model = self.model()
        skips = model.find_unused_parameters or model.static_graph  # else a backward pass reaches all of them
        arrived = self.uses.arrived
        names = ((self.names[p], p) for p in parameters) if self.watched else ()
        return {name for name, p in names if p.grad is None or (skips and name not in arrived)}

    def _drop(self) -> None:
        """Nothing of this step is kept."""
        self.runner.abandon()
        self.uses.end(overflowed=True)
        self.outcomes, self.trips, self.open = [], [], False

    def lr(self, name: str) -> float:
        """The learning rate of a parameter, for memories that follow it."""
        for group in self.optimizer.param_groups:
            if any(self.names.get(p) == name for p in group["params"]):
                return float(group["lr"])
        raise ConfigError(f"the optimizer does not hold the parameter {name!r}")

    def buckets(self, names: tuple[str, ...], first: bool) -> list[Bucket]:
        """The buckets of one of DDP's: compressed variables, and dense ones by dtype. One of the first one's tells the
        ranks' places."""
        if (first, names) not in self.plans:
            kinds: dict[Any, list[Shard]] = {}
            for name in names:
                for shard in self.runner.shards_of[name]:
                    kinds.setdefault((id(shard.communicator), shard.variable.dtype), []).append(shard)
            buckets: list[Bucket] = []
            for shards in kinds.values():
                for part in cut_into_buckets(shards, self.limits[id(shards[0].communicator)], first=False):
                    own = [shard.variable for shard in part]
                    buckets.append(Bucket(len(buckets), part[0].communicator, own, carries=first and not buckets))
            self.plans[first, names] = buckets
        return [bucket.at_step(self.runner.context.step) for bucket in self.plans[first, names]]

    @torch.no_grad()
    def exchange_bucket(self, grad_bucket: Any) -> torch.futures.Future:
        """The hook proper."""
        if self.closed:
            raise ExchangeError(
                "the state of this DistributedDataParallel model's hook was closed, and DDP cannot take a hook off: "
                "delete the model and make a new DistributedDataParallel(model.module)"
            )
        if grad_bucket.index() == 0:
            check_no_join(self.model())
            self.close_step()
            check_momentum(self.momenta, self.optimizer, later=True)
            self._count_updates()
            self.open = True
            if self.runner.follows_scaler():
                self.runner.rescale(self.grad_scaler.get_scale())
        if recorder.run is not None:
            recorder.run.gradient()
        names = tuple(self.names[p] for p in grad_bucket.parameters())
        views = dict(zip(names, gradients_of(grad_bucket), strict=True))
        missing = self._without_gradients(grad_bucket.parameters())
        self.uses.exchanged(names)
        if grad_bucket.is_last():
            self.uses.arrived.clear()
        guard, traffic, future_buffer = self.runner.stateful, self.runner.traffic, grad_bucket.buffer()
        trips: list[RoundTrip] = []
        for bucket in self.buckets(names, grad_bucket.index() == 0):
            gradients = [to_send(views[v.name], v.name in missing) for v in bucket.variables]
            present = [v.name not in missing for v in bucket.variables]
            trips.append(start_round_trip(Contribution(bucket, gradients, present, guard, traffic)))
        waits[id(self), grad_bucket.index()] = Wait(trips[0].describe_wait)
        for trip in trips:
            trip.deferred = trip.next_step = True
            while trip.advance():
                pass
        self.trips += trips

        def finish(done: Any) -> torch.Tensor:
            try:
                done.value()  # raises if a collective failed: nothing that arrived may be decoded
            except Exception as error:
                raise trips[0].failure(error) from error
            finally:  # after the failure has said where the ranks are, this one too
                waits.pop((id(self), grad_bucket.index()), None)
            try:
                for trip in trips:
                    self._write(trip, views)
                    if trip.header.out_of_step:
                        raise StepError(trip.header.out_of_step)
            except (PayloadError, StepError):
                self._drop()
                raise
            return future_buffer

        for trip in trips:
            if trip.blocks:  # a communicator of the user's own, or a single process
                trip.wait()
        works = [work for trip in trips if not trip.blocks for work in trip.handle.works]
        if not works:
            waited: torch.futures.Future = torch.futures.Future()
            waited.set_result(None)
            return waited.then(finish)
        return torch.futures.collect_all([work.get_future() for work in works]).then(finish)

    @torch.no_grad()
    def _write(self, trip: RoundTrip, views: dict[str, torch.Tensor]) -> None:
        traits = trip.traits
        outs = []
        for variable in trip.bucket.variables:
            view = views[variable.name]
            usable = view.is_contiguous() and (traits.exact or view.dtype == torch.float32)
            outs.append(view if usable else None)
        trip.arrived()
        outcomes = trip.finish(outs, wait=False)
        for outcome in outcomes:
            view = views[outcome.variable.name]
            if outcome.value is not None and outcome.value is not view:
                view.copy_(outcome.value)
            name = self.runner.shards[outcome.variable.name].whole.name
            self.uses.brought(name, outcome.value, self.shared and self.runner.stateful)
        self.outcomes += outcomes


def register_ddp_hook(
    model: Any,
    compressor: Any = None,
    memory: Any = None,
    communicator: Any = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    grad_scaler: Any = None,
    compress_after: int = 0,
    seed: int = 0,
    bucket_bytes: int | None = None,
) -> DDPState:
    """Compress what a DistributedDataParallel model exchanges.

    Args:
        model: the ``torch.nn.parallel.DistributedDataParallel`` model, before its first backward; compiled or not.
        compressor, memory, communicator: as for :func:`grace.DistributedOptimizer`.
        optimizer: whose ``step()`` uses the gradients; what memories keep of those that are cleared instead is taken
            back. Needed by memories that follow the learning rate (efsignsgd), and where a memory (dgc) or compressor
            (signum) applies momentum, which the optimizer's must not double.
        grad_scaler: the ``torch.amp.GradScaler`` in use, so that memories follow the loss scale.
        compress_after: steps that are exchanged uncompressed first, as with PowerSGDState's ``start_powerSGD_iter``;
            memories begin with the compression.
        seed: of the random numbers of stochastic methods; the same on all ranks.
        bucket_bytes: bytes on the wire that a collective carries; if left out, what
            :class:`~grace.session.bucketing.Limits` finds best for the model, or one of DDP's buckets if that is less.

    Returns:
        The hook's state, with ``state_dict()``, ``full_state_dict()``, ``load_state_dict()``, ``traffic``.

    Raises:
        ConfigError: what was given cannot work.
        RankError: the ranks gave different things, or another rank's cannot work.

    Example::

        model = torch.nn.parallel.DistributedDataParallel(model)
        state = grace.torch.register_ddp_hook(model, compressor="topk(ratio=0.01)")
    """
    model = bare(model)
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        if isinstance(model, torch.nn.Module):
            check_whole(dict(model.named_parameters()))
            check_unwrapped(dict(model.named_parameters()))
        raise ConfigError(
            f"register_ddp_hook needs a DistributedDataParallel model, not {type(model).__name__}: wrap it first, "
            "torch.nn.parallel.DistributedDataParallel(model), or use grace.DistributedOptimizer with the plain model"
        )
    context = Context(seed=seed)

    def list_variables():
        if bucket_bytes is not None:
            check_integer("bucket_bytes", bucket_bytes)
        check_integer("compress_after", compress_after, low=0)
        return variables(trainable(model))

    check_group(TorchBackend())
    backend = TorchBackend(model.process_group)

    def check(communicator):
        check_optimizer(communicator, optimizer)
        check_prompt(communicator, "DDP's hook cannot: use grace.DistributedOptimizer")

    def choose():
        if os.environ.get(STRATEGY):
            raise ConfigError(
                f"{STRATEGY} names a strategy ({os.environ[STRATEGY]}), which DDP's hook cannot execute: use "
                "grace.DistributedOptimizer, or start the program without --strategy"
            )
        return UniformPlan(compressor, memory, communicator)

    facts = [
        ("torch", public(torch.__version__)),
        ("the buckets of", "DistributedDataParallel"),
        ("bucket_bytes", str(bucket_bytes)),
        ("compress_after", str(compress_after)),
        ("grad_scaler", "none" if grad_scaler is None else "given"),
        *([] if optimizer is None else in_words(type(optimizer).__name__, hyperparameters(optimizer))),
    ]
    runner = build_step_runner(list_variables, choose, backend, context, facts, check, compress_after=compress_after)
    recorder.note(waits="DistributedDataParallel")
    state = DDPState(trainable(model), runner, optimizer, grad_scaler, bucket_bytes)
    context.lr = state.lr
    state.model = weakref.ref(model)  # whose reducer holds the state, where Python cannot collect it
    if getattr(model, "_use_python_reducer", False):
        state.take_one_by_one()
    else:
        state.watched, state.shared = state.uses.watch_arrivals(), model.gradient_as_bucket_view
    if not given_to_early(model, state):
        model.register_comm_hook(state, grace_hook)
    return state
