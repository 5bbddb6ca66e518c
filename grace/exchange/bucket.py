"""What an exchange takes, and what it brings: variables and what carries them, the outcome of each, what was sent."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from grace.core.compressor import Tensor
from grace.core.variable import Variable


@dataclass
class Bucket:
    """Variables whose payloads travel in one collective, and the communicator that carries them."""

    index: int
    communicator: Any
    variables: list[Variable]
    fuses: bool = True
    """True if all variables may be encoded in one pass (:mod:`grace.exchange.fused_codec`)."""
    label: str = "grace"
    """What the engine calls its collectives, the same on every rank."""
    carries: bool = True
    """True if its wires carry the ranks' step stamps; one bucket of a step does."""
    compared: bool = False
    """Whether all ranks' payloads were found to be of equal sizes, where nobody said that they are."""
    compares: bool = False
    """Whether they are compared in every step: those of a graph are all alike."""
    # What follows is of this bucket alone: a copy by dataclasses.replace starts without it.
    program: Any = field(default=None, init=False)
    """The bucket's :class:`~grace.exchange.program.BucketProgram`, made by its first round trip."""
    pending: deque[Any] = field(default_factory=deque, init=False)
    """Delayed round trips whose means are not applied yet, the oldest first (:mod:`grace.exchange.delayed`)."""
    plain: "Bucket | None" = field(default=None, init=False)
    """The bucket of the same variables in the steps before its communicator compresses."""
    node: "Bucket | None" = field(default=None, init=False)
    """The bucket of the sum over this rank's node, where reduction is hierarchical (:mod:`grace.session.hierarchy`)."""
    names: list[str] = field(init=False)
    """Of the variables."""
    nbytes: int = field(init=False)
    """Of their gradients."""

    def __post_init__(self) -> None:
        self.nbytes = sum(variable.nbytes for variable in self.variables)
        self.names = [variable.name for variable in self.variables]

    def at_step(self, step: int) -> "Bucket":
        """Return the bucket as it travels at a step: uncompressed before ``communicator.compress_after``.

        Its delayed means are in one queue, so that none is lost when compression begins."""
        if step >= self.communicator.compress_after:
            return self
        if self.plain is None:
            self.plain = replace(self, communicator=self.communicator.uncompressed)
            self.plain.pending = self.pending
        return self.plain

    def describe(self) -> str:
        """For messages: the bucket's number, first and last variable, and its communicator."""
        return f"bucket {self.index} ({self.ends}; {self.communicator.describe()})"

    @property
    def ends(self) -> str:
        """The first and the last variable."""
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} .. {self.names[-1]}"


class Contribution(NamedTuple):
    """What this rank puts into an exchange.

    Attributes:
        bucket: what to exchange.
        gradients: one per variable (zeros where this rank has none): tensors, or rows of sparse ones.
        present: whether this rank has a gradient, per variable.
        guard: whether state must be protected, so that overflows have to be detected.
        traffic: where to count.
    """

    bucket: Bucket
    gradients: Sequence[Any]
    present: Sequence[bool]
    guard: bool
    traffic: "Traffic"


@dataclass
class Traffic:
    """What was sent, counted.

    Attributes:
        steps: exchanges of the whole model.
        header_bytes: statuses and padding.
        sent_bytes: bytes that left this rank, as the engine's collectives move them.
        dense_bytes: bytes that would have left it without compression, by an all-reduce round a ring.
        elements: gradient elements exchanged.
        codec_seconds: time spent in compensate, compress, update, decompress and aggregate (host clock).
        wait_seconds: time in which training stood still for a collective, as far as Grace waits for it (host clock).
        told: what :func:`grace.session.metrics.metrics` has told of already.
    """

    steps: int = 0
    header_bytes: int = 0
    sent_bytes: int = 0
    dense_bytes: int = 0
    elements: int = 0
    codec_seconds: float = 0.0
    wait_seconds: float = 0.0
    told: tuple[float, ...] = field(default=(0, 0, 0.0, 0.0), repr=False)
    _counted: dict[str, int] = field(default_factory=dict, repr=False)
    _left: dict[int, tuple[list[str], list[int], int]] = field(default_factory=dict, repr=False)
    """What is to be counted still: the same lists come at every step."""

    def step(self, elements: int, nbytes: int, ranks: int) -> None:
        """Count a step of a model of so many elements and bytes."""
        self.steps += 1
        self.elements += elements
        self.dense_bytes += round(2 * (ranks - 1) / ranks * nbytes)

    def add(self, names: list[str], payload_bytes: list[int]) -> None:
        """Count payloads; neither list changes any more."""
        known = self._left.get(id(payload_bytes))
        if known is None and len(self._left) >= 64:
            _ = self.payload_bytes
        self._left[id(payload_bytes)] = names, payload_bytes, 1 if known is None else known[2] + 1

    def include(self, other: "Traffic") -> None:
        """Add the bytes, and the time for codecs, of a round trip that was counted on its own."""
        for name, nbytes in other.payload_bytes.items():
            self.payload_bytes[name] = self.payload_bytes.get(name, 0) + nbytes
        self.header_bytes += other.header_bytes
        self.sent_bytes += other.sent_bytes
        self.codec_seconds += other.codec_seconds

    @property
    def payload_bytes(self) -> dict[str, int]:
        """Bytes of payload handed to the engine, per variable."""
        counts = self._counted
        for names, payload_bytes, times in self._left.values():
            for name, nbytes in zip(names, payload_bytes, strict=True):
                counts[name] = counts.get(name, 0) + times * nbytes
        self._left.clear()
        return counts

    @property
    def bits_per_element(self) -> float:
        """Wire bits per gradient element, headers included."""
        return 8 * (sum(self.payload_bytes.values()) + self.header_bytes) / max(1, self.elements)


@dataclass(slots=True)
class Outcome:
    """What an exchange brought for one variable: the aggregate, or None if no rank had a gradient, or if nothing
    has come yet (``pending``)."""

    variable: Variable
    value: Tensor | None
    overflow: bool
    pending: bool = False
