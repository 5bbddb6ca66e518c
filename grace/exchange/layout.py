"""Layouts: the locations of a bucket's payloads in a wire, and of the header behind them.

- A summed wire has the payloads' own dtype.
- A byte wire holds the payload tensors, widest items first so that every tensor is aligned.

Behind the payloads stand the numbers of the header (:mod:`grace.exchange.header`), in the wire's dtype; byte wires are
padded to a multiple of 8 bytes.
"""

import copy
import math
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from grace.core.compressor import Payload, PayloadSpec, Tensor, TensorSpec
from grace.errors import ConfigError, PayloadError
from grace.kernels import Kernels
from grace.kernels.bucket_codec import DeviceHeader, Placed
from grace.kernels.constants import ITEM_SIZE

Item = TypeVar("Item")
Status = float | Tensor
"""Status of a variable: a number, or a 0-d tensor on the device."""
Stamps = Sequence[float] | Tensor
"""Numbers of step stamps, or a tensor of them on the device."""
WIRE_FORMAT = 4
"""Version of the wire's format: how payloads and headers are packed. All ranks must have the same."""
DTYPES, SIZE_BITS = list(ITEM_SIZE), 48
"""Dtypes by their codes in :meth:`Layout.sizes`, from 1, and the bits of a first dimension, above which a code stands.
The code 0, of simulated ranks that announce nothing, is the dtype of this rank's own payload."""
BITS_AS = {"bfloat16": "uint16"}
"""NumPy's dtype of the same width, for dtypes that NumPy does not have."""


class Difference(NamedTuple):
    """Difference of a payload from a layout.

    Attributes:
        variable: number of the payload's variable.
        of: "shapes" or "dtypes".
        now, was: the payload's, and the layout's, for each tensor.
    """

    variable: int
    of: str
    now: Sequence[object]
    was: Sequence[object]


