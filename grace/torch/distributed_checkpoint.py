"""The state of optimizers and hooks as an object of its own in checkpoints of ``torch.distributed.checkpoint``."""

from functools import partial
from typing import Any

from grace.errors import ConfigError
from grace.session import checkpoint
from grace.torch.ddp import DDPState
from grace.torch.fsdp import FSDPState
from grace.torch.fsdp_reduce_scatter import ReduceScatterState
from grace.torch.state_dict import INNER, StateMixin, load_memories, pack_state

KEY = "all_ranks"


class Memories:
    """The state of all ranks' memories, for the dict that ``torch.distributed.checkpoint`` saves, beside model and
    optimizer.

    It is made from the distributed optimizer, or from the state of DDP's hook. From then on torch's functions for state
    dicts save and load only torch's part of such an optimizer, flattened or not. The states of FSDP2's hook and
    reduce-scatters are such objects themselves.

    The state is gathered and copied when a save begins, so that ``async_save`` writes this copy, whatever the next
    steps change. It loads on any number of ranks, by the rules of :mod:`grace.session.checkpoint`.

    Args:
        owner: the optimizer, or the state of DDP's hook.
        memory: treatment of memories that do not fit: "strict", "keep" or "reset", as for the owner's
            ``load_state_dict``.

    Raises:
        ConfigError: the owner is neither.

    Example::

        state = {"model": ..., "optimizer": ..., "memories": grace.torch.Memories(optimizer)}
        dcp.async_save(state, checkpoint_id="step-1000")  # or save; and load
    """

    def __init__(self, owner: object, memory: str = "strict"):
        if isinstance(owner, (FSDPState, ReduceScatterState)):
            raise ConfigError("put this state beside the model without Memories: torch.distributed.checkpoint saves it")
        if not isinstance(owner, (StateMixin, DDPState)):
            raise ConfigError(
                "grace.torch.Memories takes a grace.DistributedOptimizer or the state of register_ddp_hook, "
                f"not {type(owner).__name__}"
            )
        checkpoint.check_mode(memory)
        runner = owner.runner if isinstance(owner, DDPState) else owner._grace.runner
        self.key = f"{KEY}.{runner.shard_label}" if runner.shard_label else KEY
        self.owner = owner
        self.memory = memory
        if isinstance(owner, StateMixin):
            owner._memories_saved_separately = True  # torch's functions then leave Grace's part out

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks' memories and compressors, as bytes. Every rank must call it.

        Raises:
            ConfigError: the state of torch's functions that is saved beside this one has the memories too.
            ExchangeError: a step is in progress.
        """
        if isinstance(self.owner, DDPState):
            return {self.key: self.owner.full_state_dict(packed=True)}
        session = self.owner._grace
        runner = session.runner
        saved = checkpoint.gather(runner, partial(_check_saveable, self.owner))
        if runner.outer_rounds:
            own = super(StateMixin, self.owner).state_dict()  # type: ignore[misc]
            saved[INNER] = runner.backend.allgather_object(pack_state(own))
        return {self.key: pack_state(saved)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of :meth:`state_dict`. Every rank must call it.

        Raises:
            ConfigError: the state does not fit.
            ExchangeError: a step is in progress.
        """
        saved = state.get(self.key) if isinstance(state, dict) else None
        if isinstance(self.owner, DDPState):
            self.owner.load_state_dict(saved, self.memory)
        else:
            load_memories(self.owner, saved, self.memory)
            if self.owner._grace.runner.outer_rounds:
                self.owner._grace.loaded_memories = saved, self.memory


def _check_saveable(optimizer: StateMixin) -> None:
    """Refuse to save in the middle of a step, or beside a state of torch's functions that has the memories too."""
    checkpoint.check_settled(optimizer._grace)
    if optimizer._memories_in_torchs_part:
        raise ConfigError(
            "get_state_dict was called before grace.torch.Memories(optimizer) was made, so that its result has the "
            "memories too: make Memories first, and call get_state_dict (or get_optimizer_state_dict) after it"
        )
