"""What optimizers and hooks remember, as a part of its own of ``torch.distributed.checkpoint``'s checkpoints."""

from typing import Any

from grace.errors import ConfigError
from grace.session import checkpoint
from grace.torch.ddp import DDPState
from grace.torch.fsdp import FSDPState
from grace.torch.reduce_scatter import ReduceScatterState
from grace.torch.state_dict import StateMixin, packed_up, rank_state

KEY = "all_ranks"


class Memories:
    """What all ranks remember, for the dict that ``torch.distributed.checkpoint`` saves, beside model and optimizer.

    It is made of the distributed optimizer, or of the state of DDP's hook. From then on torch's functions for state
    dicts save and load of such an optimizer what is torch's alone, flattened or not. The states of FSDP2's hook and
    reduce-scatters are such objects themselves.

    What is saved is gathered and copied when the save begins, so that ``async_save`` writes that, whatever the next
    steps change. It loads on any number of ranks, by the rules of :mod:`grace.session.checkpoint`.

    Args:
        owner: the optimizer, or DDP's hook's state.
        memory: what becomes of memories that do not fit: "strict", "keep" or "reset", as for the owner's
            ``load_state_dict``.

    Raises:
        ConfigError: it is neither.

    Example::

        state = {"model": ..., "optimizer": ..., "memories": grace.torch.Memories(optimizer)}
        dcp.async_save(state, checkpoint_id="step-1000")  # or save; and load
    """

    def __init__(self, owner: Any, memory: str = "strict"):
        if isinstance(owner, (FSDPState, ReduceScatterState)):
            raise ConfigError("put the state itself beside the model: it is what torch.distributed.checkpoint wants")
        if not isinstance(owner, (StateMixin, DDPState)):
            raise ConfigError(
                "grace.torch.Memories needs what grace.DistributedOptimizer or grace.torch.register_ddp_hook returned, "
                f"not {type(owner).__name__}"
            )
        checkpoint.check_mode(memory)
        self.owner, self.memory = owner, memory
        if isinstance(owner, StateMixin):
            owner._memories_apart = True

    def state_dict(self) -> dict[str, Any]:
        """What all ranks remember, as bytes; every rank must call it.

        Raises:
            ExchangeError: a step is under way.
        """
        if isinstance(self.owner, DDPState):
            return {KEY: self.owner.full_state_dict(packed=True)}
        session = self.owner._grace
        return {KEY: packed_up(checkpoint.gather(session.runner, lambda: checkpoint.check_settled(session)))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave; every rank must call it.

        Raises:
            ConfigError: it does not fit.
            ExchangeError: a step is under way.
        """
        saved = state.get(KEY) if isinstance(state, dict) else None
        if isinstance(self.owner, DDPState):
            self.owner.load_state_dict(saved, self.memory)
        else:
            self.owner.load_state_dict({**rank_state(self.owner), "grace": saved}, self.memory)
