"""Whole exchanges by Triton's codecs of buckets: the bits of CPUs, few launches, and hardly more memory traffic than
gradients, residuals and payloads are.

They run on a GPU where there is one, and else in Triton's interpreter, which test_triton.py starts: its pointers are
addresses of the host.
"""

import contextlib
import copy
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grace.exchange.fused_codec import FusedCodec
from grace.kernels import index_coding
from grace.kernels.torch import fused
from grace.kernels.triton import launching
from grace.kernels.triton.bucket_tables import SECOND
from grace.torch.cuda_graphs import ending_on_device
from tests.support.drawing import THOROUGH
from tests.support.far import as_far
from tests.support.implementations import INTERPRETED, OTHERS
from tests.support.pretended import Pretended
from tests.support.traffic import counted
from tests.support.trained import Trained, bits, drawn, fuses

pytest.importorskip("numba", reason="the CPU's are compiled")
FOUND = [param.values[0] for param in OTHERS if param.id == "triton"]
pytestmark = pytest.mark.filterwarnings("ignore:.*not a contraction", "ignore::RuntimeWarning")
SHAPES = [(20, 25), (), (0,), (2053,), (33,)]
"""Shapes of which one takes several programs of most kernels."""
LARGE = [(20, 25), (), (0,), (5003,), (33,)]
"""Shapes of which one takes several programs that read large buckets, or a sample."""
METHODS = [
    ("none", "residual"), ("bf16", "residual(beta=0.5)"), ("signsgd", None), ("signum", None),
    ("onebit", "efsignsgd"), ("natural", "residual"), ("qsgd", None), ("qsgd(levels=15)", "residual"),
    ("qsgd(levels=7, bucket_size=33, norm=l2)", "residual"), ("qsgd(levels=64, bucket_size=5000)", "residual"),
    ("terngrad(clip=1)", "residual"), ("dynamic8", "residual"), ("block(bits=4)", "residual"),
    ("block(bits=4, hadamard=32)", "residual"), ("block(format=fp8, rounding=stochastic, block=37)", None),
    ("block(hadamard=32, block=4128)", "residual"), ("block(bits=3, scale=rms, block=37)", None),
    ("block(bits=2, scale=rms)", None), ("block(bits=4, scale=rms, block=4500)", None),
    ("topk(ratio=0.02)", None), ("topk(ratio=0.1, chunk=64)", None),
    ("randomk(ratio=0.1, unbiased=true)", "residual"),
]  # fmt: skip
"""A method for each kernel, and each branch of one."""
if THOROUGH or not INTERPRETED:
    METHODS += [
        ("fp16", None), ("efsignsgd", None), ("block(bits=3)", "residual"), ("block(bits=2, block=33)", "residual"),
        ("block(bits=2, block=4992, hadamard=32)", "none"), ("block(bits=2, hadamard=32)", None),
        ("topk(ratio=0.2)", None), ("topk(ratio=0.02, chunk=1024)", "none"),
        ("randomk(ratio=0.1)", None), ("randomk(ratio=0.1, unbiased=true)", None),
    ]  # fmt: skip


def by_triton(monkeypatch):
    """Compute the CPU's tensors in the interpreter from here on, by the kernels of GPUs."""
    if INTERPRETED:
        monkeypatch.setattr(fused, "_FUSED", FOUND[0].kernels)


def elsewhere(gradients, shifted):
    """On the device; ``shifted``: each begins 4 bytes behind a multiple of 16."""
    moved = [x.contiguous().to(FOUND[0].device) for x in gradients]
    return [torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape) for x in moved] if shifted else moved


@pytest.mark.parametrize(("spec", "memory"), METHODS)
def test_exchanges_have_the_bits_of_the_cpu(spec, memory, monkeypatch):
    shapes = LARGE if re.search(r"=4\d{3}|=5000|topk", spec) else SHAPES
    there, here = (Trained(spec, memory, shapes, apart=False) for _ in range(2))
    rng = np.random.default_rng(1)
    for step in range(3):
        gradients, present = drawn(rng, shapes, torch.float32)
        if step == 1:
            gradients[0][0, 0], present[0] = np.nan, True
        with monkeypatch.context() as patched:
            by_triton(patched)
            found = there.step(elsewhere(gradients, shifted=step == 0), present)
        wanted = here.step(gradients, present)
        if step == 1:  # which of several NaN it is says nothing
            found.pop("v0"), wanted.pop("v0")
        assert found == wanted
        assert there.remembered() == here.remembered()
    assert all(isinstance(codec, FusedCodec) and codec.kernel_codec.on_device for codec in there.codecs)


