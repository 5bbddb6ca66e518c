"""What methods take where nobody measured it: figures of BENCHMARKS.md, in copies of the gradient.

``grace calibrate`` measures them on the cluster and the engine that there are.
"""

from collections.abc import Iterator, Mapping

from grace.core import specs
from grace.planner.costs import Codec, Cost

COPY = 0.4e-9
"""Seconds that a copy takes for each float: 10 ms for 25 million."""
CALL, VARIABLE = 100e-6, 2e-6
"""Seconds for each bucket, and for each variable in it, in each of the two directions."""
OTHERS = (6.0, 2.0)
COPIES = {
    "none": (1.3, 1.1),
    "cast": (1.1, 0.9),
    "topk": (2.0, 0.3),
    "dgc": (2.0, 0.3),
    "adaptive": (3.0, 0.3),
    "randomk": (2.0, 0.3),
    "efsignsgd": (0.8, 1.3),
    "onebit": (1.5, 1.3),
    "signsgd": (1.0, 1.3),
    "signum": (2.0, 1.3),
    "qsgd": (2.2, 1.5),
    "terngrad": (2.2, 1.5),
    "natural": (2.2, 1.5),
    "block": (2.2, 1.5),
    "powersgd": (1.5, 2.2),
}
"""Copies to encode an element, and to decode one, without a memory ("Codecs of whole buckets", "Encoding and decoding"
in BENCHMARKS.md); of others :data:`OTHERS`."""
KEEPING = 2.0
"""Copies that a memory takes."""
ROUND = 2.0
"""Copies that a method of several rounds takes between two of them."""
BITS = {"adaptive": 30.0, "dgc": 64.0, "threshold": 64.0}
"""For each value that is kept, where the data decide how many are."""
INCEPTIONN = 12.0


class DefaultCodecs(Mapping[str, Codec]):
    """Codecs of every built-in method and communicator, by :func:`grace.planner.exchange_costs.codec_key`.

    >>> codec = DefaultCodecs()["allgather, topk(ratio=0.05), residual"]
    >>> round(codec.start.seconds(1, 25e6, 2) * 1e3, 1)
    40.1
    """

    def __getitem__(self, key: str) -> Codec:
        communicator, _, rest = key.partition(", ")
        compressor, _, memory = rest.rpartition(", ")
        names = [specs.parse(part)[0] for part in specs.split(compressor) or (compressor,)]
        found = [COPIES.get(name, OTHERS) for name in names]
        encode = found[0][0] + sum(a for a, _ in found[1:]) * 0.1  # of few values
        decode = found[0][1] + sum(b for _, b in found[1:]) * 0.1
        encode += KEEPING if memory != "none" else 0.0
        each = communicator in ("allgather", "broadcast")  # decodes what every rank sent
        again = encode + decode if communicator in ("scatter_reduce", "scatter_merge", "reduce_broadcast") else ROUND
        return Codec(
            start=Cost(CALL, VARIABLE, encode * COPY),
            middle=Cost(CALL, VARIABLE, again * COPY),
            finish=Cost(CALL, VARIABLE, (1.0 if each else decode) * COPY, decode * COPY if each else 0.0),
            bits=_bits(names[0], compressor),
        )

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _bits(name: str, compressor: str) -> float | None:
    """Bits that an element takes where the data decide."""
    if name == "inceptionn":
        return INCEPTIONN
    if name not in BITS or specs.split(compressor):
        return None
    said = specs.parse(compressor)[1]
    return BITS[name] * float(said.get("ratio", 0.01))
