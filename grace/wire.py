"""The wire: how the payloads of a group travel in one buffer.

Behind the payloads comes one status per variable, so that every rank learns, without a collective of its
own, which variables had a gradient somewhere and which overflowed somewhere:

- summed wires have the payload's dtype; the status is 1 (present), 0 (missing) or Inf (overflow), and adds up;
- byte wires hold the payload tensors, widest items first so that every tensor is aligned, then one status
  byte per variable (0 missing, 1 present, 2 overflow), padded to a multiple of 8 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from grace.compressor import Payload, Tensor
from grace.errors import ConfigError
from grace.kernels import Kernels

MISSING, PRESENT, OVERFLOW = 0, 1, 2
ITEM_SIZE = {"float64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}


def mark(present: bool, finite: Any, sums: bool) -> Any:
    """The status of one variable on this rank; ``finite`` is a bool, or a 0-d tensor of 1.0 or 0.0.

    >>> mark(True, True, sums=False), mark(True, False, sums=False), mark(False, True, sums=True)
    (1, 2, 0)
    """
    if not present:
        return MISSING
    if isinstance(finite, bool):
        return PRESENT if finite else (math.inf if sums else OVERFLOW)
    return 1.0 / finite if sums else 2.0 - finite


class Wire:
    """The layout of one group's payloads, taken from this rank's, which all ranks share.

    >>> import numpy as np
    >>> from grace.kernels import NumpyKernels
    >>> wire = Wire(NumpyKernels(), [[np.uint8([7]), np.float32([1.5])], [np.uint8([9])]], sums=False)
    >>> buffer = wire.pack([PRESENT, MISSING])
    >>> buffer.nbytes, wire.payload_bytes, wire.statuses(buffer)
    (8, [5, 1], [1.0, 0.0])
    >>> wire.unpack(buffer)
    [[array([7], dtype=uint8), array([1.5], dtype=float32)], [array([9], dtype=uint8)]]
    """

    def __init__(self, kernels: Kernels, payloads: Sequence[Payload], sums: bool):
        self.kernels, self.sums = kernels, sums
        self.tensors = [tensor for payload in payloads for tensor in payload]
        self.lengths = [len(payload) for payload in payloads]
        self.dtypes = [kernels.dtype(tensor) for tensor in self.tensors]
        sizes = [kernels.nbytes(tensor) for tensor in self.tensors]
        ends = [sum(self.lengths[: i + 1]) for i in range(len(self.lengths))]
        self.payload_bytes = [sum(sizes[end - n : end]) for n, end in zip(self.lengths, ends, strict=True)]
        if sums:
            self.dtype = self._one_dtype()
            item = ITEM_SIZE[self.dtype]
            self.order = list(range(len(self.tensors)))
            self.units = [size // item for size in sizes]
            self.padding = 0
        else:
            self.dtype = "uint8"
            self.order = sorted(range(len(self.tensors)), key=lambda i: -ITEM_SIZE[self.dtypes[i]])
            self.units = sizes
            self.padding = -(sum(sizes) + len(payloads)) % 8

    def _one_dtype(self) -> str:
        dtypes = sorted(set(self.dtypes))
        if len(dtypes) != 1 or not dtypes[0].startswith(("float", "bfloat")):
            raise ConfigError(f"payloads that the engine sums must be of one floating dtype, not {', '.join(dtypes)}")
        return dtypes[0]

    def pack(self, statuses: list[Any], out: Tensor | None = None) -> Tensor:
        """All payload tensors, then the statuses, in one 1-d tensor (into ``out`` if it fits)."""
        k = self.kernels
        if self.sums:
            parts = [k.flat(tensor) for tensor in self.tensors]
            parts.append(k.full(statuses, self.dtype, self.tensors[0]))
        else:
            parts = [k.to_bytes(self.tensors[i]) for i in self.order]
            parts.append(k.full([*statuses, *[0] * self.padding], "uint8", self.tensors[0]))
        if out is not None and tuple(out.shape) != (self.length,):
            out = None
        return k.join(parts, out)

    @property
    def length(self) -> int:
        """Elements of the packed buffer."""
        return sum(self.units) + len(self.lengths) + self.padding

    def unpack(self, buffer: Tensor) -> list[Payload]:
        """The payloads in a buffer laid out like this one: views of it."""
        k, flat, start = self.kernels, [None] * len(self.tensors), 0
        for i in self.order:
            raw, shape = buffer[start : start + self.units[i]], tuple(self.tensors[i].shape)
            flat[i] = k.reshape(raw, shape) if self.sums else k.from_bytes(raw, self.dtypes[i], shape)
            start += self.units[i]
        payloads, rest = [], iter(flat)
        for length in self.lengths:
            payloads.append([next(rest) for _ in range(length)])
        return payloads

    def statuses(self, buffer: Tensor) -> list[float]:
        """The statuses at the end of a buffer; reads them back from the device."""
        start = sum(self.units)
        return self.kernels.to_list(buffer[start : start + len(self.lengths)])
