"""Payloads whose size follows from the step: no sizes travel, buckets stay fused, and runs resume in the middle."""

import importlib.util

import numpy as np
import pytest
import torch

from grace.core.route import Carries
from grace.exchange.fused_codec import FusedCodec
from tests.support.far import as_far
from tests.support.pools import on_ranks
from tests.support.trained import Trained, drawn
from tests.support.training import Given, digest, distributed, means

STEPS, WARMUP = 7, 4
SHAPES = [(40, 50), (3,), (9000,)]
SPECS = [
    f"topk(ratio=0.01, warmup_steps={WARMUP})",
    f"topk(ratio=0.05, chunk=64, warmup_steps={WARMUP})",
    f"topk(ratio=0.01, warmup_steps={WARMUP}) | qsgd",
]


def stepped(spec, apart=False):
    """Means and memories after each step, the bytes of its payloads, and the routes that were taken."""
    trained, rng, found, legs = Trained(spec, None, SHAPES, apart), np.random.default_rng(1), [], set()
    before = 0
    for _ in range(STEPS):
        means = trained.step(*drawn(rng, SHAPES, torch.float32))
        sent = sum(trained.runner.traffic.payload_bytes.values())
        found.append((means, trained.remembered(), sent - before))
        before = sent
        legs |= {leg.carries for bucket in trained.runner.buckets for leg in bucket.program.route()}
    return found, legs, trained.codecs


@pytest.mark.parametrize("spec", SPECS)
def test_sizes_fall_with_the_ratio_and_never_travel(spec):
    found, legs, codecs = stepped(spec)
    assert Carries.SIZES not in legs
    sizes = [nbytes for *_, nbytes in found]
    assert sizes[:WARMUP] == sorted(sizes[:WARMUP], reverse=True)
    assert len(set(sizes[:WARMUP])) == WARMUP
    assert set(sizes[WARMUP:]) == {sizes[-1]}
    in_one_pass = "|" not in spec and importlib.util.find_spec("numba") is not None  # compositions have no such codec
    assert all(isinstance(codec, FusedCodec) is in_one_pass for codec in codecs)


@pytest.mark.parametrize("spec", SPECS[:2])
def test_whole_buckets_have_the_bits_of_their_variables_through_the_warm_up(spec):
    pytest.importorskip("numba", reason="codecs of whole buckets are compiled")
    assert stepped(spec)[0] == stepped(spec, apart=True)[0]


@on_ranks()
def test_a_run_resumes_in_the_middle_of_the_warm_up():
    """Gradients of steps without a break, and of those behind a checkpoint that was made during the warm-up."""
    shapes = {"matrix": (40, 50), "vector": (700,)}

    def run(model, optimizer, steps):
        return [digest(mean) for mean in means(model, optimizer, steps)]

    model = Given(shapes)
    optimizer = distributed(model, SPECS[0])
    whole = run(model, optimizer, range(2))
    saved = optimizer.full_state_dict()
    weights = [p.detach().clone() for p in model.parameters()]
    whole += run(model, optimizer, range(2, STEPS))
    again = Given(shapes)
    with torch.no_grad():
        for p, value in zip(again.parameters(), weights, strict=True):
            p.copy_(value)
    other = distributed(again, SPECS[0])
    other.load_state_dict(saved)
    assert whole[2:] == run(again, other, range(2, STEPS))


def test_dgc_has_room_for_each_steps_payload_on_a_device():
    spec = f"dgc(ratio=0.01, warmup_steps={WARMUP})"
    with as_far(plain=True):  # which leaves out positions that only fill room, as kernels on a device do
        found, legs, _ = stepped(spec)
    sizes = [nbytes for *_, nbytes in found]
    assert Carries.SIZES not in legs
    assert sizes[:WARMUP] == sorted(sizes[:WARMUP], reverse=True)
    assert sizes[WARMUP:] == [sizes[-1]] * (STEPS - WARMUP)
