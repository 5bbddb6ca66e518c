"""Frameworks hand on how ranks exchange: three ranks on two nodes exchange between nodes only, by strategies."""

import contextlib
import gc
import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import grace
from grace.core.backend import Backend
from tests.support.drawing import THOROUGH
from tests.support.frameworks import torchrun
from tests.support.pools import on_ranks
from tests.support.training import digest, distributed, loss_of, net, sgd, train, weights

pytestmark = pytest.mark.ranks

STEPS = 3
EXACT = {"strategy": "all_reduce", "hierarchical": True}
TOPK = {"strategy": "uniform(compressor=topk(ratio=0.1))", "hierarchical": True}


@contextlib.contextmanager
def two_nodes():
    """Set the environment that torchrun would give this rank, which is one of two on its node, or alone."""
    gc.unfreeze()  # ranks freeze what they have before each function, and frozen objects are not listed
    for backend in gc.get_objects():
        if issubclass(type(backend), Backend):  # a channel may be one that an earlier test has sent through
            backend.sent_bytes = 0
    with torchrun():
        os.environ["GRACE_NODE"] = "a" if grace.rank() < 2 else "b"
        yield


class WithLoss(torch.nn.Module):
    """The model with the loss on the batch of a number, as a Trainer wants it."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, number):
        return {"loss": loss_of(self.net, int(number), rank=0)}


def under_accelerate(choices: dict[str, Any] | None, folder: Any) -> tuple[torch.nn.Module, Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    by = Accelerator(cpu=True)
    model = net()
    given = model, sgd(model.parameters())
    if choices is None:
        wrapped, optimizer = by.prepare(*given)
    else:
        wrapped, optimizer = grace.integrations.accelerate.prepare(by, *given, **choices)
    for step in range(STEPS):
        optimizer.zero_grad()
        by.backward(loss_of(wrapped, step))
        optimizer.step()
    return model, None if choices is None else grace.integrations.accelerate.state_of(wrapped)


def under_lightning(choices: dict[str, Any] | None, folder: Any) -> tuple[torch.nn.Module, Any]:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, number, index):
            return loss_of(self.net, int(number))

        def configure_optimizers(self):
            return sgd(self.parameters())

    callbacks = [] if choices is None else [grace.integrations.lightning.GraceCallback(**choices)]
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=grace.size(),
        strategy="ddp",
        use_distributed_sampler=False,
        callbacks=callbacks,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.arange(STEPS), batch_size=1))
    return module.net, callbacks[0].state if callbacks else None


def under_transformers(choices: dict[str, Any] | None, folder: Any) -> tuple[torch.nn.Module, Any]:
    import transformers

    callbacks = [] if choices is None else [grace.integrations.transformers.GraceCallback(**choices)]
    model = WithLoss()
    settings = transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        max_steps=STEPS,
        per_device_train_batch_size=1,
    )
    numbers = [{"number": torch.tensor(number)} for number in range(grace.size() * STEPS)]
    made = transformers.Trainer(
        model, settings, train_dataset=numbers, callbacks=callbacks, optimizers=(sgd(model.parameters()), None)
    )
    made.remove_callback(transformers.PrinterCallback)
    made.train()
    return model.net, callbacks[0].state if callbacks else None


FRAMEWORKS = {"accelerate": under_accelerate, "lightning": under_lightning, "transformers": under_transformers}


def between_nodes(runner: Any) -> int:
    """Bytes that this rank has sent to the other node; nothing may leave it over all ranks."""
    assert runner.hierarchical
    assert runner.channel.sent_bytes == 0
    return runner.hierarchy.backend.sent_bytes


def by_optimizer() -> tuple[str, int]:
    """A digest of the weights after an optimizer's steps, and the same bytes."""
    model = net()
    optimizer = distributed(model, **TOPK)
    train(model, optimizer, range(STEPS))
    return digest(weights(model)), between_nodes(optimizer._grace.runner)


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param(name, marks=pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed"))
        for name in FRAMEWORKS
        if THOROUGH
        or name != "transformers"  # whose callback hands choices on as Lightning's does, and is slow to load
    ],
)
@on_ranks(3)
def test_ranks_exchange_between_nodes_only(framework, tmp_path):
    """Without loss, weights are those of the framework's own exchange; with top-k, those of an optimizer, and a node's
    leader sends the bytes that it sends there, and the other rank none."""
    run = FRAMEWORKS[framework]
    with two_nodes():
        wanted, _ = run(None, tmp_path)
        got, _ = run(EXACT, tmp_path)
        for name, value in weights(wanted).items():
            torch.testing.assert_close(weights(got)[name], value, rtol=1e-5, atol=1e-6)
        compressed, state = run(TOPK, tmp_path)
        sent, leads = between_nodes(state.runner), grace.rank() % 2 == 0
        assert (sent > 0) == leads
        wanted_bits, wanted_bytes = by_optimizer()
        headers = 64 * STEPS  # of other buckets
        assert abs(sent - wanted_bytes) <= headers, (sent, wanted_bytes)
        whole = sum(4 * p.numel() for p in compressed.parameters())
        assert sent < STEPS * whole / 4
        found = digest(weights(compressed))
        assert found == wanted_bits or framework == "transformers"  # which gives each rank batches of its own
        return found
