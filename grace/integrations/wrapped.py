"""Common parts of the integrations: the exchange of a model that a framework has wrapped, and its memories in
checkpoints.

DistributedDataParallel's communication hook exchanges gradients in every step. Where ranks train alone between outer
rounds, the framework's own optimizer becomes a distributed one, and the wrapper exchanges nothing.
"""

import contextlib
import dataclasses
import functools
import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel

from grace.backends.world_size_check import check_trainer
from grace.core.api_names import TORCH
from grace.core.communicator import CommunicatorArg, CompressorArg, MemoryArg
from grace.core.outer import OuterArg
from grace.errors import ConfigError, warn
from grace.session.agreement import gather_or_raise
from grace.session.checkpoint import check_mode
from grace.session.state_schema import SavedState, checksum
from grace.session.step_runner import StepRunner
from grace.strategy.execution import StrategyArg
from grace.torch.ddp import DDPState, RoundsError, register_ddp_hook
from grace.torch.optimizer import DistributedMixin, DistributedOptimizer
from grace.torch.state_dict import INNER, load_state
from grace.torch.wrappers import Silence, unwrap_compiled

KEY = "grace"
"""Key of the state of all ranks in a framework's checkpoint."""
NOTHING: dict[str, object] = {KEY: None}
"""State that one process saves, or any before training begins."""
ExchangeState = DDPState | DistributedMixin
"""State of DistributedDataParallel's hook, or the distributed optimizer if there are outer rounds."""
NODE = torch.autograd.function.BackwardCFunction.apply.__code__
"""Code that runs the backward of a program's own function, in which other passes may start."""
P = ParamSpec("P")
T = TypeVar("T")