@pytest.mark.parametrize(
    ("spec", "memory"),
    [("none", "none"), ("bf16", None), ("onebit", None), ("qsgd(levels=7)", None), ("block(hadamard=32)", None)],
)
def test_what_several_ranks_sent_has_the_mean_of_the_cpu(spec, memory, monkeypatch):
    backends = Pretended(3, 1), Pretended(3, 1)  # of torch's tensors, which all ranks send alike
    there, here = (Trained(spec, memory, [(33, 7)], False, one, communicator="allgather") for one in backends)
    rng = np.random.default_rng(1)
    for _ in range(2):
        gradients = [torch.tensor(rng.standard_normal((33, 7))).float()]
        with monkeypatch.context() as patched:
            by_triton(patched)
            found = there.step(elsewhere(gradients, shifted=False), [True])
        assert found == here.step(gradients, [True])
    assert all(isinstance(codec, FusedCodec) for codec in there.codecs)


@pytest.mark.parametrize(
    "spec", ["threshold(value=0.5, capacity=0.2)", *(["threshold(value=9, capacity=1)"] if THOROUGH else [])]
)
def test_what_is_above_a_threshold_has_the_bits_of_torchs_operations(spec, monkeypatch):
    there, here = (Trained(spec, None, LARGE, apart=apart) for apart in (False, True))
    rng = np.random.default_rng(2)
    for step in range(5):
        gradients = [torch.tensor(rng.standard_normal(shape) * 4.0 ** (step - 3)).float() for shape in LARGE]
        present = [bool(here) for here in rng.random(len(LARGE)) > 0.2]
        if step == 3:
            gradients[0][0, 0], present[0] = np.nan, True
        with monkeypatch.context() as patched, as_far():
            by_triton(patched)
            found = there.step(elsewhere(gradients, shifted=step == 1), present)
        with as_far(plain=True), np.errstate(invalid="ignore"):
            wanted = here.step(gradients, present)
        if step == 3:
            found.pop("v0"), wanted.pop("v0")
        assert found == wanted
        assert there.remembered() == here.remembered()
    assert all(isinstance(codec, FusedCodec) and codec.kernel_codec.on_device for codec in there.codecs)


def test_positions_of_32_bits_are_the_cpus_too(monkeypatch):
    monkeypatch.setattr(index_coding, "NARROW", 1 << 10)  # as of tensors of more than 2^16
    test_exchanges_have_the_bits_of_the_cpu("topk(ratio=0.02)", "residual", monkeypatch)


ABOVE = {
    "few": lambda rng, shape: rng.standard_normal(shape) * (rng.random(shape) < 0.02),
    "more than there is room for": lambda rng, shape: rng.standard_normal(shape),
    "ties": lambda rng, shape: rng.choice([-2, -1, 0.25, 1, 2], shape),
    "ties at the last place": lambda rng, shape: rng.choice([-2, 2, 3], shape, p=[0.5, 0.44, 0.06]),
    "as many as there is room for": lambda rng, shape: np.arange(math.prod(shape)).reshape(shape) % 10 == 3,
    "none": lambda rng, shape: rng.random(shape) / 4,
    "the threshold itself": lambda rng, shape: np.where(rng.random(shape) < 0.05, 0.5 + 2**-24, 0.5),
    "another scale": lambda rng, shape: rng.standard_normal(shape),
}  # fmt: skip


