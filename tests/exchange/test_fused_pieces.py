"""ScatterReduce's shards of whole buckets at once: the same bits as piece by piece, whatever comes."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

import grace
from grace.backends import runtime
from grace.compressors.topk import TopK
from grace.errors import PayloadError
from grace.exchange.fused_codec import FusedCodec
from tests.support.trained import Trained, remembered

pytest.importorskip("numba", reason="codecs of whole buckets are compiled")
CODED = [
    ("qsgd", None), ("qsgd(levels=7, bucket_size=33)", "residual"), ("qsgd(norm=l2, levels=64)", None),
    ("efsignsgd", None), ("efsignsgd", "residual(beta=0.5)"), ("signsgd", None), ("signsgd", "residual"),
    ("none", None), ("fp16", None), ("fp16", "residual"), ("bf16", "residual(beta=0.5)"), ("natural", "residual"),
    ("terngrad", None), ("onebit", None),
]  # fmt: skip
OTHERS = [("dynamic8", None)]
SHAPES = [(40, 50), (), (2,), (1, 513), (9000,), (33, 17), (3, 1), (0, 3)]  # some leave ranks with nothing
METHODS = ["_encode", "_average", "_decode"]
STEPS, OVERFLOWS, DISCARDED, SCALED = 9, 4, 6, 7


class Shards(Trained):
    """A runner over ScatterReduce, whose gradients are drawn."""

    def __init__(self, spec, memory, apart, shapes=SHAPES):
        super().__init__(spec, memory, shapes, apart, runtime.current(), communicator="scatter_reduce")
        self.rng = np.random.default_rng(grace.rank())

    def drawn(self, shape, scale=1.0):
        return torch.tensor(self.rng.standard_normal(shape) * scale, dtype=torch.float32)

    def step(self, gradients=None, absent=(), discard=False):
        """The means' bits, by name."""
        gradients = gradients or {v.name: self.drawn(v.shape) for b in self.runner.buckets for v in b.variables}
        for bucket in self.runner.buckets:
            names = [variable.name for variable in bucket.variables]
            given = [torch.zeros_like(gradients[name]) if name in absent else gradients[name] for name in names]
            self.runner.start_round_trip(bucket, given, [name not in absent for name in names])
        if discard:
            return self.runner.discard()
        outcomes = self.runner.finish_step(
            lambda bucket: [torch.ones(v.shape) if len(v.shape) == 2 else None for v in bucket.variables]
        )
        return {o.variable.name: (o.overflow, None if o.value is None else bits(o.value)) for o in outcomes}

    def remembered(self):
        return remembered(self.runner, bits)

    @property
    def codecs(self):
        carried = [b for b in self.runner.buckets if b.communicator.name == "scatter_reduce"]
        return [bucket.program.codec for bucket in carried]


def bits(value):
    if isinstance(value, float):
        return value
    array = value.contiguous().numpy()
    return "NaN" if np.isnan(array).all() else (array.shape, array.tobytes())  # which of several NaN says nothing


def trained(spec, memory, apart):
    one, found, used = Shards(spec, memory, apart), [], []
    for method in METHODS:
        setattr(FusedCodec, method, watched(getattr(FusedCodec, method), method, used))
    try:
        for step in range(STEPS):
            one.lr = [0.5, 0.5, 0.25, 0.0, 0.3, 0.3, 0.3, 0.2, 0.2][step]
            one.runner.context.loss_scale = 8.0 if step >= SCALED else 1.0
            scale = 10.0 ** one.rng.integers(-6, 3)
            gradients = {f"v{i}": one.drawn(shape, scale) for i, shape in enumerate(SHAPES)}
            gradients["v3"] = torch.stack([gradients["v3"]] * 2, -1)[..., 0]  # with strides
            absent = {"v0"} if step in (2, 5) and grace.rank() == 1 else set()
            absent |= {"v5"} if step == 3 else set()  # on all ranks
            if step == OVERFLOWS and grace.rank() == 1:
                gradients["v4"][8999] = np.inf
            found.append((one.step(gradients, absent, discard=step == DISCARDED), one.remembered()))
    finally:
        for method in METHODS:
            setattr(FusedCodec, method, getattr(FusedCodec, method).__wrapped__)
    traffic = one.runner.traffic
    counted = traffic.payload_bytes, traffic.header_bytes, traffic.sent_bytes
    return found, counted, [isinstance(codec, FusedCodec) for codec in one.codecs], used


