"""The distributed optimizer under Horovod: Horovod's own one, with Grace's exchange in it."""

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops
from horovod.torch.optimizer import _DistributedOptimizer

from grace.backends.horovod_torch import TorchHorovodBackend
from grace.core.api_names import TORCH
from grace.core.subclassing import with_mixins
from grace.errors import ConfigError, ExchangeError
from grace.exchange.bucket import Bucket
from grace.exchange.header import digest
from grace.exchange.tracing import recorder
from grace.session.exchange_plan import ExchangePlan
from grace.session.step_runner import StepRunner
from grace.strategy.choices import Choices
from grace.torch import elastic  # noqa: F401  # Horovod's TorchState must know these optimizers
from grace.torch.gradient_hooks import not_compiled
from grace.torch.horovod_patches import AlreadyInitialized, BroadcastableState
from grace.torch.initial_sync import broadcast_optimizer_state, broadcast_parameters
from grace.torch.lifecycle import Closable, attach
from grace.torch.member import MemberMixin, NonMemberMixin
from grace.torch.parameters import NamedParameters, sparse_names
from grace.torch.pickling import allow_steps
from grace.torch.session import Session


class HorovodSession(Session):
    """A session whose exchanges start when Horovod's optimizer has all gradients of a bucket."""

    ranks_load_alone = True  # scripts for Horovod then broadcast rank 0's state and settings

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: NamedParameters,
        choices: Choices,
        backend: TorchHorovodBackend,
        **options: Any,
    ):
        self.backend = backend
        super().__init__(optimizer, parameters, choices, backend, **options)
        self.context.api_names = replace(TORCH, drop="optimizer.synchronize() and optimizer.zero_grad()")
        self._name_buckets()
        self.name_of = {p: name for name, p in self.parameters.items()}
        self.on_state_loaded()
        self._reset()

    def describe_hyperparameters(self) -> list[tuple[str, str]]:
        """Return the facts to compare: hyperparameters, and the name of the state that this rank resumed from."""
        return [*super().describe_hyperparameters(), ("gone on from what is called", self.runner.run_id)]

    def _name_buckets(self) -> None:
        """Give every bucket the name under which Horovod pairs its collectives."""
        number = self.backend.count_optimizer()  # only now that the ranks agree: a refused optimizer counts on no rank
        for bucket in self.runner.buckets:
            bucket.label = f"grace.{number}.{bucket.index}"
        for i, bucket in enumerate(self.runner.outer_rounds.buckets):
            bucket.label = f"grace.{number}.outer.{i}"
        gathered = [bucket.communicator for bucket in self.runner.buckets if not bucket.communicator.sums]
        self.unsummed = gathered[0].describe() if gathered else ""
        """Description of an exchange by other means than Horovod's all-reduce; empty without one."""

    def switch_runner(self, runner: StepRunner, plan: ExchangePlan) -> None:
        """Replace the runner and its plan, and clear the state of the current step."""
        super().switch_runner(runner, plan)
        self._name_buckets()
        self.reset_step()
        self.on_state_loaded()

    def unbucketed(self, parameters: Mapping[str, torch.nn.Parameter]) -> Collection[str]:
        """Return the names of parameters whose gradients Horovod may have to exchange: those of layers that make sparse
        gradients, if the model was not given."""
        return () if self.settings.sparse_as_dense else sparse_names(parameters)

    def _reset(self) -> None:
        """Clear the state of the current step."""
        self.sparse: set[torch.nn.Parameter] = set()
        self.held: list[Bucket] = []
        """Buckets that are ready and begin after backward, while a plan is measured."""
        self.computed_alone = False
        """True if a gradient was computed that Horovod does not see: a hook removed it, or the ranks train alone."""
        self.missing_parameters = self.bucket_parameters.copy()
        self.gradient_versions = {}
        self.checked = False

    def count_step(self) -> None:
        """Update the counters and the digest that the next exchange compares. Called after ``step()``."""
        super().count_step()
        self.on_state_loaded()

    def on_state_loaded(self) -> None:
        """Update the digest that the next exchange compares: hyperparameters, and the state that this rank resumed
        from."""
        self.context.hyperparameter_digest = digest((*self.hyperparameters, self.runner.run_id))

    def delegate_to_horovod(self, p: torch.nn.Parameter) -> bool:
        """Return True if Horovod may exchange a parameter's sparse gradient: it shares no bucket by the user's choice.
        If it shares a bucket otherwise, the bucket is exchanged as if it had no gradient for this parameter."""
        name = self.name_of[p]
        whole = self.runner.shards.get(name)
        if whole is None or whole.variable.sparse:  # Grace exchanges it by rows
            return False
        if all(len(bucket.variables) == 1 for bucket in self.buckets_of[name]):
            return True
        if self.has_chosen_groups or self.strategy is not None:
            return False
        self.sparse.add(p)
        self.mark_ready(p)
        return True

    def start_bucket(self, bucket: Bucket) -> None:
        """Begin a bucket's exchange, without the gradients that Horovod exchanges."""
        hidden = {p: p.grad for p in self.sparse}
        for p in hidden:
            p.grad = None
        try:
            super().start_bucket(bucket)
        finally:
            for p, gradient in hidden.items():
                p.grad = gradient

    def mark_ready(self, p: torch.nn.Parameter) -> None:
        """Count a parameter's complete gradient, and start the buckets that it completes."""
        name = self.name_of[p]
        if p.grad is not None and p.grad._base is not None:
            self.buffer_versions[id(p.grad._base)] = p.grad._version
        driver = self.driver
        if driver is not None and driver.steps_left:
            driver.ready(name)
        for bucket in self.buckets_of[name]:
            self.missing_parameters[bucket.index] -= 1
            if self.missing_parameters[bucket.index] == 0:
                if driver is not None and driver.after_backward:
                    self.held.append(bucket)
                else:
                    self.start_bucket(bucket)

    def count_sparse(self, gradient: torch.Tensor) -> None:
        """Count the bytes that the exchange of a sparse gradient sends: its indices and values, to every other rank."""
        self.unsummed = "an all-gather of sparse gradients"
        backend = self.runner.backend
        before = backend.sent_bytes
        backend.count((backend.size - 1) * (gradient._indices().nbytes + gradient._values().nbytes))
        self.runner.traffic.sent_bytes += backend.sent_bytes - before

    def start_remaining(self) -> None:
        """Start the remaining exchanges, and await the sparse gradients that Horovod exchanges."""
        optimizer = self.optimizer
        handles = optimizer._handles
        for p in sorted(optimizer._requires_update, key=optimizer._parameter_names.__getitem__):
            handle, _ = handles.get(p, (None, None))
            if handle is None:  # no backward pass, or fewer than backward_passes_per_step
                handles[p] = optimizer._allreduce_grad_async(p)
        while self.held:
            self.start_bucket(self.held.pop(0))
        for p, (handle, _) in handles.items():
            if callable(handle):  # of a sparse gradient, for which Horovod returns a function
                p.grad = handle()
        # Ranks begin in any order, but must finish in the same one: finishing may have collectives of its own.
        self.runner.in_flight.sort(key=lambda exchange: exchange.bucket.index)

    def discard(self) -> None:
        """Await the exchanges in progress, and discard their results. Every rank must call it."""
        if any(handle is not None for handle, _ in self.optimizer._handles.values()):
            self.start_remaining()
        self.discard_started()

    def discard_started(self) -> None:
        """Await the exchanges begun, and discard their results."""
        if self.runner.in_flight:  # collectives that were started must end on all ranks
            with self.aborting_on_error():
                self.runner.discard()
        self.reset_step()

    def reset_step(self) -> None:
        """Clear the record of exchanges in progress, here and in Horovod's optimizer."""
        optimizer = self.optimizer
        optimizer._handles.clear()
        optimizer._synchronized = False
        # Horovod's counters of backward passes until the exchange
        optimizer._allreduce_delay = dict.fromkeys(optimizer._allreduce_delay, optimizer.backward_passes_per_step)
        self._reset()

    def complete(self) -> None:
        """Await the exchanges begun, and write the means back."""
        for exchange in self.runner.in_flight:
            program = exchange.bucket.program
            if program is not None and program.sums and program.codec.layouts[0].dtype == "bfloat16":
                self.unsummed = f"{exchange.communicator.describe()}, in bfloat16, which Horovod does not sum itself"
        try:
            outcomes = self.wait_and_write_means()
        except BaseException as error:
            # So that the program may continue after zero_grad(), also if a mean could not be written.
            if isinstance(error, ExchangeError) or not self.runner.in_flight:
                self.discard_started()
            raise
        for outcome in outcomes:
            p = self.parameters[self.runner.shards[outcome.variable.name].whole.name]
            # As under Horovod, a parameter without a gradient on any rank gets zeros, unless it was frozen since.
            if p.grad is None and not outcome.pending and p.requires_grad:
                p.grad = torch.zeros_like(p)
        self.reset_step()

    @property
    def in_progress(self) -> bool:
        """True if gradients are being exchanged, by Grace or by Horovod."""
        return super().in_progress or bool(self.optimizer._handles)

    def abort(self) -> None:
        """Discard the exchanges in progress, which the engine has given up."""
        super().abort()
        self.reset_step()

    def rejoin(self) -> None:
        """Adapt to other ranks: discard the exchanges in progress, and all state that was only valid among the former
        ranks."""
        former = self.context.size
        self.abort()
        self.backend.rejoin()
        self.runner.rejoin()
        self._index_buckets()  # the factor of sums is the number of ranks
        for kind, part in self.runner.components:
            if kind == "shard_memory" and self.backend.size != former:  # shards are cut by the number of ranks
                part.state.clear()
                part.state.commit()

    @property
    def optimizer(self) -> "HorovodOptimizer":
        """The distributed optimizer."""
        optimizer: HorovodOptimizer = super().optimizer
        return optimizer

    @property
    def computed(self) -> bool:
        """True if gradients were computed since the last exchange."""
        return bool(self.optimizer._handles) or self.computed_alone

    def finish_exchange(self) -> None:
        """Start the remaining exchanges, await all of them, and write the means into ``p.grad``."""
        if self.driver is not None:
            self.driver.computed(self.copies)
        with recorder.phase("synchronize", "part"):
            if not self.checked:
                self.check_unchanged_optimizer()
            self.start_remaining()
            self.complete()
        if self.driver is not None:
            self.driver.exchanged()
        self.optimizer._synchronized = True

    def synchronize_once(self) -> None:
        """Synchronize before ``step()``, as Horovod's ``step()`` does."""
        self.check_unchanged_optimizer()
        optimizer = self.optimizer
        if optimizer._should_synchronize and (optimizer._handles or not optimizer._synchronized):
            self.finish_exchange()
        optimizer._synchronized = False
        self.commit_used_means()


