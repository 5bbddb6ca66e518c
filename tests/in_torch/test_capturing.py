"""Steps that CUDA graphs can hold: settled on the device as on the host, and refused where the host decides. Where
there is no GPU a CPU's tensors stand for its own."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

import grace
from grace.errors import ConfigError
from grace.torch.cuda_graphs import CapturedStep, Counts, capture, check_capturable, ending_on_device
from tests.support.far import as_far
from tests.support.pools import on_ranks
from tests.support.training import Given, digest, distributed, gradients, made_up, refusal, state_of

SHAPES = {"matrix": (20, 30), "vector": (200,), "tiny": (1,)}
METHODS = ["none", "bf16", "qsgd", "topk(ratio=0.1)", "efsignsgd/residual", "powersgd(rank=2)"]
BAD = {2: float("nan"), 4: float("inf")}


def steps(spec, there):
    """Gradients and state after each step, some of which overflow; settled on the device from the third on."""
    method, _, memory = spec.partition("/")
    found = []
    with as_far() if there else contextlib.nullcontext():
        model = Given(SHAPES)
        options = {} if "powersgd" in method else {"communicator": "allgather"}
        optimizer = distributed(model, method, memory=memory or None, group_bytes=400, **options)
        check_anyway(optimizer._grace)
        for number in range(6):
            optimizer.zero_grad()
            given = made_up(SHAPES, number, grace.rank())
            if number in BAD and grace.rank() == 1:
                given["vector"].flat[3] = BAD[number]
            model.backward(given)
            parts = optimizer._grace.runner.step_components()
            kept = {n: id(v) for part in parts for n, v in part.state.committed.items()}
            with ending_on_device(optimizer._grace, None) if there and number > 1 else contextlib.nullcontext():
                optimizer.synchronize()
            if there and number > 1:  # in place, as a graph needs it
                parts = optimizer._grace.runner.step_components()
                assert kept == {n: id(v) for part in parts for n, v in part.state.committed.items()}
            means = {n: torch.nan_to_num(g, nan=1234.5) for n, g in gradients(model).items()}  # NaNs have many bits
            optimizer.step()
            found.append((digest(means), digest(state_of(optimizer))))
        optimizer.close()
    return found


def check_anyway(session):
    """Over gloo, which alone is refused."""
    with pytest.raises(ConfigError, match="is not NCCL"):
        check_capturable(session)


@pytest.mark.parametrize("spec", METHODS)
@on_ranks()
def test_a_step_that_is_settled_on_the_device_ends_as_on_the_host(spec):
    assert steps(spec, True) == steps(spec, False)


@pytest.fixture
def alone():
    """A linear layer's optimizer in one process, made by a method."""
    grace.init("local")
    made = []

    def make(method="topk(ratio=0.1)", optimizer=torch.optim.SGD, **options):
        model = torch.nn.Linear(8, 8)
        made.append(grace.DistributedOptimizer(optimizer(model.parameters(), lr=0.1), model, method, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    grace.shutdown()


def test_what_cannot_be_captured_is_refused_before_anything_is_done(alone):
    def said(*args, **options):
        return refusal(check_capturable, alone(*args, **options)._grace)

    assert "threshold(value=0.1) sends is not known" in said("threshold(value=0.1)")
    assert "topk(warmup_steps=9) sends is not known to be the same at every step" in said("topk(warmup_steps=9)")
    assert "the memory dgc reads" in said("topk(ratio=0.1)", memory="dgc")
    assert "backward_passes_per_step" in said(backward_passes_per_step=2)
    assert "give Adam capturable=True" in said(optimizer=torch.optim.Adam)
    with pytest.raises(ConfigError, match=r"takes a grace\.DistributedOptimizer"):
        capture(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), lambda: None)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="need all parameters on a GPU"):
            capture(alone(), lambda: None)


