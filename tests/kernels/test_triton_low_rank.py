"""PowerSGD's whole buckets by Triton's kernels: the reference's products, the same bits on all ranks, few launches, and
hardly more memory traffic than gradients and residuals are.

As test_triton_buckets.py they run on a GPU where there is one, and else in the interpreter that test_triton.py starts.
"""

import numpy as np
import pytest
import torch

from grace.exchange.fused_codec import FusedRounds
from grace.exchange.layout import Layout
from grace.exchange.round_trip import RoundTrip
from grace.kernels.constants import LARGEST_FACTOR
from grace.kernels.random import Stream
from grace.kernels.torch.primitives import TorchKernels
from grace.kernels.triton import low_rank_codecs
from tests.kernels.test_triton_buckets import FOUND, by_triton, elsewhere
from tests.support.data import REFERENCE, data
from tests.support.implementations import INTERPRETED
from tests.support.traffic import counted
from tests.support.trained import Trained

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MATRICES = [(70, 140), (40,), (), (0, 3), (66, 3, 3), (3, 260), (2, 2)]
RANK = 3
FINITE = 0x7F7FFFFF


class Ranks:
    """Two ranks' codecs of matrices of some shapes, as exchanges call them."""

    def __init__(self, shapes, rank=RANK):
        k, self.device, self.shapes = TorchKernels(), FOUND[0].device, shapes
        self.sizes = [int(np.prod(shape)) for shape in shapes]
        self.flat = [(shape[0], int(np.prod(shape[1:]))) if shape else (1, 1) for shape in shapes]
        self.ranks = [min(rank, *shape) for shape in self.flat]
        empty = lambda n, r: [torch.zeros(n, r, device=self.device)]  # noqa: E731
        payloads = [[empty(s[i], r) for s, r in zip(self.flat, self.ranks, strict=True)] for i in range(2)]
        self.wires = [Layout.from_payloads(k, payload, True) for payload in payloads]
        placed = [[*one, *other] for one, other in zip(*(w.placed() for w in self.wires), strict=True)]
        self.codecs = [low_rank_codecs.LowRank(self.sizes, placed, torch.device(self.device)) for _ in range(2)]
        self.q = [torch.zeros(s[1], r, device=self.device) for s, r in zip(self.flat, self.ranks, strict=True)]
        self.next_q = [[torch.zeros_like(q) for q in self.q] for _ in range(2)]

    def exchange(self, gradients, residuals, first=False, step=7):
        """Return each rank's means, residuals, kept Q, and flags of the gradients and of both sums."""
        where = lambda tensors: np.array([t.data_ptr() for t in tensors], np.uint64)  # noqa: E731
        streams = np.array([Stream(9 + i, step).words for i in range(len(self.shapes))], np.uint32)
        factors, total, flags = np.full((len(self.shapes), 2), [0.5, 2], np.float32), [], []
        following = [[torch.empty_like(g) for g in one] for one in gradients]
        for codec, given, kept, xs, q in zip(self.codecs, gradients, residuals, following, self.next_q, strict=True):
            codec.start_from(where(self.q) * (not first), where(q))
            rows = np.stack([where(given), where(kept), where(xs)], 1)
            total.append(torch.zeros(self.wires[0].length, device=self.device))
            header = self.wires[0].device_header([1.0] * len(self.shapes), [])
            flags.append([codec.encode(rows, factors, total[-1].data_ptr(), FINITE, streams, header)])
        self.started = self.codecs[0].right.clone()
        for i, (wire, last) in enumerate(zip(self.wires, (False, True), strict=True)):
            sums = total[0] + total[1]
            for rank, codec in enumerate(self.codecs):
                flags[rank].append(codec.receive(sums, 2, last).clone())
                if not last:
                    total[rank] = torch.zeros(self.wires[1].length, device=self.device)
                    codec.follow(
                        total[rank], self.wires[i + 1].device_header([1.0, *[0.0] * (len(self.shapes) - 1)], [])
                    )
            assert sums[wire.statuses][0] in (2.0, float("inf"))
        outs = [[torch.empty_like(g) for g in one] for one in gradients]
        for codec, out in zip(self.codecs, outs, strict=True):
            codec.decode(where(out), (), 2, 1.0)
        return outs, following, self.next_q, flags

    def column(self, factors, i, side):
        """A transposed factor of a variable as it was written."""
        from grace.kernels.triton import low_rank_buckets as of

        at, step = ((of.LEFT, of.LEFT_STEP), (of.RIGHT, of.RIGHT_STEP))[side]
        shapes = self.codecs[0].shapes
        at, step, n = int(shapes[i, at.value]), int(shapes[i, step.value]), self.flat[i][side]
        whole = factors[at : at + self.codecs[0].most * step].view(-1, step)
        assert not whole[:, n:].any()  # what tiles read beside it
        return whole[: self.ranks[i], :n].T.cpu().numpy()


