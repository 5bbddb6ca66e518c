"""What messages call things that every framework has another name for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Calls:
    """The names in one framework.

    Attributes:
        step: what ends a training step.
        save_all: what saves the state of all ranks.
        reset: what loads a checkpoint without memories.
        group: what a dict of hyperparameters is, by its number.
        partial: how a checkpoint may have lost values, and what to do.
    """

    step: str
    save_all: str
    reset: str
    group: str = ""
    partial: str = ""


TORCH = Calls(
    step="optimizer.step()",
    save_all="optimizer.full_state_dict()",
    reset="load_state_dict(state, memory='reset')",
    group="param group {}, ",
    partial="torch.distributed.checkpoint loads only what is in the dict that it is given: save "
    "full_state_dict(packed=True), and let it load into that of the new optimizer",
)
KERAS = Calls(
    step="a training step (optimizer.apply)",
    save_all="the model by grace.tensorflow.save_model, or optimizer.full_state()",
    reset="grace.tensorflow.load_model(path, memory='reset')",
    partial="Save it again",
)
