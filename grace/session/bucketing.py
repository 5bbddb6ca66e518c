"""The assignment of shards to buckets, in the order in which all ranks start them."""

from collections.abc import Hashable, Sequence
from itertools import accumulate

from grace.exchange.bucket import Bucket
from grace.session.bucket_limits import Limits
from grace.session.sharding import Shard


def make_buckets(shards: Sequence[Shard]) -> list[Bucket]:
    """Return the buckets in the order in which all ranks start them, whatever becomes ready first.

    Shards are assigned in reverse order of declaration, the order in which backward produces gradients. Buckets with
    the lowest priority are first; of equal ones, those whose gradients are complete first.
    """
    position = {shard.variable.name: i for i, shard in enumerate(shards)}
    kinds: dict[Hashable, list[Shard]] = {}
    for shard in reversed(shards):
        variable, communicator = shard.variable, shard.communicator
        exact = communicator.compressor.traits.exact and not communicator.memory.stateful
        # Uncompressed gradients are summed in their own dtype, so a bucket must not mix dtypes.
        dtype = variable.dtype if exact or communicator.compress_after else "float32"
        kind = (id(communicator), dtype, variable.device, shard.fusion_key, shard.priority, shard.limits)
        kinds.setdefault(kind, []).append(shard)
    ordered = sorted(
        # Cut in the order in which gradients become ready; inside a bucket shards are in the order of declaration.
        (members[::-1] for alike in kinds.values() for members in cut_into_buckets(alike, alike[0].limits)),
        # A bucket is complete with the gradient of its first variable, which backward reaches last.
        key=lambda members: (members[0].priority, -position[members[0].variable.name]),
    )
    return [Bucket(i, members[0].communicator, [p.variable for p in members]) for i, members in enumerate(ordered)]


def cut_into_buckets(shards: Sequence[Shard], limits: Limits | None, first: bool = True) -> list[Sequence[Shard]]:
    """Return shards that may share collectives, in the order in which they become ready, cut into buckets.

    Args:
        shards: the shards, of one communicator.
        limits: limits of a bucket; None for one bucket.
        first: True if the first bucket is smaller.
    """
    if limits is None:
        return [shards]
    lengths = limits.lengths([(shard.variable.nbytes, shard.wire_bytes) for shard in shards], first)
    return [shards[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)]