def given(ranks, seed):
    made = [data("gaussian", (int(np.prod(shape)),), seed + i).reshape(shape) for i, shape in enumerate(ranks.shapes)]
    return elsewhere([torch.from_numpy(x) for x in made], shifted=seed == 1)


def matrix(x, shape):
    return x.cpu().numpy().reshape(shape)


@pytest.mark.parametrize("first", [False, True])
def test_two_ranks_decode_the_references_products_to_the_same_bits(first):
    ranks = Ranks(MATRICES)
    for i, q in enumerate(ranks.q):
        q.copy_(torch.from_numpy(data("gaussian", tuple(q.shape), 90 + i)))
    ranks.q[0][:, 1], ranks.q[4][0, 0] = 0, 2 * LARGEST_FACTOR
    gradients, residuals = [given(ranks, 1), given(ranks, 100)], [given(ranks, 200), given(ranks, 300)]
    outs, left, kept, flags = ranks.exchange(gradients, residuals, first)
    for i, (shape, rank) in enumerate(zip(ranks.flat, ranks.ranks, strict=True)):
        stream, q = Stream(9 + i, 7), ranks.q[i].cpu().numpy()
        q = REFERENCE.random_matrix(stream, q.shape, q) if first else REFERENCE.renew_columns(q, stream)
        assert (ranks.column(ranks.started, i, 1) == q).all()
        xs = [matrix(0.5 * r[i] + 2 * g[i], shape) for g, r in zip(gradients, residuals, strict=True)]
        mean = (xs[0].astype(np.float64) + xs[1]) / 2
        p = np.linalg.qr(mean @ q)[0] if rank else np.zeros((shape[0], 0))
        q = mean.T @ p
        for x, out, rest, own in zip(xs, outs, left, kept, strict=True):
            np.testing.assert_allclose(matrix(out[i], shape), p @ q.T, atol=2e-5 * np.sqrt(shape[1]))
            assert (matrix(rest[i], shape) == x - matrix(out[i], shape)).all()
            np.testing.assert_allclose(np.abs(matrix(own[i], q.shape)), np.abs(q), atol=1e-4 * np.sqrt(shape[0] + 1))
        assert outs[0][i].equal(outs[1][i])
        assert kept[0][i].equal(kept[1][i])
    assert all(bool((flag == 1).all()) for one in flags for flag in one)
    if first:
        again, *_ = ranks.exchange(gradients, residuals, first)
        assert all(one.equal(other) for one, other in zip(outs[0], again[0], strict=True))


@pytest.mark.parametrize("kind", ["heavy", "zeros", "denormal", "rank-one", "one-zero-column", "large", "nan"])
def test_columns_of_any_sum_become_orthonormal_and_span_what_they_did(kind):
    ranks = Ranks([(9, 6), (5, 5), (1, 1), (200, 4)], rank=4)
    (codec, _), (wire, _) = ranks.codecs, ranks.wires
    wanted = []
    for shape, k in zip(ranks.flat, ranks.ranks, strict=True):
        x = data(kind if kind in ("heavy", "zeros", "denormal") else "gaussian", (shape[0], k))
        x = np.repeat(x[:, :1], k, axis=1) if kind == "rank-one" else x * np.float32(1e30) if kind == "large" else x
        x[:, 0] = 0 if kind == "one-zero-column" else np.nan if kind == "nan" and k < 4 else x[:, 0]
        wanted.append(x)
    sums = wire.pack([[torch.from_numpy(x).to(ranks.device)] for x in wanted], [1.0] * 4)
    assert codec.receive(sums, 1, False).tolist() == [float(np.isfinite(x).all()) for x in wanted]
    for i, x in enumerate(wanted):
        q = ranks.column(codec.left, i, 0).astype(np.float64)
        np.testing.assert_allclose(q.T @ q, np.eye(q.shape[1]), atol=2e-6)
        if np.isfinite(x).all():
            assert np.abs(q @ (q.T @ x) - x).max() <= 1e-5 * np.abs(x).max() + 1e-44


