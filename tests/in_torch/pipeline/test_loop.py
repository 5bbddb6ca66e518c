"""A user's own loop over a pipeline is that of one process."""

import copy
import functools
import warnings
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import grace
from tests.support.pipelines import ROWS, alone, batch, loss_fn, made, own_batch, pipeline, rows, sgd, unmeasured
from tests.support.pools import on_ranks
from tests.support.training import digest, refusal


def own_rows(engine, name, step):
    args, kwargs, target = own_batch(engine, name, step)
    return (*args, target), kwargs


def gradients(engine):
    return {key: engine.gradient(key) for key, _ in engine.model.named_parameters()}


def close(a, b, tolerance=1e-4):
    return a.keys() <= b.keys() and all(torch.allclose(a[key], b[key], rtol=tolerance, atol=1e-6) for key in a)


@pytest.mark.parametrize("name", ["Residual", "Several", "TiedEmbedding"])
@pytest.mark.parametrize(("lazy", "size"), [(False, 4), (True, 2)])
@on_ranks()
def test_an_own_loop_is_one_process(name, lazy, size):
    engine, losses = pipeline(name, stages=2, example=not lazy), []
    if lazy:
        with pytest.raises(grace.ConfigError, match="not cut yet"):
            engine.state_dict()
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
    expected = alone(name, 2, 2, size // 2)
    assert losses == pytest.approx(expected[0], rel=1e-5)
    assert close(gradients(engine), expected[1])
    assert close(engine.state_dict(), expected[2])


@pytest.mark.parametrize("way", ["loop", "step"])
@on_ranks()
def test_gradients_accumulate(way):
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
    model, factor = made(name), 2 if way == "loop" else 1
    for args in (first, second):
        (loss_fn(model(*args[:-1]), args[-1]) / factor).backward()
    assert close(gradients(engine), {key: p.grad for key, p in model.named_parameters()})


@on_ranks(4)
def test_gradients_accumulate_after_an_exchange():
    engine, name = pipeline("TiedEmbedding", cuts=["tanh"]), "TiedEmbedding"
    model = made(name)
    assert engine.gradients.holders["table.weight"] == (0, 1)
    for step in range(2):
        engine(*own_rows(engine, name, step)[0]).backward()
        engine.exchange()
        args, _, target = batch(name, step, 2 * ROWS)
        loss_fn(model(*args), target).backward()
    assert close(gradients(engine), {key: p.grad for key, p in model.named_parameters()})


@on_ranks()
def test_a_loss_is_differentiated_once_and_keeps_no_gradients():
    engine = pipeline("Residual")
    args, _ = own_rows(engine, "Residual", 0)
    loss = engine(*args)
    loss.backward()
    kept = [StorageWeakRef(p.grad.untyped_storage()) for p in engine.parameters.values() if p.grad is not None]
    before = gradients(engine)
    assert refusal(loss.backward).startswith("loss.backward() was called before")
    assert close(before, gradients(engine), 0)
    engine.zero_grad()
    assert kept
    assert all(one.expired() for one in kept)


@pytest.mark.every
@pytest.mark.parametrize("kind", [2.0, 0.0, -1.0, float("inf"), float("-inf")])
@on_ranks(4)
def test_clipping_is_that_of_the_whole_model(kind):
    engine, model = pipeline("TiedEmbedding", stages=2), made("TiedEmbedding")
    engine(*own_rows(engine, "TiedEmbedding", 0)[0]).backward()
    norm = float(engine.clip_grad_norm_(0.01, kind))
    args, _, target = batch("TiedEmbedding", 0, 2 * ROWS)
    loss_fn(model(*args), target).backward()
    assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, kind)), rel=1e-5)
    assert close(gradients(engine), {key: p.grad for key, p in model.named_parameters()})


def test_norms_of_float64_are_computed_in_float64(local):
    x, y = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(3, 2), torch.ones(3, 1, dtype=torch.float64)
    model = torch.nn.Linear(2, 1, dtype=torch.float64)
    engine = grace.torch.Pipeline(model, x, torch.nn.functional.mse_loss, optimizer=sgd, profiles=False)
    engine(x, y).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    norm = torch.nn.utils.get_total_norm(gradients)
    assert float(engine.clip_grad_norm_(1e9)) == pytest.approx(float(norm), rel=1e-14)


