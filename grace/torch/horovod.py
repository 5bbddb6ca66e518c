"""The distributed optimizer under Horovod: Horovod's own, with Grace's exchange in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.optimizer import _DistributedOptimizer

from grace.torch.saving import StateMixin
from grace.torch.session import Session


class HorovodSession(Session):
    """A session whose exchanges start when Horovod's optimizer asks for them."""

    paused = False

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.name_of = {p: name for name, p in self.parameters.items()}
        self.begun: set[int] = set()

    def begin(self, p: torch.nn.Parameter) -> None:
        """Start the exchange of the parameter's group, unless it is under way."""
        group = self.group_of[self.name_of[p]]
        if group.index not in self.begun:
            self.start(group)
            self.begun.add(group.index)

    def count_sparse(self, gradient: torch.Tensor) -> None:
        """Count what an exchange of a sparse gradient sends: its indices and values, to every other rank."""
        backend, before = self.exchanger.backend, self.exchanger.backend.sent_bytes
        backend.count((backend.size - 1) * (gradient._indices().nbytes + gradient._values().nbytes))
        self.exchanger.traffic.sent_bytes += backend.sent_bytes - before

    def end(self) -> None:
        """Await what was begun, and write the means back."""
        self.begun.clear()
        for outcome in self.finish():
            p = self.parameters[outcome.variable.name]
            if p.grad is None:  # as Horovod: what nobody had a gradient for is zero
                p.grad = torch.zeros_like(p)

    def rejoin(self) -> None:
        """The ranks are others now: forget what was under way, and what only made sense among the former ones."""
        optimizer: Any = self.optimizer
        backend: Any = self.exchanger.backend
        former = self.context.size
        self.exchanger.abandon()
        self.begun.clear()
        self.versions = {}
        optimizer._handles.clear()
        optimizer._synchronized = False
        optimizer._allreduce_delay = dict.fromkeys(optimizer._allreduce_delay, optimizer.backward_passes_per_step)
        backend.rejoin()
        self.context.rank, self.context.size = backend.rank, backend.size
        self.before, self.after = self.reduction.factors(backend.size)
        shards = self.exchanger.components.get("shard_memory")
        if shards is not None and backend.size != former:
            shards.state.clear()
            shards.state.commit()

    def before_step(self) -> None:
        """``step()`` is about to run: synchronize as Horovod's ``step()`` does."""
        optimizer: Any = self.optimizer
        if optimizer._should_synchronize:
            optimizer.synchronize()
        optimizer._synchronized = False


def _allreduce_grad_async(self: Any, p: torch.nn.Parameter) -> tuple[Any, None]:
    """Exchange one gradient. A sparse one that is not to be made dense goes Horovod's way, uncompressed."""
    if p.grad is not None and p.grad.is_sparse and not self.sparse_as_dense:
        self._grace.count_sparse(p.grad)
        return self._sparse_allreduce_grad_async(p, self._parameter_names[p])
    self._grace.begin(p)
    return True, None


def _grouped_allreduce_grad_async(self: Any, ps: tuple[torch.nn.Parameter, ...]) -> tuple[Any, Any]:
    """Exchange a group's gradients."""
    for p in ps:
        self._grace.begin(p)
    return True, None


def _make_hook(self: Any, p: torch.nn.Parameter) -> Callable:
    """Horovod's hook, which ``no_sync()`` holds back."""
    hook = _DistributedOptimizer._make_hook(self, p)
    return lambda *ignore: None if self._grace.paused else hook(*ignore)


def synchronize(self: Any) -> None:
    """Exchange what is not exchanged yet, and write the means into ``p.grad``."""
    if self._grace is None or (self._synchronized and not self._handles):
        self._synchronized = True
        return
    started = {p for key in self._handles for p in (key if isinstance(key, tuple) else (key,))}
    for p in sorted(self._requires_update - started, key=self._parameter_names.__getitem__):
        self._handles[p] = self._allreduce_grad_async(p)
    for key, (handle, ctx) in list(self._handles.items()):
        if handle is None:  # fewer backward passes than were announced
            handle, ctx = self._handles[key] = self._allreduce_grad_async(key)
        if callable(handle):  # sparse
            key.grad = hvd.Compression.none.decompress(handle(), ctx)
    self._grace.end()
    self._handles.clear()
    self._allreduce_delay = dict.fromkeys(self._allreduce_delay, self.backward_passes_per_step)
    self._group_counts = dict.fromkeys(self._group_counts, 0)
    self._synchronized = True


