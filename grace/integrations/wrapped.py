"""Common parts of the integrations: the hook on a model that a framework has wrapped, and its memories in
checkpoints."""

import dataclasses
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from grace.backends.alone import check_trainer
from grace.core.api_names import TORCH
from grace.errors import ConfigError
from grace.session.agreement import gather_or_raise
from grace.session.checkpoint import check_mode
from grace.torch.ddp import DDPState, register_ddp_hook
from grace.torch.wrappers import unwrap_compiled

KEY = "grace"
"""Key of the state of all ranks in a framework's checkpoint."""
NOTHING: dict[str, Any] = {KEY: None}
"""State that one process saves, or any before training begins."""


class Wrapped:
    """Grace on one model: the state of its hook, in the form that frameworks' checkpoints take.

    Attributes:
        state: the hook's state; None in one process, where nothing is exchanged.
        memory_state: treatment of memories in a checkpoint: "strict", "keep" or "reset".
        progress: returns the framework's own counts of steps, by name, which are saved with memories, and which the
            framework restores before memories.
    """

    def __init__(self, state: DDPState | None, memory_state: str, progress: Callable[[], dict[str, int]]):
        self.state = state
        self.memory_state = memory_state
        self.progress = progress

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks, as bytes, and its step; every rank must call it."""
        if self.state is None:
            return dict(NOTHING)
        return {KEY: {"memories": self.state.full_state_dict(packed=True), "at": self.progress()}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the state of all ranks, on any number of ranks; every rank must call it.

        Raises:
            ConfigError: the state does not fit, or there is none, or it is of another step than the framework has
                loaded.
            RankError: another rank refused it.
        """
        found: Any = saved.get(KEY)
        earlier = not isinstance(found, dict)  # memories alone, as checkpoints held them before
        memories = found if earlier else found.get("memories")
        if self.state is None:
            if memories is not None:
                warnings.warn(
                    "the checkpoint's memories are dropped, because one process exchanges nothing", stacklevel=2
                )
            return
        if saved == NOTHING:
            self.state.load_state_dict(None, "reset")
            return
        self._compare_steps({} if earlier else found.get("at"))
        self.state.load_state_dict(memories, self.memory_state)

    def _compare_steps(self, at: Any) -> None:
        """Refuse memories of another step, on all ranks; under "keep" warn of them."""
        assert self.state is not None
        now = self.progress()
        error = None
        saved = {**now, **at} if isinstance(at, dict) else now  # counts that only one of them has are not compared
        different = [
            f"{name} {saved[name]}, and the run is at {now[name]}"
            for name in now
            if saved.get(name, now[name]) != now[name]
        ]
        calls = self.state.runner.context.api_names
        if different:
            why = (
                f"the memories were saved at {different[0]}: they are of another checkpoint than the weights beside "
                "them"
            )
            if self.memory_state == "strict":
                error = ConfigError(f"{why}. Take those that were saved with them, or start with none: {calls.reset}")
            elif self.memory_state == "keep":
                warnings.warn(why, stacklevel=3)
        backend = self.state.runner.backend
        gather_or_raise(backend, "the step of a checkpoint's memories", None, error, "did not load them")

    def metrics(self) -> dict[str, float]:
        """Return numbers for loggers, of the steps since the last call: those of ``DDPState.metrics()`` that are
        known."""
        found = {} if self.state is None else self.state.metrics()
        return {f"grace_{name}": value for name, value in found.items() if not math.isnan(value)}

    def close(self) -> None:
        """End the exchange of this model's gradients; every rank must call it."""
        if self.state is not None:
            self.state.close()


class Chosen:
    """Base class of frameworks' callbacks, with the user's choices, and the hook once training has begun."""

    def __init__(
        self,
        compressor: Any = None,
        memory: Any = None,
        communicator: Any = None,
        *,
        strategy: Any = None,
        hierarchical: bool = False,
        compress_after: int = 0,
        seed: int = 0,
        bucket_bytes: int | None = None,
        memory_state: str = "strict",
    ):
        self.choices = {
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
    def state(self) -> Any:
        """State of the hook."""
        return None if self.wrapped is None else self.wrapped.state


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
        choices: for :func:`grace.torch.register_ddp_hook`.

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
        warnings.warn("one process exchanges no gradients, so Grace compresses nothing in this run", stacklevel=3)
        return Wrapped(None, memory_state, progress)
    state = register_ddp_hook(ddp, optimizer=_optimizer_of(ddp, optimizers), **choices)
    calls = dataclasses.replace(TORCH, save_all="the framework's own checkpoint", load=load, memory="memory_state")
    state.runner.context.api_names = calls
    return Wrapped(state, memory_state, progress)


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
