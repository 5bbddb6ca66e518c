"""Whole buckets at once: the same bits as variable by variable, whatever comes."""

import resource
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import grace
from grace.backends import runtime
from grace.errors import PayloadError
from grace.exchange.fused_codec import FusedCodec
from tests.support.examples import examples
from tests.support.methods import SHAPES
from tests.support.pools import on_ranks, ranks_of
from tests.support.trained import Trained, drawn

pytest.importorskip("numba", reason="codecs of whole buckets are compiled")

SPECS = [
    ("none", None), ("none", "residual"), ("fp16", None), ("fp16", "residual"), ("bf16", "residual(beta=0.5)"),
    ("topk", None), ("topk(ratio=0.3)", "none"), ("topk(ratio=1)", "residual(beta=0.5)"), ("efsignsgd", None),
    ("efsignsgd", "residual"), ("signsgd", None), ("qsgd", None),
    ("qsgd(levels=7, bucket_size=33, norm=l2)", "residual"), ("qsgd(levels=64, bucket_size=5000)", "residual"),
    ("onebit", None), ("onebit", "efsignsgd"),
    ("terngrad", None), ("terngrad(clip=1)", "residual"), ("natural", None), ("natural", "residual"),
    ("signum", None), ("signum(momentum=0.3)", None),
    ("topk(ratio=0.1)", "residual(beta=0.7, gamma=0.3)"), ("block", None), ("block(bits=4, block=33)", "residual"),
    ("block(rounding=stochastic)", None), ("block(bits=3, scale=rms)", None), ("block(bits=3, block=33)", "residual"),
    ("block(bits=2, scale=rms)", None), ("block(bits=2, block=5000)", "residual"),
    ("block(bits=2, scale=rms, block=7)", "none"),
    ("topk(chunk=1024)", None), ("topk(ratio=0.3, chunk=32)", "none"),
    ("randomk", None), ("randomk(ratio=0.3, unbiased=true)", None),
    ("randomk(ratio=0.3, unbiased=true)", "residual"),
    ("topk(ratio=1, chunk=256)", "residual(beta=0.5)"),
]  # fmt: skip
BIG = (70_000,)  # from which a threshold is guessed, positions take four bytes, and there are several tiles


@pytest.mark.filterwarnings("ignore:.*not a contraction")
@pytest.mark.parametrize(("spec", "memory"), SPECS)
@examples(6)
@given(shapes=st.lists(st.sampled_from([*SHAPES, BIG]), min_size=1, max_size=6), seed=st.integers(0, 1 << 30))
def test_whole_buckets_give_the_bits_of_their_variables(spec, memory, shapes, seed):
    rng = np.random.default_rng(seed)
    dtype = [torch.float32, torch.float64, torch.bfloat16][seed % 3]
    both = [Trained(spec, memory, shapes, apart, dtype=dtype) for apart in (False, True)]
    for step in range(6):
        gradients, present = drawn(rng, shapes, dtype)
        if step == 3:  # an overflow, after which all is as if the step had not been
            for gradient in gradients[:1]:
                gradient.reshape(-1)[:1] = [np.inf, -np.inf, np.nan][seed % 3 - 1]
        for one in both:
            one.lr = [0.5, 0.5, 0.25, 0.0, 0.3, 0.3][step]
        whole, apart = (one.step(gradients, present, discard=step == 4) for one in both)
        if step == 3:  # which of several NaN it is says nothing
            whole, apart = ({n: v is not None and np.isnan(np.frombuffer(v, np.float32)).any() for n, v in r.items()}
                            for r in (whole, apart))  # fmt: skip
        assert whole == apart
        assert both[0].remembered() == both[1].remembered()
    assert all(isinstance(codec, FusedCodec) for codec in both[0].codecs)


@pytest.mark.parametrize("spec", ["topk(ratio=0.3)", "randomk(ratio=0.3)"])
def test_means_that_a_codec_cannot_write_are_those_of_the_step(spec):
    both = [Trained(spec, None, [(40, 50), (7,)], apart) for apart in (False, True)]
    for step in range(3):
        for one in both:
            one.strided = step == 2
        gradients, present = drawn(np.random.default_rng(step), [(40, 50), (7,)], torch.float32)
        assert both[0].step(gradients, present) == both[1].step(gradients, present)


