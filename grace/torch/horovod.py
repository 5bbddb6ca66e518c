"""The distributed optimizer under Horovod: Horovod's own, with Grace's exchange in it."""

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops
from horovod.torch.optimizer import _DistributedOptimizer

from grace.errors import ConfigError, ExchangeError
from grace.exchange.bucket import Bucket
from grace.exchange.step_stamp import digest
from grace.exchange.tracing import recorder
from grace.session.plan import ExchangePlan
from grace.session.step_runner import StepRunner
from grace.strategy.choices import Choices
from grace.torch import elastic  # noqa: F401  # Horovod's TorchState must know these optimizers
from grace.torch.horovod_patches import Asked, Initialized
from grace.torch.lifecycle import Closable, begin
from grace.torch.outside import OutsideMixin
from grace.torch.parameters import broadcast_optimizer_state, broadcast_parameters, sparse_layers_of
from grace.torch.session import Session
from grace.torch.state_dict import StateMixin


class HorovodSession(Session):
    """A session whose exchanges start when Horovod's optimizer has all gradients of a bucket."""

    by_itself = True  # as scripts for Horovod do it: then rank 0's state and settings are broadcast

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._name_buckets()
        self.name_of = {p: name for name, p in self.parameters.items()}
        own, me = self.runner.hyperparameters, weakref.proxy(self)
        self.runner.hyperparameters = lambda: [*own(), ("gone on from what is called", me.runner.run)]
        self.loaded()
        self._reset()

    def _name_buckets(self) -> None:
        backend: Any = self.runner.backend
        number = backend.count_optimizer()  # now that the ranks agree: one that was refused counts on no rank
        for bucket in self.runner.buckets:
            bucket.label = f"grace.{number}.{bucket.index}"
        gathered = [bucket.communicator for bucket in self.runner.buckets if not bucket.communicator.sums]
        self.unsummed = gathered[0].describe() if gathered else ""
        """What is exchanged by other means than Horovod's all-reduce."""

    def take(self, runner: StepRunner, plan: ExchangePlan) -> None:
        """Go on by another plan's runner."""
        super().take(runner, plan)
        self._name_buckets()
        self.forget()
        self.loaded()

    def apart(self, parameters: Mapping[str, torch.nn.Parameter]) -> Collection[str]:
        """Those whose gradients Horovod may have to exchange: of layers that make sparse ones, in a model that was not
        given."""
        return () if self.settings.sparse_as_dense else sparse_layers_of(parameters)

    def _reset(self) -> None:
        self.sparse: set[torch.nn.Parameter] = set()
        self.held: list[Bucket] = []
        """Those that are ready, and begin after backward."""
        self.taken = False
        """True if a hook of the program's took a gradient away."""
        self.waiting = self.waits.copy()
        self.versions = {}
        self.checked = False

    def after_step(self) -> None:
        """The optimizer has stepped."""
        super().after_step()
        self.loaded()

    def loaded(self) -> None:
        """The next exchange tells of the hyperparameters, and which state this rank goes on from."""
        self.context.settings = digest((*self.hyperparameters, self.runner.run))

    def leaves(self, p: torch.nn.Parameter) -> bool:
        """Whether Horovod may exchange a parameter's sparse gradient: nothing travels with it that somebody wanted to.
        A bucket of several goes without it, as if it had none."""
        name = self.name_of[p]
        whole = self.runner.shards.get(name)
        if whole is None or whole.variable.sparse:  # Grace exchanges it by rows
            return False
        if all(len(bucket.variables) == 1 for bucket in self.buckets_of[name]):
            return True
        if self.chosen_sets or self.strategy is not None:
            return False
        self.sparse.add(p)
        self.offer(p)
        return True

    def start(self, bucket: Bucket) -> None:
        """Begin a bucket's exchange, without the gradients that go Horovod's way."""
        away = {p: p.grad for p in self.sparse}
        for p in away:
            p.grad = None
        try:
            super().start(bucket)
        finally:
            for p, gradient in away.items():
                p.grad = gradient

    def offer(self, p: torch.nn.Parameter) -> None:
        """A gradient is complete: start the exchange of its bucket if it is the last one."""
        name, auto = self.name_of[p], self.auto
        if auto is not None and auto.left:
            auto.ready(name)
        for bucket in self.buckets_of[name]:
            self.waiting[bucket.index] -= 1
            if self.waiting[bucket.index] == 0:
                if auto is not None and auto.holds:
                    self.held.append(bucket)
                else:
                    self.start(bucket)

    def count_sparse(self, gradient: torch.Tensor) -> None:
        """Count what an exchange of a sparse gradient sends: its indices and values, to every other rank."""
        self.unsummed = "an all-gather of sparse gradients"
        backend, before = self.runner.backend, self.runner.backend.sent_bytes
        backend.count((backend.size - 1) * (gradient._indices().nbytes + gradient._values().nbytes))
        self.runner.traffic.sent_bytes += backend.sent_bytes - before

    def start_missing(self) -> None:
        """Begin what is not begun yet, and await sparse gradients that go Horovod's way."""
        optimizer: Any = self.optimizer
        handles = optimizer._handles
        for p in sorted(optimizer._requires_update, key=optimizer._parameter_names.__getitem__):
            handle, _ = handles.get(p, (None, None))
            if handle is None:  # no backward pass, or fewer than were announced
                handles[p] = optimizer._allreduce_grad_async(p)
        while self.held:
            self.start(self.held.pop(0))
        for p, (handle, _) in handles.items():
            if callable(handle):  # sparse
                p.grad = handle()
        # ranks begin in any order, but must end in one: an end may have a collective of its own to wait for
        self.runner._begun.sort(key=lambda exchange: exchange.bucket.index)

    def drop(self) -> None:
        """Let exchanges under way end, and drop what they brought; every rank must call it."""
        optimizer: Any = self.optimizer
        if any(handle is not None for handle, _ in optimizer._handles.values()):
            self.start_missing()
        self.discard()

    def discard(self) -> None:
        """Await what was begun, and forget it."""
        if self.runner.begun:
            with self.giving_up():
                self.runner.discard()
        self.forget()

    def forget(self) -> None:
        """Nothing is under way any more."""
        optimizer: Any = self.optimizer
        optimizer._handles.clear()
        optimizer._synchronized = False
        optimizer._allreduce_delay = dict.fromkeys(optimizer._allreduce_delay, optimizer.backward_passes_per_step)
        self._reset()

    def end(self) -> None:
        """Await what was begun, and write the means back."""
        for exchange in self.runner._begun:
            program = exchange.bucket.program
            if program is not None and program.sums and program.codec.layouts[0].dtype == "bfloat16":
                self.unsummed = f"{exchange.communicator.describe()}, in bfloat16, which Horovod does not sum itself"
        try:
            outcomes = self.finish()
        except ExchangeError:
            self.discard()  # so that the program may go on after zero_grad()
            raise
        for outcome in outcomes:
            p = self.parameters[self.runner.shards[outcome.variable.name].whole.name]
            # as Horovod: what nobody had a gradient for is zero, unless it was frozen since
            if p.grad is None and not outcome.pending and p.requires_grad:
                p.grad = torch.zeros_like(p)
        self.forget()

    dropping = "optimizer.synchronize() and optimizer.zero_grad()"

    @property
    def begun(self) -> bool:
        """Whether gradients are on their way, Grace's or those that Horovod exchanges."""
        optimizer: Any = self.optimizer
        return super().begun or bool(optimizer._handles)

    def abandon(self) -> None:
        """Forget what was under way, which the engine has given up."""
        super().abandon()
        self.forget()

    def rejoin(self) -> None:
        """The ranks are others now: forget what was under way, and what only made sense among the former ones."""
        backend: Any = self.runner.backend
        former = self.context.size
        self.abandon()
        backend.rejoin()
        self.context.rank, self.context.size = backend.rank, backend.size
        for bucket in [*self.runner.buckets, *self.runner.averages]:  # wires have room for each rank's place
            bucket.program = None
        for kind, part in self.runner.components:
            if kind == "shard_memory" and backend.size != former:
                part.state.clear()
                part.state.commit()

    @property
    def computed(self) -> bool:
        """True if gradients were computed since the last exchange."""
        return bool(self.optimizer._handles) or self.taken

    def before_step(self) -> None:
        """``step()`` is about to run: synchronize as Horovod's ``step()`` does."""
        self.check()
        optimizer: Any = self.optimizer
        if optimizer._should_synchronize and (optimizer._handles or not optimizer._synchronized):
            _synchronize(optimizer)
        optimizer._synchronized = False
        self.means_used()


