"""A user's own loop over a pipeline is that of one process."""

from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import grace
from tests.support.pipelines import ROWS, alone, batch, loss_fn, made, own_batch, pipeline, rows, sgd
from tests.support.pools import ranks_of

pytestmark = pytest.mark.ranks


def own_rows(engine, name, step):
    args, kwargs, target = own_batch(engine, name, step)
    return (*args, target), kwargs


def gradients(engine):
    return {key: engine.gradient(key) for key, _ in engine.model.named_parameters()}


def close(a, b, tolerance=1e-4):
    return a.keys() <= b.keys() and all(torch.allclose(a[key], b[key], rtol=tolerance, atol=1e-6) for key in a)


def looped(name, settings):
    engine = pipeline(name, **settings)
    if engine.plan is None:
        with pytest.raises(grace.ConfigError, match="not cut yet"):
            engine.state_dict()
    losses = []
    for step in range(2):
        engine.zero_grad()
        if engine.plan is None:
            args, kwargs, target = batch(name, step)
            args = (*args, target)
        else:
            args, kwargs = own_rows(engine, name, step)
        loss = engine(*args, **kwargs)
        assert all(p.grad is None for p in engine.parameters.values())  # until backward
        loss.backward()
        engine.optimizer.step()
        losses.append(loss.item())
    return losses, gradients(engine), engine.state_dict()


@pytest.mark.parametrize("name", ["Residual", "Several", "TiedEmbedding"])
@pytest.mark.parametrize("lazy", [False, True])
def test_an_own_loop_is_one_process(name, lazy):
    replicas = 1 if lazy else 2
    expected = alone(name, 2, 2, replicas)
    for losses, own, state in ranks_of(2 * replicas).run(looped, name, {"stages": 2, "example": not lazy}):
        assert losses == pytest.approx(expected[0], rel=1e-5)
        assert close(own, expected[1])
        assert close(state, expected[2])


def accumulated(way):
    engine, name = pipeline("Residual"), "Residual"
    (first, _), (second, _) = own_rows(engine, name, 0), own_rows(engine, name, 1)
    if way == "loop":
        (engine(*first) / 2).backward()
        (engine(*second) / 2).backward()
    else:
        with engine.no_sync():
            engine.step(*first)
        engine.step(*second)
    engine.exchange()
    return gradients(engine)


@pytest.mark.parametrize("way", ["loop", "step"])
def test_gradients_accumulate(way):
    model, factor = made("Residual"), 2 if way == "loop" else 1
    for step in range(2):
        args, _, target = batch("Residual", step)
        (loss_fn(model(*args), target) / factor).backward()
    expected = {key: p.grad for key, p in model.named_parameters()}
    assert all(close(own, expected) for own in ranks_of(2).run(accumulated, way))


def differentiated_twice():
    engine, said = pipeline("Residual"), ""
    args, _ = own_rows(engine, "Residual", 0)
    loss = engine(*args)
    loss.backward()
    kept = [StorageWeakRef(p.grad.untyped_storage()) for p in engine.parameters.values() if p.grad is not None]
    before = gradients(engine)
    try:
        loss.backward()
    except grace.ConfigError as error:
        said = str(error)
    same = close(before, gradients(engine), 0)
    engine.zero_grad()
    return said, same, len(kept), sum(not one.expired() for one in kept)


def test_a_loss_is_differentiated_once_and_keeps_no_gradients():
    for said, same, count, left in ranks_of(2).run(differentiated_twice):
        assert said.startswith("loss.backward() was called before")
        assert (same, count > 0, left) == (True, True, 0)


def clipped(settings, most, kind):
    engine = pipeline("TiedEmbedding", **settings)
    args, _ = own_rows(engine, "TiedEmbedding", 0)
    engine(*args).backward()
    norm = engine.clip_grad_norm_(most, kind)
    return float(norm), gradients(engine)


