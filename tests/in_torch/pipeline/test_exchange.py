"""Replicas of a stage exchange compressed gradients."""

import time
from unittest import mock

import pytest
import torch

import grace
from tests.support.drawing import THOROUGH, drawn
from tests.support.limits import HANGS
from tests.support.pipelines import (
    ROWS,
    alone,
    batch,
    check_is_alone,
    loss_fn,
    made,
    own_batch,
    piped,
    pipeline,
    rows,
    sgd,
    unmeasured,
)
from tests.support.pools import on_ranks, ranks_of

pytestmark = pytest.mark.ranks
COMPRESSORS = ["topk(ratio=0.3)", "powersgd(rank=1)", "fp16"]
"""Methods: one that gathers, one of several rounds, and one that sums."""


def run_compressed(cases, settings):
    return {(name, one): piped(name, 3, compressor=one, **settings) for name, one in cases}


def test_replicas_have_the_same_bits():
    cases = drawn([(name, one) for name in ("Residual", "TiedEmbedding", "SharedParameter") for one in COMPRESSORS])
    answers = ranks_of(4).run(run_compressed, cases, {"microbatches": 2, "replicas": (2, 2)})
    for key in answers[0]:
        for a, b in ((0, 1), (2, 3)):
            (losses, _, first, place), (_, _, second, other) = answers[a][key], answers[b][key]
            assert (place[0], place[1], other[1]) == (other[0], 0, 1)
            assert all(torch.equal(first[name], second[name]) for name in first), key
            assert losses[-1] < losses[0] * 2
        # copies of a parameter on two stages too
        for name in answers[0][key][2].keys() & answers[2][key][2].keys():
            assert torch.equal(answers[0][key][2][name], answers[2][key][2][name]), (key, name)


def data_parallel(name, compressor, steps, microbatches):
    """The whole model on each rank, with Grace's optimizer."""
    model, rank = made(name), grace.rank()
    optimizer = grace.DistributedOptimizer(
        sgd(model.parameters()), list(model.named_parameters()), compressor, backward_passes_per_step=microbatches
    )
    for step in range(steps):
        optimizer.zero_grad()
        given = rows(batch(name, step, 2 * ROWS), rank * ROWS, (rank + 1) * ROWS, 2 * ROWS)
        size = ROWS // microbatches
        for part in range(microbatches):
            args, kwargs, target = rows(given, part * size, (part + 1) * size, ROWS)
            (loss_fn(model(*args, **kwargs), target) / microbatches).backward()
        optimizer.step()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("compressor", ["topk(ratio=0.3)", "fp16"])