def test_what_is_above_a_threshold_has_its_wire_too(monkeypatch):
    """Entries, what fills their room, how many there are, and statuses; of positions of 16 bits and of 32."""
    monkeypatch.setattr(index_coding, "NARROW", 1 << 11)
    monkeypatch.setattr(launching, "PROGRAMS", 2)
    shapes, rng, counts = [(2503,), (), (23, 7), (7,), (2047,)], np.random.default_rng(1), []
    given = "threshold(value=0.5, capacity=0.1)", "none", shapes
    there, here = (Trained(*given, apart) for apart in (False, True))
    mine, other = (max(one.runner.buckets, key=lambda bucket: len(bucket.variables)) for one in (there, here))
    for kind, draw in {"first": ABOVE["few"], **ABOVE}.items():
        gradients = [torch.tensor(draw(rng, shape)).float() for shape in shapes]
        present = [True, kind != "ties", True, kind != "few", True]
        gradients = [g if is_there else torch.zeros_like(g) for g, is_there in zip(gradients, present, strict=True)]
        if kind == "another scale":
            rescaled(there), rescaled(here)
        with monkeypatch.context() as patched, as_far():
            by_triton(patched)
            found = there.step(elsewhere(gradients, shifted=kind == "ties"), present)
        with as_far(plain=True):
            assert found == here.step(gradients, present), kind
        assert there.remembered() == here.remembered(), kind
        own, plain = mine.program.codec, other.program.codec
        assert bits(own.buffer) == bits(plain.buffer), kind
        place = own.layouts[0].placed()[0][2].offset
        counts.append(int(own.buffer[place : place + 4].view(torch.int32)))
    assert {0, 250} < set(counts)
    assert isinstance(own, FusedCodec)
    assert not isinstance(plain, FusedCodec)


def the_whole(trained):
    return trained.remembered()


def of_one(trained):
    residual = trained.runner.communicators[0].memory.recall("v2")[1]
    return None if residual is None else bits(residual)


def a_copy(trained):
    memory = copy.deepcopy(trained.runner.communicators[0].memory)
    return sorted(memory.state), bits(memory.residual_tensors("v2")[0])


def restored(trained):
    saved = trained.runner.state()
    for kind, component in trained.runner.components:
        component.state.clear()
        component.state.update(saved.get(kind, {}))
        component.state.commit()


def rescaled(trained):
    trained.runner.rescale(2 * trained.runner.context.loss_scale)


def rejoined(trained):
    """Wires are laid out anew, and the next codec has buffers of its own."""
    for bucket in trained.runner.buckets:
        bucket.program = None


def apart(trained):
    """A step variable by variable."""
    for bucket in trained.runner.buckets:
        fuses(bucket, False)


def without_updates(trained):
    trained.lr = 0.0


SIGNS = {
    "nobody": {},
    "an overflow": {4: ["overflow"]},
    "who reads between steps": {3: [the_whole], 4: [of_one], 5: [a_copy]},
    "who reads after an overflow": {3: ["overflow"], 4: [the_whole], 5: ["overflow"], 6: [of_one]},
    "who reads before an overflow and after": {3: [of_one, "overflow"], 4: [of_one]},
    "steps that are dropped": {3: ["dropped"], 5: [a_copy, "dropped"]},
    "steps by variable": {3: [apart], 5: [apart, "overflow"]},
    "a checkpoint": {3: [restored], 5: ["overflow"], 6: [restored]},
    "other ranks": {3: [rejoined, without_updates], 5: ["overflow"], 6: [rejoined]},
    "another loss scale": {3: [rescaled], 5: [rescaled, "overflow"]},
    "no learning rate": {3: [without_updates], 4: [without_updates, the_whole]},
}


@pytest.mark.parametrize("reader", SIGNS)
def test_residuals_of_signs_are_finished_before_anybody_else_reads_them(reader, monkeypatch):
    shapes, place = [(4, 5), (0,), (53,), (33,)], list(SIGNS).index(reader)
    method = ["efsignsgd", "onebit"][place % 2], None
    there, here = (Trained(*method, shapes, apart=False) for _ in range(2))
    rng = np.random.default_rng(place)
    for step in range(8):
        gradients, present = drawn(rng, shapes, torch.float32)
        done, found = SIGNS[reader].get(step, []), []
        if "overflow" in done:
            gradients[0][0, 0], present[0] = np.nan, True
        for one in (there, here):
            one.lr = 0.5 if step % 3 else 0.25
            programs = [bucket.program for bucket in one.runner.buckets]
            with monkeypatch.context() as patched:
                by_triton(patched) if one is there else None
                told = [act(one) for act in done if callable(act)]
                mine = elsewhere(gradients, shifted=step == 3) if one is there else gradients
                means = one.step(mine, present, discard="dropped" in done)
            if apart in done:
                for bucket, program in zip(one.runner.buckets, programs, strict=True):
                    bucket.fuses, bucket.program = True, program
            if "overflow" in done:  # which of several NaN it is says nothing
                means.pop("v0")
            found.append((told, means))
        assert found[0] == found[1]
    assert there.remembered() == here.remembered()
    assert all(isinstance(codec, FusedCodec) and codec.kernel_codec.unfinished for codec in there.codecs)