def watched(call, method, used):
    """A method of a codec that writes down whether it could do what it was asked."""

    @functools.wraps(call)
    def answered(*args):
        answer = call(*args)
        if getattr(args[0], "owners", 2) > 1:  # else it is the codec of what travels whole
            used.append((method, answer is not None and answer is not False))
        return answer

    return answered


@pytest.mark.filterwarnings("ignore:.*not a contraction")
@pytest.mark.parametrize(("spec", "memory"), CODED + OTHERS)
def test_whole_buckets_give_the_bits_of_their_pieces(ranks, spec, memory):
    whole, apart = (ranks.run(trained, spec, memory, apart) for apart in (False, True))
    coded = (spec, memory) in CODED
    for (found, counted, made, used), (expected, counted_apart, _, unused) in zip(whole, apart, strict=True):
        assert found == expected
        assert counted == counted_apart
        assert found[OVERFLOWS][0]["v4"] == (True, "NaN")
        assert found[OVERFLOWS][1] == found[OVERFLOWS - 1][1]  # nothing is remembered of it
        assert found[3][0]["v5"] == (False, None) != found[2][0]["v5"]
        assert made == [coded]
        assert unused == []
        assert all(well for _, well in used)
        calls = [(step, method) for step in range(STEPS) for method in METHODS]
        if coded:
            assert [method for method, _ in used] == [m for step, m in calls if (step, m) != (DISCARDED, "_decode")]
        else:
            assert used == []
    for found, *_ in whole[1:]:
        assert [means for means, _ in found] == [means for means, _ in whole[0][0]]


class Positions(TopK):
    """A method whose payloads may be damaged: no quantizer's are, whatever they hold."""

    name = "positions"
    traits = dataclasses.replace(TopK.traits, shardable=True)

    def bucket_codec(self):
        return super().bucket_codec()

    def payload_spec(self, *given):
        return super().payload_spec(*given)


BIG = (70_000,)


def spoil(codec, collective):
    """A position that is sent to rank 0 in the next first or second collective is none."""
    method = "_encode" if collective == "shards" else "_average"
    buffer = codec.buffer if collective == "shards" else codec.means_wire
    place, call, todo = codec.layouts[0].placed()[0][1].offset, getattr(codec, method), [0xFF]

    def damaging(*args):
        answer = call(*args)
        if todo:
            buffer[place : place + 2] = todo.pop()
        return answer

    setattr(codec, method, damaging)


def refused(collective):
    """Return the error of a damaged payload, and the result of the step after it."""
    one, other, used = *(Shards(Positions(), None, apart, [BIG]) for apart in (False, True)), []
    for _ in range(2):
        same = {"v0": one.drawn(BIG)}
        assert one.step(same) == other.step(same)
    (codec,), before = one.codecs, one.remembered()
    assert before == other.remembered()
    if grace.rank() == 1:
        spoil(codec, collective)
    codec._average = watched(codec._average, "average", used)
    codec._decode = watched(codec._decode, "decode", used)
    with pytest.raises(PayloadError) as caught:
        one.step({"v0": torch.ones(BIG)})
    one.runner.abort()
    assert one.remembered() == before
    said, tried = str(caught.value), list(used)
    same = {"v0": one.drawn(BIG)}
    assert one.step(same) == other.step(same)
    assert one.remembered() == other.remembered()
    assert used[len(tried) :] == [("average", True), ("decode", True)]
    return said, tried


def test_a_damaged_shard_is_told_by_rank_and_variable(two_ranks):
    (owner, tried), (sender, _) = two_ranks.run(refused, "shards")
    assert "rank 0 of 2: what rank 1 sent of 'v0' at step 2 is no payload of positions" in owner
    assert "position 65535 is not in [0, 35000)" in owner
    assert tried == [("average", False)]
    assert "rank 0 could not decode what it was sent of 'v0'" in sender


def test_a_damaged_mean_is_told_by_rank_and_variable(two_ranks):
    for rank, (said, tried) in enumerate(two_ranks.run(refused, "means")):
        assert f"rank {rank} of 2: what rank 1 sent of 'v0' at step 2 is no payload of positions" in said
        assert "position 65535 is not in [0, 35000)" in said
        assert tried == [("average", True), ("decode", False)]
