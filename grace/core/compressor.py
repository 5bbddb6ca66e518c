"""The compressor contract."""

import dataclasses
import math
from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from grace.core.component import is_ours
from grace.core.transactional_dict import StatefulComponent
from grace.core.user_parts import check_shape, wrap_aggregate, wrap_compress
from grace.errors import ConfigError, payload_of
from grace.kernels import kernels_of
from grace.kernels.constants import ITEM_SIZE
from grace.kernels.index_coding import coded_as, decode, encode
from grace.kernels.wire_checks import check_range

# No class: the tensors of NumPy, torch and TensorFlow have no base in common.
Tensor = Any
Payload = list[Tensor]
Shape = tuple[int, ...]
Ctx = Any
"""Facts that decode any rank's payload of a variable, such as its shape or a seed. They stay on the rank."""
AFTER_WARMUP = 1 << 62
"""A step after every warm-up, for which sizes are quoted."""
BucketCodecSpec = tuple[str, dict[str, object]]
"""Name of a codec of whole buckets, and its options."""
FixedSize = Literal["by shape", "by shape and step", "by data"]
FIXED_SIZES: tuple[str, ...] = get_args(FixedSize)


class TensorSpec(NamedTuple):
    """The dtype and shape of a payload tensor that is not made yet.

    Only the first dimension may be None: the data decide it, and ranks may differ in it.

    >>> TensorSpec("int16", (10,)).nbytes
    20
    """

    dtype: str
    shape: tuple[Any, ...]

    @property
    def known(self) -> bool:
        """True if no dimension depends on the data."""
        return None not in self.shape

    @property
    def nbytes(self) -> int:
        """Bytes of a tensor whose shape is known."""
        return math.prod(self.shape) * ITEM_SIZE[self.dtype]


PayloadSpec = list[TensorSpec]


@dataclasses.dataclass(frozen=True)
class Traits:
    """The promises of a compressor, as data; all decisions about compressors read them.

    Attributes:
        category: the family of the method.
        unbiased: True if E[decompress(compress(x))] = x.
        contraction: True if E||x - decompress(compress(x))||^2 < ||x||^2 for x != 0, which error feedback needs to
            converge.
        summable: True if the sum of payloads is the payload of the sum (legal with Allreduce).
        fixed_size: quantity that the size of a variable's payload depends on. "by shape": it is the same on every rank
            and at every step. "by shape and step": it is the same on every rank, and may change from step to step, as
            in a warm-up. "by data": it may differ by rank, and so may dtypes, so both travel first. None: unknown;
            ranks compare their sizes at the first step, and the size must stay. True means "by shape", and False "by
            data".
        carries_nonfinite: True if a NaN or Inf travels in the payload itself.
        exact: True if decompress(compress(x)) == x; the gradient then keeps its own dtype.
        rounds: number of dependent reductions that one exchange takes.
        communicator, memory: names of the method's defaults.
        shardable: True if shards of a tensor, and means of decoded shards, may be compressed alike (legal
            with ScatterReduce).
        needs_memory: True if the method diverges or stalls without error feedback.

    Raises:
        ConfigError: ``fixed_size`` is none of these.

    >>> Traits("sparsification", fixed_size=False).fixed_size
    'by data'
    """

    category: Literal["none", "quantization", "sparsification", "hybrid", "low-rank"]
    unbiased: bool = False
    contraction: bool = False
    summable: bool = False
    fixed_size: FixedSize | bool | None = None
    carries_nonfinite: bool = False
    exact: bool = False
    rounds: int = 1
    communicator: str = "allgather"
    memory: str = "none"
    needs_memory: bool = False
    shardable: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.fixed_size, bool):
            object.__setattr__(self, "fixed_size", "by shape" if self.fixed_size else "by data")
        elif self.fixed_size is not None and self.fixed_size not in FIXED_SIZES:
            raise ConfigError(
                f"traits: fixed_size must be one of {', '.join(map(repr, FIXED_SIZES))}, True ('by shape'), False "
                f"('by data') or None (unknown), not {self.fixed_size!r}"
            )

    @property
    def varies(self) -> bool:
        """True if the data decide the size of payloads, so that ranks may differ in it."""
        return self.fixed_size == "by data"


