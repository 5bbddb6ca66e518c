"""All ranks start the same collectives in one order, and call ``advance`` equally often, whatever happens to them."""

import contextlib

import numpy as np
import pytest
import torch

from grace.backends import runtime
from grace.core.compressor import Compressor, Traits
from grace.core.context import Context
from grace.core.variable import Variable
from grace.errors import GraceError
from grace.exchange.round_trip import RoundTrip
from grace.session.exchange_plan import UniformPlan
from grace.session.setup import build_step_runner
from tests.support.pools import on_ranks

SHAPES = {"matrix": (40, 30), "small": (3,), "long": (9000,)}


class Changing(Compressor):
    """A payload of another shape at step 2 on rank 1, though nobody said that sizes vary."""

    name = "changing"
    traits = Traits(category="sparsification")

    def compress(self, tensor, name):
        flat = tensor.reshape(-1)
        kept = flat.shape[0] - (self.context.step == 2 and self.context.rank == 1)
        return [flat[: max(1, kept)].clone()], tuple(tensor.shape)

    def decompress(self, payload, ctx):
        out = torch.zeros(ctx)
        out.view(-1)[: payload[0].shape[0]] = payload[0]
        return out


METHODS = {
    "none": ("none", None, {}),
    "sums": ("randomk(ratio=0.5)", None, {"communicator": "allreduce"}),
    "rounds": ("powersgd(rank=2)", None, {}),
    "gathered": ("topk(ratio=0.1)", None, {}),
    "sizes": ("threshold(value=0.5)", None, {}),
    "broadcasts": ("qsgd", None, {"communicator": "broadcast"}),
    "owners": ("qsgd(levels=7)", None, {"communicator": "scatter_reduce"}),
    "merged": ("topk(ratio=0.1)", None, {"communicator": "scatter_merge"}),
    "rooted": ("topk(ratio=0.1)", None, {"communicator": "reduce_broadcast"}),
    "rooted sizes": ("threshold(value=0.5)", None, {"communicator": "reduce_broadcast"}),
    "rooted sums": ("none", None, {"communicator": "reduce_broadcast"}),
    "changing": (Changing, None, {}),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", METHODS)
@on_ranks()
def test_every_rank_starts_the_same_collectives_and_advances_equally_often(method, size):
    """Each step's collectives, as engines are told them, how often ``advance`` was called, and what was raised."""
    spec, memory, options = METHODS[method]
    backend, log, calls = runtime.current(), [], []
    find, advance = RoundTrip._start_collective, RoundTrip.advance

    def noted(self, leg, buffer):
        log.append((self.bucket.index, leg.collective.name, leg.carries.name, leg.root))
        return find(self, leg, buffer)

    def counted(self):
        calls.append(self.bucket.index)
        return advance(self)

    found = [Variable(name, shape, "float32", device="cpu") for name, shape in SHAPES.items()]
    plan = UniformPlan(spec if isinstance(spec, str) else spec(), memory, options.get("communicator"))
    runner = build_step_runner(
        lambda: found, lambda: plan, backend, Context(rank=backend.rank, size=backend.size, lr=lambda name: 0.1)
    )
    steps = []
    RoundTrip._start_collective, RoundTrip.advance = noted, counted
    try:
        for step in range(6):
            rng = np.random.default_rng((step, backend.rank))
            given = {
                name: torch.tensor(rng.standard_normal(shape), dtype=torch.float32) for name, shape in SHAPES.items()
            }
            last = backend.rank == backend.size - 1
            if step == 1 and last:
                given["matrix"][0, 0] = float("inf")
            present = {name: not (step == 3 and (last or name == "small")) for name in SHAPES}
            raised = ""
            with contextlib.suppress(GraceError):
                for bucket in runner.buckets:
                    mine = [given[name] if present[name] else torch.zeros(SHAPES[name]) for name in bucket.names]
                    runner.start_round_trip(bucket, mine, [present[name] for name in bucket.names])
                raised = "an error"
                runner.discard() if step == 4 else runner.finish_step(lambda bucket: [None] * len(bucket.names))
                raised = ""
            if raised:
                runner.abort()
            steps.append((list(log), list(calls), raised))
            log.clear()
            calls.clear()
    finally:
        RoundTrip._start_collective, RoundTrip.advance = find, advance
    assert all(log for log, *_ in steps)
    assert any(raised for *_, raised in steps) == (method == "changing")
    return steps
