"""The compressor contract."""

import dataclasses
import math
from collections.abc import Generator, Iterable, Sequence
from typing import Any, ClassVar, Literal

from grace.core.kept import Keeping, is_ours
from grace.core.ported import aggregating, check_shape, encoding
from grace.errors import payload_of
from grace.kernels import kernels_of
from grace.kernels.checks import check_range
from grace.kernels.index_coding import decode, encode

Tensor = Any
Payload = list[Tensor]


@dataclasses.dataclass(frozen=True)
class Traits:
    """What a compressor promises, as data; everything that decides about compressors reads it.

    Attributes:
        category: the family of the method.
        unbiased: whether E[decompress(compress(x))] = x.
        contraction: whether E||x - decompress(compress(x))||^2 < ||x||^2 for x != 0, which is what
            error feedback needs to converge.
        summable: whether the sum of payloads is the payload of the sum (legal with Allreduce).
        fixed_size: whether the payload of a variable has the same size on every rank and at every step. None where
            nobody says: then it is taken for true, and the sizes are compared at the first step.
        carries_nonfinite: whether a NaN or Inf travels in the payload itself.
        exact: whether decompress(compress(x)) == x; the gradient then keeps its own dtype.
        rounds: how many dependent reductions one exchange takes.
        communicator, memory: the defaults.
        shardable: whether shards of a tensor, and means of decoded shards, may be compressed alike (legal
            with ScatterReduce).
        needs_memory: whether the method diverges or stalls without error feedback.
    """

    category: Literal["none", "quantization", "sparsification", "hybrid", "low-rank"]
    unbiased: bool = False
    contraction: bool = False
    summable: bool = False
    fixed_size: bool | None = None
    carries_nonfinite: bool = False
    exact: bool = False
    rounds: int = 1
    communicator: str = "allgather"
    memory: str = "none"
    needs_memory: bool = False
    shardable: bool = False

    @property
    def varies(self) -> bool:
        """Whether payloads may differ in size."""
        return self.fixed_size is False


