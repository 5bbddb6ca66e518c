"""Parts of a training step, for the simulator: when gradients come, what each bucket does, what comes out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grace.errors import ConfigError


@dataclass(frozen=True)
class Timeline:
    """When a model computes what, on one rank that trains alone.

    Attributes:
        ready: seconds from the start of backward until each variable's gradient is there, by name.
        forward: seconds before backward.
        backward: seconds of backward; no less than any of ``ready``.
        optimizer: seconds after the gradients: the optimizer's step.

    Raises:
        ConfigError: a time is below zero, or a gradient comes after backward.

    >>> Timeline({"w": 0.2, "b": 0.1}, forward=0.1, backward=0.2, optimizer=0.05).compute
    0.35
    """

    ready: Mapping[str, float]
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0

    def __post_init__(self) -> None:
        for what in ("forward", "backward", "optimizer"):
            if not getattr(self, what) >= 0:
                raise ConfigError(f"a timeline's {what} must be at least 0 s, not {getattr(self, what)}")
        for name, seconds in self.ready.items():
            if not 0 <= seconds <= self.backward * (1 + 1e-9):
                raise ConfigError(f"the gradient of {name!r} is ready at {seconds} s of {self.backward} s of backward")

    @property
    def compute(self) -> float:
        """Seconds of a step without any exchange."""
        return round(self.forward + self.backward + self.optimizer, 12)


@dataclass(frozen=True)
class Transfer:
    """One collective of a bucket.

    Attributes:
        kind: "allreduce", "allgather", "alltoall", "broadcast" or "gather".
        seconds: that it takes when nothing else travels, its latency included.
        nbytes: that leave a rank; each but the root, where there is one.
        root: the rank at which it begins or ends; -1 where it has none.
        root_nbytes: that leave the root.
    """

    kind: str
    seconds: float
    nbytes: float = 0.0
    root: int = -1
    root_nbytes: float = 0.0


@dataclass(frozen=True)
class Work:
    """Work of a bucket in a step.

    Attributes:
        names: of the variables whose gradients it waits for.
        start: seconds of computing before the first transfer.
        transfers: one after the other.
        middle: seconds of computing between two of them.
        finish: seconds of computing after the last one.
        delayed: its means are applied in a later step, so that nothing waits for it as long as the link can follow.
        memory: bytes that it keeps on a rank, between steps and during one: residuals, wires, what is decoded.
    """

    names: tuple[str, ...]
    start: float = 0.0
    transfers: tuple[Transfer, ...] = ()
    middle: float = 0.0
    finish: float = 0.0
    delayed: bool = False
    memory: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """A step as it is expected: seconds, but for bytes.

    Attributes:
        step: all of it.
        compute: what it would be without any exchange.
        codec: encoding and decoding.
        exposed: what remains: communication that the step waits for.
        sent: bytes that leave the rank that sends most.
        memory: bytes that exchanges keep on a rank beside the gradients.
        events: (what, bucket, begin, end), for a picture; what is "compute" (the model's, of bucket -1), "start",
            "wire", "middle" or "finish".
    """

    step: float
    compute: float
    codec: float
    exposed: float
    sent: float
    memory: float = 0.0
    events: Sequence[tuple[str, int, float, float]] = field(default=(), repr=False, compare=False)
