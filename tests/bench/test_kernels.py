"""``grace bench kernels``: what it measures, against what is known in closed form; its table, files and refusals."""

import csv
import io
import json
import math
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import grace
from grace.bench.common import clocks, options
from grace.bench.common import results as record
from grace.bench.kernels import fidelity, gradients, peak_memory, timing
from grace.bench.kernels.kernels_command import TENSORS
from grace.bench.report import kernel_tables
from grace.errors import ConfigError
from tests.support.bench_runs import interrupted_bench
from tests.support.command import grace_program
from tests.support.passing import Passing

SHAPE, RANKS, DRAWS = (200, 300), 4, 16
KEYS = {
    *("method", "tensor", "elements", "device", "copy_ms", "encode_ms", "decode_ms", "memory_ms"),
    *("encode_copies", "decode_copies", "memory_copies", "encode_gbps", "decode_gbps", "bits_per_element"),
    *("vnmse", "aggregate_vnmse", "bias", "peak_extra_bytes"),
}
COUNTED = peak_memory.peak_bytes(int) is not None
HUGE_PAGE = 2 << 20
counted = pytest.mark.skipif(not COUNTED, reason="this system does not count a process's peak memory")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Use one thread, as the command does; then busy machines do not wait for each other's threads, either."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=TENSORS, scope="module")
def tensors(request) -> list[torch.Tensor]:
    """A gradient of each kind for each of 4 ranks."""
    return gradients.KINDS[request.param](SHAPE, RANKS)


def wide(tensor: torch.Tensor) -> np.ndarray:
    return np.float64(tensor.numpy())


def square(x) -> float:
    return float(np.sum(np.float64(x) ** 2))


# -- the command -------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_a_run_gives_tables_and_files(tmp_path):
    specs = ["none", "fp16", "topk(ratio=0.1)", "signsgd", "powersgd(rank=2)"]
    args = ["--size", "40k", "--repeats", "1", "--tensors", "gaussian,captured", "--out", str(tmp_path)]
    out, err = grace_program("bench", "kernels", *args, "--methods", ", ".join(specs))
    assert err == ""
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    results = record.load(tmp_path)
    assert results.kind == "kernels"
    assert results.complete
    assert results.command.startswith("grace bench kernels --size 40k")
    assert results.settings["elements"] == 200 * 200
    assert results.settings["copy_gbps"] > 0
    assert [(row["tensor"], row["method"]) for row in results.rows] == [
        (tensor, spec) for tensor in ("gaussian", "captured") for spec in specs
    ]
    for row in results.rows:
        assert set(row) >= KEYS
        assert row["bits_per_element"] == pytest.approx(grace.make("compressor", row["method"]).wire_bits((200, 200)))
        for part in ("encode", "decode", *(["memory"] if row["memory"] != "none" else [])):
            assert row[f"{part}_copies"] == pytest.approx(row[f"{part}_ms"] / row["copy_ms"])
        assert row["decode_gbps"] == pytest.approx(4 * 200 * 200 / row["decode_ms"] / 1e6)
        assert (row["peak_extra_bytes"] is not None) == COUNTED
    lines = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [float(line["vnmse"]) for line in lines] == [row["vnmse"] for row in results.rows]
    words = [line.split() for line in out.splitlines()]
    for row in results.rows[:5]:
        shown = next(line for line in words if line[:1] == [row["method"]])
        assert float(shown[1]) == pytest.approx(row["bits_per_element"], rel=0.005)
        assert float(shown[2].replace(",", "")) == pytest.approx(row["encode_copies"], rel=0.006)
    shown = next(line for line in words if line[:2] == ["topk(ratio=0.1)", "gaussian"])
    assert float(shown[2]) == pytest.approx(results.rows[2]["vnmse"], rel=0.005)
    assert ["signsgd*", "gaussian"] in [line[:2] for line in words]  # votes are marked
    assert "*: the aggregate is a vote" in out
    results.rows = [row for row in results.rows if row["method"] != "signsgd"]
    console = Console(width=80, file=io.StringIO())
    kernel_tables.show(console, results)
    assert "*:" not in console.file.getvalue()


