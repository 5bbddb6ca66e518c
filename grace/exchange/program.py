"""The program of a bucket: the facts that are the same for all of its round trips."""

import copy

from grace.core.compressor import Tensor
from grace.core.route import ALL_GATHER, Carries, EngineTraits, Leg, Route, route_of
from grace.exchange.apart_codec import ApartCodec
from grace.exchange.bucket import Bucket
from grace.exchange.codec import PerVariableCodec
from grace.exchange.fused_codec import fused_codec
from grace.exchange.header import PRESENT, shares_stamps
from grace.exchange.sparse_codec import RowCodec
from grace.kernels import kernels_of


class BucketProgram:
    """Codec and route of a bucket, and the facts that they follow from; kept in ``bucket.program``.

    Args:
        bucket: the bucket.
        like: one of its gradients.

    Attributes:
        apart: the codec, if the communicator moves payloads itself.
        looks: True if overflows are detected before sending, and reported by statuses.
        sizes_unknown: True if the method does not declare payload sizes, so that ranks compare their layouts.
        payloads_show: True if payloads show overflows: they carry Inf and NaN unchanged, or they are sums, which may be
            infinite though all terms are finite.
        statuses_matter: True if statuses are read even if all ranks have all gradients.
        well: a status (of one rank, or the sum of all ranks') if all ranks have a gradient in range.
    """

    def __init__(self, bucket: Bucket, like: Tensor):
        communicator = bucket.communicator
        compressor, context = communicator.compressor, communicator.context
        self.bucket = bucket
        self.communicator = communicator
        self.context = context
        self.kernels = kernels_of(like)
        self.type, self.device = type(like), getattr(like, "device", None)
        self.traits = compressor.traits
        self.size, self.rank = context.size, context.rank
        self.size_key = compressor.size_key(context.step)
        self.sizes_by_shape = self.traits.fixed_size == "by shape"
        self.sums = communicator.sums
        self.sparse = bucket.variables[0].sparse
        self.on_device = communicator.can_defer and not self.sparse and self.kernels.on_device(like)
        self.shares_stamps = shares_stamps(communicator)
        self.codec = self._make_codec(like)
        self.apart = self.codec if isinstance(self.codec, ApartCodec) else None
        self.looks = (
            not self.traits.carries_nonfinite or communicator.delayed or communicator.cuts or self.apart is not None
        )
        self.sizes_unknown = self.traits.fixed_size is None and self.apart is None
        self.payloads_show = communicator.sums or (self.traits.carries_nonfinite and self.apart is None)
        self.statuses_matter = self.looks or communicator.user_defined
        self.well = self.size if self.sums else PRESENT
        count = len(bucket.names)
        # Headers are made at every step; they share these lists, and never change them.
        self.all_true = [True] * count
        self.all_false = [False] * count
        self.all_present = [PRESENT] * count
        self.all_well = [self.well] * count
        self._route: Route | None = None

    def _make_codec(self, like: Tensor) -> PerVariableCodec:
        """Return the codec of rows, or of the communicator, or else a fused one, or else a
        :class:`PerVariableCodec`."""
        communicator = self.communicator
        kind: type[PerVariableCodec] = PerVariableCodec
        if self.sparse:
            kind = RowCodec
        elif communicator.moves_payloads:
            kind = ApartCodec
        elif communicator.codec is not None:
            kind = communicator.codec
        codec = kind(self.bucket, self.kernels, self.on_device)
        if kind is PerVariableCodec and self.bucket.fuses and all(codec.known):
            return fused_codec(codec, like) or codec
        return codec

    def fits(self, like: Tensor) -> bool:
        """Return True if the program was made for this kind of gradient, these ranks, and payload sizes of this
        step."""
        communicator, context = self.bucket.communicator, self.communicator.context
        return (
            self.communicator is communicator
            and self.type is type(like)
            and self.device == getattr(like, "device", None)
            and (self.size, self.rank) == (context.size, context.rank)
            and (self.sizes_by_shape or self.size_key == communicator.compressor.size_key(context.step))
        )

    def share_layouts(self, other: "BucketProgram") -> None:
        """Hold payloads to the layouts of another copy of the bucket, whose payloads were the first."""
        # Layouts keep their last results: two threads must not use one.
        self.codec.known = [found and list(map(copy.copy, found)) for found in other.codec.known]

    def route(self) -> Route:
        """Return the legs of the next round trip."""
        if self._route is None:
            codec, backend = self.codec, self.communicator.backend
            on_cpu = getattr(self.device, "type", "cpu") == "cpu"
            engine = EngineTraits(self.size, backend.by_ring, backend.concatenates, on_cpu)
            wires = [layouts[0].nbytes for layouts in codec.known if layouts] or [codec.layouts[0].nbytes]
            wires += [wires[-1]] * (self.traits.rounds - len(wires))  # rounds whose layouts are not known yet
            self._route = backend.supported(route_of(self.communicator, wires, engine, codec.varies), self.sums)
        compares = self.sizes_unknown and (self.bucket.compares or not self.bucket.compared)
        return [Leg(ALL_GATHER, Carries.DIGESTS), *self._route] if compares else self._route

    def buffers(self) -> list[tuple[Leg, str, int]]:
        """Return the legs of the route, each with the dtype and the length of its buffer.

        A user's communicator may start more collectives for a longer buffer. The other legs start one collective each,
        and have the length 1 here."""
        found, number, parts_before = [], 0, False
        for leg in self.route():
            number += leg.carries is Carries.ROUND
            layouts = self.codec.known[number] or self.codec.layouts
            dtype, length = layouts[0].dtype, 1
            if leg.carries in (Carries.SIZES, Carries.DIGESTS):
                dtype = "int64"
            elif leg.carries is Carries.MEANS or leg.in_parts or parts_before:
                dtype = "uint8"
            elif leg.carries in (Carries.GRADIENTS, Carries.ROUND):
                length = layouts[0].length
            found.append((leg, dtype, length))
            parts_before = leg.in_parts
        return found