SHAPES = [(70, 140), (40, 11, 3), (33,)]


@pytest.mark.parametrize(
    ("spec", "far", "late"),
    [("powersgd(rank=2)", False, False), ("powersgd(warm_start=false)", True, False), ("powersgd", True, True)],
)
def test_exchanges_agree_with_the_cpus(spec, far, late, monkeypatch):
    """With variables that are missing, steps that overflow or are given up, gradients of 16 bits, and strides."""
    dtype = torch.bfloat16 if far else torch.float32
    there, here = (Trained(spec, "residual(beta=0.9)", SHAPES, apart=False, dtype=dtype) for _ in range(2))
    there.strided = far
    for step in range(6):
        gradients = [torch.from_numpy(data("gaussian", s, 10 * step + i)).to(dtype) for i, s in enumerate(SHAPES)]
        present = [step != 1, True, True]
        gradients[0] *= present[0]
        if step == 3:
            gradients[1][0, 0, 0] = np.inf
        before = there.remembered()
        with monkeypatch.context() as patched:
            by_triton(patched)
            if far and INTERPRETED:
                patched.setattr(type(FOUND[0].kernels), "on_device", lambda self, x: True)
            patched.setattr(RoundTrip, "headers_after_use", late)  # as of DDP's hook
            found = there.step(elsewhere(gradients, shifted=step == 4), present, discard=step == 2)
        wanted = here.step(gradients, present, discard=step == 2)
        if step == 2:
            assert there.remembered() == before
            continue
        for name, mean in wanted.items():
            if mean is None:
                assert found[name] is None
                continue
            one, other = np.frombuffer(found[name], np.float32), np.frombuffer(mean, np.float32)
            np.testing.assert_allclose(one, other, atol=2e-4)
            assert np.isnan(one).all() == (step == 3 and name == "v1")
        if step == 3:
            assert there.remembered() == before
    for key, value in here.remembered().items():
        one, other = np.frombuffer(there.remembered()[key], np.float32), np.frombuffer(value, np.float32)
        np.testing.assert_allclose(*((one, other) if "memory" in key[0] else np.abs([one, other])), atol=1e-3)
    assert isinstance(there.codecs[0], FusedRounds)


@pytest.mark.parametrize("spec", ["powersgd(rank=9)", "powersgd"])
def test_what_is_too_wide_for_the_kernels_goes_variable_by_variable(spec, monkeypatch):
    by_triton(monkeypatch)
    monkeypatch.setattr(low_rank_codecs, "WIDEST", 49)
    trained = Trained(spec, None, [(40, 50)], apart=False)
    for _ in range(2):
        trained.step(elsewhere([torch.ones(40, 50)], False), [True])
    assert not isinstance(trained.codecs[0], FusedRounds)


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter's loads and stores are counted")
@pytest.mark.parametrize(("spec", "most"), [("powersgd", 29), ("powersgd(rank=4)", 30.5)])
def test_memory_traffic_is_within_budgets(spec, most, monkeypatch):
    """12 bytes an element to make x, 4 for the second product, 12 to decode; and factors and partial sums."""
    by_triton(monkeypatch)
    shape = (256, 256)
    trained = Trained(spec, None, [shape], apart=False)
    (bucket,), gradient = trained.runner.buckets, torch.from_numpy(data("gaussian", shape))
    for _ in range(2):
        trained.step([gradient.clone()], [True])
    with counted() as traffic:
        trained.runner.start_round_trip(bucket, [gradient], [True])
        trained.runner.finish_step(lambda bucket: [gradient])
    assert 9 <= traffic.launches <= 10
    assert 28 < traffic.nbytes / gradient.numel() <= most