class Compressor(StatefulComponent):
    """Method that turns a gradient into a small payload and back. Write ``compress`` and ``decompress``.

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
    offered: ClassVar[Sequence[str]] = ()
    """Specs by which ``strategy="auto"`` considers the method, as ("topk(ratio=0.01)",)."""
    offered_for_tables: ClassVar[Sequence[str]] = ()
    """Specs that it considers besides for embedding tables, most of whose rows have no gradient in a step."""
    stateful: bool = False
    """True if the method, or a part of it, keeps state per variable between steps."""
    owns_momentum: ClassVar[bool] = False
    """True if the method applies momentum itself, so that the optimizer's must be 0."""
    votes: bool = False
    """True if the aggregate is no mean, but a vote, for instance."""
    sends_values: ClassVar[bool] = False
    """True if the first payload tensor holds float32 values picked from the tensor, so that a second method may
    compress them: ``topk | qsgd``."""
    bounded: bool = False
    """True if payloads on a device are padded to one size, though payloads on the host vary: then the host need not
    wait for the number of elements."""
    measured_loss: ClassVar[Mapping[str, Mapping[str, float]]] = {}
    """Measured facts, for people: by spec and by optimizer ("sgd" with momentum, "adamw") the held-out loss of a
    character GPT (as ``grace bench train --task chargpt``: 70,000 parameters, about 900 steps, 2 ranks, three seeds) in
    units of that of ``none``. Empty where nobody measured."""
    by_position: bool = False
    """True if elements are told apart by int32 positions, so that a tensor must have fewer than 2^31 of them."""

    def __init__(self, average: bool | None = None, tensors_size_are_same: bool | None = None):
        """Set traits for one object, as GRACE's compressors do.

        Args:
            average: False if the aggregate is no mean, but the sum, or the result of ``aggregate``.
            tensors_size_are_same: ``traits.fixed_size``.
        """
        if average is not None:
            self.votes = not average
        if tensors_size_are_same is not None:
            self.traits = dataclasses.replace(self.traits, fixed_size=tensors_size_are_same)

    def __init_subclass__(cls, **kwargs: object):
        super().__init_subclass__(**kwargs)
        # When a class is defined, so that what it returns is checked whoever calls it: memories, tests, other methods.
        if "compress" in vars(cls):
            cls.compress = wrap_compress(cls.compress, is_ours(cls))  # type: ignore[method-assign]
        if "aggregate" in vars(cls):
            cls.aggregate = wrap_aggregate(cls.aggregate)  # type: ignore[method-assign]

    def mark_stateful(self) -> None:
        self.stateful = True

    @property
    def average(self) -> bool:
        """True if the aggregate is a mean."""
        return not self.votes

    @property
    def tensors_size_are_same(self) -> bool:
        """True if payloads have the same size on every rank."""
        return not self.traits.varies

    noise_advice: ClassVar[str] = ""
    """The choice that is recommended on a noisy method with error feedback; empty for another memory."""

    @property
    def noisy(self) -> bool:
        """True if the error can exceed the gradient, so that error feedback may diverge."""
        # Unbiased rounding may be wrong by more than the gradient, and a vote has another length than it.
        return (self.traits.unbiased and not self.traits.exact) or self.votes

    @wrap_compress
    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Ctx]:
        """Encode a tensor; a method of several rounds runs them here as if this were the only rank."""
        rounds = self.exchange(tensor, name)
        payload = next(rounds)
        while True:
            try:
                # Of one rank the mean is its own payload.
                payload = rounds.send(payload)
            except StopIteration as end:
                return end.value

    def decompress(self, payload: Payload, ctx: Ctx) -> Tensor:
        """Decode one payload, of this or another rank, to a float32 tensor of the original shape."""
        raise TypeError(f"{type(self).__name__} must define decompress(payload, ctx)")

    def exchange(self, tensor: Tensor, name: str) -> Generator[Payload, Payload, tuple[Payload, Ctx]]:
        """Run the rounds of a method with ``traits.rounds > 1``: yield each payload, receive its mean over ranks, and
        return the final ``(payload, ctx)``, which decodes to the aggregate on every rank."""
        # exchange() and exchange_all() are each defined by the other: a class must define one.
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
    ) -> Generator[list[Payload], list[Payload], list[tuple[Payload, Ctx]]]:
        """Run :meth:`exchange` for several variables that share their collectives: yield the list of their payloads,
        receive the list of the means, and return the list of the variables' results. Override it instead of
        ``exchange`` where variables are faster together.

        ``tensors`` makes each tensor when it is iterated, before the first payloads are yielded; a method that computes
        with a tensor at once finds it in the processor's cache."""
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
            # Variables share their collectives, so all of them must take equally many rounds.
            if returned or not rounds:
                if payloads:
                    raise TypeError(
                        f"{type(self).__name__}.exchange() yields more payloads of some variables than of others"
                    )
                return returned

    def accumulate(self, payload: Payload, ctx: Ctx, out: Tensor, weight: float = 1.0) -> Tensor:
        """Compute ``out += weight * decompress(payload, ctx)``; override it to avoid the dense copy.

        Returns ``out`` (a new tensor where the framework's tensors are immutable)."""
        return kernels_of(out).add(out, check_shape(self.decompress(payload, ctx), out), weight)

    @wrap_aggregate
    def aggregate(self, payloads: Sequence[Payload], ctx: Ctx, out: Tensor, count: float) -> Tensor:
        """Write the mean into ``out``: the sum of what ``payloads`` decode to, divided by ``count`` (unless the method
        ``votes``). There is one payload per rank, or their sum; ``count`` is the number of ranks, or the divisor of
        such a sum.

        It may be defined, and called, as ``aggregate(tensors)`` instead, which adds up decoded tensors, one per
        rank."""
        out = kernels_of(out).zero(out)
        for place, payload in enumerate(payloads):
            with payload_of(place):
                out = self.accumulate(payload, ctx, out, 1.0 / count if self.average else 1.0)
        return out

    def combined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of decoded tensors, one per rank."""
        return sum(tensors)

    def answering(self) -> "Compressor":
        """Return the method with which a destination compresses the mean that it sends to all ranks: this one."""
        return self

    def bucket_codec(self) -> BucketCodecSpec | None:
        """Return the name of the codec of whole buckets that gives the same bits, of
        :mod:`grace.kernels.numba.bucket_codecs` and :mod:`grace.kernels.triton.bucket_codecs`, and its options at
        this step; None if there is none for these parameters. A class that inherits it is not asked, because it may
        compute differently. Where payloads change with the step, a codec is made anew with their layout. Payloads that
        a codec does not decode are decoded with :meth:`ctx_of`."""
        raise TypeError(f"{type(self).__name__} has no codec for whole buckets")

    def sent_indices(self, payload: Payload, ctx: Ctx) -> Tensor | None:
        """Return the flat int32 positions that a sparsifier's payload holds; None if the method does not know them."""
        return None

    def count(self, shape: tuple[int, ...]) -> int | None:
        """Return the number of values that a sparsifier sends of a tensor of this shape, after the warm-up if it has
        one; None if the data decide."""
        spec = self.payload_spec(shape, AFTER_WARMUP) if self.sends_values else None
        return spec[0].shape[0] if spec else None

    def variance(self, n: int) -> float | None:
        """Return omega with E||decompress(compress(x)) - x||^2 <= omega ||x||^2 for every x of n elements, of an
        unbiased method; None if there is no such number, or none is known."""
        return None

    def payload_spec(self, shape: tuple[int, ...], step: int) -> PayloadSpec | None:
        """Return the spec of the payload of a float32 tensor of this shape at a step; None if it is not known before
        the payload is made. It must not read ``self.context.step``."""
        return None

    def round_specs(self, shape: tuple[int, ...], step: int) -> list[PayloadSpec | None]:
        """Return the spec of the payload of each round; see :meth:`payload_spec`."""
        return [self.payload_spec(shape, step)] if self.traits.rounds == 1 else [None] * self.traits.rounds

    def size_key(self, step: int) -> Hashable:
        """Return a key of the step: payloads of one shape have equal sizes at steps of equal keys."""
        return step if self.traits.fixed_size == "by shape and step" else None

    def device_spec(self, shape: tuple[int, ...], step: int) -> PayloadSpec | None:
        """Return the spec of the padded payload that a ``bounded`` method makes on a device; see
        :meth:`payload_spec`."""
        return None

    def specs(self, shape: tuple[int, ...], dtype: str, on_device: bool, step: int) -> list[PayloadSpec | None]:
        """Return the spec of the payload of each round; None for a round whose sizes are not known in advance.

        Args:
            shape, dtype: shape and dtype of the tensor that is compressed: float32, unless the method is exact.
            on_device: True if the tensor lies on a device, where ``bounded`` methods send payloads of one size.
            step: the number of the step.
        """
        found = [self.device_spec(shape, step)] if on_device and self.bounded else self.round_specs(shape, step)
        specs = [spec if spec and all(tensor.known for tensor in spec) else None for spec in found]
        if self.traits.exact and dtype != "float32":  # exact methods send values in the gradient's dtype
            kept = {"float32": dtype}
            return [spec and [TensorSpec(kept.get(t.dtype, t.dtype), t.shape) for t in spec] for spec in specs]
        return specs

    def ctx_of(self, name: str, shape: tuple[int, ...], like: Tensor) -> Ctx:
        """Return the ctx that :meth:`compress` gives at this step for a variable of this shape, and so decodes any
        rank's payload of it; ``like`` is a tensor of the framework and device. None if the method decodes without a
        ctx, or cannot know it without a payload, which users' methods need not."""
        return None

    def wire_bits(self, shape: tuple[int, ...]) -> float | None:
        """Return the bits on the wire per element of a float32 tensor of this shape, after the warm-up if the method
        has one; None if they are not known before payloads are made. It follows from :meth:`round_specs`."""
        specs = self.specs(shape, "float32", False, AFTER_WARMUP)
        if None in specs:
            return None
        return 8 * sum(tensor.nbytes for spec in specs for tensor in spec or ()) / max(1, math.prod(shape))


