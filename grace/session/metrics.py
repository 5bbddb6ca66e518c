"""Metrics for loggers: a plain dict of floats about the exchanges since the last call.

Each call ends an interval and begins the next; all callers share the intervals. The numbers are of this rank, and a
call is no collective: log them on one rank, or on every rank.

- ``bytes_sent``: bytes that left this rank, as the engine's collectives move them.
- ``bytes_dense``: bytes that would have left this rank without compression: 2 (W - 1) / W of the gradients' bytes in
  each step, which an all-reduce over a ring of W ranks sends.
- ``ratio``: ``bytes_dense / bytes_sent``; NaN if nothing was sent.
- ``residual_norm``: the Euclidean norm, over all variables, of the parts of gradients that this rank's memories hold
  now, in the units of the gradient (without the loss scale); 0 without a memory. Memories of second compressions (of
  shards' means, of a destination's answers) are not included. It is computed by the call.
- ``seconds_encode``: seconds in the codec, decoding included: compensate, compress, pack, update, decompress and
  aggregate.
- ``seconds_wait``: seconds in which training waited for collectives; NaN if another library waits for them.
- ``drift_norm``, where there are outer rounds: the Euclidean norm of this rank's parameters minus the anchors.
- ``bytes_round``, where there are outer rounds: bytes that left this rank in the last round of each fragment.

Seconds are of the host's clock. On a GPU they are the time to start operations, and the time that the host waited for
the device while it encoded.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from grace.core.compressor import Tensor
from grace.exchange.bucket import Traffic
from grace.kernels import kernels_of
from grace.session.step_runner import StepRunner

NORMS = ("residual_norm", "drift_norm")
"""Metrics that are Euclidean norms, as :func:`add_up` combines them; all others are sums."""


def metrics(runner: StepRunner | None, traffic: Traffic, waits: bool = True) -> dict[str, float]:
    """Return the metrics of the interval that ends now, and begin the next interval.

    Args:
        runner: the runner whose memories count; None before there is one.
        traffic: the counters of the exchanges.
        waits: True if Grace itself waits for collectives.

    >>> sorted(metrics(None, Traffic(sent_bytes=10, dense_bytes=40)).items())[:3]
    [('bytes_dense', 40.0), ('bytes_sent', 10.0), ('ratio', 4.0)]
    """
    now = traffic.sent_bytes, traffic.dense_bytes, traffic.codec_seconds, traffic.wait_seconds
    sent, dense, encode, wait = (float(a - b) for a, b in zip_longest(now, traffic.reported, fillvalue=0))
    traffic.reported = now
    found = {
        "bytes_sent": sent,
        "bytes_dense": dense,
        "ratio": dense / sent if sent else math.nan,
        "residual_norm": 0.0 if runner is None else residual_norm(runner),
        "seconds_encode": encode,
        "seconds_wait": wait if waits else math.nan,
    }
    if runner is not None and runner.outer_rounds:
        rounds = runner.outer_rounds
        found |= {"drift_norm": norm(rounds.drifts()), "bytes_round": float(rounds.bytes_round)}
    return found


def add_up(each: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the metrics of several runners together, such as those of optimizers for parts of a model.

    >>> parts = {"bytes_sent": 1.0, "bytes_dense": 4.0, "residual_norm": 3.0}, {"bytes_sent": 1.0, "residual_norm": 4.0}
    >>> add_up(parts)
    {'bytes_sent': 2.0, 'bytes_dense': 4.0, 'residual_norm': 5.0, 'ratio': 2.0}
    """
    found = {}
    for name in dict.fromkeys(name for one in each for name in one):  # only some may have outer rounds
        values = [one[name] for one in each if name in one]
        found[name] = math.hypot(*values) if name in NORMS else sum(values)
    found["ratio"] = found["bytes_dense"] / found["bytes_sent"] if found["bytes_sent"] else math.nan
    return found


def residual_norm(runner: StepRunner) -> float:
    """Return the Euclidean norm of this rank's residuals, in the units of gradients, and of parameters where drifts are
    sent. One number is read back from each device."""
    scaled, plain = list[Tensor](), list[Tensor]()
    for shard in runner.shards.values():
        memory = shard.communicator.memory
        if memory.stateful:
            (scaled if shard.outer is None else plain).extend(memory.residual_tensors(shard.variable.name))
    return math.hypot(norm(scaled) / runner.context.loss_scale, norm(plain))


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all elements of some tensors."""
    squares: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        k = kernels_of(tensor)
        # In float64, since long sums of float32 squares lose digits; as a matrix product, which all kernels have.
        column = k.reshape(k.cast(tensor, "float64"), (math.prod(tensor.shape), 1))
        square = k.reshape(k.matmul(column, column, transpose=True), (1,))
        squares.setdefault(str(getattr(tensor, "device", "cpu")), []).append(square)
    # On a device the sums of all tensors are joined first: one number at a time would make the host wait for each.
    found = [math.fsum(kernels_of(own[0]).to_list(kernels_of(own[0]).join(own))) for own in squares.values()]
    return math.sqrt(math.fsum(found))
