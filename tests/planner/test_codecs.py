"""Times and errors of methods, measured over pretended ranks."""

import time

import numpy as np
import pytest
import torch

from grace.backends import simulated
from grace.communicators import Allgather, ReduceBroadcast
from grace.core.compressor import Compressor, Traits
from grace.errors import ConfigError
from grace.kernels.reference import Kernels
from grace.planner import codecs
from grace.planner.codecs import measure
from tests.support.passing import Passing
from tests.support.planners import measured

SHAPES = {"w": (60, 50), "wide": (40, 90), "b": (50,), "v": (7,)}
QUICK = 0.02


@pytest.fixture
def clock(monkeypatch):
    """Time passes while a method sleeps, and else not: a busy machine changes nothing."""
    found = Passing()
    for module in (codecs, simulated):  # the ranks that are pretended take no time, which is subtracted
        monkeypatch.setattr(module, "time", found)
    monkeypatch.setitem(globals(), "time", found)


def gradients(make=np.array):
    rng = np.random.default_rng(0)
    return {name: make(rng.standard_normal(shape).astype(np.float32)) for name, shape in SHAPES.items()}


class Slow(Compressor):
    """Takes half a millisecond for each variable to encode, and a whole one to decode it from each rank."""

    name = "slow"
    traits = Traits(category="quantization", memory="none", communicator="allgather", fixed_size=True)

    def compress(self, tensor, name):
        time.sleep(5e-4)
        return [tensor.astype("float16")], None

    def decompress(self, payload, ctx):
        time.sleep(1e-3)
        return payload[0].astype("float32")


@pytest.mark.usefixtures("clock")
def test_times_are_those_that_the_method_takes():
    slow = measure(Allgather(Slow()), gradients(), ranks=4, limit_seconds=0.2).codec
    encoding = slow.start.seconds(40, 10_000, 2) - slow.start.seconds(20, 10_000, 2)
    assert encoding == pytest.approx(0.01, rel=0.2)
    assert slow.finish.seconds(32, 3000, 2) > slow.start.seconds(32, 3000, 2) * 1.5


class OncePerBucket(Slow):
    """Takes 5 ms for a bucket: for that one of its variables which is its first."""

    name = "once_per_bucket"

    def compress(self, tensor, name):
        time.sleep(5e-3 * (name in ("w0", "x0")))
        return [tensor.astype("float16")], None


@pytest.mark.usefixtures("clock")
def test_what_a_bucket_takes_is_told_from_what_its_variables_take():
    given = {"w0": gradients()["w"], "wide": gradients()["wide"]}
    start = measure(Allgather(OncePerBucket()), given, ranks=2, limit_seconds=0.2).codec.start
    assert start.seconds(1, 10, 2) == pytest.approx(5e-3, rel=0.2)
    assert start.seconds(40, 10_000, 2) == pytest.approx(5e-3, rel=0.2)


class Uneven(Slow):
    """Takes 6 ms for a variable of 3,000 elements, but in one of ten steps, and half of one for a smaller one."""

    name = "uneven"
    calls = 0

    def compress(self, tensor, name):
        Uneven.calls += 1
        if Uneven.calls % 10:
            time.sleep(6e-3 if tensor.size >= 3000 else 5e-4)
        return [tensor.astype("float16")], None

    def decompress(self, payload, ctx):
        return payload[0].astype("float32")


@pytest.mark.usefixtures("clock")
def test_times_are_those_of_the_whole_model_and_not_the_shortest():
    given = {f"w{i}": gradients()["w"] for i in range(3)}
    found = measure(Allgather(Uneven()), given, ranks=2, limit_seconds=0.5).codec
    assert found.start.seconds(3, 9000, 2) == pytest.approx(14e-3, rel=0.5)


class Seen(Slow):
    """Notes the shapes that it gets."""

    name = "seen"
    shapes: list = []

    def compress(self, tensor, name):
        Seen.shapes.append(tensor.shape)
        return [tensor.astype("float16")], None


def test_the_work_of_choosing_a_part_grows_with_the_variables_and_not_with_their_square(monkeypatch):
    counts = []
    numel = codecs._numel
    monkeypatch.setattr(codecs, "_numel", lambda x: counts.append(x) or numel(x))

    def count(variables):
        counts.clear()
        measure(Allgather("topk"), {f"w{i}": np.ones((8, 8), np.float32) for i in range(variables)}, 2, 0, QUICK)
        return len(counts)

    assert count(400) < 5 * count(100)


