"""What the frameworks share: the hook on a model that one has wrapped, and its memories in their checkpoints."""

import dataclasses
import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from grace.backends.alone import check_trainer
from grace.core.calls import TORCH
from grace.errors import ConfigError
from grace.session.checkpoint import check_mode
from grace.torch.ddp import DDPState, register_ddp_hook
from grace.torch.wrappers import bare

KEY = "grace"
"""Of what all ranks remember, in what a framework saves."""


class Wrapped:
    """Grace on one model: the state of its hook, and that as frameworks' checkpoints take it.

    Attributes:
        state: None in one process, where nothing is exchanged.
        memory_state: what becomes of memories that a checkpoint brings: "strict", "keep" or "reset".
    """

    def __init__(self, state: DDPState | None, memory_state: str):
        self.state, self.memory_state = state, memory_state

    def state_dict(self) -> dict[str, bytes | None]:
        """What all ranks remember, as bytes; every rank must call it."""
        return {KEY: None if self.state is None else self.state.full_state_dict(packed=True)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore it, on any number of ranks; every rank must call it.

        Raises:
            ConfigError: it does not fit, or there is none.
            RankError: another rank refused it.
        """
        memories = saved.get(KEY)
        if self.state is None:
            if memories is not None:
                warnings.warn("what the checkpoint remembers is dropped: one process exchanges nothing", stacklevel=2)
            return
        alone = KEY in saved and memories is None  # one process saved it, which remembers nothing
        self.state.load_state_dict(memories, "reset" if alone else self.memory_state)

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
        seed: int = 0,
        bucket_bytes: int | None = None,
        memory_state: str = "strict",
    ):
        self.choices = {
            "compressor": compressor,
            "memory": memory,
            "communicator": communicator,
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
        choices: for :func:`grace.torch.register_ddp_hook`.

    Raises:
        ConfigError: the model is wrapped by something else, or has a hook already, or what was chosen cannot work; or
            a launcher has started more ranks than the framework knows.
    """
    check_mode(memory_state)
    check_trainer(ranks, way)
    ddp = bare(model)
    if not isinstance(ddp, DistributedDataParallel):
        check_unsharded(ddp, way)
        if ranks > 1:
            raise ConfigError(
                f"the model is not in DistributedDataParallel but a {type(ddp).__name__} on {ranks} ranks: Grace "
                f"compresses what DistributedDataParallel exchanges. {way}"
            )
        warnings.warn("one process exchanges no gradients, so Grace compresses nothing in this run", stacklevel=3)
        return Wrapped(None, memory_state)
    state = register_ddp_hook(ddp, optimizer=_holder(ddp, optimizers), **choices)
    calls = dataclasses.replace(TORCH, save_all="the framework's own checkpoint", load=load, memory="memory_state")
    state.exchanger.context.calls = calls
    return Wrapped(state, memory_state)


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