def _allreduce_grad_async(self: Any, p: torch.nn.Parameter) -> tuple[Any, None]:
    """Exchange one gradient. A sparse one that is not to be made dense goes Horovod's way, uncompressed."""
    session = self._grace
    if p.grad is not None and p.grad.is_sparse and not self.sparse_as_dense and session.leaves(p):
        session.count_sparse(p.grad)
        return self._sparse_allreduce_grad_async(p, self._parameter_names[p])
    session.offer(p)
    return True, None


def _make_hook(self: Any, p: torch.nn.Parameter) -> Callable:
    """Horovod's hook, which ``no_sync()`` holds back. It must not keep the optimizer alive, and does nothing any more
    when that was closed: it stays with the parameter's node of the graph."""
    session = weakref.ref(self._grace)

    def hook(*ignore: Any) -> None:
        alive = session()
        if alive is None or not alive.hooks:
            return
        if recorder.run is not None:
            recorder.run.gradient()
        alive.idle = False
        taken = p.grad is None  # by a hook of the program's: what it puts there instead is exchanged in step()
        alive.taken |= taken
        if taken or alive.optimizer._paused:
            alive.optimizer._synchronized = False
        else:
            if not alive.checked:
                alive.check()
            _DistributedOptimizer._make_hook(alive.optimizer, p)(*ignore)

    return hook


