"""The wire: how the payloads of a bucket travel in one buffer.

Behind the payloads comes one status per variable, so that every rank learns, without a collective of its
own, which variables had a gradient somewhere and which overflowed somewhere:

- summed wires have the payload's dtype; the status is 1 (present), 0 (missing) or Inf (overflow), and adds up;
- byte wires hold the payload tensors, widest items first so that every tensor is aligned, then one status
  byte per variable (0 missing, 1 present, 2 overflow; 3 in an answer: what was sent for it could not be decoded),
  padded to a multiple of 8 bytes.

Behind the statuses, one bucket of each step carries the ranks' places (:mod:`grace.exchange.places`): in a summed wire
each rank has elements of its own, in which all others write 0, and the sum is all ranks' places.
"""

import copy
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from grace.core.compressor import Payload, Tensor
from grace.core.ported import ITEM_SIZE
from grace.errors import ConfigError, PayloadError
from grace.kernels import Kernels
from grace.kernels.contract.primitives import Placed

VERSION = 2
"""Of what travels: how payloads and statuses are packed. All ranks must have the same."""
MISSING, PRESENT, OVERFLOW, REFUSED = 0, 1, 2, 3
PATTERNS = {"bfloat16": "uint16"}
"""How NumPy, which does not know them all, calls the bits of numbers."""
LARGEST = 2.0**95
"""Of a finite tensor that a memory learns from: what a payload leaves out of it is finite, though methods may decode to
2^31 times as much (random-k, unbiased) and sums over ranks to more."""


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


def mark_mean(finite: Any, spoilt: Any) -> Any:
    """The status of a mean in bytes: whether it is finite, and whether what it was made of was not, each a bool, or a
    0-d tensor of 1.0 or 0.0.

    >>> mark_mean(True, False), mark_mean(True, True), mark_mean(False, False)
    (1, 2, 2)
    """
    if isinstance(spoilt, bool):
        return OVERFLOW if spoilt else mark(True, finite, False)
    return OVERFLOW - finite * (1.0 - spoilt)


def in_range(k: Any, tensor: Tensor, payload: Sequence[Tensor], kept: bool, found: Any = None) -> Any:
    """Whether a tensor and all numbers of its payload are finite (methods add, scale and round, so that a payload may
    not be); a bool, or a 0-d tensor of 1.0 or 0.0.

    Where something is ``kept`` of them, what is larger than :data:`LARGEST` counts as infinite. ``found`` is the answer
    for the tensor alone, if that is known."""
    if found is None:
        found = k.all_finite(tensor, LARGEST if kept else math.inf)
    for part in payload:
        if "float" in k.dtype(part):
            found = both(found, k.all_finite(part))
    return found


def both(one: Any, other: Any) -> Any:
    """Whether both hold: bools, or 0-d tensors of 1.0 or 0.0."""
    if isinstance(one, bool):
        return one and other
    return one if other is True else one * other