class HorovodOptimizer(_DistributedOptimizer):
    """Methods that replace those of Horovod's optimizer; all others are Horovod's."""

    _grace: HorovodSession
    """The session; None on a rank outside of the process set, which calls few of these methods."""
    _paused: bool
    _synchronized: bool

    def _allreduce_grad_async(self, p: torch.nn.Parameter) -> tuple[object, None]:
        """Start the exchange of one gradient. A sparse one that is not to be made dense is exchanged by Horovod,
        uncompressed."""
        session = self._grace
        if p.grad is not None and p.grad.is_sparse and not self.sparse_as_dense and session.delegate_to_horovod(p):
            session.count_sparse(p.grad)
            return self._sparse_allreduce_grad_async(p, self._parameter_names[p])
        session.mark_ready(p)
        return True, None

    def _make_hook(self, p: torch.nn.Parameter) -> Callable:
        """Return Horovod's hook of a parameter, which ``no_sync()`` suspends. The hook stays with the parameter's node
        of the graph, so it must not keep the optimizer alive, and does nothing once the optimizer was closed."""
        session = weakref.ref(self._grace)

        @not_compiled
        def hook(*ignore: torch.Tensor) -> None:
            """Run Horovod's hook if the optimizer is open and not paused."""
            alive = session()
            if alive is None or not alive.hooks:
                return
            if recorder.run is not None:
                recorder.run.gradient()
            alive.cleared_since_step = False
            # A hook of the program may have removed it; the tensor it stores instead is exchanged in step().
            # While the ranks train alone there are no buckets: Horovod would take the gradient for one in progress, and
            # refuse zero_grad() and a second backward pass.
            alone = p.grad is None or not alive.runner.buckets
            alive.computed_alone |= alone
            if alone or alive.optimizer._paused:
                alive.optimizer._synchronized = False
            else:
                if not alive.checked:
                    alive.check_unchanged_optimizer()
                _DistributedOptimizer._make_hook(alive.optimizer, p)(*ignore)

        return hook

    @not_compiled
    def synchronize(self) -> None:
        """Start the remaining exchanges, await all of them, and write the means into ``p.grad``."""
        # A rank outside of the process set has no session; and Horovod allows synchronize() twice.
        if self._grace is None or (self._synchronized and not self._handles):
            self._synchronized = True
            return
        with self._grace.deferring_commit():
            self._grace.finish_exchange()

    def join(self) -> int:
        """Run Horovod's ``join()``: this rank has no more batches and takes part in the other ranks' sums with zeros.

        Afterwards every rank has the parameters, momenta, settings, counters and shared state (PowerSGD's factors) of
        the rank that was last, so that training can go on; memories stay each rank's own. It is a method because all
        this needs the optimizer.

        Returns:
            the last rank; ``grace.broadcast_parameters(model, last)`` gives its buffers to all.

        Raises:
            ConfigError: an exchange is not an all-reduce, as Horovod needs it; or only a set of ranks exchanges.
        """
        session = self._grace
        if self.process_set.process_set_id:
            raise ConfigError(
                "Horovod's join() is for all ranks, and this optimizer was given a process_set. Give every rank of the "
                "set as many batches, and leave out join()"
            )
        if session.unsummed and session.context.size > 1:
            raise ConfigError(
                "the other ranks can go on after join() only if everything is summed, and this optimizer exchanges "
                f"by {session.unsummed}. Choose communicator='allreduce' and a method that it takes ('none', "
                "'fp16', 'randomk', 'powersgd'), or give every rank as many batches and leave out join()"
            )
        last: int = mpi_ops.join()  # returns when all ranks have joined
        backend = session.runner.backend
        broadcast_parameters(session.parameters, last, backend)
        broadcast_optimizer_state(self, last, backend)
        session.runner.broadcast_state(last)
        return last

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward passes only accumulate; the next pass outside starts the exchange."""
        before = self._paused  # contexts may be nested
        self._paused = True
        try:
            yield
        finally:
            self._paused = before

    @not_compiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients. Raise, as Horovod does, while their exchange is in progress."""
        if self._handles:
            _DistributedOptimizer.zero_grad(self)  # raises
        if self._grace is not None:
            self._grace.on_zero_grad()
            self._grace.computed_alone = False
        self._synchronized = False  # also if no step() followed synchronize(), as after an overflow
        super(self.__class__, self).zero_grad(set_to_none=set_to_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Value of torch's attribute of this name, which ``GradScaler.step()`` reads before it unscales gradients. The
        exchange must be over by then, so reading it synchronizes."""
        if self._grace is not None and self._grace.computed:
            self.synchronize()
        return self.__dict__.get("_step_supports_amp_scaling", False)


def distribute(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters,
    choices: Choices,
    backend: TorchHorovodBackend,
    options: dict[str, Any],
    step_pre_hook: Callable,
    step_post_hook: Callable,
) -> torch.optim.Optimizer:
    """Make the optimizer, in place, a Horovod DistributedOptimizer that exchanges through Grace.

    Horovod derives a class from the user's at run time, and so does this function, from Horovod's class body with the
    methods of :class:`HorovodOptimizer` in it. Horovod's methods call ``super(self.__class__, self)``, so they must be
    in the class of the object itself. ``step`` is left out: learning-rate schedulers made earlier have bound the user's
    ``step``, so a hook does its work.
    """
    names = named_parameters
    if isinstance(named_parameters, torch.nn.Module):
        names = named_parameters.named_parameters()
    elif named_parameters is not None:
        named_parameters = names = list(named_parameters)  # they may come from a generator, and are read twice
    session = HorovodSession(optimizer, named_parameters, choices, backend, **options) if backend.included else None
    if session is not None:
        known = {p: name for name, p in session.parameters.items()}
        others = [p for group in optimizer.param_groups for p in group["params"] if p not in known]
        names = [*session.parameters.items(), *((f"grace.frozen.{i}", p) for i, p in enumerate(others))]
    allow_steps(optimizer)  # a copy of a distributed optimizer refuses to step until then
    cls = type(optimizer)
    attributes_before = set(vars(optimizer))
    patches = {name: value for name, value in vars(HorovodOptimizer).items() if not name.startswith("__")}
    body = {**vars(_DistributedOptimizer), **patches}
    for left_out in ("step", "__module__", "__dict__", "__weakref__"):
        body.pop(left_out, None)
    mixins = (AlreadyInitialized, Closable, BroadcastableState, NonMemberMixin if session is None else MemberMixin)
    optimizer.__class__ = with_mixins(cls, *mixins, body=body)
    distributed = cast(HorovodOptimizer, optimizer)
    settings = options["settings"]
    distributed._grace = cast(HorovodSession, session)
    distributed._paused = False
    _DistributedOptimizer.__init__(
        distributed,
        distributed.param_groups,
        names,
        hvd.Compression.none,
        options["passes"],
        hvd.Sum if settings.reduction.op == "sum" else hvd.Average,
        settings.reduction.predivide,
        None,  # the session has the groups
        settings.sparse_as_dense,
        backend.process_set,
    )
    if session is not None and not distributed._grad_accs:
        distributed._register_hooks()  # Horovod registers none on one rank, where compression has an effect too
    if session is not None:
        attach(distributed, session, step_pre_hook, step_post_hook, attributes_before)
    else:
        distributed._grace_added = set(vars(distributed)) - attributes_before
    return distributed
