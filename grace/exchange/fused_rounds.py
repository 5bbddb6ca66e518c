"""The codec of a bucket in one pass, for methods of several rounds on a device; and the choice among fused codecs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from grace.core.compressor import Tensor
from grace.exchange.bucket import Bucket
from grace.exchange.codec import PerVariableCodec
from grace.exchange.double_buffer import DoubleBuffer
from grace.exchange.fused_codec import FusedCodec, kernel_codec, moments_of
from grace.exchange.header import Header
from grace.exchange.layout import Layout
from grace.kernels import Kernels


class FusedRounds(FusedCodec):
    """Codec of kernels for methods of several rounds: it writes each round's wire and receives each round's sum.

    The method keeps the result of the last sum, from which its next step starts, in a double buffer, like residuals.
    Both are stored only when all is decoded.
    """

    stores_at_once = False  # residuals are what the last round leaves out

    def __init__(self, bucket: Bucket, kernels: Kernels, on_device: bool, kind: Any, options: dict[str, Any]):
        super().__init__(bucket, kernels, on_device, kind, options)
        shapes = [payload[0].shape for payload in self._layout_of(1).placed()]
        self.started = DoubleBuffer(self.compressor, self.kernels, self.names, shapes)
        self.second_wire: Tensor | None = None

    def _layout_of(self, number: int) -> Layout:
        layouts = self.known[number]
        assert layouts is not None
        return layouts[0]

    def placed(self, owner: int) -> Any:
        return payloads_of_rounds(self)

    def encode(self, gradients: Sequence[Tensor], header: Header) -> Tensor:
        self.round = 0
        self.layouts = [self._layout_of(0)]
        return super().encode(gradients, header)

    def _encode(self, gradients: Sequence[Tensor], header: Header) -> bool:
        if not self.started.swap(gradients[0]):
            return False
        self.codec.start_from(self.started.rows[:, 1], self.started.rows[:, 2])
        return super()._encode(gradients, header)

    def receive(self, total: Tensor, count: float) -> Any:
        if not self.fused:
            return None
        return self.codec.receive(total, count, self.round + 1 == len(self.known))

    def next_round(self, total: Tensor, count: float, header: Header) -> Tensor:
        if not self.fused:
            return super().next_round(total, count, header)
        self.round += 1
        layout = self._layout_of(self.round)
        self.layouts = [layout]
        if self.second_wire is None:
            self.second_wire = self.kernels.zeros((layout.length,), layout.dtype, total)
        self.codec.follow(self.second_wire, layout.end(header.statuses(later_round=True), header.own_stamp()))
        return self.second_wire

    def decode(
        self, wires: Sequence[Tensor], layouts: Sequence[Layout], outs: Sequence[Any], count: float, means: bool
    ) -> list[Any]:
        if not self.fused:
            return super().decode(wires, layouts, outs, count, means)
        k = self.kernels
        found = self.rooms(outs, wires[0])
        given, places = found, k.addresses(found)
        if places is None:  # kernels cannot write to these tensors: decode into others, and copy
            given = [k.blank(tuple(out.shape), "float32", wires[0]) for out in found]
            places = k.addresses(given)
        self.codec.decode(np.array(places, np.uint64), (), count, self.context.loss_scale)
        for out, mean in zip(found, given, strict=True):
            if out is not mean:
                k.divide(out, mean, 1)
        self.residuals.store()
        self.started.store()
        return found


def payloads_of_rounds(codec: PerVariableCodec) -> list[list[Any]]:
    """Return the locations of each variable's tensors of all rounds in the rounds' wires."""
    each = zip(*(layouts[0].placed() for layouts in codec.known if layouts), strict=True)
    return [[tensor for payload in of_variable for tensor in payload] for of_variable in each]


def fused_codec(plain: PerVariableCodec, like: Tensor) -> FusedCodec | None:
    """Return the codec of a bucket in one pass; None if its method and memories have none.

    Args:
        plain: the codec of the same bucket variable by variable, whose layouts are known.
        like: one of the bucket's gradients.
    """
    bucket, kernels = plain.bucket, plain.kernels
    communicator, compressor, second = bucket.communicator, plain.compressor, plain.second
    found = kernel_codec(bucket, kernels, like)
    # A delayed round trip is still under way when the next one encodes: it has buffers of its own.
    if found is None or communicator.delayed:
        return None
    # Means are encoded by the same kernels: the second method must be the same, and draw its own random numbers.
    if second is not None and (found[0].draws == "shared" or type(second[0]) is not type(compressor)):
        return None
    if moments_of(compressor) and communicator.memory.stateful:  # a codec has one pair of buffers: x or residuals
        return None
    if compressor.traits.rounds == 1:
        return FusedCodec(bucket, kernels, plain.on_device, *found)
    if not communicator.memory.stateful or not communicator.sums:
        return None
    # The kernels' low rank takes matrices alone.
    if all(layouts and layouts[0].body for layouts in plain.known) and found[0].takes(payloads_of_rounds(plain)):
        return FusedRounds(bucket, kernels, plain.on_device, *found)
    return None
