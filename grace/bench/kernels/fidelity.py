"""Errors of one rank's compression and of the aggregate, over repeated draws."""

import math
import warnings
from typing import Any, NamedTuple

import torch

import grace
from grace.bench.common.results import Row
from grace.communicators.choice import build_communicator
from grace.core.communicator import Communicator
from grace.core.compressor import Compressor, Ctx
from grace.core.context import Context
from grace.core.registry import known

STEP = 1_000_000
"""Simulated step: after any warm-up of a method."""
NAME = "gradient"
DEVIATIONS = 4
"""Standard deviations by which the square of a bias must exceed that of none to count: 3 in 100,000 do by chance."""


def communicator_of(method: str, memory: str | None = None) -> Communicator:
    """Return a method, ready for a late step of a run; without the warnings that a training run would get."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        communicator = build_communicator(method, memory, None)
    communicator.bind(Context(step=STEP))
    return communicator


class Encoded(NamedTuple):
    """Gradients of several ranks, compressed: a compressor, each rank's payload and ctx, and the bytes that a rank has
    sent, all rounds together."""

    compressor: Compressor
    payloads: list[list[torch.Tensor]]
    ctxs: list[Ctx]
    sent_bytes: int


def encoded(method: str, gradients: list[torch.Tensor], seed: int = 0) -> Encoded:
    """Compress one gradient per rank, as in one step of a run with this seed, without a memory and from fresh state.

    For a method of several rounds the payloads are means over ranks already, so there is only one.
    """
    ranks: list[Compressor] = [grace.make("compressor", method) for _ in gradients]
    for rank, compressor in enumerate(ranks):
        compressor.bind(Context(seed, STEP, rank, len(ranks)))
    if ranks[0].traits.rounds == 1:
        pairs = [compressor.compress(x, NAME) for compressor, x in zip(ranks, gradients, strict=True)]
        return Encoded(ranks[0], [payload for payload, _ in pairs], [ctx for _, ctx in pairs], _nbytes(pairs[0][0]))
    rounds = [compressor.exchange(x, NAME) for compressor, x in zip(ranks, gradients, strict=True)]
    payloads, sent = [next(each) for each in rounds], 0
    try:
        while True:
            sent += _nbytes(payloads[0])
            mean = [total / len(ranks) for total in _summed(payloads)]
            payloads = [each.send(mean) for each in rounds]
    except StopIteration as end:  # of the first rank, whose result is that of all
        payload, ctx = end.value
        return Encoded(ranks[0], [payload], [ctx], sent)


def aggregate(method: str, gradients: list[torch.Tensor], seed: int = 0) -> torch.Tensor:
    """Return the result of one step, as the method's default communicator would aggregate it (float32).

    Payloads that an Allreduce carries are added up in their own dtype, in the order of ranks.

    >>> aggregate("topk(ratio=0.5)", [torch.tensor([4.0, 1.0]), torch.tensor([1.0, -2.0])])
    tensor([ 2., -1.])
    """
    first, payloads, ctxs, _ = encoded(method, gradients, seed)
    count = len(payloads)
    cls: Any = known("communicator")[first.traits.communicator]
    if cls.sums and count > 1:
        payloads = [_summed(payloads)]
    return first.aggregate(payloads, ctxs[0], torch.zeros_like(gradients[0]), count)


def errors(method: str, gradients: list[torch.Tensor], draws: int) -> Row:
    """Return errors of a method without a memory, over ``draws`` repetitions, at least 2, with different random
    numbers.

    With x_r the gradient of rank r, x their mean, C one rank's compression and A the aggregate:

        vnmse            E||C(x_0) - x_0||^2 / ||x_0||^2
        aggregate_vnmse  E||A - x||^2 / ||x||^2
        bias             ||E[A] - x|| / ||x||

    The mean of T draws differs from x although the method is unbiased: by sum_i var(A_i) / T in its square. That is
    estimated from the same draws and taken off, which leaves an unbiased estimate of the bias's square (the mean of
    <A_s - x, A_t - x> over s != t). Under no bias its variance is 2 / (T (T - 1)) sum_i var(A_i)^2 where the elements'
    errors are independent. A square within 4 of its standard deviations could be chance, and ``bias`` is 0 then;
    ``bias_floor`` is the smallest that would have been seen. A method whose first two draws have the same bits has no
    randomness: its bias is exact, and no more is drawn. An error that is not finite is None.

    >>> errors("topk(ratio=0.5)", [torch.tensor([3.0, 4.0])], draws=4)
    {'vnmse': 0.36, 'aggregate_vnmse': 0.36, 'bias': 0.6, 'bias_floor': 0.0, 'draws': 2}
    """
    own = gradients[0].double()
    target = torch.stack(gradients).double().mean(0) if len(gradients) > 1 else own
    mean, spread = torch.zeros_like(target), torch.zeros_like(target)
    of_one, of_all, first = [], [], None
    for draw in range(draws):
        found = aggregate(method, gradients, seed=draw)
        compressor, (payload, *_), (ctx, *_), _ = encoded(method, gradients[:1], seed=draw)
        of_one.append(_square(compressor.decompress(payload, ctx).double() - own))
        of_all.append(_square(found.double() - target))
        step = found.double() - mean  # Welford's running mean and sum of squares
        mean += step / (draw + 1)
        spread += step * (found.double() - mean)
        if first is None:
            first = found.clone()
        elif draw == 1 and torch.equal(first, found):
            break  # no randomness: further draws would tell nothing
    count, whole = len(of_one), _square(target)
    variance = spread / (count - 1)
    chance = math.sqrt(2 / (count * (count - 1)) * _square(variance))
    square = _square(mean - target) - float(variance.sum()) / count
    floor = DEVIATIONS * chance
    # above the floor the bias counts; a square that is NaN is neither, and becomes None below
    facts = {
        "vnmse": sum(of_one) / count / _square(own),
        "aggregate_vnmse": sum(of_all) / count / whole,
        "bias": 0.0 if square <= floor else math.sqrt(square / whole) if square > floor else square,
        "bias_floor": math.sqrt(floor / whole),
    }
    return {**{key: value if math.isfinite(value) else None for key, value in facts.items()}, "draws": count}


def sent_bytes(method: str, x: torch.Tensor) -> int:
    """Return the bytes of every payload tensor that travels for x, all rounds together.

    >>> sent_bytes("fp16", torch.zeros(1000)), sent_bytes("powersgd", torch.zeros(20, 30))
    (2000, 200)
    """
    return encoded(method, [x]).sent_bytes


def _nbytes(payload: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in payload)


def _summed(payloads: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the sum over ranks, tensor by tensor, in the tensors' own dtype."""
    totals = [tensor.clone() for tensor in payloads[0]]
    for payload in payloads[1:]:
        for total, tensor in zip(totals, payload, strict=True):
            total += tensor
    return totals


def _square(x: torch.Tensor) -> float:
    """Return ||x||^2."""
    return float(torch.sum(x * x))
