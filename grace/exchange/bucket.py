"""Inputs and results of an exchange: buckets of variables, contributions of ranks, outcomes, and counted traffic."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from grace.core.communicator import Communicator
from grace.core.component import Component
from grace.core.compressor import Tensor
from grace.core.variable import Variable
from grace.exchange.sparse_rows import Gradient


@dataclass
class Bucket:
    """Variables whose payloads share one collective, and their communicator."""

    index: int
    communicator: Communicator
    variables: list[Variable]
    fuses: bool = True
    """True if all variables may be encoded in one pass (:mod:`grace.exchange.fused_codec`)."""
    label: str = "grace"
    """Label of its collectives in the engine, equal on every rank."""
    carries_stamps: bool = True
    """True if its wires carry the ranks' step stamps, which one bucket of each step does."""
    sizes_compared: bool = False
    """True once all ranks' payloads were found to have equal sizes, for methods that do not declare it."""
    compares_every_step: bool = False
    """True if sizes are compared in every step: a graph runs the same collectives in all steps."""
    # The following fields belong to this bucket alone: a copy by dataclasses.replace starts without them.
    program: Any = field(default=None, init=False)
    """The bucket's :class:`~grace.exchange.round_trip.BucketProgram`, made by its first round trip."""
    pending: deque[Any] = field(default_factory=deque, init=False)
    """Delayed round trips whose means are not applied yet, the oldest first (:mod:`grace.exchange.delayed`)."""
    idle: "list[Bucket]" = field(default_factory=list, init=False)
    """Copies of this bucket, each with a program of its own, that no delayed round trip uses at the moment."""
    parts: dict[int, Component] = field(default_factory=dict, init=False)
    """Copies of the communicator's parts in a bucket of :attr:`idle`, by the ids of the originals."""
    plain: "Bucket | None" = field(default=None, init=False)
    """The bucket of the same variables in the steps before its communicator compresses."""
    node: "Bucket | None" = field(default=None, init=False)
    """The bucket of the sum over this rank's node, where reduction is hierarchical (:mod:`grace.session.hierarchy`)."""
    names: list[str] = field(init=False)
    """Names of the variables."""
    nbytes: int = field(init=False)
    """Bytes of their gradients."""

    def __post_init__(self) -> None:
        self.nbytes = sum(variable.nbytes for variable in self.variables)
        self.names = [variable.name for variable in self.variables]

    def at_step(self, step: int) -> "Bucket":
        """Return the bucket that is exchanged at a step: an uncompressed one before ``communicator.compress_after``.

        Both share one queue of delayed means, so that none is lost when compression begins."""
        if step >= self.communicator.compress_after:
            return self
        if self.plain is None:
            assert self.communicator.uncompressed is not None  # made by the session, for communicators that begin later
            self.plain = replace(self, communicator=self.communicator.uncompressed)
            self.plain.pending = self.pending
        return self.plain

    def describe(self) -> str:
        """Return the bucket's number, first and last variable, and communicator, for messages."""
        return f"bucket {self.index} ({self.ends}; {self.communicator.describe()})"

    @property
    def ends(self) -> str:
        """Names of the first and the last variable."""
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} .. {self.names[-1]}"


class Contribution(NamedTuple):
    """Contribution of this rank to an exchange.

    Attributes:
        bucket: the bucket.
        gradients: one per variable (zeros if this rank has none): tensors, or rows of sparse ones.
        present: True for each variable that this rank has a gradient of.
        finds_overflow: True if overflows must be found, because a memory, a compressor or an anchor keeps state.
        traffic: counters of the bytes and seconds of the exchange.
    """

    bucket: Bucket
    gradients: Sequence[Gradient]
    present: Sequence[bool]
    finds_overflow: bool
    traffic: "Traffic"


@dataclass
class Traffic:
    """Counters of exchanges.

    Attributes:
        steps: exchanges of the whole model.
        header_bytes: bytes of headers and padding.
        sent_bytes: bytes that left this rank, as the engine's collectives move them.
        dense_bytes: bytes that would have left this rank without compression, by an all-reduce over a ring.
        elements: gradient elements exchanged.
        codec_seconds: seconds spent in compensate, compress, update, decompress and aggregate (host clock).
        wait_seconds: seconds in which training waited for collectives, if Grace waits for them (host clock).
        reported: counters at the last call of :func:`grace.session.metrics.metrics`.
    """

    steps: int = 0
    header_bytes: int = 0
    sent_bytes: int = 0
    dense_bytes: int = 0
    elements: int = 0
    codec_seconds: float = 0.0
    wait_seconds: float = 0.0
    reported: tuple[float, ...] = field(default=(), repr=False)
    _counted: dict[str, int] = field(default_factory=dict, repr=False)
    _uncounted: dict[int, tuple[list[str], list[int], int]] = field(default_factory=dict, repr=False)
    """Names and bytes of payloads that are not in ``_counted`` yet, and how often. Steps pass the same lists, so they
    are counted by identity, and added up when they are read."""

    def step(self, elements: int, nbytes: int, ranks: int) -> None:
        """Count one step of a model with these numbers of elements and bytes."""
        self.steps += 1
        self.elements += elements
        self.dense_bytes += round(2 * (ranks - 1) / ranks * nbytes)

    def add(self, names: list[str], payload_bytes: list[int]) -> None:
        """Count the payloads of a bucket. The lists must not be changed afterwards."""
        known = self._uncounted.get(id(payload_bytes))
        if known is None and len(self._uncounted) >= 64:
            _ = self.payload_bytes  # adds up, and empties the dict, so that lists of changing sizes do not fill memory
        self._uncounted[id(payload_bytes)] = names, payload_bytes, 1 if known is None else known[2] + 1

    def include(self, other: "Traffic") -> None:
        """Add the bytes and codec seconds of a round trip that was counted separately."""
        for name, nbytes in other.payload_bytes.items():
            self.payload_bytes[name] = self.payload_bytes.get(name, 0) + nbytes
        self.header_bytes += other.header_bytes
        self.sent_bytes += other.sent_bytes
        self.codec_seconds += other.codec_seconds

    @property
    def payload_bytes(self) -> dict[str, int]:
        """Bytes of payload handed to the engine, per variable."""
        counts = self._counted
        for names, payload_bytes, times in self._uncounted.values():
            for name, nbytes in zip(names, payload_bytes, strict=True):
                counts[name] = counts.get(name, 0) + times * nbytes
        self._uncounted.clear()
        return counts

    @property
    def bits_per_element(self) -> float:
        """Wire bits per gradient element, headers included."""
        return 8 * (sum(self.payload_bytes.values()) + self.header_bytes) / max(1, self.elements)


@dataclass(slots=True)
class Outcome:
    """Outcome of an exchange for one variable: the aggregate (rows of a sparse gradient), or None if no rank had a
    gradient, or if no mean has arrived yet (``pending``).

    ``overflow`` is True if a gradient overflowed on a rank. Without ``Contribution.finds_overflow`` it may be False
    although the aggregate is not finite.
    """

    variable: Variable
    value: Tensor | None
    overflow: bool
    pending: bool = False
