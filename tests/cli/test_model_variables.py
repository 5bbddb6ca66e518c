"""The example models: that they train, which gradients are sparse, and that strategies are built for them."""

import doctest
import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from grace.cli.inputs import model_variables
from tests.support.command import grace_program

ROOT = Path(__file__).parents[2]
NAMES = ("mlp", "resnet", "lstm", "transformer", "ncf")
SLOW = pytest.mark.slow
SPARSE = {
    "torch": {
        "lstm": {"embedding.weight"},
        "ncf": {f"{whose}_{what}.weight" for whose in ("user", "item") for what in ("factors", "features")},
    },
    "tensorflow": {
        "lstm": {"embedding/embeddings"},
        "transformer": {"embedding/embeddings"},
        "ncf": {f"{whose}_{what}/embeddings" for whose in ("user", "item") for what in ("factors", "features")},
    },
}
LEARNING = {
    "mlp": (0.5, 0.25),
    "resnet": (0.07, 0.75),
    "lstm": (3.0, 0.7),
    "transformer": (0.5, 0.45),
    "ncf": (0.5, 0.85),
}
"""Learning rates, and the part of the loss that may be left; seeds 0 to 19 leave nine tenths of that at most."""
OTHER_SIZES = {
    "mlp": ({"inputs": 20, "classes": 3}, {"hidden": 8}),
    "resnet": ({"channels": 3, "classes": 4}, {"width": 6, "stages": 3}),
    "lstm": ({"vocabulary": 20}, {"width": 8, "hidden": 12}),
    "transformer": ({"vocabulary": 20, "length": 9}, {"width": 12, "heads": 3, "blocks": 1}),
    "ncf": ({"users": 30, "items": 50}, {"width": 4}),
}
"""Arguments of the batches and the models, and those of the models alone."""


def load(framework: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip(framework, exc_type=ImportError)
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module(f"examples.{framework}.models")


@pytest.fixture(params=["torch", pytest.param("tensorflow", marks=SLOW)])
def ours(request, monkeypatch) -> SimpleNamespace:
    """A framework, its models, tensors of arrays and back, and how models are seeded, differentiated and trained."""
    models = load(request.param, monkeypatch)
    steps = in_torch(models) if request.param == "torch" else in_tensorflow(models)
    return SimpleNamespace(framework=request.param, models=models, **steps)


@pytest.fixture
def batches(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("examples.batches")


def in_torch(models: ModuleType) -> dict[str, Any]:
    import torch

    def gradients(name: str, model: Any) -> list[tuple[tuple[int, ...], bool]]:
        models.loss(name, model, models.batch(name, 0, 8)).backward()
        return [(tuple(p.grad.shape), p.grad.is_sparse) for p in model.parameters()]

    def train(name: str, model: Any, lr: float, steps: int, size: int) -> tuple[float, float]:
        optimizer = torch.optim.SGD(model.parameters(), lr)
        held_out = models.batch(name, 10_000, size)
        losses = []
        for seed in range(steps + 1):
            if seed in (0, steps):
                with torch.no_grad():
                    losses.append(models.loss(name, model, held_out).item())
            optimizer.zero_grad()
            models.loss(name, model, models.batch(name, seed, size)).backward()
            optimizer.step()
        return losses[0], losses[1]

    def array(tensor: Any) -> np.ndarray:
        return tensor.detach().numpy()

    seed = torch.manual_seed
    return {"tensor": torch.tensor, "array": array, "seed": seed, "gradients": gradients, "train": train}


def in_tensorflow(models: ModuleType) -> dict[str, Any]:
    import keras
    import tensorflow as tf

    def gradients(name: str, model: Any) -> list[tuple[tuple[int, ...], bool]]:
        with tf.GradientTape() as tape:
            loss = models.loss(name, model, models.batch(name, 0, 8))
        found = tape.gradient(loss, [v.value for v in model.trainable_variables])
        return [
            (tuple(g.dense_shape.numpy()), True) if isinstance(g, tf.IndexedSlices) else (tuple(g.shape), False)
            for g in found
        ]

    def train(name: str, model: Any, lr: float, steps: int, size: int) -> tuple[float, float]:
        optimizer = keras.optimizers.SGD(lr)
        optimizer.build(model.trainable_variables)

        @tf.function(autograph=False)
        def step(batch: Any) -> None:
            with tf.GradientTape() as tape:
                loss = models.loss(name, model, batch)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        held_out = models.batch(name, 10_000, size)
        before = float(models.loss(name, model, held_out))
        for seed in range(steps):
            step(models.batch(name, seed, size))
        return before, float(models.loss(name, model, held_out))

    def array(tensor: Any) -> np.ndarray:
        return tensor.numpy()

    seed = keras.utils.set_random_seed
    return {"tensor": tf.constant, "array": array, "seed": seed, "gradients": gradients, "train": train}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW) if name in ("resnet", "lstm") else name for name in NAMES]
)
def test_training_lowers_the_loss_on_other_samples(ours, name):
    lr, factor = LEARNING[name]
    ours.seed(0)
    before, after = ours.train(name, getattr(ours.models, name)(), lr, steps=20, size=64)
    assert after < factor * before


@pytest.mark.parametrize("name", NAMES)
def test_all_variables_are_listed_and_sparse_where_their_gradients_are(ours, name):
    model = getattr(ours.models, name)()
    variables = model_variables(model)
    assert {v.name for v in variables if v.sparse} == SPARSE[ours.framework].get(name, set())
    assert [(v.shape, v.sparse) for v in variables] == ours.gradients(name, model)
    assert len({v.name for v in variables}) == len(variables)
    assert {v.dtype for v in variables} == {"float32"}
    assert model_variables(getattr(ours.models, name)()) == variables  # Keras numbers layers that have no name