def _patterns(numbers: Sequence[Any], dtype: str) -> np.ndarray:
    """Statuses and places, which all dtypes hold exactly, as they stand in a wire."""
    found = np.array(numbers, np.float32)
    return (found.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else found.astype(dtype)


class Wire:
    """The layout of one bucket's payloads, taken from this rank's, which all ranks share; behind the statuses there is
    room for so many numbers of ``places``.

    >>> import numpy as np
    >>> from grace.kernels import NumpyKernels
    >>> payloads = [[np.uint8([7]), np.float32([1.5])], [np.uint8([9])]]
    >>> wire = Wire(NumpyKernels(), payloads, sums=False)
    >>> buffer = wire.pack(payloads, [PRESENT, MISSING])
    >>> buffer.nbytes, wire.payload_bytes, wire.statuses(buffer)
    (8, [5, 1], [1.0, 0.0])
    >>> wire.unpack(buffer)
    [[array([7], dtype=uint8), array([1.5], dtype=float32)], [array([9], dtype=uint8)]]
    """

    def __init__(self, kernels: Kernels, payloads: Sequence[Payload], sums: bool, places: int = 0):
        self.kernels, self.sums = kernels, sums
        self.header = len(payloads) + places
        tensors = [tensor for payload in payloads for tensor in payload]
        sizes = [kernels.nbytes(tensor) for tensor in tensors]
        self.lengths = [len(payload) for payload in payloads]
        self.dtypes = [kernels.dtype(tensor) for tensor in tensors]
        for dtype in self.dtypes:
            if dtype not in ITEM_SIZE:
                raise ConfigError(f"a payload tensor is of dtype {dtype}; the wire carries {', '.join(ITEM_SIZE)}")
        self.shapes = [tuple(tensor.shape) for tensor in tensors]
        rest = iter(sizes)
        self.payload_bytes = [sum(next(rest) for _ in range(length)) for length in self.lengths]
        self.total = sum(self.payload_bytes)
        if sums:
            self.dtype = self._one_dtype()
            self.order = list(range(len(tensors)))
            self.units = [size // ITEM_SIZE[self.dtype] for size in sizes]
            self.padding = 0
        else:
            self.dtype = "uint8"
            self.order = sorted(range(len(tensors)), key=lambda i: -ITEM_SIZE[self.dtypes[i]])
            self.units = sizes
            self.padding = -(sum(sizes) + self.header) % 8
        self.body = sum(self.units)
        self.length = self.body + self.header + self.padding
        self._statuses: tuple[list[Any], Tensor] | None = None
        self._marks: tuple[list[Any], np.ndarray] | None = None
        self._end: tuple[Tensor, np.ndarray] | None = None
        self._unpacked: tuple[Tensor, list[Payload]] | None = None

    def _one_dtype(self) -> str:
        dtypes = sorted(set(self.dtypes))
        if len(dtypes) != 1 or not dtypes[0].startswith(("float", "bfloat")):
            raise ConfigError(f"payloads that the engine sums must be of one floating dtype, not {', '.join(dtypes)}")
        return dtypes[0]

    def sizes(self) -> list[int]:
        """The first dimension of every payload tensor: what may differ between ranks; 1 of a 0-d one."""
        return [shape[0] if shape else 1 for shape in self.shapes]

    def marks(self) -> list[int]:
        """By which ranks compare their layouts: of each payload its bytes, and a digest of dtypes and shapes."""
        rest, found = iter(zip(self.dtypes, self.shapes, strict=True)), []
        for nbytes, length in zip(self.payload_bytes, self.lengths, strict=True):
            found += [nbytes, zlib.crc32(repr([next(rest) for _ in range(length)]).encode())]
        return found

    def resized(self, sizes: Sequence[float], most: float = math.inf) -> "Wire":
        """The layout of another rank's buffer, from its :meth:`sizes`; ``most`` is the bytes it may have.

        Raises:
            PayloadError: no payload has such sizes.
        """
        for n, shape in zip(sizes, self.shapes, strict=True):
            if n < 0 or (not shape and n != 1):
                raise PayloadError(f"a payload tensor is said to have {n:.0f} elements")
        other = copy.copy(self)
        other.shapes = [(int(n), *shape[1:])[: len(shape)] for n, shape in zip(sizes, self.shapes, strict=True)]
        other.units = [
            math.prod(shape) * ITEM_SIZE[dtype] for shape, dtype in zip(other.shapes, self.dtypes, strict=True)
        ]
        other.body = sum(other.units)
        if other.body > most:
            raise PayloadError(f"the payloads are said to take {other.body} bytes, more than {most} of any use")
        other.padding = -(other.body + self.header) % 8
        other.length = other.body + self.header + other.padding
        other._unpacked = other._statuses = other._end = None
        return other

    def pack(
        self, payloads: Sequence[Payload], statuses: list[Any], out: Tensor | None = None, places: Any = ()
    ) -> Tensor:
        """All payload tensors, then the statuses and places, in one 1-d tensor (into ``out`` if given). Places are
        numbers, or stand in a tensor of the wire's dtype."""
        k, tensors = self.kernels, [tensor for payload in payloads for tensor in payload]
        plain = all(isinstance(status, (int, float)) for status in statuses)  # comparing tensors would wait for them
        ends = [] if len(places) else [0] * self.padding
        if self._statuses is None or not plain or self._statuses[0] != statuses:
            self._statuses = statuses, k.full([*statuses, *ends], self.dtype, tensors[0])
        parts = [k.flat(tensor) for tensor in tensors] if self.sums else [k.to_bytes(tensors[i]) for i in self.order]
        parts.append(self._statuses[1])
        if len(places):
            numbers = list(places) if isinstance(places, Sequence) else []
            parts += [] if numbers else [places]
            parts.append(k.full([*numbers, *[0] * self.padding], self.dtype, tensors[0]))
        return k.join(parts, out)

    def zeros(self, like: Tensor) -> list[Payload]:
        """Payloads of zeros, laid out like this."""
        each = zip(self.shapes, self.dtypes, strict=True)
        rest = iter([self.kernels.zeros(shape, dtype, like) for shape, dtype in each])
        return [[next(rest) for _ in range(length)] for length in self.lengths]

    def placed(self) -> list[list[Placed]]:
        """Where the tensors of each variable's payload stand."""
        size = ITEM_SIZE[self.dtype]
        offsets, start = [0] * len(self.units), 0
        for i in self.order:
            offsets[i] = start * size
            start += self.units[i]
        rest = map(Placed, offsets, self.shapes, self.dtypes)
        return [[next(rest) for _ in range(length)] for length in self.lengths]

    def write_marks(self, buffer: Tensor, statuses: Sequence[Any], places: Sequence[int]) -> None:
        """Write the statuses and places behind the payloads of a buffer that is there, whose address is known."""
        if self._end is None or self._end[0] is not buffer:
            memory = self.kernels.memory(buffer).view(PATTERNS.get(self.dtype, self.dtype))
            self._end = buffer, memory[self.body : self.body + self.header]
        if self._marks is None or self._marks[0] != statuses:
            self._marks = list(statuses), _patterns(statuses, self.dtype)
        end, count = self._end[1], len(self.lengths)
        end[:count] = self._marks[1]
        if places:
            end[count:] = _patterns(places, self.dtype)

    def end(self, marks: Sequence[float], places: Sequence[int]) -> tuple[Any, str, list[float], float, Any]:
        """What stands behind the payloads: at which bytes, of which dtype, the numbers, of which statuses come first,
        the status of what is not in range, and the addresses of statuses that say so too, which are none."""
        numbers = [*marks, *places, *[0] * self.padding]
        return [self.body * ITEM_SIZE[self.dtype]], self.dtype, numbers, math.inf if self.sums else OVERFLOW, []

    def unpack(self, buffer: Tensor) -> list[Payload]:
        """The payloads in a buffer laid out like this one: views of it."""
        if self._unpacked is not None and self._unpacked[0] is buffer:
            return self._unpacked[1]
        k, parts = self.kernels, self.kernels.split(buffer[: self.body], [self.units[i] for i in self.order])
        flat: list[Tensor] = [None] * len(self.units)
        for i, raw in zip(self.order, parts, strict=True):
            flat[i] = k.reshape(raw, self.shapes[i]) if self.sums else k.from_bytes(raw, self.dtypes[i], self.shapes[i])
        rest = iter(flat)
        payloads = [[next(rest) for _ in range(length)] for length in self.lengths]
        if self.sums:  # the same buffer comes back every step
            self._unpacked = buffer, payloads
        return payloads

    def statuses(self, buffer: Tensor) -> list[float]:
        """The statuses at the end of a buffer; reads them back from the device."""
        return self.kernels.to_list(self.marked(buffer))

    def marked(self, buffer: Tensor) -> Tensor:
        """The statuses at the end of a buffer, where they are."""
        return buffer[self.body : self.body + len(self.lengths)]

    def told(self, buffer: Tensor) -> Tensor:
        """The places at the end of a buffer."""
        return buffer[self.body + len(self.lengths) : self.body + self.header]