@pytest.mark.every
@pytest.mark.parametrize("kind", [2.0, float("inf")])
def test_clipping_is_that_of_the_whole_model(kind):
    model = made("TiedEmbedding")
    args, _, target = batch("TiedEmbedding", 0, 2 * ROWS)
    loss_fn(model(*args), target).backward()
    expected = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, kind))
    for norm, own in ranks_of(4).run(clipped, {"stages": 2}, 0.01, kind):
        assert norm == pytest.approx(expected, rel=1e-5)
        assert close(own, {key: p.grad for key, p in model.named_parameters()})


def evaluated(name, settings, gather):
    engine = pipeline(name, **settings)
    args, kwargs = own_rows(engine, name, 0)
    engine.step(*args, **kwargs)
    engine.eval()
    outputs = engine(*args[:-1], gather=gather, **kwargs)
    state = engine.state_dict()
    engine.train()
    engine.step(*args, **kwargs)
    return outputs, state, engine.replica


@pytest.mark.parametrize("name", ["Normalized", "Several", "TiedEmbedding"])
@pytest.mark.parametrize("gather", [False, True])
def test_outputs_are_those_of_the_model_in_evaluation(name, gather):
    for outputs, state, replica in ranks_of(4).run(evaluated, name, {"stages": 2}, gather):
        model = made(name)
        model.load_state_dict(state)
        model.eval()
        args, kwargs, _ = batch(name, 0, 2 * ROWS)
        if not gather:
            args, kwargs = rows((args, kwargs), replica * ROWS, (replica + 1) * ROWS, 2 * ROWS)
        with torch.no_grad():
            expected = model(*args, **kwargs)
        leaves = torch.utils._pytree.tree_leaves
        if name == "Normalized":  # each rank has its own replica's statistics
            assert outputs.shape == expected.shape
            assert replica or gather or torch.allclose(outputs, expected, atol=1e-5)
            continue
        for a, b in zip(leaves(outputs), leaves(expected), strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def scaled(overflows):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    engine = pipeline("FewParameters", grad_scaler=scaler, stages=2, compressor="topk(ratio=0.5)")
    args, _ = own_rows(engine, "FewParameters", 0)
    before = engine.state_dict()
    if overflows and engine.stage == 1:
        engine.parameters["two.bias"].register_hook(lambda gradient: gradient * float("inf"))
    if overflows:
        with mock.patch("grace.pipeline.torch.capture.check_hooks"):  # which refuses the one above
            engine.step(*args)
        return engine.state_dict(), before, scaler.get_scale()
    loss = engine(*args)
    scaler.scale(loss).backward()
    scaler.step(engine.optimizer)
    scaler.update()
    return engine.state_dict(), before, scaler.get_scale()


def test_an_overflow_in_one_stage_skips_the_step_of_all():
    for after, before, scale in ranks_of(4).run(scaled, True):
        assert all(torch.equal(after[key], before[key]) for key in after)
        assert scale == 32.0


def overflowing():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 1))
    model = model.to(memory_format=torch.channels_last)
    scaler, x = torch.amp.GradScaler("cpu", init_scale=64.0), torch.ones(4, 3, 4, 4)
    engine = grace.torch.Pipeline(model, x, loss_fn, optimizer=sgd, stages=2, microbatches=2, grad_scaler=scaler)
    before = engine.state_dict()
    engine.step(1e30 * x, torch.zeros(4, 1))
    return engine.state_dict(), before, scaler.get_scale()


def test_a_step_that_overflows_is_skipped_in_channels_last_too():
    for after, before, scale in ranks_of(2).run(overflowing):
        assert all(torch.equal(after[key], before[key]) for key in after)
        assert scale == 32.0