@pytest.mark.parametrize("name", NAMES)
def test_models_are_small_but_for_the_embeddings_of_ncf(ours, name):
    variables = model_variables(getattr(ours.models, name)())
    size = sum(v.nbytes for v in variables) // 4
    if name == "ncf":
        assert sum(v.nbytes for v in variables if v.sparse) // 4 > 0.99 * size
    else:
        assert size < 300_000


@pytest.mark.parametrize("name", NAMES)
def test_models_and_batches_have_other_sizes(ours, name):
    shared, own = OTHER_SIZES[name]
    model = getattr(ours.models, name)(**shared, **own)
    loss = ours.array(ours.models.loss(name, model, ours.models.batch(name, 0, 5, **shared)))
    assert loss.shape == ()
    assert loss.dtype == np.float32
    assert 0 < loss < 10


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_later_characters_do_not_change_earlier_predictions(ours, batches, name):
    model = getattr(ours.models, name)()
    ((first, second),), _ = batches.text(np.random.default_rng(0), 2)
    mixed = np.concatenate([first[:20], second[20:]])
    one, other = (ours.array(model(ours.tensor(x[None]))) for x in (first, mixed))
    np.testing.assert_allclose(one[:, :20], other[:, :20], atol=1e-5)
    assert np.abs(one[:, 20:] - other[:, 20:]).max() > 0.01


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_has_one_batch_and_frameworks_have_the_same(ours, batches, name):
    inputs, targets = ours.models.batch(name, 3, 6)
    expected, answers = batches.arrays(name, 3, 6)
    for tensor, array in zip([*inputs, targets], [*expected, answers], strict=True):
        found = ours.array(tensor)
        if ours.framework == "tensorflow" and found.ndim == 4:
            found = np.moveaxis(found, -1, 1)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("name", NAMES)
def test_batches_of_other_seeds_differ(batches, name):
    (one, *_), _ = batches.arrays(name, 0, 16)
    (other, *_), _ = batches.arrays(name, 1, 16)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("name", ["text", "ratings"])
def test_the_largest_numbers_occur(batches, name):
    sizes = {"text": {"vocabulary": 3}, "ratings": {"users": 3, "items": 3}}[name]
    inputs, _ = getattr(batches, name)(np.random.default_rng(0), 300, **sizes)
    for numbers in inputs:
        assert set(np.unique(numbers)) == {0, 1, 2}


def test_an_unknown_name_is_refused_with_those_there_are(batches):
    with pytest.raises(ValueError, match="no model is called 'vgg'; there are mlp, resnet, lstm, transformer, ncf"):
        batches.arrays("vgg", 0, 1)


@pytest.mark.parametrize("name", ["lstm", "transformer", "ncf"])
@pytest.mark.parametrize("sparse", [False, True])
def test_torchs_embeddings_are_sparse_if_asked(monkeypatch, name, sparse):
    model = getattr(load("torch", monkeypatch), name)(sparse=sparse)
    assert any(v.sparse for v in model_variables(model)) == sparse


@pytest.mark.parametrize(
    ("optimizer", "options", "refused"),
    [
        ("SGD", {"momentum": 0.9}, None),
        ("SGD", {"weight_decay": 0.1}, "add"),
        ("Adagrad", {}, None),
        ("Adagrad", {"weight_decay": 0.1}, "sparse"),
        ("SparseAdam", {}, "dense"),
        ("Adam", {}, "sparse"),
        ("AdamW", {}, "sparse"),
        ("RMSprop", {}, "sparse"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_torchs_optimizers_take_sparse_gradients_as_the_docstring_says(monkeypatch, optimizer, options, refused):
    models = load("torch", monkeypatch)
    import torch

    model = models.ncf(users=20, items=20)
    stepping = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, **options)

    def steps() -> None:
        for seed in range(2):  # the second has rows that the first has not
            stepping.zero_grad()
            models.loss("ncf", model, models.batch("ncf", seed, 8, users=20, items=20)).backward()
            stepping.step()

    if refused is None:
        steps()
    else:
        with pytest.raises(RuntimeError, match=refused):
            steps()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("model", "variables"),
    [("examples.torch.models:lstm", 7), pytest.param("examples.tensorflow.models:ncf", 10, marks=SLOW)],
)
def test_strategies_are_built_and_checked_for_them(tmp_path, monkeypatch, model, variables):
    pytest.importorskip("pydantic", reason="pydantic is not installed")
    pytest.importorskip(model.split(".")[1], exc_type=ImportError)

    out = str(tmp_path / "s.yaml")
    options = ["--model", model, "--builder", "parallax", "-n", "2", "-o", out]
    said, _ = grace_program("strategy", "build", *options, cwd=ROOT)
    assert said == f"Wrote {out}: {variables} variables, for 2 ranks on 1 node, by parallax\n"

    from grace.cli.strategy import app

    monkeypatch.syspath_prepend(ROOT)
    checked = CliRunner().invoke(app, ["check", out, "--model", model])
    assert checked.exit_code == 0, checked.output
    assert f"{variables} variables, for 2 ranks" in checked.output


def test_the_docstrings_examples_hold(ours, batches):
    for module in (ours.models, batches):
        result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
        assert result.attempted
        assert not result.failed