def test_every_codec_is_tried():
    having = {name for name, cls in grace.known("compressor").items() if "bucket_codec" in vars(cls)}
    on_gpus_alone = {"dynamic8", "powersgd", "threshold"}
    assert having - on_gpus_alone == {grace.make("compressor", spec).name for spec, _ in SPECS}


def over_ranks(spec, memory, apart, communicator=None):
    shapes, rng = [(40, 50), (), BIG, (7,)], np.random.default_rng(grace.rank())
    trained, used = Trained(spec, memory, shapes, apart, runtime.current(), communicator=communicator), []
    found = []
    for _ in range(3):
        found.append(trained.step(*drawn(rng, shapes, torch.float32)))
        for codec in trained.codecs:
            if isinstance(codec, FusedCodec) and codec not in [one for one, _ in used]:
                decode = codec._decode
                used.append((codec, calls := []))
                codec._decode = lambda *args, decode=decode, calls=calls: (calls.append(decode(*args)), calls[-1])[1]
    assert all(calls == [True] * 2 for _, calls in used)
    return found, trained.remembered(), [isinstance(codec, FusedCodec) for codec in trained.codecs]


@pytest.mark.every
@pytest.mark.filterwarnings("ignore:.*not a contraction")
@pytest.mark.parametrize(("spec", "memory"), SPECS)
def test_ranks_get_the_same_means_from_whole_buckets(two_ranks, spec, memory):
    (whole, *_), (other, *_) = two = two_ranks.run(over_ranks, spec, memory, False)
    assert all(made for _, _, codecs in two for made in codecs)
    assert whole == other
    apart = two_ranks.run(over_ranks, spec, memory, True)
    assert [found[:2] for found in two] == [found[:2] for found in apart]


@pytest.mark.ranks
@pytest.mark.parametrize("communicator", ["allgather", "broadcast"])
@pytest.mark.parametrize(("spec", "memory"), [("none", None), ("fp16", "residual"), ("bf16", None)])
def test_numbers_that_are_not_summed_on_their_way_are_summed_at_once(spec, memory, communicator):
    ranks = ranks_of(3)  # a third is no power of two, so that what is rounded once or twice differs
    whole = ranks.run(over_ranks, spec, memory, False, communicator)
    assert all(all(codecs) for _, _, codecs in whole)
    assert whole[0][0] == whole[1][0] == whole[2][0]
    apart = ranks.run(over_ranks, spec, memory, True, communicator)
    assert [found[:2] for found in whole] == [found[:2] for found in apart]


@on_ranks()
def test_what_cannot_be_decoded_is_told_by_rank_and_variable():
    trained, rng = Trained("topk", None, [BIG], apart=False, backend=runtime.current()), np.random.default_rng(1)
    trained.step(*drawn(rng, [BIG], torch.float32))
    (bucket,) = trained.runner.buckets
    before = trained.remembered()
    if grace.rank():
        codec = bucket.program.codec
        encode, (_, coded) = codec.kernel_codec.encode, codec.layouts[0].placed()[0]

        def damaging(*args):
            sound = encode(*args)
            codec.buffer[coded.offset + 3] = 0x7F
            return sound

        codec.kernel_codec.encode = damaging
    said = "what rank 1 sent of 'v0' at step 1 is no payload of topk.*is not in \\[0, 70000\\)"
    with pytest.raises(PayloadError, match=said):
        trained.step([torch.ones(BIG)], [True])
    assert trained.remembered() == before


@pytest.mark.parametrize(
    "spec", ["none", "fp16", "bf16", "topk", "efsignsgd", "signsgd", "signum", "onebit", "qsgd", "terngrad", "natural"]
)
def test_steps_take_no_new_memory(spec):
    trained, gradients = Trained(spec, None, [(1 << 20,)], apart=False), [torch.randn(1 << 20)]
    (bucket,) = trained.runner.buckets

    def step():
        trained.runner.start_round_trip(bucket, gradients, [True])
        trained.runner.finish_step(lambda bucket: gradients)

    for _ in range(4):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step()
    # the residual alone is 1,024 pages, of which each step made new ones before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 250

    # pages that were freed may come back without a fault: what is asked for is counted as well
    tracemalloc.start()  # NumPy's, and Python's own
    step()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    step()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most - held < 200_000
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        step()
    assert sum(max(0, event.self_cpu_memory_usage) for event in profile.function_events) < 100_000
