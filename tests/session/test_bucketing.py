"""Cuts between buckets: by what travels, in the order in which gradients become ready."""

import itertools
import random

import pytest

from grace.communicators.choice import build_communicator
from grace.core.variable import Variable
from grace.session.bucket_limits import COLLECTIVE_BYTES, FIRST_BYTES, GRADIENT_BYTES, Limits
from grace.session.bucketing import make_buckets
from grace.session.exchange_plan import UniformPlan
from grace.session.sharding import uniform
from tests.support.grouping import in_groups

STAGES = ((64, 256, 3), (128, 512, 4), (256, 1024, 6), (512, 2048, 3))


def resnet50():
    """Names and shapes of ResNet-50's 161 variables, in declaration order."""
    found, before = [("conv1", (64, 3, 7, 7)), ("bn1.weight", (64,)), ("bn1.bias", (64,))], 64
    for stage, (inner, outer, blocks) in enumerate(STAGES, 1):
        for block in range(blocks):
            convolutions = [(inner, before, 1, 1), (inner, inner, 3, 3), (outer, inner, 1, 1)]
            convolutions += [(outer, before, 1, 1)] if block == 0 else []
            for i, shape in enumerate(convolutions):
                name, own = f"layer{stage}.{block}.{i}", (shape[0],)
                found += [(f"{name}.conv", shape), (f"{name}.bn.weight", own), (f"{name}.bn.bias", own)]
            before = outer
    return [Variable(*pair) for pair in [*found, ("fc.weight", (1000, 2048)), ("fc.bias", (1000,))]]


RESNET = resnet50()
assert len(RESNET) == 161
assert sum(variable.numel for variable in RESNET) == 25_557_032


def cut(compressor, variables=RESNET, **limits):
    """The buckets, each as bytes of gradient, bytes on the wire, and names; those of dense variables apart."""
    shards = uniform(variables, build_communicator(compressor, None, None), Limits(**limits))
    sizes = {shard.variable.name: (shard.variable.nbytes, shard.wire_bytes) for shard in shards}
    found, dense = [], []
    for bucket in make_buckets(shards):
        names = [variable.name for variable in bucket.variables]
        row = (*(sum(sizes[name][i] for name in names) for i in (0, 1)), names)
        (found if bucket.communicator.compressor.spec != "none" or compressor == "none" else dense).append(row)
    assert sorted(name for *_, names in found + dense for name in names) == sorted(sizes)
    return found, dense


@pytest.mark.parametrize("compressor", ["fp16", "qsgd", "natural", "terngrad", "topk(ratio=0.01)", "efsignsgd", "topk"])
def test_a_compressed_bucket_is_worth_the_square_root_of_what_travels(compressor):
    found, _ = cut(compressor)
    total = sum(wire for _, wire, _ in found)
    best = (COLLECTIVE_BYTES * total) ** 0.5
    largest = max(variable.nbytes for variable in RESNET)
    wires = [wire for _, wire, _ in found]
    cost = [COLLECTIVE_BYTES * n + total / n for n in (len(found), total / best)]
    assert cost[0] < 1.5 * cost[1]  # of the time that nothing hides
    assert all(gradient <= GRADIENT_BYTES + largest for gradient, *_ in found)
    assert all(wire <= 1.25 * best + 1e6 or len(names) == 1 for _, wire, names in found[1:])
    assert all(wire >= COLLECTIVE_BYTES / 2 for wire in wires)
    if compressor in ("qsgd", "natural", "fp16"):
        assert 1e6 < best < 2.5e6


def test_without_compression_the_buckets_are_ddps():
    found, dense = cut("none")
    assert not dense
    gradients = [gradient for gradient, *_ in found]
    assert found[0][2] == ["fc.weight", "fc.bias"]  # more than the first may have, and yet not two
    assert all(GRADIENT_BYTES / 2 <= gradient <= GRADIENT_BYTES for gradient in gradients[1:-1])
    assert len(found) == 5
    small = [Variable(f"v{i}", (1 << 16,)) for i in range(240)]  # 60 MiB
    assert [gradient for gradient, *_ in cut("none", small)[0]] == [FIRST_BYTES, 25 << 20, 25 << 20, 9 << 20]


def test_nothing_small_travels_alone():
    layers = [Variable(f"{i}.{kind}", shape) for i in range(9) for kind, shape in (("w", (512, 512)), ("b", (512,)))]
    for variables in (layers, [Variable("class_token", (768,)), *layers], [*layers, Variable("scale", ())]):
        for compressor in ("none", "fp16", "qsgd", "topk(ratio=0.01)"):
            for limits in ({}, {"bucket_bytes": 1 << 20}, {"group_bytes": 3 << 20}):
                found, dense = cut(compressor, variables, **limits)
                assert min(wire for _, wire, _ in found) > 2**14 or len(found) == 1
                assert len(dense) <= 1


def test_bytes_on_the_wire_or_of_gradient_may_be_given():
    total = sum(wire for _, wire, _ in cut("topk(ratio=0.01)")[0])
    whole, _ = cut("topk(ratio=0.01)", bucket_bytes=1 << 30)
    assert len(whole) == 1
    halves, _ = cut("topk(ratio=0.01)", bucket_bytes=round(total / 2))
    assert 2 <= len(halves) <= 3
    by_gradient, _ = cut("topk(ratio=0.01)", group_bytes=10 << 20)
    assert 10 <= len(by_gradient) <= 20
    assert all(gradient <= 1.25 * (10 << 20) for gradient, *_ in by_gradient)
    both, _ = cut("topk(ratio=0.01)", bucket_bytes=1 << 30, group_bytes=10 << 20)
    assert both == by_gradient
    each, _ = cut("none", bucket_bytes=1)
    assert len(each) == 161


def test_what_is_sent_of_a_variable_may_be_unknown():
    assert [names for *_, names in cut("threshold(value=0.1)")[0]] == [names for *_, names in cut("none")[0]]


def test_chosen_sets_are_cut_by_gradient_only():
    names = [variable.name for variable in RESNET]
    plan = UniformPlan("qsgd", None, None, Limits().for_sets, lambda: [names[:80], names[80:]])
    buckets = make_buckets(plan.shards(RESNET))
    compressed = [bucket for bucket in buckets if bucket.communicator.compressor.spec != "none"]
    assert all(len({v.name in names[:80] for v in bucket.variables}) == 1 for bucket in buckets)
    assert len(compressed) < 10 < len(cut("qsgd")[0])


@in_groups(("seed",), [(seed,) for seed in range(50)], lambda seed: str(seed // 10))
def test_every_cut_is_a_partition_in_order(seed):
    draw = random.Random(seed)
    count = draw.randint(1, 40)
    sizes = [draw.choice([0, 4, 400, 10**5, 10**7]) for _ in range(count)]
    share = draw.choice([1.0, 0.5, 0.02])
    given = {key: draw.choice([1, 5000, 1 << 20]) for key in ("bucket_bytes", "group_bytes") if draw.random() < 0.4}
    limits = Limits(**given)
    lengths = limits.lengths([(size, share * size) for size in sizes])
    assert sum(lengths) == count
    assert all(lengths)
    ends = list(itertools.accumulate(lengths))
    bound = max(1, min(limits.wire_bytes(share * sum(sizes), share < 1) / share, limits.gradient_bytes))
    for length, end in list(zip(lengths, ends, strict=True))[:-2]:  # two may have been made even at the end
        held = sizes[end - length : end]
        assert sum(held) <= 1.25 * bound + max(held)
        assert sum(held[:-1]) <= bound