def synchronize(self: Any) -> None:
    """Exchange what is not exchanged yet, and write the means into ``p.grad``."""
    if self._grace is None or (self._synchronized and not self._handles):
        self._synchronized = True
        return
    with self._grace.leaving_unused():
        _synchronize(self)


def _synchronize(self: Any) -> None:
    auto = self._grace.auto
    if auto is not None:
        auto.computed(self._grace.copies)
    with recorder.phase("synchronize", "part"):
        if not self._grace.checked:
            self._grace.check()
        self._grace.start_missing()
        self._grace.end()
    if auto is not None:
        auto.exchanged()
    self._synchronized = True


def join(self: Any) -> int:
    """Horovod's ``join()``: this rank has no more batches and takes part in the other ranks' sums with zeros.

    Afterwards every rank has the parameters, momenta, settings, counters and shared state (PowerSGD's factors) of the
    rank that was last, so that training can go on; memories stay each rank's own. It is a method because all this
    needs the optimizer.

    Returns:
        the rank that was last; ``grace.broadcast_parameters(model, last)`` gives its buffers to all.

    Raises:
        ConfigError: something is not exchanged by an all-reduce, as Horovod needs it; or by a set of ranks only.
    """
    session = self._grace
    if self.process_set.process_set_id:
        raise ConfigError(
            "Horovod's join() is for all ranks, and this optimizer was given a process_set. Give every rank of the set "
            "as many batches, and leave out join()"
        )
    if session.unsummed and session.context.size > 1:
        raise ConfigError(
            "the other ranks can go on after join() only if everything is summed, and this optimizer exchanges "
            f"by {session.unsummed}. Choose communicator='allreduce' and a method that it takes ('none', "
            "'fp16', 'randomk', 'powersgd'), or give every rank as many batches and leave out join()"
        )
    last: int = mpi_ops.join()
    backend = session.runner.backend
    broadcast_parameters(session.parameters, last, backend)
    broadcast_optimizer_state(self, last, backend)
    session.runner.broadcast_state(last)
    return last