class Compressor(Keeping):
    """Turns a gradient into a small payload and back. Write ``compress`` and ``decompress``.

    ``compress(tensor, name) -> (payload, ctx)``: ``payload`` is the list of tensors that travels,
    ``ctx`` stays here, so that a payload from another rank must decode with the local ``ctx``.
    ``tensor`` is float32 (its own dtype if the method is exact), contiguous, of any shape, and must
    not be changed; payload tensors may be views of it. A single tensor is a payload too. Built-in
    methods are written in :func:`~grace.kernels.kernels_of` primitives and work in every framework;
    your own may use torch or TensorFlow operations directly.

    >>> import numpy as np
    >>> class Half(Compressor):
    ...     name = "half"
    ...     traits = Traits(category="quantization", summable=True, communicator="allreduce")
    ...     def compress(self, tensor, name):
    ...         return [tensor.astype("float16")], None
    ...     def decompress(self, payload, ctx):
    ...         return payload[0].astype("float32")
    >>> half = Half()
    >>> payload, ctx = half.compress(np.float32([1.0, 0.1]), "w")
    >>> half.decompress(payload, ctx)
    array([1.        , 0.09997559], dtype=float32)
    """

    kind = "compressor"
    traits: Traits = Traits(category="quantization")
    stateful: bool = False
    """Whether the method, or a part of it, keeps something per variable between steps."""
    owns_momentum: ClassVar[bool] = False
    """Whether the method applies momentum itself, so that the optimizer's must be 0."""
    votes: bool = False
    """Whether the aggregate is a vote, or something else that is no mean."""
    sends_values: ClassVar[bool] = False
    """Whether the first payload tensor holds float32 values picked from the tensor, so that a second
    method may compress them: ``topk | qsgd``."""
    bounded: bool = False
    """Whether payloads of what lies on a device are of one size, though others vary: they have room that is filled up,
    so that no rank's host must know how many elements came of its tensor."""
    by_position: bool = False
    """Whether elements are told apart by int32 positions, so that a tensor must have fewer than 2^31 of them."""

    def __init__(self, average: bool | None = None, tensors_size_are_same: bool | None = None):
        """GRACE's way to say traits, for one object.

        Args:
            average: False if the aggregate is no mean, but the sum, or what ``aggregate`` makes of it.
            tensors_size_are_same: ``traits.fixed_size``.
        """
        if average is not None:
            self.votes = not average
        if tensors_size_are_same is not None:
            self.traits = dataclasses.replace(self.traits, fixed_size=tensors_size_are_same)

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "compress" in vars(cls):
            cls.compress = encoding(cls.compress, is_ours(cls))  # type: ignore[method-assign]
        if "aggregate" in vars(cls):
            cls.aggregate = aggregating(cls.aggregate)  # type: ignore[method-assign]

    def keeping(self) -> None:
        self.stateful = True

    @property
    def average(self) -> bool:
        """Whether the aggregate is a mean."""
        return not self.votes

    @property
    def tensors_size_are_same(self) -> bool:
        """Whether payloads have the same size on every rank."""
        return not self.traits.varies

    noise_advice: ClassVar[str] = "memory='none'"
    """What to use instead of error feedback on a noisy method."""

    @property
    def noisy(self) -> bool:
        """Whether the error can exceed the gradient, so that error feedback may diverge."""
        return (self.traits.unbiased and not self.traits.exact) or self.votes

    @encoding
    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Any]:
        """Encode; a method of several rounds runs them here as if this were the only rank."""
        rounds = self.exchange(tensor, name)
        payload = next(rounds)
        while True:
            try:
                payload = rounds.send(payload)
            except StopIteration as end:
                return end.value

    def decompress(self, payload: Payload, ctx: Any) -> Tensor:
        """Decode one payload, its own or another rank's, to a float32 tensor of the original shape."""
        raise TypeError(f"{type(self).__name__} must define decompress(payload, ctx)")

    def exchange(self, tensor: Tensor, name: str) -> Generator[Payload, Payload, tuple[Payload, Any]]:
        """For ``traits.rounds > 1``: yield each payload, receive its mean over ranks, and return the
        final ``(payload, ctx)``, which decodes to the aggregate on every rank."""
        if type(self).exchange_all is Compressor.exchange_all:
            raise TypeError(f"{type(self).__name__} must define compress(tensor, name)")
        rounds = self.exchange_all([tensor], [name])
        (payload,) = next(rounds)
        while True:
            mean = yield payload
            try:
                (payload,) = rounds.send([mean])
            except StopIteration as end:
                (returned,) = end.value
                return returned

    def exchange_all(
        self, tensors: Iterable[Tensor], names: Sequence[str]
    ) -> Generator[list[Payload], list[Payload], list[tuple[Payload, Any]]]:
        """:meth:`exchange` of several variables, which share their collectives: yield the list of their payloads,
        receive the list of the means, and return the list of what each returns. Override it instead of ``exchange``
        where variables are faster together.

        Each of ``tensors`` is made when it is taken, before the first payloads, so what is done with it at once finds
        it in the processor's cache."""
        rounds, payloads = [], []
        for tensor, name in zip(tensors, names, strict=True):
            rounds.append(self.exchange(tensor, name))
            payloads.append(next(rounds[-1]))
        while True:
            means = yield payloads
            payloads, returned = [], []
            for one, mean in zip(rounds, means, strict=True):
                try:
                    payloads.append(one.send(mean))
                except StopIteration as end:
                    returned.append(end.value)
            if returned or not rounds:
                if payloads:
                    raise TypeError(
                        f"{type(self).__name__}.exchange() yields more payloads of some variables than of others"
                    )
                return returned

    def accumulate(self, payload: Payload, ctx: Any, out: Tensor, weight: float = 1.0) -> Tensor:
        """``out += weight * decompress(payload, ctx)``; override it to avoid the dense copy.

        Returns ``out`` (a new tensor where the framework's tensors are immutable)."""
        return kernels_of(out).add(out, check_shape(self.decompress(payload, ctx), out), weight)

    @aggregating
    def aggregate(self, payloads: Sequence[Payload], ctx: Any, out: Tensor, count: float) -> Tensor:
        """Write the mean into ``out``: the sum of what ``payloads`` decode to, divided by ``count`` (unless the method
        ``votes``). There is one payload per rank, or their sum; ``count`` is the number of ranks, or what such a sum is
        to be divided by.

        It may be written as ``aggregate(tensors)`` instead, which adds up decoded tensors, one per rank; and may be
        called so."""
        out = kernels_of(out).zero(out)
        for place, payload in enumerate(payloads):
            with payload_of(place):
                out = self.accumulate(payload, ctx, out, 1.0 / count if self.average else 1.0)
        return out

    def combined(self, tensors: Sequence[Tensor]) -> Tensor:
        """What decoded tensors, one per rank, add up to."""
        return sum(tensors)

    def answering(self) -> "Compressor":
        """The method that a destination compresses the mean with, which goes back to all: this one."""
        return self

    def bucket_codec(self) -> tuple[str, dict[str, Any]] | None:
        """The name of what encodes and decodes whole buckets to the same bits, of
        :mod:`grace.kernels.fused.bucket_codecs` and :mod:`grace.kernels.triton.sparse_codecs`, and its options;
        None if it has none with its parameters. A class that inherits it is not asked. Where a ctx is of one step only,
        ``ctx_of(name, shape, like)`` makes this step's."""
        raise TypeError(f"{type(self).__name__} has no codec for whole buckets")

    def sent_indices(self, payload: Payload, ctx: Any) -> Tensor | None:
        """Flat int32 positions that a sparsifier's payload holds; None if the method does not tell."""
        return None

    def count(self, shape: tuple[int, ...]) -> int | None:
        """How many values a sparsifier sends of a tensor of this shape; None if that depends on the data."""
        return None

    def variance(self, n: int) -> float | None:
        """omega with E||decompress(compress(x)) - x||^2 <= omega ||x||^2 for every x of n elements, of an unbiased
        method; None if there is no such number, or nobody worked it out."""
        return None

    def wire_bits(self, shape: tuple[int, ...]) -> float | None:
        """Bits on the wire per element of a tensor of this shape; None if it is not known."""
        return None


