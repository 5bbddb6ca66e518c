"""Names of API calls that error messages mention, by framework."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ApiNames:
    """Names of API calls in one framework, for error messages.

    Attributes:
        step: the call that ends a training step.
        save_all: the call that saves the state of all ranks.
        load: the call that loads a checkpoint, with a place for its arguments.
        memory: name of the loading call's parameter that decides how memories are loaded.
        drop: the call that drops a step before it is made; empty if there is none.
        group: name of a parameter group, with a place for its number; empty if the framework has none.
        partial: advice for checkpoints that lack values: a possible cause, and the remedy.
    """

    step: str
    save_all: str
    load: str
    memory: str = "memory"
    drop: str = ""
    group: str = ""
    partial: str = "Save it again"

    @property
    def reset(self) -> str:
        """The call that loads a checkpoint and empties memories."""
        return self.load.format(f"{self.memory}='reset'")

    @property
    def otherwise(self) -> str:
        """Advice on loading a checkpoint that does not fit."""
        return (
            f"or load it with {self.memory}='keep', which keeps what fits, or {self.memory}='reset', which starts with "
            "empty memories"
        )


TORCH = ApiNames(
    step="optimizer.step()",
    save_all="optimizer.full_state_dict()",
    load="load_state_dict(state, {})",
    drop="optimizer.zero_grad()",
    group="param group {}, ",
    partial="torch.distributed.checkpoint loads only what is in the dict that it is given: save "
    "full_state_dict(packed=True), and let it load into that of the new optimizer",
)
BY_HAND = ApiNames(
    step="step() or receive_step()",
    save_all="state_dict(everyone=True)",
    load="load_state_dict(state, {})",
)
REDUCE_SCATTER = ApiNames(
    step="optimizer.step()",
    save_all="the states of all ranks, rank_0_of_N to rank_{N-1}_of_N",
    load="load_state_dict(state, {})",
    drop="optimizer.zero_grad()",
)
KERAS = ApiNames(
    step="a training step (optimizer.apply)",
    save_all="the model by grace.tensorflow.save_model, or optimizer.full_state()",
    load="grace.tensorflow.load_model(path, {})",
    memory="memory_state",
)