class Wrapped:
    """Grace on one model, with its state in the form that frameworks' checkpoints take.

    Attributes:
        state: the hook's state; the distributed optimizer if there are outer rounds; None in one process, where nothing
            is exchanged.
        rounds: True if there are outer rounds.
        optimizer: the optimizer that uses what is exchanged; None if several do.
        memory_state: treatment of memories in a checkpoint: "strict", "keep" or "reset".
        progress: returns the framework's own counts of steps, by name, which are saved with memories, and which the
            framework restores before memories.
    """

    def __init__(self, state: ExchangeState | None, memory_state: str, progress: Callable[[], dict[str, int]]):
        self.state = state
        self.rounds = isinstance(state, DistributedMixin)
        self.optimizer = state if self.rounds else getattr(state, "optimizer", None)
        self.memory_state = memory_state
        self.progress = progress

    @property
    def runner(self) -> StepRunner:
        """Runner of the exchanges, of which there are none in one process."""
        assert self.state is not None
        return self.state._grace.runner if isinstance(self.state, DistributedMixin) else self.state.runner

    def state_dict(self) -> dict[str, object]:
        """Return the state of all ranks, as bytes, and its step; every rank must call it."""
        if self.state is None:
            return dict(NOTHING)
        if isinstance(self.state, DistributedMixin):  # the framework saves torch's own part
            saved = self.state.full_state_dict(packed=True)
            parts: dict[str, object] = {"memories": saved["grace"], "inner": saved[INNER]}
        else:
            parts = {"memories": self.state.full_state_dict(packed=True)}
        return {KEY: {**parts, "at": self.progress()}}

    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        """Load the state of all ranks, on any number of ranks; every rank must call it.

        Raises:
            ConfigError: the state does not fit, or there is none, or it is of another step than the framework has
                loaded.
            RankError: another rank refused it.
        """
        found = saved.get(KEY)
        # memories alone are of an earlier version
        parts: dict[str, Any] = found if isinstance(found, dict) else {"memories": found}
        memories = parts.get("memories")
        if self.state is None:
            if memories is not None:
                warn("the checkpoint's memories are dropped, because one process exchanges nothing")
            return
        if saved == NOTHING:  # saved by one process, or before training: there are no memories to load
            self._load(self.state, None, (), "reset")
            return
        self._compare_steps(parts.get("at"))
        self._load(self.state, memories, parts.get("inner", ()), self.memory_state)

    def _load(
        self, state: ExchangeState, memories: SavedState | bytes | None, inner: object, memory_state: str
    ) -> None:
        if not isinstance(state, DistributedMixin):
            state.load_state_dict(memories, memory_state)
            return
        # The framework has loaded the optimizer's state of one rank into those of all.
        load_state(state, {**state.state_dict(), "grace": memories, INNER: inner}, memory_state)

    def _compare_steps(self, at: object) -> None:
        """Refuse memories of another step, on all ranks; under "keep" warn of them."""
        now = self.progress()
        error = None
        saved = {**now, **at} if isinstance(at, dict) else now  # counts that only one of them has are not compared
        different = [
            f"{name} {saved[name]}, and the run is at {now[name]}"
            for name in now
            if saved.get(name, now[name]) != now[name]
        ]
        calls = self.runner.context.api_names
        if different:
            why = (
                f"the memories were saved at {different[0]}: they are of another checkpoint than the weights beside "
                "them"
            )
            if self.memory_state == "strict":
                error = ConfigError(f"{why}. Take those that were saved with them, or start with none: {calls.reset}")
            elif self.memory_state == "keep":
                warn(why)
        backend = self.runner.backend
        gather_or_raise(backend, "the step of a checkpoint's memories", None, error, "did not load them")

    def metrics(self) -> dict[str, float]:
        """Return numbers for loggers, of the steps since the last call: those of ``DDPState.metrics()`` that are
        known."""
        found = {} if self.state is None else self.state.metrics()
        return {f"grace_{name}": value for name, value in found.items() if not math.isnan(value)}

    def anchor(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the parameters that all ranks share. Without outer rounds it changes
        nothing."""
        return self.state.anchor() if isinstance(self.state, DistributedMixin) else contextlib.nullcontext()

    def flush(self) -> None:
        """Run a last outer round, after which all ranks have equal parameters; every rank must call it. Without outer
        rounds it does nothing."""
        if isinstance(self.state, DistributedMixin):
            self.state.flush()

    def has_equal_parameters(self) -> bool:
        """Return True if all ranks have the same parameters; every rank must call it."""
        if not isinstance(self.state, DistributedMixin):  # they are exchanged in every step
            return True
        own = checksum(dict(self.state._grace.parameters))
        return len(set(self.runner.backend.allgather_object(own))) == 1

    def close(self) -> None:
        """End the exchange of this model; every rank must call it."""
        if self.state is not None:
            self.state.close()


class Chosen:
    """Base class of frameworks' callbacks, with the user's choices, and the exchange once training has begun."""

    training = False
    """True from the begin of training to its end."""

    def __init__(
        self,
        compressor: CompressorArg | None = None,
        memory: MemoryArg | None = None,
        communicator: CommunicatorArg | None = None,
        *,
        outer: OuterArg | None = None,
        period: int | None = None,
        strategy: StrategyArg | None = None,
        hierarchical: bool = False,
        compress_after: int = 0,
        seed: int = 0,
        bucket_bytes: int | None = None,
        memory_state: str = "strict",
    ):
        self.choices = {
            "outer": outer,
            "period": period,
            "compressor": compressor,
            "memory": memory,
            "communicator": communicator,
            "strategy": strategy,
            "hierarchical": hierarchical,
            "compress_after": compress_after,
            "seed": seed,
            "bucket_bytes": bucket_bytes,
        }
        self.memory_state = memory_state
        self.wrapped: Wrapped | None = None

    @property
    def state(self) -> ExchangeState | None:
        """State of the hook, or the distributed optimizer."""
        return None if self.wrapped is None else self.wrapped.state

    def anchor(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a model in training has the parameters that all ranks share."""
        return self.wrapped.anchor() if self.wrapped is not None and self.training else contextlib.nullcontext()

    def at_anchor(self, owner: object, *methods: str) -> None:
        """Let methods of the framework's object run in the context of :meth:`anchor`."""
        for name in methods:
            setattr(owner, name, self._at_anchor(getattr(owner, name)))

    def _at_anchor(self, method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def at_anchor(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.anchor():
                return method(*args, **kwargs)

        return at_anchor

    def end_training(self, flush: bool) -> None:
        """End training, with a last outer round unless the framework has set the parameters of all ranks since."""
        self.training = False
        if self.wrapped is not None and flush:
            self.wrapped.flush()


def wrap(
    model: torch.nn.Module,
    ranks: int,
    optimizers: Sequence[torch.optim.Optimizer],
    memory_state: str,
    way: str,
    load: str,
    progress: Callable[[], dict[str, int]] = dict,
    **choices: Any,
) -> Wrapped:
    """Compress the exchange of a wrapped model.

    Args:
        model: the framework's wrapper of the user's model.
        ranks: number of ranks.
        optimizers: the framework's optimizers; the one that has the model's parameters is chosen.
        memory_state: treatment of memories in a checkpoint.
        way: the advice how to let the framework use DistributedDataParallel, for messages.
        load: the call that loads a checkpoint, for messages, with a place for the treatment of memories.
        progress: returns the framework's counts of steps, by name.
        choices: for :func:`grace.torch.register_ddp_hook`; and outer and period of
            :func:`grace.DistributedOptimizer`.

    Raises:
        ConfigError: the model is wrapped by another class, or has a hook already, or the choices cannot work; or a
            launcher has started more ranks than the framework knows.
    """
    check_mode(memory_state)
    check_trainer(ranks, way)
    ddp = unwrap_compiled(model)
    if not isinstance(ddp, DistributedDataParallel):
        check_unsharded(ddp, way)
        if ranks > 1:
            raise ConfigError(
                f"the model is not in DistributedDataParallel but a {type(ddp).__name__} on {ranks} ranks: Grace "
                f"compresses what DistributedDataParallel exchanges. {way}"
            )
        warn("one process exchanges no gradients, so Grace compresses nothing in this run")
        return Wrapped(None, memory_state, progress)
    optimizer = _optimizer_of(ddp, optimizers)
    outer = choices.pop("outer", None)
    period = choices.pop("period", None)
    state: ExchangeState | None = None
    if outer is None and period is None:
        with contextlib.suppress(RoundsError):  # then the strategy has rounds
            state = register_ddp_hook(ddp, optimizer=optimizer, **choices)
    if state is None:
        state = train_alone(ddp, optimizer, outer=outer, period=period, **choices)
    wrapped = Wrapped(state, memory_state, progress)
    calls = dataclasses.replace(TORCH, save_all="the framework's own checkpoint", load=load, memory="memory_state")
    wrapped.runner.context.api_names = calls
    return wrapped


def train_alone(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer | None, **choices: Any
) -> DistributedMixin:
    """Let ranks train alone between outer rounds: make the optimizer distributed, and the wrapper of the model silent.

    The ranks of a node that average gradients have the means at the end of backward, as DistributedDataParallel has,
    because frameworks clip them before the optimizer's step.

    Args:
        model: the model, which exchanges nothing until the optimizer is closed.
        optimizer: the optimizer of all its parameters; None if there is no such one.
        choices: for :func:`grace.DistributedOptimizer`.

    Raises:
        ConfigError: there is no such optimizer; or the choices cannot work, or keep some variables in step.
    """
    if optimizer is None:
        raise ConfigError(
            "outer rounds need one optimizer that has all parameters of the model that train, and the framework has "
            "none: make one optimizer with several parameter groups, or exchange in every step, without outer"
        )
    silence = Silence(model)  # first: DistributedOptimizer refuses a model whose wrapper exchanges gradients
    try:
        distributed: DistributedMixin = DistributedOptimizer(
            optimizer, model.module, process_group=model.process_group, **choices
        )
    except BaseException:  # an interrupt as well: the model must exchange again
        silence.remove()
        raise
    session = distributed._grace
    session.hooks.append(silence)  # type: ignore[arg-type]  # which has the remove() of a handle
    in_step = [name for name, shard in session.runner.shards.items() if shard.outer is None]
    if in_step:
        distributed.close()
        raise ConfigError(
            f"the strategy keeps {in_step[0]!r} in step and lets ranks train other variables alone: frameworks clip "
            "all gradients by one norm, each rank by its own, so its values would differ by rank. Give all variables "
            "outer (over='nodes' keeps the ranks of a node in step), or call grace.DistributedOptimizer in a loop of "
            "your own"
        )
    type(model).optimizer = weakref.ref(distributed)  # type: ignore[attr-defined]
    distributed._saved_by_framework = True
    distributed._grace_added.add("_saved_by_framework")
    if session.runner.buckets:
        parameters = list(session.parameters.values())
        session.hooks.append(register_multi_grad_hook(parameters, EndOfBackward(distributed), mode="any"))
    return distributed


class EndOfBackward:
    """Hook of the first gradient of a backward pass, which lets the pass end with the exchange of its gradients.

    Args:
        optimizer: the distributed optimizer; the hook does not keep it alive.
    """

    def __init__(self, optimizer: DistributedMixin):
        self.optimizer = weakref.ref(optimizer)

    def __call__(self, gradient: torch.Tensor) -> None:
        # A pass within another one (reentrant checkpoints) ends before the other gradients have come.
        if _within_backward():
            return
        # DDP's own way: the callback runs at the end of this backward pass, before backward() returns
        torch.autograd.Variable._execution_engine.queue_callback(self.synchronize)  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Exchange the gradients, unless they only accumulate in this pass."""
        optimizer = self.optimizer()
        if optimizer is not None and optimizer._grace.computed:
            optimizer.synchronize()


def _within_backward() -> bool:
    """Return True if the calling hook runs in a backward pass that another one has started."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not NODE:
        frame = frame.f_back
    return frame is not None


def check_unsharded(model: torch.nn.Module, way: str) -> None:
    """Refuse a model that ``fully_shard`` has sharded.

    Raises:
        ConfigError: the model is sharded.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is not None and any(isinstance(module, kind) for module in model.modules()):
        raise ConfigError(
            "the model is sharded by fully_shard (FSDP2) over all ranks, so there are no replicas whose exchange could "
            f"be compressed. {way}; or shard it yourself, over one axis of a mesh of two, and call "
            "grace.torch.register_fsdp_hook(model, mesh['replicate'], ...)"
        )


def _optimizer_of(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
    """Return the optimizer of the model's parameters, without the framework's wrapper; None if several share them."""
    wanted = {p for p in model.parameters() if p.requires_grad}
    for given in optimizers:
        optimizer = getattr(given, "optimizer", given)
        if wanted <= {p for group in optimizer.param_groups for p in group["params"]}:
            if hasattr(optimizer, "_grace"):
                raise ConfigError(
                    "the optimizer is a grace.DistributedOptimizer, which exchanges gradients as well: give the "
                    "framework the plain one"
                )
            return optimizer
    return None
