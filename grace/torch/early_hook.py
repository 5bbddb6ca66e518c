"""What DistributedDataParallel calls; and a hook that a framework registers before there is a state."""

from typing import Any

from grace.errors import ConfigError


class EarlyState:
    """What stands for a hook's state until ``register_ddp_hook`` is called for the same model."""

    state: Any = None


def grace_hook(state, bucket):  # DDP inspects the names and annotations, and wants real types or none
    """The hook, for a state or an early one.

    Raises:
        ConfigError: the early one was never given a state.
    """
    if isinstance(state, EarlyState):
        if state.state is None:
            raise ConfigError(
                "the model has Grace's hook without its state: call grace.torch.register_ddp_hook for it (under "
                "Lightning, give the Trainer callbacks=[callback] as well as the hook)"
            )
        state = state.state
    return None if isinstance(bucket, tuple) else state.exchange(bucket)  # one by one: the parameters' own hooks do it


def given_to_early(model: Any, state: Any) -> bool:
    """Whether the model has an early hook, which has the state now."""
    early = [given for _, given in model._comm_hooks if isinstance(given, EarlyState)]
    for given in early:
        given.state = state
    return bool(early)