def test_the_exchange_is_that_of_whole_models(compressor):
    expected = ranks_of(2).run(data_parallel, "Residual", compressor, 3, 2)[0]
    settings = {"microbatches": 2, "stages": 2}
    for answer in ranks_of(4).run(run_compressed, [("Residual", compressor)], settings):
        for name, value in answer["Residual", compressor][2].items():
            assert torch.allclose(value, expected[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@on_ranks(4)
def test_a_stage_exchanges_while_those_in_front_of_it_still_compute(tmp_path, schedule):
    """The last stage has exchanged before the first one has ended its last micro-batch's backward, and all weights
    after a step are one process's."""
    args, kwargs, target = batch("Residual", 0, 2 * ROWS)
    settings = {"microbatches": 2, "stages": 2, "replicas": 2, "schedule": schedule, "inputs": "global"}
    engine = unmeasured(made("Residual"), (args, kwargs), loss_fn, optimizer=sgd, **settings)
    folder, calls, seen = tmp_path, [], []
    if engine.stage == 0:

        def wait(gradient):
            calls.append(None)
            if len(calls) == 2:
                ends = time.monotonic() + HANGS
                while len(list(folder.iterdir())) < 2 and time.monotonic() < ends:
                    time.sleep(0.01)
                seen.append(len(list(folder.iterdir())))

        next(iter(engine.parameters.values())).register_hook(wait)
    else:
        exchange = engine.gradients.exchange

        def told():
            exchange()
            (folder / str(grace.rank())).touch()

        engine.gradients.exchange = told
    with mock.patch("grace.pipeline.torch.capture.check_hooks"):  # which refuses the one above
        loss = float(engine.step(*args, target, **kwargs))
    assert seen == ([2] if engine.stage == 0 else [])
    losses, _, expected = alone("Residual", 1, 2, replicas=2)
    assert loss == pytest.approx(losses[0], rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(engine.state_dict()[name], value, rtol=1e-5, atol=1e-6)


@on_ranks(4)
def test_what_is_not_sent_is_remembered():
    """Applied + mean of the residuals = steps x the gradient, of a model that stands still."""
    engine = pipeline("Residual", compressor="topk(ratio=0.2)", optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0))
    args, kwargs, target = own_batch(engine, "Residual", 0)
    applied = {key: torch.zeros_like(p) for key, p in engine.parameters.items()}
    for _ in range(3):
        engine.step(*args, target, **kwargs)
        for key, p in engine.parameters.items():
            applied[key] += p.grad
    memories = [part for kind, part in engine.optimizer._grace.runner.components if kind.startswith("memory")]
    left = {key: torch.as_tensor(value).clone() for one in memories for key, value in one.state.items()}
    metrics = engine.metrics()
    norm = torch.cat([value.flatten() for value in left.values()]).double().norm()
    assert metrics["residual_norm"] == pytest.approx(float(norm), rel=1e-6)
    assert metrics["bytes_dense"] == 3 * sum(p.nbytes for p in engine.parameters.values())
    assert metrics["bytes_sent"] > 0
    _, gradients, _ = alone("Residual", 1, 2, replicas=2)
    both = [of_rank for stage, of_rank in grace.allgather_object((engine.stage, left)) if stage == engine.stage]
    assert len(both) == 2
    assert left
    for name, value in applied.items():
        rest = sum(of_rank[name].view_as(value) for of_rank in both) / 2 if name in left else 0
        assert torch.allclose(value + rest, 3 * gradients[name], rtol=1e-4, atol=1e-6), name


@on_ranks()
def test_a_rank_without_parameters_or_replicas_tells_that_nothing_was_sent():
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh())
    x, y = torch.ones(4, 6), torch.zeros(4, 4)
    choices = {"stages": 2, "microbatches": 2, "cuts": ["linear"], "compressor": "topk(ratio=0.5)"}
    engine = unmeasured(model, (x,), torch.nn.functional.mse_loss, optimizer=sgd, **choices)
    engine.step(x, y)
    assert sorted(grace.allgather_object(bool(engine.parameters))) == [False, True]
    metrics = engine.metrics()
    assert metrics["bytes_sent"] == metrics["bytes_dense"] == metrics["residual_norm"] == 0


def run_unequal(names, replicas, schedule):
    return {name: piped(name, 2, replicas=replicas, microbatches=2, schedule=schedule) for name in names}


UNEQUAL = ["Residual", "TiedEmbedding", "LossAsOutput", "SharedParameter"]
if THOROUGH:
    UNEQUAL += ["FewParameters", "Convolutional"]


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_with_unequal_replicas_are_one_process(replicas, schedule):
    """Each model meets one of both numbers; `make thorough` runs the product."""
    names = UNEQUAL if THOROUGH else UNEQUAL[replicas[0] - 1 :: 2]
    answers = ranks_of(3).run(run_unequal, names, replicas, schedule)
    for name in names:
        check_is_alone(name, [answer[name] for answer in answers], alone(name, 2, 2, replicas=2))
        assert {answer[name][3] for answer in answers} == {(s, r) for s in (0, 1) for r in range(replicas[s])}


@on_ranks(3)
def test_sums_are_the_same_multiple_of_the_mean_in_all_stages():
    """Losses of the replicas of the last stage are added up, however many replicas other stages have."""
    for replicas in ((2, 1), (1, 2)):
        for name in ("Residual", "TiedEmbedding"):
            engine = pipeline(name, replicas=replicas, op="sum")
            args, kwargs, target = own_batch(engine, name, 0)
            engine(*args, target, **kwargs).backward()
            engine.exchange()
            means = alone(name, 1, 2, replicas=2)[1]
            for key, p in engine.parameters.items():
                assert torch.allclose(p.grad, replicas[-1] * means[key], rtol=1e-4, atol=1e-6), (name, key, replicas)
