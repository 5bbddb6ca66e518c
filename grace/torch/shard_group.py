"""Parts that compressed collectives within the shard groups of FSDP2 have in common."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from grace.communicators.choice import build_communicator
from grace.core.backend import Backend
from grace.core.communicator import Communicator, MemoryArg
from grace.core.compressor import Compressor
from grace.core.specs import Spec
from grace.errors import ConfigError, StepError
from grace.exchange.header import OVERFLOW, PRESENT
from grace.exchange.layout import Layout
from grace.session import checkpoint
from grace.session.state_schema import SavedState
from grace.session.step_runner import StepRunner
from grace.torch.fsdp_layout import ModuleLayout
from grace.torch.pickling import InertCopies
from grace.torch.state_dict import pack_state, unpack_state

MODULES = 64
"""Modules that a status tells apart: it is a byte, of two bits for the status itself."""


class ShardGroupState(InertCopies):
    """Base class of the states of compressed collectives of a shard group: the runner, which has the method and its
    memory, a wire for each module, and how they are saved.

    Args:
        layouts: the modules.
        runner: the runner over the shard group.
    """

    def __init__(self, layouts: Sequence[ModuleLayout], runner: StepRunner):
        self.layouts = layouts
        self.runner = runner
        self.backend: Any = runner.channel
        self.context = runner.context
        (self.communicator,) = runner.communicators
        self.compressor = self.communicator.compressor
        self.memory = self.communicator.memory
        self.sent_bytes = 0
        """Number of bytes that this rank has sent so far."""
        self.closed = False
        self.wires: dict[str, tuple[Layout, torch.Tensor]] = {}
        """Layout and buffer of each module's wire: sizes follow from shapes, so one of each serves all steps."""
        self.numbers = {layout.name: i % MODULES for i, layout in enumerate(layouts)}
        """Number of each wire's module, which stands in its statuses."""

    def status_of(self, key: str, finite: bool) -> int:
        """Return the status of a wire's payloads: their module's number, and if they are of finite tensors."""
        return 4 * self.numbers[key] + (PRESENT if finite else OVERFLOW)

    def is_finite(self, key: str, received: torch.Tensor, backend: Backend, sender: int) -> bool:
        """Return True if the payloads in a wire of another rank are of finite tensors.

        Args:
            key: the key of this rank's wire.
            received: the wire that arrived.
            backend: the backend that moved it.
            sender: the number of its sender there.

        Raises:
            StepError: they are of another module.
        """
        wire, _ = self.wires[key]
        number, status = divmod(int(wire.kernels.to_list(received[wire.statuses])[0]), 4)
        if number != self.numbers[key]:
            others = [repr(layout.name) for layout in self.layouts if self.numbers[layout.name] == number]
            theirs = " or ".join(others) or "an unknown one"
            raise StepError(
                f"rank {backend.number_of(backend.rank)} is at module {key!r}, and rank {backend.number_of(sender)} "
                f"sent its part of {theirs}: all ranks of a shard group must run the same "
                "modules in the same order, also a layer that only some of them need"
            )
        return status == PRESENT

    def settle(self, saves: bool) -> None:
        """Prepare to save or load the state.

        Raises:
            ExchangeError: a step is in progress that the state depends on.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, as bytes under its own key: ``torch.distributed.checkpoint`` saves and loads the
        bytes whole. Every rank must call it.

        Raises:
            ExchangeError: a step is in progress that the state depends on: gradients were reduced, and no optimizer has
                used them yet.
        """
        self.settle(saves=True)
        return {self.key: pack_state(to_file_format(checkpoint.save(self.runner)))}

    @property
    def key(self) -> str:
        """Key of this rank in a saved state."""
        return f"rank_{dist.get_rank()}_of_{dist.get_world_size()}"

    def own_entry(self, given: object) -> Any:
        """Return this rank's entry of a saved state, with unchecked values; None if there is none."""
        return from_file_format(given.get(self.key)) if isinstance(given, dict) else None

    def check_choice(self, saved: SavedState, memory: str) -> None:
        """Refuse a state that was saved with another method."""
        if memory == "strict" and saved["components"] != self.runner.name:
            raise ConfigError(
                f"this state was saved with choice {saved['components']!r}, and here it is {self.runner.name!r}: "
                f"what was left out belongs to the method. Start without it, {self.context.api_names.otherwise}"
            )


def to_file_format(saved: SavedState) -> dict[str, Any]:
    """Return a state under the names that saved files have: "choice", and "memory" by module and receiver."""
    state = dict(saved["state"])
    kept = {"choice": saved["components"], "memory": state.pop("memory", {}), "state": state}
    return {**{key: value for key, value in saved.items() if key != "components"}, **kept}


def from_file_format(packed: object) -> Any:
    """Return a state that :func:`to_file_format` has renamed, from bytes. Damage is checked later."""
    saved = unpack_state(packed)
    if isinstance(saved, dict) and isinstance(saved.get("state"), dict) and {"choice", "memory"} <= saved.keys():
        saved = {**saved, "components": saved["choice"], "state": {**saved["state"], "memory": saved["memory"]}}
        del saved["choice"], saved["memory"]
    return saved


def build_method(
    block: Spec | Compressor, memory: MemoryArg | None, size: int, what: str, instead: str
) -> Communicator:
    """Return the method and its memory, as a communicator that has both.

    Args:
        what: the calling function, for messages.
        instead: advice for a group of one rank.

    Raises:
        ConfigError: the method or the memory cannot serve a collective of shards.
    """
    if size == 1:
        raise ConfigError(f"every rank holds a whole copy of the model, so that {instead}")
    built = build_communicator(block, memory, "allgather", size)
    traits = built.compressor.traits
    if not traits.shardable or traits.rounds > 1 or traits.fixed_size != "by shape" or built.compressor.votes:
        raise ConfigError(
            f"{what}: {built.compressor.spec} cannot compress the parts of a tensor alike; use block, or qsgd, "
            "natural, terngrad, dynamic8"
        )
    return built