@contextlib.contextmanager
def no_sync(self: Any) -> Iterator[None]:
    """Backward passes in this context only accumulate; the next one outside starts the exchange."""
    before, self._grace.paused = self._grace.paused, True
    try:
        yield
    finally:
        self._grace.paused = before


def zero_grad(self: Any, set_to_none: bool = True) -> None:
    """Clear gradients; refused, as Horovod does, while their exchange is under way."""
    if self._handles:
        _DistributedOptimizer.zero_grad(self)  # raises
    super(self.__class__, self).zero_grad(set_to_none=set_to_none)


def _amp(self: Any) -> bool:
    """``GradScaler.step()`` asks this before it unscales gradients, which the exchange must be over by."""
    if self._handles:
        self.synchronize()
    return self.__dict__.get("_step_supports_amp_scaling", False)


class _Initialized(StateMixin):
    """Stands between Horovod's methods and the user's optimizer, which is initialized already."""

    def __init__(self, params: Any):
        """Horovod's ``__init__`` comes here where a new optimizer would be made."""


REPLACED = {
    "_allreduce_grad_async": _allreduce_grad_async,
    "_grouped_allreduce_grad_async": _grouped_allreduce_grad_async,
    "_make_hook": _make_hook,
    "synchronize": synchronize,
    "no_sync": no_sync,
    "zero_grad": zero_grad,
    "_step_supports_amp_scaling": property(_amp),
}
"""How one gradient is exchanged; the rest is Horovod's."""


def distribute(
    optimizer: torch.optim.Optimizer,
    named_parameters: Any,
    choices: tuple[Any, Any, Any],
    backend: Any,
    options: dict[str, Any],
    before_step: Callable,
) -> Any:
    """Make the optimizer a Horovod DistributedOptimizer that exchanges through Grace; in place.

    Horovod derives a class from the user's at run time, and so does this, from Horovod's class body with
    ``REPLACED`` in it (Horovod's methods call ``super(self.__class__, self)``, so they must lie in the very
    class of the object). ``step`` is left out of it: a hook does what it does, since learning-rate schedulers
    made earlier have bound the user's ``step``.
    """
    pairs = None if named_parameters is None else list(named_parameters)
    session = HorovodSession(optimizer, pairs, choices, backend, **options) if backend.included else None
    names = pairs
    if session is not None:
        known = {p: name for name, p in session.parameters.items()}
        others = [p for group in optimizer.param_groups for p in group["params"] if p not in known]
        names = [*session.parameters.items(), *((f"grace.frozen.{i}", p) for i, p in enumerate(others))]
    cls = type(optimizer)
    body = {**_DistributedOptimizer.__dict__, **REPLACED, "__module__": cls.__module__}
    for left_out in ("step", "__dict__", "__weakref__"):
        body.pop(left_out, None)
    optimizer.__class__ = type(cls.__name__, (_Initialized, cls), body)
    made: Any = optimizer
    made._grace = session
    groups = None
    if session is not None and any(len(group.variables) > 1 for group in session.exchanger.groups):
        groups = [[session.parameters[v.name] for v in group.variables] for group in session.exchanger.groups]
    _DistributedOptimizer.__init__(
        made,
        made.param_groups,
        names,
        hvd.Compression.none,
        options["passes"],
        hvd.Sum if options["reduction"].op == "sum" else hvd.Average,
        options["reduction"].predivide,
        groups,
        options["sparse_as_dense"],
        backend.process_set,
    )
    if session is not None and not made._grad_accs:
        made._register_hooks()  # on one rank Horovod registers none, but compression shows its effect
    if session is not None:
        made.register_step_pre_hook(before_step)
    return made