class Layout:
    """Layout of one wire, equal on all ranks unless payloads vary in size.

    Args:
        kernels: the kernels of the bucket's tensors.
        payloads: dtypes and shapes of each variable's payload.
        sums: True if an engine adds wires up.
        stamps: number of step stamp numbers in the header.

    Attributes:
        payload_bytes: bytes of each variable's payload.
        total: bytes of all payloads.
        body: items (of the wire's dtype) of all payloads, and so the offset of the header.
        length, nbytes: items and bytes of the whole wire.
        statuses, stamps: slices of a wire: the statuses behind the payloads, and the step stamps behind these.

    >>> import numpy as np
    >>> from grace.kernels import NumpyKernels
    >>> payloads = [[np.uint8([7]), np.float32([1.5])], [np.uint8([9])]]
    >>> layout = Layout.from_payloads(NumpyKernels(), payloads, sums=False)
    >>> wire = layout.pack(payloads, [1, 0])
    >>> wire.nbytes, layout.payload_bytes, wire[layout.statuses]
    (8, [5, 1], array([1, 0], dtype=uint8))
    >>> layout.unpack(wire)
    [[array([7], dtype=uint8), array([1.5], dtype=float32)], [array([9], dtype=uint8)]]
    """

    def __init__(self, kernels: Kernels, payloads: Sequence[PayloadSpec], sums: bool, stamps: int = 0):
        self.kernels = kernels
        self.sums = sums
        self.header = len(payloads) + stamps
        self.lengths = [len(payload) for payload in payloads]
        specs = [spec for payload in payloads for spec in payload]
        self.dtypes = [spec.dtype for spec in specs]
        self.shapes = [tuple(spec.shape) for spec in specs]
        for dtype in self.dtypes:
            if dtype not in ITEM_SIZE:
                raise ConfigError(f"a payload tensor is of dtype {dtype}; the wire carries {', '.join(ITEM_SIZE)}")
        self.dtype = self._dtype_of_sums() if sums else "uint8"
        self._measure()
        # Caches of the last results with their inputs, which are the same at most steps.
        self._packed_statuses: tuple[Sequence[Status], Tensor] | None = None
        self._plain_statuses: tuple[list[Status], np.ndarray] | None = None
        self._end: tuple[Tensor, np.ndarray] | None = None

    @classmethod
    def from_payloads(cls, kernels: Kernels, payloads: Sequence[Payload], sums: bool, stamps: int = 0) -> "Layout":
        """Return the layout of existing payloads."""
        specs = [[TensorSpec(kernels.dtype(t), tuple(t.shape)) for t in payload] for payload in payloads]
        return cls(kernels, specs, sums, stamps)

    def _measure(self) -> None:
        """Compute the order of payload tensors, bytes and offsets from dtypes and shapes."""
        self.order = list(range(len(self.shapes)))
        if not self.sums:
            self.order.sort(key=lambda i: -ITEM_SIZE[self.dtypes[i]])
        counts = [math.prod(shape) for shape in self.shapes]
        sizes = [n * ITEM_SIZE[dtype] for n, dtype in zip(counts, self.dtypes, strict=True)]
        self.payload_bytes = list(map(sum, self._by_variable(sizes)))
        self.total = sum(sizes)
        self.units = counts if self.sums else sizes
        self.body = sum(self.units)
        self.padding = 0 if self.sums else -(self.body + self.header) % 8
        self.statuses = slice(self.body, self.body + len(self.lengths))
        self.stamps = slice(self.statuses.stop, self.body + self.header)
        self.length = self.body + self.header + self.padding
        self.nbytes = self.length * ITEM_SIZE[self.dtype]

    def _by_variable(self, of_tensors: Iterable[Item]) -> list[list[Item]]:
        """Return the items of all payload tensors as a list for each variable."""
        rest = iter(of_tensors)
        return [[next(rest) for _ in range(length)] for length in self.lengths]

    def _dtype_of_sums(self) -> str:
        dtypes = sorted(set(self.dtypes))
        if len(dtypes) != 1 or not dtypes[0].startswith(("float", "bfloat")):
            raise ConfigError(f"payloads that the engine sums must be of one floating dtype, not {', '.join(dtypes)}")
        return dtypes[0]

    # -- layouts of other ranks ------------------------------------------------------------------------

    def sizes(self) -> list[int]:
        """Return a number for every payload tensor: its first dimension (1 of a 0-d one) and the code of its dtype,
        both of which may differ between ranks."""
        each = zip(self.dtypes, self.shapes, strict=True)
        return [(1 + DTYPES.index(dtype) << SIZE_BITS) + (shape[0] if shape else 1) for dtype, shape in each]

    def digests(self) -> list[int]:
        """Return, of each payload, its bytes and a digest of its dtypes and shapes; ranks compare layouts by these."""
        specs = self._by_variable(zip(self.dtypes, self.shapes, strict=True))
        each = zip(self.payload_bytes, specs, strict=True)
        return [number for nbytes, payload in each for number in (nbytes, zlib.crc32(repr(payload).encode()))]

    def resized(self, sizes: Sequence[float], most: float = math.inf) -> "Layout":
        """Return the layout of another rank's wire, from its :meth:`sizes`.

        Args:
            most: bytes that its payloads may have.

        Raises:
            PayloadError: no payload can have these sizes.
        """
        each = [divmod(int(size), 1 << SIZE_BITS) for size in sizes]
        for size, (code, n), shape in zip(sizes, each, self.shapes, strict=True):
            known = 0 <= code <= len(DTYPES)
            if not known or (not shape and n != 1):
                raise PayloadError(f"a header announces a payload tensor of {n if known else size:.0f} elements")
        other = copy.copy(self)
        other.dtypes = [DTYPES[code - 1] if code else own for (code, _), own in zip(each, self.dtypes, strict=True)]
        other.shapes = [(n, *shape[1:])[: len(shape)] for (_, n), shape in zip(each, self.shapes, strict=True)]
        other._measure()
        if other.body > most:
            raise PayloadError(f"a header announces payloads of {other.body} bytes, and they can have {most} at most")
        other._packed_statuses = other._end = None
        return other

    def first_difference(self, payloads: Sequence[Payload]) -> Difference | None:
        """Return the first difference of payloads from the layout; None if there is none."""
        shapes, dtypes = self._by_variable(self.shapes), self._by_variable(self.dtypes)
        for i, payload in enumerate(payloads):
            now = [tuple(tensor.shape) for tensor in payload]
            if now != shapes[i]:
                return Difference(i, "shapes", now, shapes[i])
            dtypes_now = [self.kernels.dtype(tensor) for tensor in payload]
            if dtypes_now != dtypes[i]:
                return Difference(i, "dtypes", dtypes_now, dtypes[i])
        return None

    # -- writing ---------------------------------------------------------------------------------------

    def pack(
        self, payloads: Sequence[Payload], statuses: Sequence[Status], stamps: Stamps = (), out: Tensor | None = None
    ) -> Tensor:
        """Join all payload tensors, statuses and stamps into one 1-d tensor.

        Args:
            statuses: one per variable: numbers, or 0-d tensors on the device.
            stamps: numbers, or a tensor of the wire's dtype.
            out: the tensor to write to; None for a new tensor.
        """
        k = self.kernels
        tensors = [tensor for payload in payloads for tensor in payload]
        parts = [k.flat(tensor) for tensor in tensors] if self.sums else [k.to_bytes(tensors[i]) for i in self.order]
        padding = [0] * self.padding
        has_stamps = len(stamps) > 0
        plain = all(isinstance(status, (int, float)) for status in statuses)  # comparing tensors would wait for them
        if self._packed_statuses is None or not plain or self._packed_statuses[0] != statuses:
            ends = [*statuses] if has_stamps else [*statuses, *padding]
            self._packed_statuses = statuses, k.full(ends, self.dtype, tensors[0])
        parts.append(self._packed_statuses[1])
        if has_stamps and isinstance(stamps, Sequence):
            parts.append(k.full([*stamps, *padding], self.dtype, tensors[0]))
        elif has_stamps:
            parts += [stamps, k.full(padding, self.dtype, tensors[0])]
        return k.join(parts, out)

    def zeros(self, like: Tensor) -> list[Payload]:
        """Return payloads of zeros that have this layout."""
        each = zip(self.shapes, self.dtypes, strict=True)
        return self._by_variable(self.kernels.zeros(shape, dtype, like) for shape, dtype in each)

    def placed(self) -> list[list[Placed]]:
        """Return offset, shape and dtype of the tensors of each variable's payload."""
        size = ITEM_SIZE[self.dtype]
        offsets, start = [0] * len(self.units), 0
        for i in self.order:
            offsets[i] = start * size
            start += self.units[i]
        return self._by_variable(map(Placed, offsets, self.shapes, self.dtypes))

    def write_header(self, wire: Tensor, statuses: Sequence[Status], stamps: Sequence[float]) -> None:
        """Write statuses and stamps into a wire in the host's memory."""
        if self._end is None or self._end[0] is not wire:
            memory = self.kernels.memory(wire).view(BITS_AS.get(self.dtype, self.dtype))
            self._end = wire, memory[self.body : self.body + self.header]
        if self._plain_statuses is None or self._plain_statuses[0] != statuses:
            self._plain_statuses = list(statuses), _bits(statuses, self.dtype)
        end, count = self._end[1], len(self.lengths)
        end[:count] = self._plain_statuses[1]
        if stamps:
            end[count:] = _bits(stamps, self.dtype)

    def device_header(self, statuses: Sequence[Status], stamps: Sequence[float]) -> DeviceHeader:
        """Return the header that a kernel on a device writes behind the payloads."""
        numbers = [*statuses, *stamps, *[0] * self.padding]
        return DeviceHeader([self.body * ITEM_SIZE[self.dtype]], self.dtype, numbers, math.inf if self.sums else 2, [])

    # -- reading ---------------------------------------------------------------------------------------

    def unpack(self, wire: Tensor) -> list[Payload]:
        """Return the payloads in a wire, as views of it."""
        k = self.kernels
        parts = k.split(wire[: self.body], [self.units[i] for i in self.order])
        flat: list[Tensor] = [None] * len(self.units)
        for i, raw in zip(self.order, parts, strict=True):
            flat[i] = k.reshape(raw, self.shapes[i]) if self.sums else k.from_bytes(raw, self.dtypes[i], self.shapes[i])
        return self._by_variable(flat)


def _bits(numbers: Sequence[Status], dtype: str) -> np.ndarray:
    """Return numbers of a header, which all dtypes hold exactly, in the bits of the wire's dtype."""
    found = np.array(numbers, np.float32)
    return (found.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else found.astype(dtype)
