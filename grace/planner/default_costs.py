"""Default costs of methods, in copies of the gradient ("Encoding and decoding" in BENCHMARKS.md).

``grace calibrate`` measures it on the cluster and the engine that there are.
"""

import functools
from collections.abc import Iterator, Mapping

import numpy as np

from grace.core import specs
from grace.core.registry import make
from grace.planner.costs import CodecCost, Cost

COPY = 0.4e-9
"""Seconds that a copy takes for each float: 10 ms for 25 million."""
CALL, VARIABLE = 100e-6, 2e-6
"""Seconds for each bucket, and for each variable in it, in each of the two directions."""
COPIES = {"none": (1.3, 1.1), "sparsification": (2.0, 0.3), "low-rank": (1.5, 2.2)}
"""Copies to encode an element, and to decode one, by the method's category."""
SUMMED, OTHERS = (1.1, 0.9), (2.0, 1.5)
"""Default costs of quantizers whose payloads are summed, and of all other quantizers."""
KEEPING, ROUND = 2.0, 2.0
"""Copies that a memory takes, and that a method of several rounds takes between two of them."""


class DefaultCodecs(Mapping[str, CodecCost]):
    """Codecs of every method and communicator, by :func:`grace.planner.exchange_costs.codec_key`.

    >>> codec = DefaultCodecs()["allgather, topk(ratio=0.05), residual"]
    >>> round(codec.start.seconds(1, 25e6, 2) * 1e3, 1)
    40.1
    """

    def __getitem__(self, key: str) -> CodecCost:
        return _codec(key)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


@functools.cache
def _codec(key: str) -> CodecCost:
    communicator, _, rest = key.partition(", ")
    compressor, _, memory = rest.rpartition(", ")
    first, *others = [make("compressor", part).traits for part in specs.split(compressor) or (compressor,)]
    encode, decode = COPIES.get(first.category, SUMMED if first.summable else OTHERS)
    encode += KEEPING * (memory != "none") + 0.2 * len(others)  # a second method encodes few values
    each = communicator in ("allgather", "broadcast")  # decodes what every rank sent
    again = encode + decode if communicator in ("scatter_reduce", "scatter_merge", "reduce_broadcast") else ROUND
    return CodecCost(
        start=Cost(CALL, VARIABLE, encode * COPY),
        middle=Cost(CALL, VARIABLE, again * COPY),
        finish=Cost(CALL, VARIABLE, (1.0 if each else decode) * COPY, decode * COPY if each else 0.0),
        bits=_bits(compressor),
    )


def _bits(spec: str) -> float | None:
    """Return the bits that an element of a Gaussian gradient takes, where the data decide; None where shapes do."""
    compressor = make("compressor", spec)
    x = np.random.default_rng(0).standard_normal(1 << 12).astype("float32")
    if compressor.wire_bits(x.shape) is not None:
        return None
    payload, _ = compressor.compress(x, "synthetic")
    return max(1e-3, 8 * sum(np.asarray(part).nbytes for part in payload) / x.size)