def test_a_parameter_without_a_gradient_is_refused(alone):
    optimizer = alone("qsgd")
    optimizer.param_groups[0]["params"][0].sum().backward()
    with (
        ending_on_device(optimizer._grace, None),
        pytest.raises(ConfigError, match="'bias' has no gradient in this step"),
    ):
        optimizer.synchronize()


def test_replays_are_counted_as_steps_and_the_capture_is_not(alone):
    optimizer = alone("qsgd")
    session = optimizer._grace
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def step():
        sum(p.sum() for p in parameters).backward()
        optimizer.step()

    step()
    one, counts = optimizer.traffic.elements, Counts(session)
    sent = dict(optimizer.traffic.payload_bytes)
    step()
    counts.subtract_capture()
    assert (session.context.step, session.context.updates, optimizer.traffic.steps) == (1, 1, 1)
    assert optimizer.traffic.payload_bytes == sent
    counts.add()
    assert (session.context.step, session.context.updates, optimizer.traffic.steps) == (2, 2, 2)
    assert optimizer.traffic.elements == 2 * one
    assert optimizer.traffic.payload_bytes == {name: 2 * n for name, n in sent.items()}


def test_replays_go_on_from_what_other_steps_and_checkpoints_left(alone):
    optimizer = alone("topk(ratio=0.1)")
    session = optimizer._grace
    (state,) = [part.state for part in session.runner.step_components() if part.kind == "memory"]
    parameters, seen, finished = [p for group in optimizer.param_groups for p in group["params"]], [], []

    def step():
        sum((p * torch.randn(p.shape)).sum() for p in parameters).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(), step()
    counts = Counts(session)
    step()
    counts.subtract_capture()
    (name, mine), *_ = state.committed.items()
    state.deferred = {name: SimpleNamespace(finish=lambda: finished.append(len(seen)))}
    graph = SimpleNamespace(replay=lambda: seen.append(mine.clone()))
    captured = CapturedStep(session.context, graph, torch.zeros(1), counts, None, [state])
    saved, wanted = optimizer.state_dict(), []
    for between in (step, lambda: None, lambda: optimizer.load_state_dict(saved)):
        between()
        wanted.append(state[name].clone())
        captured()
        assert state.committed[name] is mine
    assert all(map(torch.equal, seen, wanted))
    assert not torch.equal(seen[0], seen[2])
    assert finished == [0, 1, 2, 3]  # after each replay once more
    optimizer.load_state_dict(saved, memory="reset")
    with pytest.raises(ConfigError, match="was reset, and the graph still uses the former one"):
        captured()


def launched(method, there, step):
    """The numbers, and shapes of tensors, that the kernels of one step are started with, on the meta device."""
    from grace.core.context import Context
    from grace.kernels.triton.launching import recorded
    from tests.support.methods import make

    compressor, x = make(method), torch.empty(1 << 13, 8, device="meta")
    compressor.bind(Context(step=step, device_step=there))
    with recorded() as made:
        payload, ctx = compressor.compress(x, "w")
        compressor.accumulate(payload, ctx, x, 0.5)
    told = lambda arg: tuple(arg.shape) if isinstance(arg, torch.Tensor) else arg  # noqa: E731
    return [(one.kernel.__name__, one.programs, *map(told, one.args), str(one.constants)) for one in made]


@pytest.mark.parametrize("method", ["qsgd", "natural", "terngrad", "topk(ratio=0.01)", "randomk"])
def test_all_steps_launch_the_same_with_the_same_numbers_where_the_step_lies_in_memory(method, monkeypatch):
    pytest.importorskip("triton")
    from grace.kernels.torch import fused
    from grace.kernels.triton.primitives import KERNELS

    monkeypatch.setattr(fused, "_PLAIN", KERNELS)
    there = torch.empty(1, dtype=torch.int64, device="meta")
    assert launched(method, there, 5) == launched(method, there, 6) != []
    if method in ("qsgd", "natural", "terngrad", "randomk"):  # else it is in an argument
        assert launched(method, None, 5) != launched(method, None, 6)
