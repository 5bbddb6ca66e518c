"""The distributed optimizer: the user's own, whose gradients are exchanged compressed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from grace import checkpoint
from grace.backend import Backend
from grace.communicator import Communicator
from grace.component import Context
from grace.errors import ConfigError, ExchangeError
from grace.exchange import Group, Traffic
from grace.exchanger import build_exchanger
from grace.runtime import current
from grace.torch.backends.distributed import TorchBackend
from grace.torch.parameters import broadcast_parameters, check_memory, named, variables

GROUP_BYTES = 25 << 20


class Session:
    """What a distributed optimizer adds to the user's: hooks on its parameters and the state of this step.

    A parameter's hook counts backward passes; when every parameter of the next group has had them all, the
    group's exchange starts. ``synchronize`` starts what is left (with zeros where this rank has no gradient),
    awaits everything, and writes the means back.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Any,
        choices: tuple[Any, Any, Any],
        backend: Backend,
        *,
        passes: int,
        group_bytes: int,
        seed: int,
        grad_scaler: Any,
        sparse_as_dense: bool,
        broadcast: bool,
    ):
        self.optimizer, self.passes, self.grad_scaler = optimizer, passes, grad_scaler
        self.sparse_as_dense = sparse_as_dense
        self.parameters: dict[str, torch.nn.Parameter] = {}

        def list_variables():
            _check_settings(passes, group_bytes)
            self.parameters = named(optimizer, parameters)
            return variables(self.parameters)

        self.context = Context(seed=seed, lr=self._lr)
        settings = [
            ("backward_passes_per_step", str(passes)),
            ("group_bytes", str(group_bytes)),
            ("broadcast", str(broadcast)),
            ("grad_scaler", "none" if grad_scaler is None else "given"),
        ]
        self.exchanger = build_exchanger(
            list_variables, choices, backend, self.context, group_bytes, settings, self._check
        )
        self.group_of = {v.name: group for group in self.exchanger.groups for v in group.variables}
        self.param_group = {
            name: index
            for index, group in enumerate(optimizer.param_groups)
            for name, p in self.parameters.items()
            if any(p is other for other in group["params"])
        }
        self.paused = False
        self.synchronized = False
        self._reset()
        if broadcast:
            broadcast_parameters(self.parameters, 0, backend)
        self.hooks = [p.register_post_accumulate_grad_hook(self._hook(n)) for n, p in self.parameters.items()]

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self.hooks:
            hook.remove()

    def _check(self, communicator: Communicator) -> None:
        check_memory(communicator.memory, self.optimizer)

    def _lr(self, name: str) -> float:
        return float(self.optimizer.param_groups[self.param_group[name]]["lr"])

    def _reset(self) -> None:
        self.counts = dict.fromkeys(self.parameters, 0)
        self.waiting = [len(group.variables) for group in self.exchanger.groups]
        self.next_group = 0
        self.versions: dict[str, tuple[torch.Tensor, int]] = {}

    # -- during backward -------------------------------------------------------------------------------

    def _hook(self, name: str):
        def hook(parameter: torch.nn.Parameter) -> None:
            if self.paused:
                return
            self.synchronized = False
            if self.counts[name] == self.passes:
                raise ExchangeError(
                    f"the gradient of {name!r} was computed {self.passes + 1} times before step(), and its exchange "
                    f"has begun. Accumulate with backward_passes_per_step={self.passes + 1}, or run the earlier "
                    "passes under `with optimizer.no_sync():`"
                )
            self.counts[name] += 1
            if self.counts[name] == self.passes:
                self.waiting[self.group_of[name].index] -= 1
                while self.next_group < len(self.waiting) and self.waiting[self.next_group] == 0:
                    self._start_next()

        return hook

    @torch.no_grad()
    def _start_next(self) -> None:
        group = self.exchanger.groups[self.next_group]
        if self.next_group == 0 and self.grad_scaler is not None and self.grad_scaler.is_enabled():
            self.exchanger.rescale(self.grad_scaler.get_scale())
        gradients, present = [], []
        for variable in group.variables:
            p = self.parameters[variable.name]
            present.append(p.grad is not None)
            gradients.append(torch.zeros_like(p) if p.grad is None else self._dense(variable.name, p))
            if p.grad is not None:
                self.versions[variable.name] = (p.grad, p.grad._version)
        self.next_group += 1
        self.exchanger.start(group, gradients, present)

    def _dense(self, name: str, p: torch.nn.Parameter) -> torch.Tensor:
        assert p.grad is not None
        if p.grad.layout is not torch.strided:
            if not self.sparse_as_dense:
                raise ConfigError(
                    f"the gradient of {name!r} is sparse ({p.grad.layout}); pass sparse_as_dense=True to exchange "
                    "it as a dense one, or make the layer dense (Embedding(sparse=False))"
                )
            p.grad = p.grad.to_dense()
        return p.grad.contiguous()

    # -- at the end of a step --------------------------------------------------------------------------

    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchange what is not exchanged yet and write the means into ``p.grad``."""
        self._check_untouched()
        while self.next_group < len(self.exchanger.groups):
            self._start_next()
        outcomes = self.exchanger.finish(self._outs)
        for outcome in outcomes:
            p = self.parameters[outcome.variable.name]
            if outcome.value is None or outcome.value is p.grad:
                continue
            if p.grad is None:
                p.grad = torch.empty_like(p)
            p.grad.copy_(outcome.value)
        self._reset()
        self.synchronized = True

    def before_step(self) -> None:
        """``step()`` is about to run: synchronize unless the user has done it since the last one."""
        if not self.synchronized:
            self.synchronize()
        self.synchronized = False

    def before_zero_grad(self) -> None:
        """The gradients are about to be dropped: let exchanges under way end, and drop what they brought."""
        # every rank that has run its backward passes comes here, whether it has begun a group or not
        if self.passes in self.counts.values() and not self.synchronized:
            while self.next_group < len(self.exchanger.groups):
                self._start_next()
            self.exchanger.discard()
        self._reset()
        self.synchronized = False

    def _check_untouched(self) -> None:
        states = getattr(self.grad_scaler, "_per_optimizer_states", {})  # torch counts no version for unscale_()
        unscaled = getattr(states.get(id(self.optimizer), {}).get("stage"), "name", "") == "UNSCALED"
        for name, (gradient, version) in self.versions.items():
            p = self.parameters[name]
            if unscaled or p.grad is not gradient or gradient._version != version:
                raise ExchangeError(
                    f"the gradient of {name!r} was changed after its exchange began (by clipping, unscaling or "
                    "another backward pass). Call optimizer.synchronize() after backward and before you change "
                    "gradients; step() then uses them as they are"
                )

    def _outs(self, group: Group) -> list[torch.Tensor | None]:
        """Where aggregates may be written directly: float32 or exact gradients, contiguous, of this rank."""
        traits = group.communicator.compressor.traits
        outs: list[torch.Tensor | None] = []
        for variable in group.variables:
            grad = self.parameters[variable.name].grad
            usable = grad is not None and grad.is_contiguous() and (traits.exact or grad.dtype == torch.float32)
            outs.append(grad if usable else None)
        return outs


def _check_settings(passes: Any, group_bytes: Any) -> None:
    for name, value in (("backward_passes_per_step", passes), ("group_bytes", group_bytes)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")


class DistributedMixin:
    """The methods that a distributed optimizer has beside, or instead of, the user's optimizer's."""

    _grace: Session

    def synchronize(self) -> None:
        """Await the exchange, so that ``p.grad`` holds the means: before clipping or unscaling."""
        if not self._grace.synchronized:
            self._grace.synchronize()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context only accumulate; the next one outside starts the exchange."""
        session = self._grace
        before, session.paused = session.paused, True
        try:
            yield
        finally:
            session.paused = before

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Horovod's spelling: ``step()`` in this context does not synchronize, because you have. Grace's
        ``step()`` knows that by itself."""
        if not self._grace.synchronized:
            raise ExchangeError("call synchronize() before `with optimizer.skip_synchronize():`")
        yield

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """``GradScaler.step()`` asks this before it unscales gradients, which the exchange must be over by."""
        if any(self._grace.counts.values()):
            self.synchronize()
        return self.__dict__.get("_step_supports_amp_scaling", False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; an exchange under way is completed and its result dropped."""
        self._grace.before_zero_grad()
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the groups of the exchange are fixed when the optimizer is made distributed."""
        raise ConfigError(
            "add the parameter group to the optimizer before grace.DistributedOptimizer, which fixes what is "
            "exchanged together"
        )

    def state_dict(self) -> dict[str, Any]:
        """The user's optimizer's state, and under "grace" what this rank remembers."""
        state = super().state_dict()  # type: ignore[misc]
        state["grace"] = checkpoint.save(self._grace.exchanger)
        return state

    def full_state_dict(self) -> dict[str, Any]:
        """Like ``state_dict()``, with every rank's memories, for one file that loads on any number of ranks.

        Every rank must call it; save it on one."""
        state = super().state_dict()  # type: ignore[misc]
        state["grace"] = checkpoint.gather(self._grace.exchanger)
        return state

    def load_state_dict(self, state_dict: dict[str, Any], memory: str = "strict") -> None:
        """Restore. A run that is stopped and resumed continues bit for bit.

        Args:
            state_dict: from ``state_dict()`` of the same rank, or from ``full_state_dict()``.
            memory: "strict", or "reset" to start with empty memories.

        Raises:
            ConfigError: the memories belong to another rank, number of ranks or method.
        """
        plain = {key: value for key, value in state_dict.items() if key != "grace"}
        saved = state_dict.get("grace")
        session = self._grace
        saved = saved and _on_devices(saved, session.parameters)
        checkpoint.load(session.exchanger, saved, memory)
        super().load_state_dict(plain)  # type: ignore[misc]

    @property
    def traffic(self) -> Traffic:
        """What was exchanged so far, counted."""
        return self._grace.exchanger.traffic


def _on_devices(saved: Any, parameters: dict[str, torch.nn.Parameter], device: Any = "cpu") -> Any:
    """The saved state with each variable's tensors on its parameter's device."""
    if isinstance(saved, torch.Tensor):
        return saved.to(device, copy=True)
    if isinstance(saved, dict):
        return {
            key: _on_devices(value, parameters, parameters[key].device if key in parameters else device)
            for key, value in saved.items()
        }
    if isinstance(saved, list):
        return [_on_devices(value, parameters, device) for value in saved]
    return saved


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compressor: Any = None,
    memory: Any = None,
    communicator: Any = None,
    *,
    backward_passes_per_step: int = 1,
    process_group: Any = None,
    backend: Backend | None = None,
    grad_scaler: Any = None,
    sparse_as_dense: bool = False,
    broadcast: bool = True,
    seed: int = 0,
    group_bytes: int = GROUP_BYTES,
) -> Any:
    """Make an optimizer exchange its gradients, compressed, between backward and step.

    The optimizer is changed in place and returned: it still is of its class, and ``step()`` first replaces
    each ``p.grad`` by the mean over ranks (or what the method defines). Exchanges start during backward.
    All ranks must make the same call.

    Args:
        optimizer: any torch optimizer.
        named_parameters: ``model.named_parameters()``; names are what state and messages are keyed by.
        compressor: spec ("topk(ratio=0.01)"), dict or object; "none" if left out.
        memory: the same; the compressor's default if left out.
        communicator: the same, or a Communicator object that holds all three; the compressor's default.
        backward_passes_per_step: exchange after this many backward passes, whose gradients add up.
        process_group: a torch.distributed group; all ranks if left out.
        backend: a Backend object, instead of that of ``grace.init()``.
        grad_scaler: the ``torch.amp.GradScaler`` in use, so that memories follow the loss scale.
        sparse_as_dense: exchange sparse gradients as dense ones (they are refused otherwise).
        broadcast: start every rank from rank 0's parameter values.
        seed: of the random numbers of stochastic methods; the same on all ranks.
        group_bytes: bytes of gradient that are exchanged in one collective.

    Raises:
        ConfigError: what was given cannot work; nothing was exchanged.
        RankError: the ranks gave different things, or another rank's cannot work.

    >>> import grace
    >>> backend = grace.init("local")
    >>> model = torch.nn.Linear(10, 10)
    >>> opt = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> opt = grace.DistributedOptimizer(opt, model.named_parameters(), compressor="topk(ratio=0.1)")
    >>> isinstance(opt, torch.optim.SGD)
    True
    >>> model(torch.ones(1, 10)).sum().backward()
    >>> opt.step()
    >>> int((model.weight.grad != 0).sum())
    10
    >>> grace.shutdown()
    """
    if isinstance(optimizer, DistributedMixin):
        raise ConfigError("this optimizer is distributed already")
    if backend is None:
        backend = TorchBackend(process_group) if process_group is not None else current()
    session = Session(
        optimizer,
        named_parameters,
        (compressor, memory, communicator),
        backend,
        passes=backward_passes_per_step,
        group_bytes=group_bytes,
        seed=seed,
        grad_scaler=grad_scaler,
        sparse_as_dense=sparse_as_dense,
        broadcast=broadcast,
    )
    cls = type(optimizer)
    optimizer.__class__ = type(cls.__name__, (DistributedMixin, cls), {"__module__": cls.__module__})
    optimizer._grace = session  # type: ignore[attr-defined]
    optimizer.register_step_pre_hook(_before_step)
    return optimizer


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Synchronize before the user's step; with a closure, after the closure's backward instead."""
    session = optimizer._grace
    given = args[1:]  # torch hands the hook step()'s arguments with the optimizer first
    closure = kwargs.get("closure", given[0] if given else None)
    if closure is None:
        session.before_step()
        return None

    def synchronized_closure() -> Any:
        loss = closure()
        session.before_step()
        return loss

    if given:
        return (optimizer, synchronized_closure, *given[1:]), kwargs
    return args, {**kwargs, "closure": synchronized_closure}
