"""The contract of codecs of whole buckets, which the loops of CPUs and the kernels of GPUs implement."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy import ndarray as Array

from grace.kernels.reference import Tensor


class Placed(NamedTuple):
    """Location of one tensor of a payload in the buffer that travels: its byte offset, shape and dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: str


Places = Sequence[Sequence[Placed]]
"""Locations of the tensors of each variable's payload in a wire."""


class DeviceHeader(NamedTuple):
    """Header that a kernel writes into a wire, behind the payloads.

    Attributes:
        offsets: its offset in bytes; of variables that are cut into pieces one in each piece's wire.
        dtype: the dtype of the wire.
        numbers: statuses of variables without an overflow, then step stamps and padding.
        overflow: the status of a variable that has overflowed.
        received: addresses of the statuses that arrived.
    """

    offsets: Sequence[int]
    dtype: str
    numbers: Sequence[float | Tensor]
    overflow: float
    received: Sequence[int]


class BucketCodec:
    """Encodes all variables of a bucket in one call, and decodes them in another.

    Encoding computes x = a residual + b gradient, writes the payload of x into the wire and x - C(x) where the next
    residual goes; without one x is the gradient, which stays as it is. Operations are those of the kernels that
    compressors call one by one, in the same order, so that the bits are the same. Addresses are of contiguous float32
    tensors in one memory. An engine's class takes ``sizes`` (elements of each variable), ``payloads``
    (:data:`Places`) and the options of its method.
    """

    draws: bool | str = False
    """True if encoding takes random numbers; "shared" if all ranks draw the same ones."""
    on_device = False
    """True if it writes the header of the wire, since only the device knows what is in range."""
    unfinished = False
    """True if x itself is kept, and ``finish`` makes residuals of it; ``encode`` subtracts from the x that it reads."""

    def encode(
        self, rows: Array, factors: Array, wire: int, most: np.uint32, streams: Array, *header: DeviceHeader
    ) -> list[bool] | Tensor:
        """Write every payload into the wire, and the next residuals; on a device the wire's header, too.

        Args:
            rows: addresses, uint64 of shape (variables, 3): gradient, residual, next residual; 0 for none. Of a codec
                that is ``unfinished`` (variables, 5): and of the numbers that are still to be subtracted from either
                residual, float32 of shape (2,).
            factors: float32 of shape (variables, 2): of its residual, and of its gradient.
            wire: the address of the wire.
            most: the bit pattern of the largest magnitude that is in range.
            streams: uint32 of shape (variables, 4): the words of each variable's random numbers.
            header: on a device alone, a :class:`DeviceHeader`. With several offsets variables are cut into as many
                pieces, each of which has a row, and all headers say what is in all of a variable's pieces.

        Returns:
            True for each variable whose x was in range; on a device a tensor of 1.0 and 0.0.
        """
        raise NotImplementedError

    def decode(self, outs: Array, wires: Array, count: float, loss_scale: float) -> bool:
        """Write the mean over ``count`` ranks' wires into ``outs``; return False if one cannot be decoded.

        Args:
            outs, wires: addresses, uint64; wires of shape (ranks,), or (1, variables) if each variable has a
                wire of its own.
        """
        raise NotImplementedError

    def finish(self, rows: Array, sides: Tensor) -> None:
        """Subtract ``sides`` from residuals, and set it to zeros."""
        raise NotImplementedError
