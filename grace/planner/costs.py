"""Times as they were measured: of a codec by the elements of a bucket, and of a collective by its bytes."""

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from grace.core.documents import shown
from grace.errors import ConfigError


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the coefficients, from 0 on, of sums that are nearest to measured seconds, by squares of relative errors.

    Args:
        rows: the terms of each sum.
        seconds: what each took; above 0.

    >>> rows = [(1, 10), (1, 20), (1, 40)]
    >>> [[round(one, 9) for one in fit(rows, seconds)] for seconds in ([0.2, 0.3, 0.5], [0.4, 0.2, 0.1])]
    [[0.1, 0.01], [0.133333333, 0.0]]
    """
    weighted = np.array(rows, float) / np.array(seconds, float)[:, None]
    scale = np.linalg.norm(weighted, axis=0)
    scale[scale == 0] = 1.0
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
    """Computing of a method (a communicator with its compressor and memory) for a bucket.

    Attributes:
        start: before anything travels: compensate, compress, pack.
        middle: between its collectives, if it has several, for each but the last.
        finish: decode, aggregate and write back, and update memories.
        bits: bits of a value on the wire, where the data decide; None where shapes do.
    """

    start: Cost = Cost()
    middle: Cost = Cost()
    finish: Cost = Cost()
    bits: float | None = None

    def __post_init__(self) -> None:
        if self.bits is not None and not 0 < self.bits < np.inf:
            raise ConfigError(f"a value takes more than 0 bits on the wire, not {self.bits}")

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
        known = all(len(point) == 2 and 0 < min(point) <= max(point) < 1e300 for point in self.points)
        rises = known and all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(self.points))
        if not rises or not self.points:
            raise ConfigError(
                f"a curve must be a list of bytes and seconds above 0, both rising, not {shown(self.points)}"
            )

    @classmethod
    def through(cls, measured: Iterable[tuple[float, float]]) -> "Curve":
        """Return the nearest curve that does not fall: neighbours that do are given their mean (of logarithms; the
        pool-adjacent-violators algorithm).

        Raises:
            ConfigError: there is nothing to go by, or bytes or seconds that are not above 0.

        >>> Curve.through([(1, 4e-4), (10, 1e-4)]).points
        ((1.0, 0.0002), (10.0, 0.0002))
        """
        ordered = sorted(measured)
        blocks: list[tuple[float, int]] = []
        """Mean logarithm of seconds, and number of points."""
        for _, seconds in ordered:
            blocks.append((math.log(seconds) if seconds > 0 else math.inf, 1))
            while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
                (other, more), (one, weight) = blocks.pop(), blocks.pop()
                blocks.append(((one * weight + other * more) / (weight + more), weight + more))
        risen = [round(math.exp(log), 12) for log, count in blocks for _ in range(count)]
        return cls(tuple((float(nbytes), seconds) for (nbytes, _), seconds in zip(ordered, risen, strict=True)))

    def seconds(self, nbytes: float) -> float:
        """Return the seconds for so many bytes."""
        sizes, times = self._columns
        i = bisect.bisect_left(sizes, nbytes)
        if i == 0:
            return times[0]
        if i == len(sizes):
            return times[-1] + (nbytes - sizes[-1]) * self.slope
        return times[i - 1] + (times[i] - times[i - 1]) * ((nbytes - sizes[i - 1]) / (sizes[i] - sizes[i - 1]))

    @functools.cached_property
    def _columns(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Bytes, and seconds."""
        return tuple(nbytes for nbytes, _ in self.points), tuple(seconds for _, seconds in self.points)

    @functools.cached_property
    def slope(self) -> float:
        """Seconds that a byte more takes beyond the largest; 0 of a curve of one point."""
        sizes, times = self._columns
        if len(sizes) == 1:
            return 0.0
        first = min(bisect.bisect_left(sizes, sizes[-1] / 20), len(sizes) - 2)
        return (times[-1] - times[first]) / (sizes[-1] - sizes[first])
