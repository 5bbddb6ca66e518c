"""Replicas of a stage exchange compressed gradients."""

import time
from pathlib import Path
from unittest import mock

import pytest
import torch

import grace
from tests.support.drawing import THOROUGH, drawn
from tests.support.limits import HANGS
from tests.support.pipelines import ROWS, alone, batch, loss_fn, made, own_batch, piped, pipeline, rows, sgd
from tests.support.pools import ranks_of

pytestmark = pytest.mark.ranks
COMPRESSORS = ["topk(ratio=0.3)", "powersgd(rank=1)", "fp16"]
"""Of methods, one that gathers, one of several rounds, and one that sums."""


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


def behind(folder, schedule):
    """Whether the last stage had exchanged before the first one had ended its last micro-batch's backward, and all
    weights after a step, and one process's."""
    args, kwargs, target = batch("Residual", 0, 2 * ROWS)
    settings = {"microbatches": 2, "stages": 2, "replicas": 2, "schedule": schedule, "inputs": "global"}
    engine = grace.torch.Pipeline(made("Residual"), (args, kwargs), loss_fn, optimizer=sgd, **settings)
    folder, calls, seen = Path(folder), [], []
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
    return seen, loss, engine.state_dict(), alone("Residual", 1, 2, replicas=2)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_stage_exchanges_while_those_in_front_of_it_still_compute(tmp_path, schedule):
    answers = ranks_of(4).run(behind, str(tmp_path), schedule)
    assert [seen for seen, *_ in answers] == [[2], [2], [], []]
    for _, loss, weights, (losses, _, expected) in answers:
        assert loss == pytest.approx(losses[0], rel=1e-5)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


def feedback(name, compressor, steps):
    """What was applied in so many steps of a model that stands still, what is remembered, and where this rank is."""
    engine = pipeline(name, compressor=compressor, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0))
    args, kwargs, target = own_batch(engine, name, 0)
    applied = {key: torch.zeros_like(p) for key, p in engine.parameters.items()}
    for _ in range(steps):
        engine.step(*args, target, **kwargs)
        for key, p in engine.parameters.items():
            applied[key] += p.grad
    memories = [part for kind, part in engine.optimizer._grace.runner.components if kind.startswith("memory")]
    left = {key: torch.as_tensor(value).clone() for one in memories for key, value in one.state.items()}
    nbytes = sum(p.nbytes for p in engine.parameters.values())
    return applied, left, (engine.stage, engine.replica), (engine.metrics(), nbytes)


def test_what_is_not_sent_is_remembered():
    """Applied + mean of the residuals = steps x the gradient."""
    _, gradients, _ = alone("Residual", 1, 2, replicas=2)
    answers = ranks_of(4).run(feedback, "Residual", "topk(ratio=0.2)", 3)
    for _, left, _, (metrics, nbytes) in answers:
        norm = torch.cat([value.flatten() for value in left.values()]).double().norm()
        assert metrics["residual_norm"] == pytest.approx(float(norm), rel=1e-6)
        assert metrics["bytes_dense"] == 3 * nbytes
        assert metrics["bytes_sent"] > 0
    for a, b in ((0, 1), (2, 3)):
        (applied, first, *_), (_, second, *_) = answers[a], answers[b]
        assert first
        for name, value in applied.items():
            rest = (first[name].view_as(value) + second[name].view_as(value)) / 2 if name in first else 0
            assert torch.allclose(value + rest, 3 * gradients[name], rtol=1e-4, atol=1e-6), name


def one_without_parameters():
    """A rank's metrics, and whether its stage has parameters."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh())
    x, y = torch.ones(4, 6), torch.zeros(4, 4)
    choices = {"stages": 2, "microbatches": 2, "cuts": ["linear"], "compressor": "topk(ratio=0.5)"}
    engine = grace.torch.Pipeline(model, (x,), torch.nn.functional.mse_loss, optimizer=sgd, **choices)
    engine.step(x, y)
    return engine.metrics(), bool(engine.parameters)


def test_a_rank_without_parameters_or_replicas_tells_that_nothing_was_sent():
    answers = ranks_of(2).run(one_without_parameters)
    assert sorted(has for _, has in answers) == [False, True]
    for metrics, _ in answers:
        assert metrics["bytes_sent"] == metrics["bytes_dense"] == metrics["residual_norm"] == 0


def run_unequal(names, replicas, schedule):
    return {name: piped(name, 2, replicas=replicas, microbatches=2, schedule=schedule) for name in names}


UNEQUAL = ["FewParameters", "Residual", "TiedEmbedding", "LossAsOutput", "Convolutional", "SharedParameter"]


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_with_unequal_replicas_are_one_process(replicas, schedule):
    """Each model meets one of both numbers; `make thorough` runs the product."""
    names = UNEQUAL if THOROUGH else UNEQUAL[replicas[0] - 1 :: 2]
    answers = ranks_of(3).run(run_unequal, names, replicas, schedule)
    for name in names:
        losses, gradients, state = alone(name, 2, 2, replicas=2)
        for answer in answers:
            got, own, values, place = answer[name]
            assert got == pytest.approx(losses, rel=1e-5), (name, place)
            for key in own:
                assert torch.allclose(own[key], gradients[key], rtol=1e-4, atol=1e-6), (name, key, place)
                assert torch.allclose(values[key], state[key], rtol=1e-4, atol=1e-6), (name, key, place)
        assert {answer[name][3] for answer in answers} == {(s, r) for s in (0, 1) for r in range(replicas[s])}
