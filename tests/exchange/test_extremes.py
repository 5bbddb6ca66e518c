"""Gradients at the ends of their dtypes: whatever a method makes of them, no memory keeps what is not finite."""

import warnings

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import grace
from grace.core.registry import known, legal_communicators, legal_memories, make
from tests.support.examples import examples
from tests.support.training import copied, digest

pytestmark = pytest.mark.ranks

SPARSIFIERS = ("topk(ratio={})", "randomk(ratio={})", "threshold(value=0.5)", "dgc(ratio={})")
VALUES = ("fp16", "bf16", "qsgd(levels=7)", "natural", "terngrad", "efsignsgd", "dynamic8", "sketch", "inceptionn")
METHODS = (
    *("none", "fp16", "bf16", "qsgd", "qsgd(norm=l2)", "natural", "terngrad", "onebit", "signsgd", "signum"),
    *("efsignsgd", "randomk(ratio=0.1, unbiased=true)", "adaptive(ratio=0.4)", "dynamic8", "sketch(quantiles=4)"),
    *("inceptionn", "powersgd(rank=1)", "powersgd(rank=2, warm_start=false)"),
    *(s.format(r) for s in SPARSIFIERS for r in (0.1, 1.0)),
    *(f"{s.format(1.0)} | {v}" for s in SPARSIFIERS for v in VALUES),
)


def parts_of(method):
    compressor = make("compressor", method)
    return [(method, c, m) for c in legal_communicators(compressor) for m in legal_memories(compressor)]


CASES = [parts for method in METHODS for parts in parts_of(method)]
EXTREMES = [3.4028235e38, 2e38, 1e38, 1e30, 7e4, 65504.0, 6e4, 4e4, 1.0, 0.0, 1e-38, float("inf"), float("nan")]
NUMBERS = st.builds(lambda sign, value: sign * value, st.sampled_from([1, -1]), st.sampled_from(EXTREMES))
SIZE = 24


def finite(value):
    if isinstance(value, dict):
        return all(finite(item) for item in value.values())
    return bool(torch.isfinite(torch.as_tensor(value)).all())


def steps(parts, values, dtype):
    """Good, extreme, and good steps: what must hold, beside a run without the second, and what that brought.

    (A finite mean may be beyond float16, to which gradients return: all ranks see that, and it was no overflow.)"""
    warnings.simplefilter("ignore")
    compressor, communicator, memory = parts
    runs = [known("communicator")[communicator](compressor, memory) for _ in range(2)]
    good = [torch.randn(4, SIZE // 4, generator=torch.Generator().manual_seed(5 * n + grace.rank())) for n in range(3)]
    good = [values.to(dtype) for values in good]
    bad = torch.tensor(values[grace.rank()]).reshape(4, -1).to(dtype)
    for run in runs:
        run.lr = 1.0
    kept = lambda run: {kind: copied(part.state.committed) for kind, part in run.stateful_parts.items()}  # noqa: E731
    for run in runs:
        run.step(good[0], "w")
    before = kept(runs[0])
    brought = runs[0].step(bad, "w").float()
    after = kept(runs[0])
    spoilt = not finite(brought) and not (dtype is torch.float16 and finite(bad) and bool(brought.isinf().any()))
    runs[1].context.step += 1  # as if the step had been skipped
    nexts = [run.step(good[1], "w") for run in runs]
    return {
        "kept is finite": finite(after),
        "skipped keeps": not spoilt or digest(before) == digest(after),
        "next is finite": finite(nexts[0]),
        "next is as if skipped": not spoilt or digest(nexts[0]) == digest(nexts[1]),
        "bad numbers are seen": spoilt or finite(bad),
    }, digest(brought)


def vector(draw):
    return [dict(draw).get(i, (-1.0) ** i * (1 + i)) for i in range(SIZE)]


ONE_RANK = st.one_of(
    st.lists(st.tuples(st.integers(0, SIZE - 1), NUMBERS), max_size=4).map(vector),
    st.lists(NUMBERS, min_size=SIZE, max_size=SIZE),
    NUMBERS.map(lambda value: [value] * SIZE),
)
MOST, FLOAT, HALF = 3.4028235e38, torch.float32, torch.float16
ALTERNATING = [MOST, -MOST] * (SIZE // 2)


@example(("topk(ratio=1.0) | fp16", "allgather", "residual"), [1.0, 7e4, 2.0, 3.0] * 6, [1.0] * SIZE, FLOAT)
@example(("topk(ratio=1.0) | bf16", "reduce_broadcast", "residual"), [MOST] * SIZE, [1.0] * SIZE, FLOAT)
@example(("threshold(value=0.5) | bf16", "broadcast", "dgc"), [1.0] * SIZE, ALTERNATING, FLOAT)
@example(("randomk(ratio=1.0) | fp16", "allreduce", "residual"), [4e4] * SIZE, [4e4] * SIZE, FLOAT)
@example(("randomk(ratio=0.1)", "reduce_broadcast", "efsignsgd"), [MOST] * SIZE, [MOST] * SIZE, FLOAT)
@example(("randomk(ratio=0.1, unbiased=true)", "allgather", "residual"), [2e38] * SIZE, [1.0] * SIZE, FLOAT)
@example(("sketch(quantiles=4)", "allgather", "residual"), ALTERNATING, [MOST] * SIZE, FLOAT)
@example(("onebit", "scatter_reduce", "residual"), [MOST] * SIZE, ALTERNATING, FLOAT)
@example(("adaptive(ratio=0.4)", "reduce_broadcast", "residual"), ALTERNATING, ALTERNATING, FLOAT)
@example(("powersgd(rank=1)", "allreduce", "residual"), [1e25] * SIZE, [1.0] * SIZE, FLOAT)
@example(("powersgd(rank=1)", "allreduce", "residual"), [MOST] * SIZE, [1.0] * SIZE, FLOAT)
@example(("topk(ratio=1.0) | fp16", "allgather", "dgc"), [65504.0] * SIZE, [-65504.0] * SIZE, HALF)
@examples(20)
@given(st.sampled_from(CASES), ONE_RANK, ONE_RANK, st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_what_overflows_reaches_no_memory(case, one, other, dtype):
    from tests.support.pools import ranks_of

    answers = ranks_of(2).run(steps, case, (one, other), dtype)
    assert len({bits for _, bits in answers}) == 1
    for answer, _ in answers:
        assert all(answer.values()), answer
