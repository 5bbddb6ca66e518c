"""What loggers take: a plain dict of floats of what was exchanged since they last asked.

Each call ends an interval and begins the next; all who ask share them. The numbers are this rank's, and asking is no
collective: log them on one rank, or on each by itself.

- ``bytes_sent``: bytes that left this rank, as the engine's collectives move them.
- ``bytes_dense``: bytes that would have left it without compression: 2 (W - 1) / W of the gradients' bytes in each
  step, as an all-reduce round a ring of W ranks sends.
- ``ratio``: ``bytes_dense / bytes_sent``; NaN where nothing was sent.
- ``residual_norm``: the Euclidean norm, over all variables, of what this rank's memories hold now of gradients that
  were left out, in the units of the gradient (a loss scale is taken off); 0 without a memory. Second compressions (of
  shards' means, of a destination's answers) have memories of their own, which are not in it. It is computed when it is
  asked for.
- ``seconds_encode``: seconds in the codec, decoding included: compensate, compress, pack, update, decompress and
  aggregate.
- ``seconds_wait``: seconds in which training stood still for collectives; NaN where it is not Grace that waits.

Seconds are of the host's clock. On a GPU they tell how long starting operations took, and what the host waited for the
device while it encoded.
"""

import math
from typing import Any

from grace.exchange.bucket import Traffic
from grace.kernels import kernels_of
from grace.session.step_runner import StepRunner


def metrics(runner: StepRunner | None, traffic: Traffic, waits: bool = True) -> dict[str, float]:
    """The numbers above, of the interval that ends now.

    Args:
        runner: whose memories count; None before there is one.
        traffic: what it has counted.
        waits: whether it is Grace that waits for collectives.

    >>> sorted(metrics(None, Traffic(sent_bytes=10, dense_bytes=40)).items())[:3]
    [('bytes_dense', 40.0), ('bytes_sent', 10.0), ('ratio', 4.0)]
    """
    now = traffic.sent_bytes, traffic.dense_bytes, traffic.codec_seconds, traffic.wait_seconds
    sent, dense, encode, wait = (float(a - b) for a, b in zip(now, traffic.told, strict=True))
    traffic.told = now
    return {
        "bytes_sent": sent,
        "bytes_dense": dense,
        "ratio": dense / sent if sent else math.nan,
        "residual_norm": 0.0 if runner is None else residual_norm(runner),
        "seconds_encode": encode,
        "seconds_wait": wait if waits else math.nan,
    }


def residual_norm(runner: StepRunner) -> float:
    """Of all that memories hold of this rank's gradients; one number is read back from each device."""
    squares: dict[Any, list[Any]] = {}
    for shard in runner.shards.values():
        memory = shard.communicator.memory
        for tensor in memory.residual_tensors(shard.variable.name) if memory.stateful and not shard.period else ():
            k = kernels_of(tensor)
            column = k.reshape(k.cast(tensor, "float64"), (math.prod(tensor.shape), 1))
            square = k.reshape(k.matmul(column, column, transpose=True), (1,))
            squares.setdefault(str(getattr(tensor, "device", "cpu")), []).append(square)
    found = [math.fsum(kernels_of(own[0]).to_list(kernels_of(own[0]).join(own))) for own in squares.values()]
    return math.sqrt(math.fsum(found)) / runner.context.loss_scale
