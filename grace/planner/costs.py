"""Times of a codec by the elements of a bucket, and of a collective by its bytes; and codecs that nobody measured."""

import bisect
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from grace.core import specs
from grace.core.communicator import Communicator
from grace.core.documents import shown
from grace.core.registry import find, make
from grace.errors import ConfigError

LEAST, MOST = 1e-12, 1e18
"""The least and the most bytes and seconds that can have been measured; squares of them are numbers."""
COPY = 0.4e-9
"""Seconds that a copy takes for each float: 10 ms for 25 million."""
CALL, VARIABLE = 100e-6, 2e-6
"""Seconds for each bucket, and for each variable in it, in each of the two directions."""
COPIES = {"none": (1.3, 1.1), "sparsification": (2.0, 0.3), "low-rank": (1.5, 2.2)}
"""Copies to encode an element, and to decode one, by the method's category."""
SUMMED, OTHERS = (1.1, 0.9), (2.0, 1.5)
"""Copies to encode an element, and to decode one, by quantizers whose payloads are summed, and by all others."""
KEEPING, ROUND = 2.0, 2.0
"""Copies that a memory takes, and that a method of several rounds takes between two of them."""


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the coefficients, from 0 on, of sums that are nearest to measured seconds, by squares of relative errors.
    Each row has the terms of a sum.

    >>> rows = [(1, 10), (1, 20), (1, 40)]
    >>> [[round(one, 9) for one in fit(rows, seconds)] for seconds in ([0.2, 0.3, 0.5], [0.4, 0.2, 0.1])]
    [[0.1, 0.01], [0.133333333, 0.0]]
    """
    weighted = np.array(rows, float) / np.array(seconds, float)[:, None]  # so that squares are of relative errors
    scale = np.linalg.norm(weighted, axis=0)
    scale[scale == 0] = 1.0  # a term that no row has
    found, terms = np.zeros(len(scale)), list(range(len(scale)))
    while terms:
        solved = np.linalg.lstsq(weighted[:, terms] / scale[terms], np.ones(len(rows)), rcond=None)[0]
        if solved.min() >= 0:
            found[terms] = solved / scale[terms]
            break
        del terms[int(solved.argmin())]  # the others explain more without it
    return [float(one) for one in found]


@dataclass(frozen=True)
class Cost:
    """Seconds of computing for a bucket of V variables with n elements in all, of W ranks:
    ``call + variable V + element n + peer n W``.

    >>> round(Cost(call=1e-5, element=1e-9, peer=1e-9).seconds(variables=3, elements=1000, ranks=2), 9)
    1.3e-05
    """

    call: float = 0.0
    variable: float = 0.0
    element: float = 0.0
    peer: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= part < np.inf for part in astuple(self)):
            raise ConfigError(f"the parts of a cost are seconds from 0 on, not {astuple(self)}")

    def seconds(self, variables: int, elements: float, ranks: int) -> float:
        """Return the seconds for such a bucket."""
        return self.call + self.variable * variables + self.element * elements + self.peer * elements * ranks

    def times(self, factor: float) -> "Cost":
        """Return the cost with all seconds multiplied."""
        return Cost(*(factor * part for part in astuple(self)))


@dataclass(frozen=True)
class CodecCost:
    """Computing of a method (a communicator with its compressor and memory) for a bucket: before anything travels;
    between its collectives, for each but the last; and afterwards, with updates of memories. ``bits`` are those of a
    value on the wire where the data decide, None where shapes do."""

    start: Cost = Cost()
    middle: Cost = Cost()
    finish: Cost = Cost()
    bits: float | None = None

    def __post_init__(self) -> None:
        if self.bits is not None and not 0 < self.bits < np.inf:
            raise ConfigError(f"a value takes more than 0 bits on the wire, not {self.bits}")

    def seconds(self, variables: int, elements: float, ranks: int) -> float:
        """Return the seconds of all three parts for such a bucket."""
        return sum(part.seconds(variables, elements, ranks) for part in (self.start, self.middle, self.finish))

    def times(self, factor: float) -> "CodecCost":
        """Return the codec with all seconds multiplied."""
        return CodecCost(self.start.times(factor), self.middle.times(factor), self.finish.times(factor), self.bits)


@dataclass(frozen=True)
class Curve:
    """Seconds by bytes, from measurements: rising, straight between them, and as steep beyond the largest as before it.

    Args:
        points: bytes and seconds, bytes above zero and each another.

    >>> curve = Curve.through([(1e3, 1e-4), (1e6, 1e-3), (1e8, 1e-1)])
    >>> curve.seconds(1e3), round(curve.seconds(2e8), 6)
    (0.0001, 0.2)
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        known = all(len(point) == 2 and LEAST <= min(point) <= max(point) <= MOST for point in self.points)
        rises = known and all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(self.points))
        if not rises or not self.points:
            raise ConfigError(
                f"a curve must be a list of bytes and seconds above 0, both rising, not {shown(self.points)}"
            )

    @classmethod
    def through(cls, measured: Iterable[tuple[float, float]]) -> "Curve":
        """Return the curve through measured bytes and seconds, on which more bytes take no less: the geometric mean of
        what fewer bytes take at most, and more bytes at least.

        >>> Curve.through([(1, 4e-4), (10, 1e-4)]).points
        ((1.0, 0.0002), (10.0, 0.0002))
        """
        ordered = sorted(measured)
        sizes, seconds = [float(nbytes) for nbytes, _ in ordered], [took for _, took in ordered]
        most_before, least_after = np.maximum.accumulate(seconds), np.minimum.accumulate(seconds[::-1])[::-1]
        risen = np.round(np.sqrt(most_before * least_after), 12).tolist()
        return cls(tuple(zip(sizes, risen, strict=True)))

    def seconds(self, nbytes: float) -> float:
        """Return the seconds for so many bytes."""
        sizes, times = self._columns
        return float(np.interp(nbytes, sizes, times)) + max(0.0, nbytes - sizes[-1]) * self.slope

    @functools.cached_property
    def _columns(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Bytes, and seconds."""
        return tuple(nbytes for nbytes, _ in self.points), tuple(seconds for _, seconds in self.points)

    @functools.cached_property
    def slope(self) -> float:
        """Seconds that a byte more takes beyond the largest; 0 of a curve of one point."""
        sizes, times = self._columns
        if len(sizes) == 1:  # no second point tells a slope
            return 0.0
        first = min(bisect.bisect_left(sizes, sizes[-1] / 20), len(sizes) - 2)  # as steep as over the last factor of 20
        return (times[-1] - times[first]) / (sizes[-1] - sizes[first])


class DefaultCodecs(Mapping[str, CodecCost]):
    """Codecs of every method and communicator, by :func:`grace.planner.exchange_costs.codec_key`, in copies of the
    gradient ("Encoding and decoding" in BENCHMARKS.md). ``grace calibrate`` measures them where they are used.

    >>> codec = DefaultCodecs()["allgather, topk(ratio=0.05), residual"]
    >>> round(codec.start.seconds(1, 25e6, 2) * 1e3, 1)
    40.1
    """

    def __getitem__(self, key: str) -> CodecCost:
        return _default_codec(key)

    def __iter__(self) -> Iterator[str]:
        return iter(())  # its keys are all methods, and endless

    def __len__(self) -> int:
        return 0


@functools.cache
def _default_codec(key: str) -> CodecCost:
    communicator, _, rest = key.partition(", ")
    compressor, _, memory = rest.rpartition(", ")
    first, *others = [make("compressor", part).traits for part in specs.split(compressor) or (compressor,)]
    encode, decode = COPIES.get(first.category, SUMMED if first.summable else OTHERS)
    encode += KEEPING * (memory != "none") + 0.2 * len(others)  # a second method encodes few values
    kind: Any = find("communicator", communicator) or Communicator
    averages = kind.rooted or kind.piecewise  # a rank encodes again what it has averaged for the others
    each = not (kind.sums or averages)  # a rank decodes what every rank has sent
    again = encode + decode if averages else ROUND
    return CodecCost(
        start=Cost(CALL, VARIABLE, encode * COPY),
        middle=Cost(CALL, VARIABLE, again * COPY),
        finish=Cost(CALL, VARIABLE, (1.0 if each else decode) * COPY, decode * COPY if each else 0.0),
        bits=_bits(compressor),
    )


def _bits(spec: str) -> float | None:
    """Return the bits that an element of a Gaussian gradient takes, where the data decide; None where shapes do."""
    compressor, x = make("compressor", spec), np.random.default_rng(0).standard_normal(1 << 12).astype("float32")
    if compressor.wire_bits(x.shape) is not None:
        return None
    payload, _ = compressor.compress(x, "synthetic")
    return max(1e-3, 8 * sum(np.asarray(part).nbytes for part in payload) / x.size)  # 0 bits are no CodecCost