@pytest.mark.ranks
def test_an_interrupted_run_keeps_what_is_finished(tmp_path):
    args = ["kernels", "--size", "1M", "--methods", "all", "--repeats", "50"]
    code, err, results = interrupted_bench(*args, out=tmp_path, by=signal.SIGTERM)
    assert code == 130
    assert 0 < len(results.rows) < 60
    assert not results.complete
    # a compiler that is interrupted may complain before
    assert err.splitlines()[-1] == f"grace bench kernels: interrupted; what is finished is in {tmp_path}"


@pytest.mark.parametrize("text", ["", "0", "-5", "1.5", "25MB", "1e", "nan", "0x10", "²M"])
def test_sizes_that_are_none(text):
    with pytest.raises(ConfigError, match="as in 4096"):
        options.size(text)


# -- errors ------------------------------------------------------------------------------------------------


def test_no_compression_has_no_error(tensors):
    found = fidelity.errors("none", tensors, DRAWS)
    assert found["vnmse"] == 0
    assert found["bias"] < 1e-7  # the mean is in float32
    assert found["aggregate_vnmse"] < 1e-14


def test_topk_leaves_the_energy_of_the_rest(tensors):
    def kept(x):
        smallest = np.sort(np.abs(x).ravel())[-x.size // 10]
        return np.where(np.abs(x) >= smallest, x, 0)

    xs = [wide(x) for x in tensors]
    mean, sent = np.mean(xs, axis=0), np.mean([kept(x) for x in xs], axis=0)
    found = fidelity.errors("topk(ratio=0.1)", tensors, DRAWS)
    assert found["vnmse"] == pytest.approx(1 - square(kept(xs[0])) / square(xs[0]), rel=1e-6)
    assert found["aggregate_vnmse"] == pytest.approx(square(sent - mean) / square(mean), rel=1e-5)
    assert found["bias"] == pytest.approx(math.sqrt(square(sent - mean) / square(mean)), rel=1e-5)
    assert found["bias_floor"] == 0
    assert found["draws"] == 2  # no randomness: more would be the same


def test_a_vote_is_as_wrong_as_signs_are(tensors):
    xs = [wide(x) for x in tensors]
    signs = [np.where(x >= 0, 1.0, -1.0) for x in xs]
    mean, vote = np.mean(xs, axis=0), np.where(np.sum(signs, axis=0) >= 0, 1.0, -1.0)
    found = fidelity.errors("signsgd", tensors, DRAWS)
    assert found["vnmse"] == pytest.approx(square(signs[0] - xs[0]) / square(xs[0]), rel=1e-6)
    assert found["aggregate_vnmse"] == pytest.approx(square(vote - mean) / square(mean), rel=1e-5)


@pytest.mark.parametrize("levels", [1, 7, 127])
def test_qsgd_has_the_variance_of_stochastic_rounding_and_no_bias(tensors, levels):
    def variance(x):
        flat = np.concatenate([x.ravel(), np.zeros(-x.size % 512)]).reshape(-1, 512)
        level = np.abs(flat).max(axis=1, keepdims=True) / levels
        part = np.divide(np.abs(flat), level, out=np.zeros_like(flat), where=level > 0) % 1
        return float((part * (1 - part) * level**2).sum())

    xs = [wide(x) for x in tensors]
    found = fidelity.errors(f"qsgd(levels={levels})", tensors, DRAWS)
    assert found["vnmse"] == pytest.approx(variance(xs[0]) / square(xs[0]), rel=0.03)
    mean = square(np.mean(xs, axis=0))
    expected = sum(map(variance, xs)) / RANKS**2 / mean
    assert found["aggregate_vnmse"] == pytest.approx(expected, rel=0.03)
    assert found["draws"] == DRAWS
    assert found["bias"] == 0
    assert 0 < found["bias_floor"] < 0.6 * math.sqrt(expected / DRAWS)  # without the correction that would be the bias


def test_a_bias_under_noise_is_found(tensors):
    """TernGrad clips and then rounds without bias, with noise of the size of the gradient."""
    xs = [wide(x) for x in tensors]
    clipped = [np.clip(x, -2.5 * x.std(), 2.5 * x.std()) for x in xs]
    mean, expected = np.mean(xs, axis=0), np.mean(clipped, axis=0)
    true = math.sqrt(square(expected - mean) / square(mean))
    found = fidelity.errors("terngrad", tensors, draws=40)
    noise = math.sqrt(found["aggregate_vnmse"] / 40)
    assert noise > 0.08
    assert found["bias"] == pytest.approx(true, rel=0.2 if true < noise else 0.03)


def test_a_bias_of_most_of_the_gradient_is_exact(tensors):
    found = fidelity.errors("randomk(ratio=0.3)", tensors, draws=40)  # its mean is 0.3 x
    assert found["bias"] == pytest.approx(0.7, rel=0.03)
    assert found["vnmse"] == pytest.approx(0.7, rel=0.03)


def test_an_error_that_is_no_number_is_none():
    found = fidelity.errors("fp16", [torch.tensor([[1e6, 1.0]])], DRAWS)
    assert found["vnmse"] is None
    assert found["bias"] is None
    json.dumps(found, allow_nan=False)


REAL = ["none", "fp16", "bf16", "qsgd(levels=7)", "topk", "randomk", "signsgd", "efsignsgd", "powersgd(rank=2)"]
REAL += ["adaptive", "terngrad", "topk | efsignsgd"]


def test_simulated_ranks_aggregate_as_real_ones_do(two_ranks):
    answers = two_ranks.run(one_step_of_each)  # of two, the order of sums does not matter
    for method in REAL:
        simulated = fidelity.aggregate(method, gradients.gaussian(SHAPE, two_ranks.size), seed=5)
        for answer in answers:
            torch.testing.assert_close(answer[method], simulated, rtol=1e-5, atol=1e-5)


def one_step_of_each() -> dict[str, torch.Tensor]:
    found = {}
    for method in REAL:
        communicator = fidelity.communicator_of(method)
        context = grace.Context(5, fidelity.STEP, grace.rank(), grace.size())
        communicator.bind(context, grace.init())
        communicator.lr = 1.0
        x = gradients.gaussian(SHAPE, grace.size())[grace.rank()]
        found[method] = communicator.step(x, fidelity.NAME)
    return found


# -- gradients ---------------------------------------------------------------------------------------------


def test_gradients_are_the_same_in_every_run_and_differ_between_ranks(tensors, request):
    again = gradients.KINDS[request.node.callspec.params["tensors"]](SHAPE, RANKS)
    for rank, (one, other) in enumerate(zip(tensors, again, strict=True)):
        assert one.shape == SHAPE
        assert one.dtype == torch.float32
        assert one.is_contiguous()
        assert torch.equal(one, other)
        assert rank == 0 or not torch.equal(one, tensors[0])


def test_heavy_tails_are_heavy():
    def kurtosis(x):
        return float((x**4).mean() / (x**2).mean() ** 2)

    gaussian, heavy = (wide(gradients.KINDS[kind](SHAPE, 1)[0]) for kind in ("gaussian", "heavy-tailed"))
    assert kurtosis(gaussian) == pytest.approx(3, rel=0.1)
    assert kurtosis(heavy) > 10
    assert gaussian.std() == pytest.approx(1, rel=0.02)
    assert heavy.std() == pytest.approx(math.sqrt(3), rel=0.1)


def test_a_captured_gradient_is_one_of_a_batch():
    before = torch.get_rng_state()
    one, other = (wide(x) for x in gradients.captured((150, 120), 2))
    assert torch.equal(torch.get_rng_state(), before)
    values = np.linalg.svd(one, compute_uv=False)
    assert (values > 1e-6 * values[0]).sum() <= gradients.BATCH
    assert 0 < (one == 0).mean() < 0.9  # units that are off
    alike = float((one * other).sum() / math.sqrt(square(one) * square(other)))
    assert 0.2 < alike < 0.999  # another batch of the same task
    with pytest.raises(ConfigError, match="at most 6 ranks, not 7"):
        gradients.captured((150, 120), 7)


# -- time and memory ---------------------------------------------------------------------------------------


def test_times_are_medians_after_a_first_call(monkeypatch):
    calls = []

    def work():
        calls.append(None)
        clock.sleep(0.5 if len(calls) == 1 else 0.02)

    clock = Passing()
    monkeypatch.setattr(clocks, "time", clock)
    assert timing.times_ms({"work": work}, repeats=3)["work"] == pytest.approx(20)
    assert len(calls) == 4


@counted
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_the_peak_is_counted_whoever_allocates(kind):
    x = torch.ones(4_000_000)
    works = {"torch": lambda: x.half(), "numpy": lambda: x.numpy().astype(np.float16)}
    kept = []
    works[kind]()  # loads what it needs
    for work, per_element in (
        (works[kind], 2),
        (lambda: (works[kind](), works[kind](), None)[-1], 4),
        (lambda: [works[kind]() is None for _ in range(3)], 2),  # one after the other
        (lambda: kept.append(works[kind]()), 2),
    ):
        assert peak_memory.peak_bytes(work) / x.numel() == pytest.approx(per_element, rel=0.1)


@counted
@pytest.mark.parametrize(
    ("spec", "per_element"),
    [
        ("none", 0),
        ("signsgd", 1 / 8),
        ("qsgd", 1),
        ("fp16", 2),
        ("topk", 8 + 0.08),  # what is compressed now, and the residual of the step before
        ("powersgd", 8),
        ("dgc", 16 + 0.08),  # velocities and sums, now and before
    ],
)
def test_extra_memory_is_payload_scratch_and_state(spec, per_element):
    x = gradients.gaussian((2000, 2000))[0]
    uncounted = 0.12 * x.numel()
    for _ in range(3):  # a system that is short of memory may take back cold pages of this process meanwhile
        more = timing.extra_bytes(spec, x) - per_element * x.numel()
        # Selecting takes buffers of which little is written to: by chance of addresses, a huge page or none.
        if -uncounted < more < uncounted + (HUGE_PAGE if spec in ("topk", "dgc") else 0):
            return
    pytest.fail(f"{more:.0f} bytes more than {per_element} an element")


@counted
def test_counting_peaks_gives_the_heap_back():
    def data() -> int:
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        return next(1024 * int(words[1]) for words in lines if words[0] == "VmData:")

    peak_memory.peak_bytes(int)
    blocks = [torch.ones(100_000) for _ in range(100)]
    del blocks[::2]
    before = data()
    peak_memory.peak_bytes(int)
    blocks += [torch.ones(90_000) for _ in range(50)]  # into the holes: 18 MB
    assert data() - before < 5e6
    assert all(bool((block == 1).all()) for block in blocks)


def test_bits_count_all_rounds_and_what_depends_on_data():
    x = gradients.gaussian((30, 40))[0]
    assert fidelity.sent_bytes("powersgd(rank=2)", x) == 4 * 2 * (30 + 40)
    assert fidelity.sent_bytes("topk(ratio=0.01)", x) == 12 * (4 + 2)
    above = int((x.abs() > 2).sum())
    few, many = (fidelity.sent_bytes(f"threshold(value={value})", x) for value in (2, 1))
    assert 4 * above < few <= 8 * above < many