class Accumulating(Compressor):
    """A method whose decoder is ``accumulate``, and whose ``ctx`` is the tensor's shape."""

    def decompress(self, payload: Payload, ctx: Any) -> Tensor:
        k = kernels_of(payload[0])
        return self.accumulate(payload, ctx, k.zeros(ctx, "float32", payload[0]))


class Sparsifier(Accumulating):
    """A payload of [values, indices as :mod:`grace.kernels.index_coding` codes them]; ``ctx`` is the tensor's shape.

    >>> import numpy as np
    >>> Sparsifier().decompress([np.float32([5]), np.int16([1])], (3,))
    array([0., 5., 0.], dtype=float32)
    """

    sends_values = True
    by_position = True

    def within(self, flat: Tensor, threshold: float, room: int) -> Payload:
        """A payload of one size, whatever is in the tensor, for devices: of what is above a threshold the largest, for
        which there is room, and how many they are. Nothing is read back; what is left out is decoded as 0."""
        k = kernels_of(flat)
        values, indices, count = k.largest_above(flat, threshold, room)
        return [values, encode(k, indices, flat.shape[0] + 1, fixed=False), count]

    def accumulate(self, payload: Payload, ctx: Any, out: Tensor, weight: float = 1.0) -> Tensor:
        k = kernels_of(out)
        values = shown(payload[:1], payload[2:])[0] if self.bounded else payload[0]
        return k.reshape(k.scatter_add(k.flat(out), self.sent_indices(payload, ctx), values, weight), ctx)

    def sent_indices(self, payload: Payload, ctx: Any) -> Tensor | None:
        values, coded = shown(payload[:2], payload[2:]) if self.bounded else payload[:2]
        return decode(kernels_of(coded), coded, math.prod(ctx), values.shape[0])


def shown(parts: list[Tensor], count: list[Tensor]) -> list[Tensor]:
    """Without what only fills their room, by the count that came with them, if one did; on a device that stays, because
    kernels leave out positions that are not there."""
    if not count or kernels_of(parts[0]).far(parts[0]):
        return parts
    n = int(kernels_of(count[0]).to_list(count[0])[0])
    check_range(n, n, parts[0].shape[0] + 1, "the number of elements")
    return [part[:n] for part in parts]