@pytest.mark.parametrize(("settled", "reads"), [(1, ()), (2, (4,)), (3, (3, 5))])
def test_residuals_of_signs_are_the_cpus_where_steps_are_settled_on_the_device(settled, reads, monkeypatch):
    """CUDA graphs do so, and subtract whether somebody has read residuals in between or not."""
    there, here = (Trained("onebit", None, SHAPES, apart=False) for _ in range(2))
    session = SimpleNamespace(runner=there.runner, context=there.runner.context)
    rng, everyone = np.random.default_rng(1), [True] * len(SHAPES)
    for step in range(7):
        gradients, _ = drawn(rng, SHAPES, torch.float32)
        if step == 4:
            gradients[0][0, 0] = np.nan
        with monkeypatch.context() as patched, as_far():
            by_triton(patched)
            if step < settled:
                found = there.step(elsewhere(gradients, shifted=False), everyone)
            else:
                with ending_on_device(session, None):
                    found = there.step(elsewhere(gradients, shifted=False), everyone)
        wanted = here.step(gradients, everyone)
        assert step == 4 or found == wanted
        assert step not in (*reads, 6) or there.remembered() == here.remembered()


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter's loads and stores are looked at")
def test_bitmaps_begin_at_any_byte_and_are_written_by_aligned_words(monkeypatch):
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    by_triton(monkeypatch)
    shapes = [(500,), (33,), (100,)]
    there = Trained("topk(ratio=0.2)", None, shapes, apart=False)
    gradients, _ = drawn(np.random.default_rng(1), shapes, torch.float32)
    there.step(gradients, [True] * 3)  # variable by variable
    with counted() as traffic:
        there.step(gradients, [True] * 3)
    (codec,) = there.codecs
    assert {offset % 4 for offset in codec.kernel_codec.plan[:, SECOND.value].tolist()} > {0}
    assert traffic.launches == 9
    with pytest.raises(AssertionError, match="multiples of the size"), counted() as traffic:
        traffic.add(
            TensorHandle(np.array([6], np.uint64), tl.pointer_type(tl.int32)), TensorHandle(np.array([True]), tl.int1)
        )


