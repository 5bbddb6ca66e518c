"""What the frameworks share: the hook on a model that one has wrapped, and its memories in their checkpoints."""

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
from grace.session.agreement import tell
from grace.session.checkpoint import check_mode
from grace.torch.ddp import DDPState, register_ddp_hook
from grace.torch.wrappers import unwrap_compiled

KEY = "grace"
"""Of what all ranks remember, in what a framework saves."""
NOTHING: dict[str, Any] = {KEY: None}
"""What is saved by one process, or before training begins: there is nothing to remember."""


class Wrapped:
    """Grace on one model: the state of its hook, and that as frameworks' checkpoints take it.

    Attributes:
        state: None in one process, where nothing is exchanged.
        memory_state: what becomes of memories that a checkpoint brings: "strict", "keep" or "reset".
        progress: the framework's own counts of steps, by their names: what is saved beside memories, and is restored
            before they are.
    """

    def __init__(self, state: DDPState | None, memory_state: str, progress: Callable[[], dict[str, int]]):
        self.state, self.memory_state, self.progress = state, memory_state, progress

    def state_dict(self) -> dict[str, Any]:
        """What all ranks remember, as bytes, and at which step; every rank must call it."""
        if self.state is None:
            return dict(NOTHING)
        return {KEY: {"memories": self.state.full_state_dict(packed=True), "at": self.progress()}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore it, on any number of ranks; every rank must call it.

        Raises:
            ConfigError: it does not fit, or there is none, or it is of another step than what the framework has loaded.
            RankError: another rank refused it.
        """
        found: Any = saved.get(KEY)
        earlier = not isinstance(found, dict)  # memories alone, as checkpoints held them before
        memories = found if earlier else found.get("memories")
        if self.state is None:
            if memories is not None:
                warnings.warn("what the checkpoint remembers is dropped: one process exchanges nothing", stacklevel=2)
            return
        if saved == NOTHING:
            self.state.load_state_dict(None, "reset")
            return
        self._check_step({} if earlier else found.get("at"))
        self.state.load_state_dict(memories, self.memory_state)

    def _check_step(self, at: Any) -> None:
        """Refuse memories of another step, on all ranks; under "keep" warn of them."""
        assert self.state is not None
        now, error = self.progress(), None
        told = {**now, **at} if isinstance(at, dict) else now  # of what either does not count nothing is known
        unlike = [
            f"{name} {told[name]}, and the run is at {now[name]}"
            for name in now
            if told.get(name, now[name]) != now[name]
        ]
        calls = self.state.runner.context.calls
        if unlike:
            why = f"the memories were saved at {unlike[0]}: they are of another checkpoint than the weights beside them"
            if self.memory_state == "strict":
                error = ConfigError(f"{why}. Take those that were saved with them, or start with none: {calls.reset}")
            elif self.memory_state == "keep":
                warnings.warn(why, stacklevel=3)
        tell(self.state.runner.backend, "the step of a checkpoint's memories", None, error, "did not load them")

    def metrics(self) -> dict[str, float]:
        """What loggers take, of the steps since the last call: what is known of ``DDPState.metrics()``."""
        found = {} if self.state is None else self.state.metrics()
        return {f"grace_{name}": value for name, value in found.items() if not math.isnan(value)}

    def close(self) -> None:
        """Grace takes part in this model's training no more; every rank must call it."""
        if self.state is not None:
            self.state.close()


class Chosen:
    """Base of frameworks' callbacks: what is chosen when one is made, and what it holds once training has begun."""

    def __init__(
        self,
        compressor: Any = None,
        memory: Any = None,
        communicator: Any = None,
        *,
        compress_after: int = 0,
        seed: int = 0,
        bucket_bytes: int | None = None,
        memory_state: str = "strict",
    ):
        self.choices = {
            "compressor": compressor,
            "memory": memory,
            "communicator": communicator,
            "compress_after": compress_after,
            "seed": seed,
            "bucket_bytes": bucket_bytes,
        }
        self.memory_state = memory_state
        self.wrapped: Wrapped | None = None

    @property
    def state(self) -> Any:
        """The hook's state."""
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
    """Compress what a wrapped model exchanges.

    Args:
        model: what the framework made of the user's model.
        ranks: how many there are.
        optimizers: among which the one that holds the model's parameters is found.
        memory_state: what becomes of memories that a checkpoint brings.
        way: how the framework is told to take DistributedDataParallel.
        load: what messages say loads a checkpoint, with a place for what becomes of memories.
        progress: the framework's counts of steps, by their names.
        choices: for :func:`grace.torch.register_ddp_hook`.

    Raises:
        ConfigError: the model is wrapped by something else, or has a hook already, or what was chosen cannot work; or
            a launcher has started more ranks than the framework knows.
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
    state = register_ddp_hook(ddp, optimizer=_holder(ddp, optimizers), **choices)
    calls = dataclasses.replace(TORCH, save_all="the framework's own checkpoint", load=load, memory="memory_state")
    state.runner.context.calls = calls
    return Wrapped(state, memory_state, progress)


def check_unsharded(model: torch.nn.Module, way: str) -> None:
    """Refuse a model that ``fully_shard`` has sharded.

    Raises:
        ConfigError: it is.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is not None and any(isinstance(module, kind) for module in model.modules()):
        raise ConfigError(
            "the model is sharded by fully_shard (FSDP2) over all ranks, so there are no replicas whose exchange could "
            f"be compressed. {way}; or shard it yourself, over one axis of a mesh of two, and call "
            "grace.torch.register_fsdp_hook(model, mesh['replicate'], ...)"
        )


def _holder(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
    """The optimizer of the model's parameters, without what the framework put around it; None if several share them."""
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