def test_a_part_of_a_large_model_has_whole_tensors():
    """A low-rank method needs them: its products have both sides, and a few rows of each matrix would tell little."""
    given = {f"w{i}": np.ones((512, 128), np.float32) for i in range(40)}
    Seen.shapes.clear()
    measure(Allgather(Seen()), given, ranks=2, limit_seconds=1e-9)
    whole = Seen.shapes.count((512, 128))
    assert 0 < whole < 40 * codecs.WARM
    assert set(Seen.shapes) <= {(512, 128), (2, 128), (codecs.SMALL // 128, 128)}


def test_what_is_lost_is_what_the_method_says():
    x = gradients()
    found = measured("topk(ratio=0.1)", x)
    for name in ("w", "wide"):
        least = np.sort(np.square(x[name].ravel()))[: round(0.9 * x[name].size)].sum()  # the largest travel
        assert found.errors[name] == pytest.approx(least / np.square(x[name]).sum(), rel=1e-4)
    exact = measured("none", x)
    assert exact.errors == dict.fromkeys(x, 0.0)
    assert exact.method == "allreduce, none, none"


def test_random_methods_are_averaged_and_repeatable():
    x = gradients()
    one, same, other = (measured("qsgd", x, 2, seed).errors["w"] for seed in (0, 0, 9))
    assert one == same != other
    assert 0 < one < 1
    assert one == pytest.approx(other, rel=0.2)


def test_what_the_method_leaves_dense_loses_nothing():
    found = measured("powersgd(rank=2)", gradients())
    assert set(found.errors) == {"w", "wide"}
    assert 0 < found.errors["w"] < 1
    assert found.codec.middle.seconds(2, 6600, 2) > 0  # two rounds


def test_bits_are_measured_where_the_data_decide():
    x = {"w": np.where(np.arange(4000) % 4 == 0, 5.0, 1e-6).astype(np.float32)}
    found = measured("threshold(value=1.0)", x)
    assert 0.25 * 32 < found.codec.bits < 0.25 * 64 + 2  # a quarter: values, and where they are
    assert measured("topk", gradients()).codec.bits is None


@pytest.mark.parametrize("make", [np.array, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("spec", ["topk", "efsignsgd", "none", "fp16", "powersgd(rank=2)"])
def test_gradients_are_not_changed(make, spec):
    given, before = gradients(make), gradients()
    measured(spec, given, ranks=3)
    for name, x in before.items():
        np.testing.assert_array_equal(np.asarray(given[name]), x)


@pytest.mark.parametrize(
    "choice", ["scatter_reduce, qsgd, none", "scatter_merge, topk, residual", "broadcast, signsgd, none"]
)
def test_every_communicator_can_be_measured(choice):
    found = measured(choice, gradients(), ranks=3)
    assert found.method == choice
    assert found.codec.finish.seconds(3, 1e5, 3) > 0


def test_gradients_of_several_dtypes_are_measured_though_they_share_no_bucket():
    first, *others = gradients().items()
    found = measured("none", {first[0]: first[1].astype(np.float64), **dict(others)}, ranks=2)
    assert set(found.errors) == set(SHAPES)
    assert found.codec.finish.seconds(3, 1e5, 2) > 0


def test_the_destination_is_who_computes():
    found = measure(ReduceBroadcast("topk", destination=5), gradients(), ranks=6, limit_seconds=QUICK)
    assert found.method == "reduce_broadcast, topk, residual"
    assert found.codec.middle.seconds(3, 1e5, 3) > 0


def test_of_large_variables_a_part_is_taken(monkeypatch):
    monkeypatch.setattr("grace.planner.codecs.SMALL", 64)
    x = {"w": np.tile(np.random.default_rng(0).standard_normal((1, 500)), (2000, 1)).astype(np.float32)}
    found = measured("fp16", x, ranks=2, limit_seconds=1e-3)  # the errors of all rows are alike
    lost = x["w"] - x["w"].astype(np.float16).astype(np.float32)
    expected = np.square(lost).sum() / np.square(x["w"]).sum()
    assert found.errors["w"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("choice", "given", "said"),
    [
        ("powersgd", {"b": np.ones(9, np.float32)}, "makes none of these 1 gradients smaller"),
        ("topk", {"w": np.full((50, 50), np.nan, np.float32)}, r"gradient of 'w' holds a NaN"),
        ("topk", {"w": np.ones((50, 50), np.int32)}, r"gradient of 'w': it is of dtype int32"),
    ],
)
def test_what_cannot_be_measured_is_refused(choice, given, said):
    with pytest.raises(ConfigError, match=said):
        measured(choice, given)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("choice", "grows"),
    {
        "allreduce, none, none": set(),
        "scatter_reduce, qsgd, none": set(),
        "allgather, qsgd, none": {"finish"},
        "reduce_broadcast, none, none": {"middle"},
    }.items(),
)
def test_only_what_is_done_with_every_ranks_payload_grows_with_the_ranks(choice, grows):
    """Noise elsewhere would be hundreds of times as much for a thousand ranks."""
    large = {"w": np.ones((512, 512), np.float32), "b": np.ones(64, np.float32)}
    codec = measured(choice, large, ranks=8, limit_seconds=0.2).codec
    found = {part for part in ("start", "middle", "finish") if getattr(codec, part).peer > 0}
    assert found <= grows
    if choice.startswith("allgather"):  # eight decodings against two
        assert found


@pytest.mark.usefixtures("clock")
def test_times_are_those_of_the_device_and_not_of_its_launches(monkeypatch):
    """A device goes on after the host has launched its work: the time passes where the host waits."""
    monkeypatch.setattr(Kernels, "wait_for", lambda self, x: time.sleep(1e-3))
    found = measure(Allgather("qsgd"), gradients(), 2, 0, QUICK).codec
    assert found.start.call + found.start.variable + found.start.element == pytest.approx(1e-3, rel=0.1)


def test_waiting_for_a_device_reads_one_number_and_a_cpu_is_not_waited_for(monkeypatch):
    read, x = [], np.arange(6.0).reshape(2, 3)
    monkeypatch.setattr(Kernels, "read", lambda self, tensors: read.extend(tensors))
    Kernels().wait_for(x)
    assert not read
    monkeypatch.setattr(Kernels, "on_device", lambda self, x: True)
    Kernels().wait_for(x)
    assert [tensor.tolist() for tensor in read] == [[0.0]]
