"""A training step, predicted: when gradients come, what each bucket computes and sends, and who waits for whom.

The rules are those of the exchanges (:class:`grace.session.step_runner.StepRunner`):

- A bucket starts when its gradients are there and all before it have started. Then computing encodes it, and its first
  collective joins the queue of the wire, which carries one at a time.
- Behind backward, all buckets that have more collectives go on, one collective each in every round: computing waits for
  the one under way, does what comes between, and the next one joins the queue. Then bucket by bucket computing waits
  for the last one and decodes. The optimizer comes after all of them.
- What goes through a root (a parameter server) waits in the same queue, and computing between a gather and its answer
  is the root's: of several roots, whose links are apart, no overlap is supposed.

None of this lets a step become faster when something in it takes longer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grace.errors import ConfigError

Event = tuple[str, int, float, float]
"""Kind, bucket, begin and end of an event. The kind is "compute" (the model's, of bucket -1), "start", "wire", "middle"
or "finish"."""


@dataclass(frozen=True)
class Timeline:
    """When a model computes what, on one rank that trains alone: seconds from the start of backward until each
    variable's gradient is there, by name; and those of forward, backward and the optimizer's step. Raise ConfigError if
    a time is below zero, or a gradient comes after backward.

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
            if not 0 <= seconds <= self.backward * (1 + 1e-9):  # a rounding error is no mistake
                raise ConfigError(f"the gradient of {name!r} is ready at {seconds} s of {self.backward} s of backward")

    @property
    def compute(self) -> float:
        """Seconds of a step without any exchange."""
        return round(self.forward + self.backward + self.optimizer, 12)  # as 0.35, and not 0.35000000000000003


@dataclass(frozen=True)
class Transfer:
    """One collective of a bucket: its kind, as "allgather"; the seconds that it takes when nothing else travels, its
    latency included; the bytes that leave a rank, each but the root, where there is one; the root, -1 where there is
    none; the bytes that leave the root; and the share of a rank's computing, below 1, that it takes meanwhile: engines
    add up and copy on the processor."""

    kind: str
    seconds: float
    nbytes: float = 0.0
    root: int = -1
    root_nbytes: float = 0.0
    contention: float = 0.0


@dataclass(frozen=True)
class BucketCosts:
    """Costs of a bucket in a step: the variables whose gradients it waits for; seconds of computing before the first
    transfer, between two of them, and after the last one; and the bytes that it keeps on a rank, between steps and
    during one: residuals, wires, what is decoded."""

    names: tuple[str, ...]
    start: float = 0.0
    transfers: tuple[Transfer, ...] = ()
    middle: float = 0.0
    finish: float = 0.0
    memory: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """A step as it is expected: its seconds; those that it would take without any exchange, those of encoding and
    decoding, and what remains: communication that the step waits for; the bytes that leave the rank that sends most,
    and those that exchanges keep on a rank beside the gradients; and events, for a picture."""

    step: float
    compute: float
    codec: float
    exposed: float
    sent: float
    memory: float = 0.0
    events: Sequence[Event] = field(default=(), repr=False, compare=False)


def simulate_step(timeline: Timeline, buckets: Sequence[BucketCosts]) -> Prediction:
    """Predict a step.

    Args:
        timeline: when gradients are ready; those that it does not name when backward ends.
        buckets: the buckets, in the order in which ranks start them.

    >>> timeline = Timeline({"b": 0.1, "w": 0.2}, forward=0.1, backward=0.2)
    >>> send = Transfer("allreduce", seconds=0.15)
    >>> simulate_step(timeline, [BucketCosts(("b",), transfers=(send,)), BucketCosts(("w",), transfers=(send,))]).step
    0.5
    """
    return _SimulatedStep(timeline, buckets).run()


class _SimulatedStep:
    """One step of the rank that takes longest."""

    def __init__(self, timeline: Timeline, buckets: Sequence[BucketCosts]):
        self.timeline, self.buckets = timeline, buckets
        self.time = self.free = 0.0
        """When the wire can carry one more collective."""
        self.done = [0.0] * len(buckets)
        """When the last collective that a bucket has started is done."""
        self.under_way: list[tuple[float, float, float]] = []
        """Begin and end of collectives that take a share of computing, in order, and this share."""
        self.events: list[Event] = []

    def run(self) -> Prediction:
        """Play the step through."""
        self._compute("compute", -1, self.timeline.forward)
        self._backward()
        self._further_rounds()
        for i, bucket in enumerate(self.buckets):
            self.time = max(self.time, self.done[i])
            self._compute("finish", i, bucket.finish)
        self._compute("compute", -1, self.timeline.optimizer)
        compute, memory = self.timeline.compute, sum(bucket.memory for bucket in self.buckets)
        codec = sum(one.start + one.middle * max(0, len(one.transfers) - 1) + one.finish for one in self.buckets)
        exposed = max(0.0, self.time - compute - codec)
        return Prediction(round(self.time, 12), compute, codec, exposed, most_sent(self.buckets), memory, self.events)

    def _backward(self) -> None:
        """Play backward through, and the buckets that start in it."""
        ready, end, done = self.timeline.ready, self.timeline.backward, 0.0
        for i, bucket in enumerate(self.buckets):
            need = max([ready.get(name, end) for name in bucket.names], default=0.0)
            self._compute("compute", -1, max(0.0, need - done))
            done = max(done, need)  # gradients of an earlier bucket may have come later
            self._compute("start", i, bucket.start)
            if bucket.transfers:
                self._launch(i, 0)
        self._compute("compute", -1, end - done)

    def _further_rounds(self) -> None:
        """Play through the collectives that follow the first ones, round by round."""
        most = max((len(bucket.transfers) for bucket in self.buckets), default=0)
        for number in range(1, most):
            for i, bucket in enumerate(self.buckets):
                if number < len(bucket.transfers):
                    self.time = max(self.time, self.done[i])
                    self._compute("middle", i, bucket.middle)
                    self._launch(i, number)

    def _compute(self, kind: str, i: int, seconds: float) -> None:
        """Go on computing."""
        if seconds > 0:
            begin, self.time = self.time, self._end_of(seconds)
            self.events.append((kind, i, begin, self.time))

    def _end_of(self, seconds: float) -> float:
        """Return when so much computing is done that begins now, slower beside collectives that take a share of it."""
        time, left = self.time, seconds
        for start, end, contention in self.under_way:
            undisturbed, beside = max(0.0, start - time), max(0.0, end - max(start, time))
            if left <= undisturbed:  # it ends before this collective begins
                break
            left, time = left - undisturbed, time + undisturbed
            if left <= (1 - contention) * beside:
                return time + left / (1 - contention)
            left, time = left - (1 - contention) * beside, time + beside
        return time + left

    def _launch(self, i: int, number: int) -> None:
        """Let a bucket's collective join the queue of the wire."""
        begin, transfer = max(self.time, self.free), self.buckets[i].transfers[number]  # one collective at a time
        self.free = self.done[i] = begin + transfer.seconds
        if transfer.contention:
            self.under_way.append((begin, self.free, transfer.contention))
        self.events.append(("wire", i, begin, self.free))


def most_sent(buckets: Sequence[BucketCosts]) -> float:
    """Return the bytes that leave the rank that sends most, in a step."""
    transfers = [transfer for bucket in buckets for transfer in bucket.transfers]
    more: dict[int, float] = {}
    for transfer in transfers:
        if transfer.root >= 0:
            more[transfer.root] = more.get(transfer.root, 0.0) + transfer.root_nbytes - transfer.nbytes
    return sum(transfer.nbytes for transfer in transfers) + max(0.0, max(more.values(), default=0.0))