N = 1 << 12
SEARCHED = 1 << 15
"""Elements of searches, of which samples are little, as on GPUs."""
TRAFFIC = {
    "none": (8.5, 8.5), "none/residual": (16.5, 12.5), "fp16": (6.5, 6.5), "fp16/residual": (14.5, 8.5),
    "qsgd": (5.5, 5.5), "qsgd/residual": (13.5, 5.5), "qsgd(norm=l2)": (5.5, 5.5), "qsgd(levels=7)": (5.5, 5),
    "natural": (5.5, 5.5),
    "natural/residual": (13.5, 5.5), "block/none": (5.5, 5.5), "block": (13.5, 5.5), "block(bits=4)": (13.5, 5),
    "block(bits=3)": (12.5, 5), "block(bits=2)": (12.5, 4.5),
    "block(format=fp8)": (13.5, 5.5), "block(bits=4, hadamard=32)": (13.5, 5), "signsgd": (4.5, 4.5),
    "signsgd/residual": (12.5, 4.5), "signum": (12.5, 4.5),
    "efsignsgd/none": (4.5, 4.5), "efsignsgd": (12.5, 4.5), "onebit": (12.5, 4.5),
    # codes need the scale of the whole variable: no codec reads x less often than twice, 8 bytes and the payload, and
    # with a residual both of what x is made of
    "terngrad": (8.75, 4.75), "terngrad/residual": (20.75, 4.75), "dynamic8": (9.5, 5.5),
    "dynamic8/residual": (21.5, 5.5),
    # TernGrad's formula without clipping, with scales of buckets: x is read once
    "qsgd(levels=1)": (4.5, 4.5), "qsgd(levels=1)/residual": (12.5, 4.5),
    # digit by digit, of lists of what is above a guess
    "topk(ratio=0.01)/none": (6, 4.5), "topk": (14.5, 4.5), "topk(ratio=0.1)/none": (9, 5),
    "topk(ratio=0.1)": (17.5, 5), "topk(ratio=0.3)": (24, 6), "topk(ratio=0.3)/none": (14.5, 6),
    "threshold(value=258)/none": (6, 4.5), "threshold(value=1)/none": (7, 5), "threshold(value=258)": (15.5, 5),
    "topk(chunk=1024)/none": (4.5, 4.5), "topk(chunk=1024)": (12.5, 4.5),
    "randomk/none": (4.5, 4.5), "randomk": (12.5, 4.5),
    # and of buckets that begin anywhere, or of which each takes several programs
    "qsgd(levels=7, bucket_size=37)": (9.5, 5), "qsgd(bucket_size=9000)": (9.5, 5.5),
}  # fmt: skip
"""The most bytes an element to encode, and to decode one rank's wire; of sums, which are looked at whether they are
finite before something is kept, those of a second read too. Decoding takes no more than the payload and 8, whatever it
is: a bucket's table, which stays in the caches, is counted apart."""
SEARCHES = {"topk(ratio=0.1)", "topk(ratio=0.3)", "threshold(value=258)"}
"""Methods that search many elements. `make thorough` runs all of them, and all memories that methods can do without."""
RUN = TRAFFIC if THOROUGH else [name for name in TRAFFIC if "/" not in name and name not in SEARCHES]


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter's loads and stores are counted")
@pytest.mark.parametrize("method", RUN)
def test_memory_traffic_and_launches_are_within_budgets(method, monkeypatch):
    by_triton(monkeypatch)
    monkeypatch.setattr(launching, "PROGRAMS", 1)  # of many elements, as on GPUs
    spec, _, memory = method.partition("/")
    searches = "threshold" in spec or ("topk" in spec and "chunk" not in spec)
    n = SEARCHED if searches else N
    trained = Trained(spec, memory or None, [(n,)], apart=False)
    (bucket,) = trained.runner.buckets
    (gradient,), _ = drawn(np.random.default_rng(1), [(n,)], torch.float32)

    def tables():
        codec = bucket.program.codec.kernel_codec
        return [codec.owners, *(copy.tensor for copy in codec.copies.values())]

    with as_far() if "threshold" in spec else contextlib.nullcontext():
        for _ in range(2):
            trained.step([gradient.clone()], [True])  # after which residuals have been kept
        with counted(tables) as encoding:
            trained.runner.start_round_trip(bucket, [gradient], [True])
        with counted(tables) as decoding:
            trained.runner.finish_step(lambda bucket: [gradient])
    assert 0 < encoding.launches <= (7 if searches else 3)
    assert 0 < decoding.launches <= 2 + (spec == "randomk")
    most = TRAFFIC[method]
    assert most[0] - 1 < encoding.nbytes / n <= most[0]
    assert most[1] - 1 < decoding.nbytes / n <= most[1]
    assert decoding.nbytes <= bucket.program.codec.buffer.nbytes + 8 * n
    assert 0 < sum(decoding.told.values()) < 256


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter's loads and stores are counted")
def test_what_fills_the_room_of_a_payload_is_not_read(monkeypatch):
    """The last program of a variable would read all of it, alone."""
    by_triton(monkeypatch)
    n = 2 * N - 33
    trained, gradient = Trained("threshold(capacity=1)", "none", [(n,)], apart=False), torch.zeros(n)
    gradient[::1000] = 1
    with as_far():
        for _ in range(2):
            trained.step([gradient.clone()], [True])
        (bucket,) = trained.runner.buckets
        trained.runner.start_round_trip(bucket, [gradient], [True])
        with counted() as decoding:
            trained.runner.finish_step(lambda bucket: [gradient])
    assert isinstance(bucket.program.codec, FusedCodec)
    assert 4 < decoding.nbytes / gradient.numel() < 4.5


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter's loads and stores are counted")
def test_wasteful_kernels_are_counted():
    from grace.kernels.triton.launching import launch
    from tests.support.triton_kernels import contracted, twice

    x = torch.ones(N)
    for kernel, nbytes in ((contracted, 8), (twice, 12)):
        with counted() as traffic:
            launch(kernel, N // 1024, torch.empty(N), x, N, *([0.3] if kernel is contracted else []), N=1024)
        assert (traffic.launches, traffic.nbytes) == (1, nbytes * N)