class Accumulating(Compressor):
    """Method whose decoder is ``accumulate``, and whose ``ctx`` is the tensor's shape."""

    def ctx_of(self, name: str, shape: tuple[int, ...], like: Tensor) -> Ctx:
        return shape

    def decompress(self, payload: Payload, ctx: Ctx) -> Tensor:
        k = kernels_of(payload[0])
        return self.accumulate(payload, ctx, k.zeros(ctx, "float32", payload[0]))


class Sparsifier(Accumulating):
    """Method with a payload of [values, indices coded by :mod:`grace.kernels.index_coding`]; ``ctx`` is the shape.

    >>> import numpy as np
    >>> Sparsifier().decompress([np.float32([5]), np.int16([1])], (3,))
    array([0., 5., 0.], dtype=float32)
    """

    sends_values = True
    by_position = True

    def padded_payload(self, flat: Tensor, threshold: float, room: int) -> Payload:
        """Return a padded payload of a fixed size, for devices: the ``room`` largest elements above a threshold, and
        their number. Nothing is read back; elements that are left out decode to 0."""
        k = kernels_of(flat)
        values, indices, count = k.largest_above(flat, threshold, room)
        # One position more than there are elements: padding points behind the last one.
        return [values, encode(k, indices, flat.shape[0] + 1, fixed=False), count]

    def padded_spec(self, shape: tuple[int, ...], room: int) -> PayloadSpec:
        """Return the spec of the payload of :meth:`padded_payload`."""
        dtype, _ = coded_as(math.prod(shape) + 1)
        return [TensorSpec("float32", (room,)), TensorSpec(dtype, (room,)), TensorSpec("int32", (1,))]

    def accumulate(self, payload: Payload, ctx: Ctx, out: Tensor, weight: float = 1.0) -> Tensor:
        k = kernels_of(out)
        values = without_padding(payload[:1], payload[2:])[0] if self.bounded else payload[0]
        return k.reshape(k.scatter_add(k.flat(out), self.sent_indices(payload, ctx), values, weight), ctx)

    def payload_spec(self, shape: tuple[int, ...], step: int) -> PayloadSpec | None:
        return self._spec(math.prod(shape), None)

    def _spec(self, n: int, count: int | None, chunk: int = 0) -> PayloadSpec:
        """Return the spec of ``count`` values and positions of n elements; None if the data decide how many."""
        dtype, length = coded_as(n, count, chunk)
        return [TensorSpec("float32", (count,)), TensorSpec(dtype, (length,))]

    def sent_indices(self, payload: Payload, ctx: Ctx) -> Tensor | None:
        values, coded = without_padding(payload[:2], payload[2:]) if self.bounded else payload[:2]
        return decode(kernels_of(coded), coded, math.prod(ctx), values.shape[0])


def without_padding(parts: list[Tensor], count: list[Tensor]) -> list[Tensor]:
    """Return the parts of a payload without their padding, by the count in the payload, if it has one. On a device
    padding stays, because kernels skip positions out of range."""
    if not count or kernels_of(parts[0]).on_device(parts[0]):
        return parts
    n = int(kernels_of(count[0]).to_list(count[0])[0])
    check_range(n, n, parts[0].shape[0] + 1, "the number of elements")
    return [part[:n] for part in parts]
