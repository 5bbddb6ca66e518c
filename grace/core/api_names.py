"""What messages call things that every framework has another name for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Calls:
    """The names in one framework.

    Attributes:
        step: what ends a training step.
        save_all: what saves the state of all ranks.
        load: what loads a checkpoint.
        memory: its parameter for what becomes of memories.
        group: what a dict of hyperparameters is, by its number.
        partial: how a checkpoint may have lost values, and what to do.
    """

    step: str
    save_all: str
    load: str
    memory: str = "memory"
    group: str = ""
    partial: str = ""

    @property
    def reset(self) -> str:
        """What loads a checkpoint without memories."""
        return self.load.format(f"{self.memory}='reset'")

    @property
    def otherwise(self) -> str:
        """How to load what does not fit."""
        return (
            f"or load it with {self.memory}='keep', which keeps what fits, or {self.memory}='reset', which starts with "
            "empty memories"
        )


TORCH = Calls(
    step="optimizer.step()",
    save_all="optimizer.full_state_dict()",
    load="load_state_dict(state, {})",
    group="param group {}, ",
    partial="torch.distributed.checkpoint loads only what is in the dict that it is given: save "
    "full_state_dict(packed=True), and let it load into that of the new optimizer",
)
BY_HAND = Calls(
    step="step() or receive_step()",
    save_all="state_dict(everyone=True)",
    load="load_state_dict(state, {})",
    partial="Save it again",
)
REDUCE_SCATTER = Calls(
    step="optimizer.step()",
    save_all="the states of all ranks, rank_0_of_N to rank_{N-1}_of_N",
    load="load_state_dict(state, {})",
    partial="Save it again",
)
KERAS = Calls(
    step="a training step (optimizer.apply)",
    save_all="the model by grace.tensorflow.save_model, or optimizer.full_state()",
    load="grace.tensorflow.load_model(path, {})",
    memory="memory_state",
    partial="Save it again",
)
