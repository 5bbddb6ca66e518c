"""ScatterReduce's exchanges by Triton's codecs: the pieces of all ranks at once have the bits of CPUs.

One of three ranks has Triton's kernels and leaves statuses where they are, the others the CPU's: they decode what it
sent, and it what they sent.
"""

import contextlib

import numpy as np
import pytest
import torch

from grace.communicators.choice import build_communicator
from grace.core.context import Context
from grace.core.variable import Variable
from grace.exchange.bucket import Bucket, Contribution, Traffic
from grace.exchange.fused_codec import FusedCodec
from grace.exchange.header import resolve_headers
from grace.exchange.round_trip import RoundTrip
from tests.kernels.test_triton_buckets import INTERPRETED, by_triton
from tests.support.drawing import THOROUGH
from tests.support.far import as_far
from tests.support.pretended import Among
from tests.support.trained import bits

pytest.importorskip("numba", reason="the CPU's are compiled")
pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="test_triton.py runs this in Triton's interpreter"),
    pytest.mark.filterwarnings("ignore:.*not a contraction", "ignore::RuntimeWarning"),
]
RANKS, OTHER = 3, 1
SHAPES = [(21, 40), (5,), ()]  # the last of which leaves two ranks nothing
METHODS = [
    ("none", "none"), ("fp16", "residual"), ("onebit", None), ("natural", "residual"),
    ("qsgd(levels=7, bucket_size=200)", "residual"), ("dynamic8", "residual"),
]  # fmt: skip
if THOROUGH:
    METHODS += [("signsgd", None), ("efsignsgd", "residual(beta=0.5)"), ("qsgd", None), ("terngrad", None)]
    METHODS += [("block(bits=4)", "residual")]
STEPS = ["laid out", "whole", "missing", "overflow", "large", "after", "last"]
READ = (1, 5, 6)
"""The steps after which somebody reads residuals, of which some are unfinished till then: these go on from there."""


class Rank:
    """An exchange's end, and what it has brought."""

    def __init__(self, spec, memory, rank, sent, around):
        self.rank, self.sent, self.around = rank, sent, around
        self.communicator = build_communicator(spec, memory, "scatter_reduce")
        self.communicator.bind(Context(size=RANKS, rank=rank, lr=lambda name: 0.5), Among(rank, sent))
        self.bucket = Bucket(0, self.communicator, [Variable(f"v{i}", s, "float32") for i, s in enumerate(SHAPES)])
        self.reads = []

    def start(self, number, gradients, present):
        self.communicator.context.step = number
        with self.around() as self.log:
            self.exchange = RoundTrip(Contribution(self.bucket, gradients, present, True, Traffic()))
            self.exchange.start()
            self.exchange.defers_headers = True

    def go_on(self):
        with self.around() as log:
            going = self.exchange.advance()
        self.log = [*self.log, *log]
        return going

    def finish(self, number):
        """Return what was decoded, what is remembered, and the ends of what was sent."""
        with self.around() as log:
            self.exchange.wait()
            outcomes = self.exchange.finish([None if number % 2 else torch.ones(shape) for shape in SHAPES])
            resolve_headers([self.exchange])
        self.reads.append([*self.log, *log])
        kept = {}
        for name, part in self.communicator.stateful_parts.items():
            if any(outcome.overflow for outcome in outcomes):
                part.state.rollback()
            part.state.commit()
            if number in READ:
                kept |= {(name, key): bits(value) for key, value in part.state.committed.items()}
        wires = self.exchange.codec.layouts
        shards, means = (self.sent[kind][self.rank] for kind in ("alltoall", "allgather"))
        parts = zip([*wires, wires[self.rank]], [*shards.view(RANKS, -1), means], strict=True)
        ends = [part[wire.body :].tolist() for wire, part in parts]  # statuses and places
        values = [(o.overflow, None if o.value is None else meant(o.value)) for o in outcomes]
        return values, kept, ends


def meant(value):
    return "NaN" if value.isnan().all() else bits(value)  # which of several NaN it is says nothing


def exchanged(spec, memory, around):
    """Per step, what each rank has got and remembers; and the ranks."""
    sent = {"alltoall": [None] * RANKS, "allgather": [None] * RANKS}
    ranks = [Rank(spec, memory, i, sent, around if i == OTHER else nothing) for i in range(RANKS)]
    rng, found = np.random.default_rng(1), []
    for number, step in enumerate(STEPS):
        for one in ranks:
            given = [torch.tensor(rng.standard_normal(shape), dtype=torch.float32) for shape in SHAPES]
            present = [True, step != "missing" or one.rank != OTHER, step != "missing"]
            if step == "missing":
                given[0] = torch.cat([torch.zeros(1), given[0].reshape(-1)])[1:].view(SHAPES[0])  # begins elsewhere
            if step == "overflow" and one.rank == OTHER:
                given[0].view(-1)[-1] = np.nan  # in the last rank's piece
            if step == "large":  # a sum of which is infinite, or which memories do not learn from
                given[1].fill_(2e38)
            given = [x if here else torch.zeros_like(x) for x, here in zip(given, present, strict=True)]
            one.start(number, given, present)
        while all([one.go_on() for one in ranks]):
            pass
        found.append([one.finish(number) for one in ranks])
    return found, ranks


@contextlib.contextmanager
def nothing():
    yield []


@pytest.mark.parametrize(("spec", "memory"), METHODS)
def test_pieces_have_the_bits_of_the_cpu(spec, memory, monkeypatch):
    @contextlib.contextmanager
    def on_the_device():
        with monkeypatch.context() as patched, as_far() as log:
            by_triton(patched)
            yield log

    found, ranks = exchanged(spec, memory, on_the_device)
    wanted, others = exchanged(spec, memory, nothing)
    for step, one, other in zip(STEPS, found, wanted, strict=True):
        assert one == other, step
        overflown = [[overflow for overflow, _ in values] for values, *_ in one]
        assert overflown[0] == overflown[1] == overflown[2], step
        large = step == "large" and (spec == "none" or ranks[0].communicator.memory.stateful)
        assert overflown[0][:2] == [step == "overflow", large], step
    codecs = [one.bucket.program.codec for one in ranks]
    on_the_gpu = [isinstance(codec, FusedCodec) and codec.writes_headers for codec in codecs]
    assert on_the_gpu == [i == OTHER for i in range(RANKS)]
    assert isinstance(others[0].bucket.program.codec, FusedCodec) or spec == "dynamic8" or "block" in spec
    assert ranks[OTHER].reads == [["read"]] * len(STEPS)