def frozen(stages, saved, scaled=True, make=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    model[0].requires_grad_(False)
    x, scaler = torch.ones(4, 4), torch.amp.GradScaler("cpu", init_scale=64.0) if scaled else None
    replicas, cuts = 2 // stages, ["relu"] if stages == 2 else None
    engine = grace.torch.Pipeline(
        model, x, loss_fn, optimizer=make or momentum, cuts=cuts, replicas=replicas, microbatches=2, grad_scaler=scaler
    )
    if saved is not None:
        engine.load_state_dict(saved[0])
        engine.load_optimizer_state_dict(saved[1], memory="keep")
    losses = [engine.step(x, torch.zeros(4, 1)).item() for _ in range(2)]
    return losses, (engine.state_dict(), engine.optimizer_state_dict()), engine.gradient("0.weight").count_nonzero()


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def momentum_of_some(parameters):
    return momentum([p for p in parameters if p.requires_grad])


def test_a_stage_in_which_nothing_trains():
    expected, _, _ = ranks_of(2).run(frozen, 2, None, False)[0]
    assert ranks_of(2).run(frozen, 2, None, False, momentum_of_some)[1][0] == expected
    (losses, saved, left), (others, _, _) = ranks_of(2).run(frozen, 2, None)
    assert losses == others == expected
    assert left == 0
    (later, _, _), _ = ranks_of(2).run(frozen, 2, saved)
    assert ranks_of(2).run(frozen, 1, saved)[0][0] == pytest.approx(later, rel=1e-5)
    assert later[0] < losses[1]


def test_a_scaler_in_an_own_loop():
    plain = ranks_of(4).run(unscaled)[0]
    for after, before, scale in ranks_of(4).run(scaled, False):
        assert close(after, plain)
        assert not close(before, plain)
        assert scale == 64.0


def unscaled():
    engine = pipeline("FewParameters", stages=2, compressor="topk(ratio=0.5)")
    args, _ = own_rows(engine, "FewParameters", 0)
    engine.step(*args)
    return engine.state_dict()


def half(name, dtype):
    engine = pipeline(name, schedule="1f1b")
    args, kwargs = own_rows(engine, name, 0)
    with torch.autocast("cpu", dtype):
        loss = engine(*args, **kwargs)
    loss.backward()
    built = next(iter(engine._built.values()))
    sent = [value.dtype for value in (*built.stage.sends, *built.stage.receives)]
    return loss.item(), gradients(engine), sent


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_one_process(dtype):
    name = "Convolutional"
    model = made(name)
    args, _, target = batch(name)
    total = 0.0
    for low in (0, ROWS // 2):
        with torch.autocast("cpu", dtype):
            loss = loss_fn(model(args[0][low : low + ROWS // 2]), target[low : low + ROWS // 2]) / 2
        loss.backward()
        total += loss.item()
    for got, own, sent in ranks_of(2).run(half, name, dtype):
        assert got == pytest.approx(total, rel=1e-5)
        assert close(own, {key: p.grad for key, p in model.named_parameters()}, 1e-3)
        assert dtype in sent


def with_inputs(inputs):
    engine = pipeline("Several", stages=2, inputs=inputs)
    args, kwargs, target = batch("Several", 0, 2 * ROWS)
    if inputs == "rank0" and grace.rank():
        args, kwargs, target = torch.utils._pytree.tree_map(lambda _: torch.empty(0), (args, kwargs, target))
    loss = engine.step(*args, target, **kwargs)
    return loss.item(), engine.state_dict()


@pytest.mark.parametrize("inputs", ["global", "rank0"])
def test_the_whole_batch_may_be_given(inputs):
    expected = alone("Several", 1, 2, replicas=2)
    for loss, state in ranks_of(4).run(with_inputs, inputs):
        assert loss == pytest.approx(expected[0][0], rel=1e-5)
        assert close(state, expected[2])


def smaller():
    engine = pipeline("Residual")
    args, _, target = batch("Residual")
    engine.step(*args, target)
    with pytest.raises(grace.ConfigError, match="a batch of 5 rows cannot be cut into 2 micro-batches"):
        engine.step(args[0][:5], target[:5])
    engine.step(args[0][:4], target[:4])
    with pytest.raises(grace.ConfigError, match="evaluating"):
        engine.eval().step(*args, target)
    return engine.state_dict()


def test_a_smaller_last_batch_has_stages_of_its_own():
    model = made("Residual")
    optimizer = sgd(model.parameters())
    args, _, target = batch("Residual")
    for size in (ROWS, 4):
        optimizer.zero_grad()
        loss_fn(model(args[0][:size]), target[:size]).backward()
        optimizer.step()
    assert all(close(state, model.state_dict()) for state in ranks_of(2).run(smaller))
