"""Eight bits of dynamic range: a table of 256 values."""

import math
from dataclasses import dataclass

import numpy as np

from grace.core.compressor import Accumulating, BucketCodecSpec, Payload, PayloadSpec, Shape, Tensor, TensorSpec, Traits
from grace.kernels import kernels_of


def dynamic_tree() -> np.ndarray:
    """Return the 256 values of the 8-bit dynamic tree, ascending (float32).

    A sign, z zeros, a 1, and 6 - z bits that bisect [0.1, 1]: the value is 10^-z times the middle of the
    interval that is left. All bits 0 is 0, and the code that would be its negative is 1, so that the largest
    magnitude has a value of its own.

    >>> table = dynamic_tree()
    >>> table.size, table[126:130].tolist() == np.float32([-5.5e-7, 0, 5.5e-7, 3.25e-6]).tolist()
    (256, True)
    """
    # These two are exact: zeros stay zeros, and the largest element is its scale.
    values = [0.0, 1.0]
    for zeros in range(7):
        intervals = 1 << (6 - zeros)
        for i in range(intervals):
            middle = (0.1 + 0.9 * (i + 0.5) / intervals) / 10**zeros
            values += [-middle, middle]
    return np.sort(np.array(values)).astype(np.float32)


def midpoints(table: np.ndarray) -> np.ndarray:
    """Return the largest float32 at or below the middle of each two neighbours: a value above it is nearer to the
    upper.

    >>> midpoints(np.float32([0, 1, 4]))
    array([0.5, 2.5], dtype=float32)
    """
    exact = (table[:-1].astype(np.float64) + table[1:]) / 2
    rounded = exact.astype(np.float32)
    return np.where(rounded > exact, np.nextafter(rounded, np.float32(-np.inf)), rounded)


TABLES = {"tree": dynamic_tree()}
EDGES = {name: midpoints(table) for name, table in TABLES.items()}


@dataclass
class Dynamic8(Accumulating):
    """Rounds x / s to the nearest of 256 values that cover seven decades; one byte per element.

        s = max |x|,    C(x) = s t,    t the entry of the table nearest to x / s, of two equally near the lower

    Codes are positions in the ascending table, :func:`dynamic_tree`. The error is at most 0.7 % of s, and
    small elements survive beside large ones. Source: Dettmers, "8-bit approximations for parallelism in deep
    learning", ICLR 2016, arXiv 1511.04561.

    Args:
        table: "tree", the paper's best.

    >>> import numpy as np
    >>> dynamic = Dynamic8()
    >>> dynamic.decompress(*dynamic.compress(np.float32([1, 0, -0.25]), "w"))
    array([ 1. , 0. , -0.24765626], dtype=float32)
    """

    table: str = "tree"

    name = "dynamic8"
    traits = Traits(category="quantization", fixed_size="by shape", contraction=True, shardable=True)

    def __post_init__(self) -> None:
        self.check_choice("table", tuple(TABLES))

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Shape]:
        k = kernels_of(tensor)
        flat = k.flat(tensor)
        scale = k.max_abs(flat)
        return [k.bucketize(flat, scale, EDGES[self.table]), scale], tuple(tensor.shape)

    def accumulate(self, payload: Payload, ctx: Shape, out: Tensor, weight: float = 1.0) -> Tensor:
        k = kernels_of(out)
        codes, scale = payload
        return k.reshape(k.add_table(k.flat(out), codes, 8, TABLES[self.table], scale, weight), ctx)

    def bucket_codec(self) -> BucketCodecSpec:
        return "table", {"edges": EDGES[self.table], "entries": TABLES[self.table]}

    def payload_spec(self, shape: Shape, step: int) -> PayloadSpec | None:
        return [TensorSpec("uint8", (math.prod(shape),)), TensorSpec("float32", (1,))]
