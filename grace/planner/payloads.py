"""Bytes that a bucket's exchange puts on the wire, read off its route, and bytes that it keeps in memory."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.exchange.bucket import Bucket
from grace.exchange.route_bytes import LegBytes, rows_of
from grace.exchange.sparse_codec import RowCompressor
from grace.planner.network import KINDS


class Payloads(NamedTuple):
    """One collective of an exchange.

    Attributes:
        kind: see :data:`grace.planner.network.KINDS`.
        nbytes: of a rank's buffer.
        rooted: whether it begins or ends at one rank.
        hop: whether it is but the second half of a sum.
        half: whether 16-bit floats are added up.
    """

    kind: str
    nbytes: float
    rooted: bool = False
    hop: bool = False
    half: bool = False


def payloads_of(legs: Sequence[LegBytes], ranks: int) -> list[Payloads]:
    """The collectives of a route on so many ranks. One of the user's, which no network was measured for, is taken for
    an all-to-all that sends as much as it sends from the rank that sends most."""
    found, in_parts = list[Payloads](), False
    for leg, nbytes, dtype in legs:
        kind, rooted = leg.collective.name, leg.root is not None
        if kind not in KINDS:
            most = max(leg.sent(nbytes, ranks, rank) for rank in range(ranks))
            kind, nbytes, rooted = "alltoall", most * ranks / max(1, ranks - 1), False
        half = kind == "allreduce" and dtype in ("float16", "bfloat16")
        found.append(Payloads(kind, nbytes, rooted, in_parts, half))
        in_parts = leg.in_parts
    return found


def check_bits(bucket: Bucket, bits: float | None) -> None:
    """Refuse to guess how many bits an element takes.

    Raises:
        ConfigError: the data decide, and nobody says.
    """
    communicator: Any = bucket.communicator
    compressor = communicator.compressor
    inner = compressor.inner if isinstance(compressor, RowCompressor) else compressor
    if bits is None and any(inner.wire_bits(variable.shape) is None for variable in bucket.variables):
        raise ConfigError(
            f"{bucket.names[0]!r} is carried by {communicator.describe()}, whose bytes the data decide: its codec must "
            "say the bits that an element takes (Codec.bits), as it was measured"
        )


def elements_of(variables: Sequence[Variable], rows: Mapping[str, float], sparse: bool) -> float:
    """Return the number of elements that are compressed; with ``sparse`` those of the rows that come."""
    if not sparse:
        return sum(variable.numel for variable in variables)
    return sum(rows_of(variable, rows) * math.prod(variable.shape[1:]) for variable in variables)


def of_all_ranks(communicator: Any) -> tuple[bool, bool, bool]:
    """Whether what is computed before, between and behind a communicator's collectives is done with whole payloads of
    every rank, and so grows with the ranks.

    >>> from grace.communicators import ReduceBroadcast, ScatterReduce
    >>> of_all_ranks(ReduceBroadcast("topk")), of_all_ranks(ScatterReduce("qsgd"))
    ((False, True, False), (False, False, False))
    """
    rooted = communicator.rooted
    return False, rooted, not (rooted or communicator.sums or communicator.cuts)  # pieces get shorter


def kept_bytes(
    bucket: Bucket, ranks: int, elements: float, payloads: Sequence[Payloads], stateful_parts: Sequence[tuple[str, Any]]
) -> float:
    """Bytes that a bucket's exchange keeps on the rank that keeps most: what method and memories remember, twice (what
    is kept, and what this step makes of it); its buffers; and what comes from other ranks.

    Args:
        elements: how many are compressed.
        stateful_parts: the parts that remember something, by what they are.
    """
    communicator: Any = bucket.communicator
    kept = wires = 0.0
    for kind, part in stateful_parts:
        share = ranks if kind == "shard_memory" else 1
        for variable in bucket.variables:
            shape = (-(-variable.numel // share),) if share > 1 else variable.shape
            kept += 8.0 * _numbers(part.keeps(shape), variable.numel / share)
    for payload in payloads:
        gathers = payload.kind in ("allgather", "gather") or (payload.kind == "broadcast" and not payload.rooted)
        came = ranks * payload.nbytes if gathers else 0.0 if payload.kind == "allreduce" else payload.nbytes
        wires = max(wires, payload.nbytes + came)
    if communicator.delayed:
        under_way = communicator.staleness if communicator.sync else communicator.ahead
        wires = wires * max(1, under_way) + 4.0 * elements * under_way
    return kept + wires


def _numbers(keeps: Any, usual: float) -> float:
    """How many numbers there are in what a part keeps; as many as the variable has where it does not say."""
    if keeps is None:
        return usual
    if keeps is float:
        return 1.0
    if isinstance(keeps, dict):
        return sum(_numbers(one, usual) for one in keeps.values())
    return float(math.prod(keeps))