@pytest.mark.parametrize("kind", [2.0, float("inf")])
@on_ranks()
def test_a_gradient_that_is_not_finite_is_clipped_as_torch_does(kind):
    engine, model = pipeline("FewParameters"), made("FewParameters")
    args, _, target = batch("FewParameters")
    engine(*args, target).backward()
    loss_fn(model(*args), target).backward()
    for p in (engine.parameters.get("one.bias"), model.one.bias):
        if p is not None:
            p.grad[0] = float("nan")
    assert engine.clip_grad_norm_(1.0, kind).isnan()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, kind)
    assert all(p.grad.isnan().all() for p in model.parameters())
    assert all(p.grad.isnan().all() for p in engine.parameters.values())


@pytest.mark.parametrize("name", ["Normalized", "Several", "TiedEmbedding"])
@on_ranks(4)
def test_outputs_are_those_of_the_model_in_evaluation(name):
    engine = pipeline(name, stages=2)
    given, keywords = own_rows(engine, name, 0)
    engine.step(*given, **keywords)
    engine.eval()
    own, gathered = (engine(*given[:-1], gather=gather, **keywords) for gather in (False, True))
    model = made(name)
    model.load_state_dict(engine.state_dict())
    engine.train()
    engine.step(*given, **keywords)
    *every, _ = batch(name, 0, 2 * ROWS)
    mine = rows(every, engine.replica * ROWS, (engine.replica + 1) * ROWS, 2 * ROWS)
    leaves = torch.utils._pytree.tree_leaves
    for outputs, (args, kwargs) in ((own, mine), (gathered, every)):
        with torch.no_grad():
            expected = model.eval()(*args, **kwargs)
        if name == "Normalized":  # each rank has its own replica's statistics
            assert outputs.shape == expected.shape
            assert engine.replica or outputs is gathered or torch.allclose(outputs, expected, atol=1e-5)
            continue
        for a, b in zip(leaves(outputs), leaves(expected), strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


class Measured(torch.nn.Module):
    """Outputs without rows: sums over rows, means, and neither. There are as many classes as rows of a micro-batch."""

    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(6, 5), torch.nn.Linear(5, 4)

    def forward(self, x, y):
        out = self.two(torch.tanh(self.one(x)))
        errors = (out - y).square()
        right = out.argmax(1) == y.argmax(1)
        weights = y.argmax(1) + 1.0
        return {
            "out": out,
            "sums": {
                "errors": errors.sum(),
                "mse": F.mse_loss(out, y, reduction="sum"),
                "entropy": F.cross_entropy(out, y.argmax(1), reduction="sum"),
                "right": right.sum(),
                "as float": right.float().sum(),
                "right as float": right.sum().double(),
                "by class": errors.sum(0),
            },
            "means": {"errors": errors.mean(), "of classes": errors.mean(0).sum(), "norm": self.two.weight.sum()},
            "of this micro-batch": {"weighted": (weights / weights.sum() * errors.mean(1)).sum()},
        }


@on_ranks(4)
def test_sums_over_rows_are_those_of_the_batch_in_evaluation():
    torch.manual_seed(0)
    model = Measured()
    x, y = torch.randn(16, 6), torch.randn(16, 4)
    loss = lambda outputs, target: F.mse_loss(outputs["out"], target)  # noqa: E731
    options = {"optimizer": sgd, "microbatches": 2, "stages": 2}
    engine = unmeasured(copy.deepcopy(model), (x[:8], y[:8]), loss, **options).eval()
    own = slice(8 * engine.replica, 8 * engine.replica + 8)
    for gather in (False, True):
        got = engine(x[own], y[own], gather=gather)
        whole = slice(None) if gather else own
        expected = model(x[whole], y[whole])
        for kind in ("sums", "means"):
            torch.testing.assert_close(got[kind], expected[kind], msg=kind)
        micro_batches = zip(x[whole].split(4), y[whole].split(4), strict=True)
        every = [model(*part)["of this micro-batch"]["weighted"] for part in micro_batches]
        torch.testing.assert_close(got["of this micro-batch"]["weighted"], torch.stack(every).mean())


class Summed(torch.nn.Module):
    """A loss that is a sum over rows."""

    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(6, 5), torch.nn.Linear(5, 4)

    def forward(self, x, y):
        return F.mse_loss(self.two(torch.tanh(self.one(x))), y, reduction="sum")


@on_ranks()
def test_losses_that_are_sums_are_refused():
    x, y = torch.randn(8, 6), torch.randn(8, 4)
    for loss in (torch.nn.MSELoss(reduction="sum"), functools.partial(F.mse_loss, reduction="sum")):
        said = refusal(unmeasured, made("FewParameters"), x, loss, optimizer=sgd)
        assert said.startswith("loss_fn sums over rows, and a pipeline averages losses over micro-batches")
    said = refusal(unmeasured, Summed(), (x, y), optimizer=sgd, microbatches=2, stages=2)
    assert said.startswith("the model returns a sum over rows for its loss, and a pipeline averages losses")
    engine = unmeasured(Measured().eval(), (x, torch.randn(8, 4)), optimizer=sgd, microbatches=2, stages=2)
    assert engine(x, torch.randn(8, 4))["sums"]["right"].dtype == torch.int64


def scaled_steps():
    """A pipeline with a scaler, and this rank's batch."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    engine = pipeline("FewParameters", grad_scaler=scaler, stages=2, compressor="topk(ratio=0.5)")
    return engine, scaler, own_rows(engine, "FewParameters", 0)[0]


@on_ranks(4)
def test_an_overflow_in_one_stage_skips_the_step_of_all():
    engine, scaler, args = scaled_steps()
    before = engine.state_dict()
    if engine.stage == 1:
        engine.parameters["two.bias"].register_hook(lambda gradient: gradient * float("inf"))
    with mock.patch("grace.pipeline.torch.capture.check_hooks"):  # which refuses the one above
        engine.step(*args)
    assert digest(engine.state_dict()) == digest(before)
    assert scaler.get_scale() == 32.0


@on_ranks()
def test_a_step_that_overflows_is_skipped_in_channels_last_too():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 1))
    model = model.to(memory_format=torch.channels_last)
    scaler, x = torch.amp.GradScaler("cpu", init_scale=64.0), torch.ones(4, 3, 4, 4)
    engine = unmeasured(model, x, loss_fn, optimizer=sgd, stages=2, microbatches=2, grad_scaler=scaler)
    before = engine.state_dict()
    engine.step(1e30 * x, torch.zeros(4, 1))
    assert digest(engine.state_dict()) == digest(before)
    assert scaler.get_scale() == 32.0


@on_ranks(4)
def test_a_scaler_in_an_own_loop():
    plain = pipeline("FewParameters", stages=2, compressor="topk(ratio=0.5)")
    plain.step(*own_rows(plain, "FewParameters", 0)[0])
    engine, scaler, args = scaled_steps()
    before = engine.state_dict()
    scaler.scale(engine(*args)).backward()
    scaler.step(engine.optimizer)
    scaler.update()
    assert close(engine.state_dict(), plain.state_dict())
    assert not close(before, plain.state_dict())
    assert scaler.get_scale() == 64.0


def frozen(stages, saved, scaled=True, make=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    model[0].requires_grad_(False)
    x, scaler = torch.ones(4, 4), torch.amp.GradScaler("cpu", init_scale=64.0) if scaled else None
    replicas, cuts = 2 // stages, ["relu"] if stages == 2 else None
    engine = unmeasured(
        model, x, loss_fn, optimizer=make or momentum, cuts=cuts, replicas=replicas, microbatches=2, grad_scaler=scaler
    )
    if saved is not None:
        engine.load_state_dict(saved[0])
        engine.load_optimizer_state_dict(copy.deepcopy(saved[1]), memory="keep")  # torch would share the momenta
    losses = [engine.step(x, torch.zeros(4, 1)).item() for _ in range(2)]
    return losses, (engine.state_dict(), engine.optimizer_state_dict()), engine.gradient("0.weight").count_nonzero()


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def momentum_of_some(parameters):
    return momentum([p for p in parameters if p.requires_grad])


@on_ranks()
def test_a_stage_in_which_nothing_trains():
    expected, _, _ = frozen(2, None, False)
    assert grace.allgather_object(frozen(2, None, False, momentum_of_some)[0])[1] == expected
    losses, saved, left = frozen(2, None)
    assert losses == expected
    assert grace.rank() or left == 0
    later, _, _ = frozen(2, saved)
    assert frozen(1, saved)[0] == pytest.approx(later, rel=1e-5)
    assert later[0] < losses[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks()
def test_autocast_is_one_process(dtype):
    name = "Convolutional"
    engine, model = pipeline(name, schedule="1f1b"), made(name)
    given, keywords = own_rows(engine, name, 0)
    with torch.autocast("cpu", dtype):
        got = engine(*given, **keywords)
    got.backward()
    built = next(iter(engine._built.values()))
    assert dtype in [value.dtype for value in (*built.stage.sends, *built.stage.receives)]
    args, _, target = batch(name)
    total = 0.0
    for low in (0, ROWS // 2):
        with torch.autocast("cpu", dtype):
            loss = loss_fn(model(args[0][low : low + ROWS // 2]), target[low : low + ROWS // 2]) / 2
        loss.backward()
        total += loss.item()
    assert got.item() == pytest.approx(total, rel=1e-5)
    assert close(gradients(engine), {key: p.grad for key, p in model.named_parameters()}, 1e-3)


def test_a_loss_of_float16_is_scaled_in_float32(local):
    """A scaled loss of 4.0 is no number of float16, though its gradients are."""

    class Half(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).mean()

    model = Half(2, 1)
    torch.nn.init.constant_(model.weight, 2.0)
    torch.nn.init.zeros_(model.bias)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    with torch.autocast("cpu", torch.float16):
        engine = unmeasured(model, torch.ones(4, 2), optimizer=sgd, microbatches=2, grad_scaler=scaler)
        loss = engine(torch.ones(4, 2))
    scaler.scale(loss).backward()
    assert loss.item() == 4.0
    assert model.weight.grad.tolist() == [[2.0**15, 2.0**15]]


@on_ranks()
def test_rank_0_alone_may_have_the_first_batch():
    """The model is cut for rank 0's batch."""
    engine = pipeline("Several", stages=2, inputs="rank0", example=False)
    args, kwargs, target = batch("Several")
    if grace.rank():
        args, kwargs, target = torch.utils._pytree.tree_map(lambda _: torch.empty(0), (args, kwargs, target))
    loss = engine.step(*args, target, **kwargs)
    expected = alone("Several", 1, 2)
    assert loss.item() == pytest.approx(expected[0][0], rel=1e-5)
    assert close(engine.state_dict(), expected[2])


@pytest.mark.parametrize("inputs", ["global", "rank0"])
@on_ranks(4)
def test_the_whole_batch_may_be_given(inputs):
    engine = pipeline("Several", stages=2, inputs=inputs)
    args, kwargs, target = batch("Several", 0, 2 * ROWS)
    if inputs == "rank0" and grace.rank():
        args, kwargs, target = torch.utils._pytree.tree_map(lambda _: torch.empty(0), (args, kwargs, target))
    loss = engine.step(*args, target, **kwargs)
    expected = alone("Several", 1, 2, replicas=2)
    assert loss.item() == pytest.approx(expected[0][0], rel=1e-5)
    assert close(engine.state_dict(), expected[2])


@on_ranks()
def test_a_smaller_last_batch_has_stages_of_its_own():
    engine, model = pipeline("Residual"), made("Residual")
    args, _, target = batch("Residual")
    engine.step(*args, target)
    with pytest.raises(grace.ConfigError, match="a batch of 5 rows cannot be cut into 2 micro-batches"):
        engine.step(args[0][:5], target[:5])
    engine.step(args[0][:4], target[:4])
    with pytest.raises(grace.ConfigError, match="evaluating"):
        engine.eval().step(*args, target)
    with pytest.raises(grace.ConfigError, match=r"evaluating, without a target: to train, call engine.train\(\) first"):
        engine(*args, target)
    optimizer = sgd(model.parameters())
    for size in (ROWS, 4):
        optimizer.zero_grad()
        loss_fn(model(args[0][:size]), target[:size]).backward()
        optimizer.step()
    assert close(engine.state_dict(), model.state_dict())


@on_ranks()
def test_batches_of_many_shapes_are_warned_of_and_old_stages_are_dropped():
    """The weights, after batches of sizes of which all but two are dropped, are those of the plain model."""
    engine, model = pipeline("Residual"), made("Residual")
    optimizer = sgd(model.parameters())
    args, _, target = batch("Residual")
    limits = {"MANY_SHAPES": 2, "MOST_SHAPES": 2}
    with mock.patch.multiple("grace.pipeline.torch.pipeline", **limits), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for size in (ROWS, 4, 2, ROWS, 2):
            engine.step(args[0][:size], target[:size])
            optimizer.zero_grad()
            loss_fn(model(args[0][:size]), target[:size]).backward()
            optimizer.step()
            assert len(engine._built) <= 2
    assert close(engine.state_dict(), model.state_dict())
    assert sum("pad batches to few lengths" in str(one.message) for one in said) == (grace.rank() == 0)


@on_ranks()
def test_a_frozen_batch_norm_evaluates_while_the_model_trains():
    """Fine-tuning freezes it so: ``model.last.eval()`` holds until the next ``train()``."""
    model, plain = made("Normalized"), made("Normalized")
    model.last.eval()
    engine, optimizer = pipeline("Normalized", model=model), sgd(plain.parameters())
    for step in range(4):
        if step == 2:
            engine.train()
        plain.last.train(step >= 2)
        (x,), _, target = batch("Normalized", step)
        engine.step(x, target)
        optimizer.zero_grad()
        for low in (0, ROWS // 2):
            (loss_fn(plain(x[low : low + ROWS // 2]), target[low : low + ROWS // 2]) / 2).backward()
        optimizer.step()
    assert close(plain.state_dict(), engine.state_dict())
    assert model.last.training