@contextlib.contextmanager
def no_sync(self: Any) -> Iterator[None]:
    """Backward passes in this context only accumulate; the next one outside starts the exchange."""
    before, self._paused = self._paused, True
    try:
        yield
    finally:
        self._paused = before


def zero_grad(self: Any, set_to_none: bool = True) -> None:
    """Clear gradients; refused, as Horovod does, while their exchange is under way."""
    if self._handles:
        _DistributedOptimizer.zero_grad(self)  # raises
    if self._grace is not None:
        self._grace.gradients_cleared()
        self._grace.taken = False
    self._synchronized = False  # also where no step() came after synchronize(), as after an overflow
    super(self.__class__, self).zero_grad(set_to_none=set_to_none)


def _amp(self: Any) -> bool:
    """``GradScaler.step()`` asks this before it unscales gradients, which the exchange must be over by."""
    if self._grace is not None and self._grace.computed:
        self.synchronize()
    return self.__dict__.get("_step_supports_amp_scaling", False)


PATCHES = {
    "_allreduce_grad_async": _allreduce_grad_async,
    "_make_hook": _make_hook,
    "synchronize": synchronize,
    "join": join,
    "no_sync": no_sync,
    "zero_grad": zero_grad,
    "_step_supports_amp_scaling": property(_amp),
}
"""How one gradient is exchanged; the rest is Horovod's."""


def distribute(
    optimizer: torch.optim.Optimizer,
    named_parameters: Any,
    choices: Choices,
    backend: Any,
    options: dict[str, Any],
    before_step: Callable,
    after_step: Callable,
) -> Any:
    """Make the optimizer a Horovod DistributedOptimizer that exchanges through Grace; in place.

    Horovod derives a class from the user's at run time, and so does this, from Horovod's class body with
    ``PATCHES`` in it (Horovod's methods call ``super(self.__class__, self)``, so they must lie in the very
    class of the object). ``step`` is left out of it: a hook does what it does, since learning-rate schedulers
    made earlier have bound the user's ``step``.
    """
    module = isinstance(named_parameters, torch.nn.Module)
    pairs: Any = named_parameters if named_parameters is None or module else list(named_parameters)
    session = HorovodSession(optimizer, pairs, choices, backend, **options) if backend.included else None
    names: Any = pairs.named_parameters() if module else pairs
    if session is not None:
        known = {p: name for name, p in session.parameters.items()}
        others = [p for group in optimizer.param_groups for p in group["params"] if p not in known]
        names = [*session.parameters.items(), *((f"grace.frozen.{i}", p) for i, p in enumerate(others))]
    cls, had = type(optimizer), set(vars(optimizer))
    body = {**_DistributedOptimizer.__dict__, **PATCHES, "__module__": cls.__module__}
    for left_out in ("step", "__dict__", "__weakref__"):
        body.pop(left_out, None)
    bases = (Initialized, Closable, Asked, OutsideMixin if session is None else StateMixin, cls)
    optimizer.__class__ = type(cls.__name__, bases, body)
    made: Any = optimizer
    settings = options["settings"]
    made._grace, made._paused = session, False
    _DistributedOptimizer.__init__(
        made,
        made.param_groups,
        names,
        hvd.Compression.none,
        options["passes"],
        hvd.Sum if settings.reduction.op == "sum" else hvd.Average,
        settings.reduction.predivide,
        None,  # the session has the groups
        settings.sparse_as_dense,
        backend.process_set,
    )
    if session is not None and not made._grad_accs:
        made._register_hooks()  # on one rank Horovod registers none, but compression shows its effect
    if session is not None:
        begin(made, session, before_step, after_step, had)
    else:
        made._grace_added = set(vars(made)) - had
    return made
