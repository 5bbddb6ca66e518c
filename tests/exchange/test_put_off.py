"""On a device statuses are read once, at the end of a step: to the same gradients and memories as when they are read as
they come. A CPU's tensors stand for a device's here."""

import contextlib

import pytest
import torch

import grace
from grace.core.registry import legal_communicators, make
from tests.exchange import test_damaged_payloads as damaged
from tests.exchange import test_overflow as overflow
from tests.session import test_out_of_step as out_of_step
from tests.support.far import as_far
from tests.support.pools import on_ranks
from tests.support.training import Given, digest, distributed, gradients, made_up, state_of

SHAPES = {"matrix": (20, 30), "vector": (200,), "tiny": (1,)}
METHODS = ["none", "bf16", "qsgd", "topk(ratio=0.1)", "topk(ratio=0.1) | fp16", "signsgd", "powersgd(rank=2)"]
UNTRIED = ("scatter_merge", "broadcast")
"""Communicators left out: the one finds out positions, and the other is like allgather."""
STEPS = {
    "good": ([1, 1], [1, 1], 0.0),
    "missing": ([1, 0], [1, 1], 0.0),
    "nowhere": ([0, 0], [1, 1], 0.0),
    "overflow": ([1, 1], [1, 1], float("nan")),
    "infinite": ([1, 0], [1, 1], float("inf")),
    "after": ([1, 1], [1, 1], 0.0),
}
"""Per step, which ranks have a gradient of the matrix and of the vector, and what rank 1's vector has in it."""

REFUSED = [case[:3] for case in damaged.CASES if case[1].startswith("far")]


def steps(spec, communicator, far, plain=False):
    """Gradients and state after each step, and what was read in it."""
    found, reads = [], []
    with as_far(plain) if far else contextlib.nullcontext([]) as log:
        model = Given(SHAPES)
        optimizer = distributed(
            model, spec, communicator=communicator, group_bytes=400, optimizer=lambda p: torch.optim.SGD(p, lr=0.05)
        )
        for number, (matrix, vector, bad) in enumerate(STEPS.values()):
            optimizer.zero_grad()
            given = made_up(SHAPES, number, grace.rank())
            if bad and grace.rank() == 1:
                given["vector"].flat[3] = bad
            here = {"matrix": matrix, "vector": vector, "tiny": [1, 1]}
            parts = dict(model.named_parameters())
            sum((parts[n] * torch.from_numpy(g)).sum() for n, g in given.items() if here[n][grace.rank()]).backward()
            log.clear()
            optimizer.synchronize()
            reads.append(list(log))
            optimizer.step()
            found.append((digest(gradients(model)), digest(state_of(optimizer))))
    return found, reads


@pytest.mark.parametrize("spec", METHODS)
@on_ranks()
def test_what_is_read_at_the_end_of_a_step_is_heeded_as_what_is_read_at_once(spec):
    names = [name for name in legal_communicators(make("compressor", spec)) if name not in UNTRIED]
    names += ["reduce_broadcast(destination=1)"] if "reduce_broadcast" in names else []
    for name in names:
        (near, _), (far, reads) = steps(spec, name, False), steps(spec, name, True)
        assert dict(zip(STEPS, far, strict=True)) == dict(zip(STEPS, near, strict=True)), name
        assert reads == [["read"]] * len(STEPS), name


BOUNDED = {"threshold(value=0.8, capacity=1.0)": True, "dgc(ratio=0.1)": False, "adaptive(ratio=0.1)": False}
"""True for methods that compute the same on a device, to the last bit."""


@pytest.mark.parametrize("spec", BOUNDED)
@on_ranks()
def test_payloads_have_room_on_a_device_and_their_sizes_are_not_read(spec):
    names = [name for name in legal_communicators(make("compressor", spec)) if name not in UNTRIED]
    means = {}
    for name in names:
        (found, reads), (near, _) = steps(spec, name, True, plain=True), steps(spec, name, False)
        means[name] = [gradients for gradients, _ in found]
        assert reads == [["read"]] * len(STEPS), name
        assert found == near or not BOUNDED[spec], name
        kept = dict(zip(STEPS, (state for _, state in found), strict=True))
        assert kept["nowhere"] == kept["overflow"] == kept["infinite"] != kept["after"], name
    return means


def far(function, *args):
    return far_and_reads(function, *args)[0]


def far_and_reads(function, *args):
    with as_far() as log:
        return function(*args), log


@pytest.mark.parametrize("method", [out_of_step.METHODS[i] for i in (0, 2, 4, 5, 6)], ids=str)
def test_a_rank_that_goes_its_own_way_is_named_by_all_before_they_update(three_ranks, method):
    out_of_step.check(three_ranks.run(far, out_of_step.all_faults, list(out_of_step.FAULTS), *method))


@pytest.mark.parametrize(
    ("spec", "communicator"),
    [
        *[("bf16", None), ("topk(ratio=0.1)", None), ("powersgd(rank=2)", None), ("signsgd", None)],
        *[("block", "scatter_reduce"), ("signsgd", "reduce_broadcast")],
    ],
)
def test_ddps_hook_keeps_its_state_from_bad_numbers(two_ranks, spec, communicator):
    near = two_ranks.run(overflow.around_overflow_under_ddp, spec, communicator)
    answers = two_ranks.run(far_and_reads, overflow.around_overflow_under_ddp, spec, communicator)
    assert [found for found, _ in answers] == near
    assert [reads for _, reads in answers] == [["read"] * 5] * 2  # once a step, when its state is asked for


@on_ranks()
def test_a_delayed_value_beyond_the_range_of_its_payload_reaches_no_memory():
    far(overflow.test_a_delayed_value_beyond_the_range_of_its_payload_reaches_no_memory.body)


def test_payloads_that_do_not_decode_are_refused_by_all(two_ranks):
    near = two_ranks.run(damaged.failed, REFUSED)
    assert two_ranks.run(far, damaged.failed, REFUSED) == near
    assert any("rank 0 could not decode" in error for error, *_ in near[1])
