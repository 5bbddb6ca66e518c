"""A loop of Accelerate's: digits on two ranks, stopped and resumed also on others, and what is refused."""

import gc
import math
import shutil
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import grace
from tests.support.frameworks import OUTER, Recorded, bits, check_refused, digits, kept, torchrun
from tests.support.pool import Ranks
from tests.support.pools import on_ranks
from tests.support.training import digest

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")

TOPK = "topk(ratio=0.1)"


def net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def accelerator(**options: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, gradient_accumulation_steps=2, **options)


class Run:
    """A loop that accumulates two batches, clips and computes in bfloat16."""

    def __init__(self, compressor: str | None = TOPK, seed: int = 0, scaler: Any = None, **choices: Any):
        self.by = by = accelerator(**({} if scaler else {"mixed_precision": "bf16"}))
        by.scaler = scaler
        x, y = digits()
        model, data = net(seed), torch.utils.data.TensorDataset(x[:512], y[:512])
        optimizer = sgd(model)
        self.recorded = Recorded(model, optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
        loader = torch.utils.data.DataLoader(data, batch_size=16)
        given = model, optimizer, loader, scheduler
        if compressor is None and not choices:
            made = by.prepare(*given)
        else:
            made = grace.integrations.accelerate.prepare(by, *given, compressor=compressor, **choices)
        self.model, self.optimizer, self.loader, self.scheduler = made

    @property
    def state(self) -> Any:
        return grace.integrations.accelerate.state_of(self.model)

    @property
    def module(self) -> torch.nn.Module:
        return self.by.unwrap_model(self.model)

    def train(self, batches: int = 8, clip: bool = True) -> "Run":
        for images, labels in list(self.loader)[:batches]:
            with self.by.accumulate(self.model):
                self.by.backward(torch.nn.functional.cross_entropy(self.model(images), labels))
                if clip and self.by.sync_gradients:
                    self.by.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return self

    def save(self, folder: Path) -> None:
        self.by.save_state(str(folder))
        self.by.wait_for_everyone()

    def load(self, folder: Path) -> "Run":
        self.by.load_state(str(folder))
        return self

    def bits(self) -> str:
        return digest(dict(self.by.unwrap_model(self.model).state_dict()))


def residuals(state: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in state.state_dict()["state"]["memory"].items()}


def stopped_and_resumed(folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """A digest of weights, and what this rank remembered where the run was stopped."""
    with torchrun():
        whole = Run().train()
        remembered = residuals(whole.state)
        whole.save(folder)
        whole.train()
        told = grace.integrations.accelerate.metrics(whole.model)
        assert told["grace_ratio"] > 2
        assert told["grace_bytes_sent"] == whole.state.traffic.sent_bytes
        resumed = Run(seed=1).load(folder).train()
        assert resumed.bits() == whole.bits()
        assert kept(resumed.state) == kept(whole.state)
        assert resumed.state.runner.context.step == 8
        return whole.bits(), remembered


def resumed_on_others(folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    with torchrun():
        run = Run(seed=1).load(folder)
        remembered = residuals(run.state)
        return run.train(batches=2).bits(), remembered


def empty_after_one_process(folder: Path) -> None:
    with torchrun():
        run = Run(seed=1).load(folder)
        assert run.state.runner.context.step == 0
        assert residuals(run.state) == {}
        run.train(batches=2)


def test_a_run_goes_on_bit_for_bit_and_also_on_other_numbers_of_ranks(
    two_ranks: Ranks, three_ranks: Ranks, tmp_path: Path, monkeypatch: Any
):
    (one, first), (other, second) = two_ranks.run(stopped_and_resumed, tmp_path / "two")
    assert one == other
    on_three = three_ranks.run(resumed_on_others, tmp_path / "two")
    assert len({bits for bits, _ in on_three}) == 1
    for _, remembered in on_three:  # the mean of what the two ranks had
        for name, value in remembered.items():
            torch.testing.assert_close(value, (first[name] + second[name]) / 2)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.warns(UserWarning, match="one process exchanges no"):
        run = Run()
    with pytest.warns(UserWarning, match="are dropped, because one process exchanges nothing"):
        run.load(tmp_path / "two")
    assert run.state is None
    assert grace.integrations.accelerate.metrics(run.model) == {}
    run.train(batches=2).save(tmp_path / "one")
    two_ranks.run(empty_after_one_process, tmp_path / "one")


def weights_in(folder: Path) -> torch.nn.Module:
    """The model that a checkpoint has."""
    from safetensors.torch import load_model

    model = net(seed=9)
    load_model(model, folder / "model.safetensors")
    return model


@on_ranks(2)
def test_ranks_that_train_alone_go_the_way_of_the_loop_by_hand(tmp_path):
    """Four steps at a time, where a period is three; one is stopped after the first four, and resumed."""
    with torchrun():
        whole = Run(**OUTER)
        for number in range(4):
            whole.train()
            with grace.integrations.accelerate.anchor(whole.model), torch.no_grad():
                whole.model.eval()(digits()[0][:8])
                shared = bits(whole.module)
            whole.model.train()
            if number == 0:
                whole.save(tmp_path)
                assert bits(weights_in(tmp_path)) == shared
        assert grace.integrations.accelerate.metrics(whole.model)["grace_drift_norm"] > 0
        resumed = Run(seed=1, **OUTER).load(tmp_path)
        for _ in range(3):
            resumed.train()
        assert bits(resumed.module) == bits(whole.module) != shared
        assert kept(resumed.state) == kept(whole.state)
        for run in (whole, resumed):
            grace.integrations.accelerate.flush(run.model)
        assert bits(resumed.module) == bits(whole.module)
        assert whole.recorded.by_hand(hand := net(), sgd(hand), **OUTER) == bits(whole.module)
        return bits(whole.module)


@on_ranks(2)
def test_a_strategy_may_keep_the_ranks_of_a_node_in_step():
    """Then clipping sees the mean of their gradients."""
    with torchrun():
        outer = {"optimizer": "none", "period": 2, "over": "nodes"}
        rules = [{"match": {}, "sync": {"type": "allreduce"}, "outer": outer}]
        run = Run(None, strategy={"version": 1, "rules": rules}).train()
        assert len(run.recorded.gradients) == 4
        return bits(run.module), digest(run.recorded.gradients)


class Checkpointed(torch.nn.Module):
    """Three layers, whose middle one runs in a checkpoint, or not."""

    def __init__(self, reentrant: bool):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (torch.nn.Linear(64, n) for n in (64, 64, 10))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        checkpoint = torch.utils.checkpoint.checkpoint
        x = checkpoint(self.middle, x, use_reentrant=True) if self.reentrant else self.middle(x)
        return self.last(x.relu())


@on_ranks(2)
def test_the_backward_pass_of_a_reentrant_checkpoint_does_not_end_the_step():
    """Such a pass runs within the model's, at whose end the ranks of a node have the mean, once."""
    outer = {"optimizer": "none", "period": 2, "over": "nodes"}
    strategy = {"version": 1, "rules": [{"match": {}, "sync": {"type": "allreduce"}, "outer": outer}]}

    def trained(reentrant: bool) -> tuple[str, int]:
        by, model = accelerator(), Checkpointed(reentrant)
        wrapped, optimizer = grace.integrations.accelerate.prepare(by, model, sgd(model), strategy=strategy)
        x, y = digits()
        for step in range(4):
            own = slice(32 * step + 16 * grace.rank(), 32 * step + 16 * grace.rank() + 16)
            by.backward(torch.nn.functional.cross_entropy(wrapped(x[own]), y[own]))
            optimizer.step()
            optimizer.zero_grad()
        return bits(model), grace.integrations.accelerate.state_of(wrapped).traffic.sent_bytes

    with torchrun():
        plain = trained(False)
        assert trained(True) == plain
        return plain[0]


@on_ranks()
def test_the_loss_is_within_noise_of_the_uncompressed_one():
    """Two seeds each train, uncompressed and compressed."""
    with torchrun():
        found: list[list[float]] = []
        x, y = digits()
        for chosen in (None, TOPK):
            runs = [Run(chosen, seed) for seed in range(2)]
            for run in runs:
                for _ in range(3):
                    run.train(batches=16)
            with torch.no_grad():
                logits = [run.model(x[1500:]) for run in runs]
            found.append([torch.nn.functional.cross_entropy(each, y[1500:]).item() for each in logits])
        plain, compressed = found
        assert sum(compressed) / 2 < max(plain) + abs(plain[0] - plain[1]), (plain, compressed)
        return found


@on_ranks(2)
def test_a_scaler_is_followed():
    """An overflow in the first step, which no memory keeps, and the scale is followed."""
    with torchrun():
        run = Run(scaler=torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-110)).train(
            2, clip=False
        )
        assert run.optimizer.step_was_skipped
        assert residuals(run.state) == {}
        run.train(2, clip=False)
        assert not run.optimizer.step_was_skipped
        norm = grace.integrations.accelerate.metrics(run.model)["grace_residual_norm"]
        plain = Run(scaler=torch.amp.GradScaler("cpu", init_scale=1.0)).train(2, clip=False)
        expected = grace.integrations.accelerate.metrics(plain.model)["grace_residual_norm"]
        assert math.isclose(norm, expected, rel_tol=1e-4)
        return [run.bits(), plain.bits()]


@on_ranks(2)
def test_what_cannot_work_is_refused_in_accelerates_words(tmp_path):
    """Training that follows the refusals must still work."""

    def wrapping() -> None:
        by, model = accelerator(), net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = by.prepare(model, grace.DistributedOptimizer(optimizer, model, TOPK))
        for _ in range(2):
            by.backward(model(torch.ones(2, 64)).sum())
            optimizer.step()

    def without_model() -> None:
        grace.integrations.accelerate.prepare(accelerator(), torch.optim.SGD(net().parameters()), compressor=TOPK)

    def twice() -> None:
        run = Run()
        grace.integrations.accelerate.prepare(run.by, run.model, compressor=TOPK)

    def sharded() -> None:
        from torch.distributed.fsdp import fully_shard

        from grace.integrations.wrapped import wrap

        wrap(fully_shard(net()), 2, [], "strict", "Start without FSDP", "prepare({})")

    def another_step() -> None:
        run = Run().train(4)
        run.save(tmp_path / "one")
        run.train(4).save(tmp_path / "two")
        name = "custom_checkpoint_0.pkl"
        grace.from_root(lambda: shutil.copy(tmp_path / "two" / name, tmp_path / "one" / name))
        Run().load(tmp_path / "one")

    def in_step() -> None:
        rules = [{"match": {"name": "0.*"}, "sync": {"type": "allreduce"}}]
        rules += [{"match": {}, "sync": {"type": "allreduce"}, "outer": {"optimizer": "none", "period": 2}}]
        Run(None, strategy={"version": 1, "rules": rules})

    def without_optimizer() -> None:
        grace.integrations.accelerate.prepare(accelerator(), net(), outer="none", period=2)

    def following_no_optimizer() -> None:
        grace.integrations.accelerate.prepare(accelerator(), net(), compressor="efsignsgd")

    misuses = {
        in_step: ["keeps '0.weight' in step", "frameworks clip all", "over='nodes'"],
        without_optimizer: ["need one optimizer that has all parameters"],
        wrapping: [
            "is in a DistributedDataParallel model",
            "grace.integrations.accelerate.prepare(accelerator, model, optimizer,",
        ],
        without_model: ["needs the model", "Loaders and schedulers may go to accelerator.prepare alone"],
        following_no_optimizer: ["follows the learning rate", "prepare(accelerator, model, optimizer, ...)"],
        twice: ["has Grace's hook already"],
        sharded: ["sharded by fully_shard (FSDP2)", "Start without FSDP", "grace.torch.register_fsdp_hook"],
        another_step: ["were saved at", "and the run is at", "prepare(..., memory_state='reset')"],
    }
    with torchrun():
        check_refused(misuses)
        by, model = accelerator(), net()
        prepared, optimizer = by.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        teacher: Any = net().requires_grad_(False)
        teacher._is_accelerate_prepared = True  # as on GPUs, where Accelerate leaves frozen models unwrapped
        same = grace.integrations.accelerate.prepare(by, prepared, optimizer, teacher, compressor="efsignsgd")
        assert same[0] is prepared
        assert grace.integrations.accelerate.state_of(prepared).optimizer is optimizer.optimizer


@on_ranks(2)
def test_another_try_is_saved_alone_and_the_first_model_is_freed(tmp_path):
    """The first try ends between backward and step, as where memory runs out; the second one is all that is saved."""
    with torchrun():
        by = accelerator()

        def prepared() -> Any:
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return grace.integrations.accelerate.prepare(by, model, optimizer, compressor=TOPK)

        def first() -> Any:
            model, _ = prepared()
            by.backward(model(torch.ones(2, 64)).sum())
            return weakref.ref(by.unwrap_model(model))

        left = first()
        by.free_memory()
        gc.collect()
        assert left() is None
        model, optimizer = prepared()
        for _ in range(2):
            by.backward(model(torch.ones(2, 64)).sum())
            optimizer.step()
            optimizer.zero_grad()
        by.save_state(str(tmp_path))
        by.wait_for_everyone()
        assert len(list(tmp_path.glob("custom_checkpoint*"))) == 1
        remembered = kept(grace.integrations.accelerate.state_of(model))
        by = accelerator()
        model, optimizer = prepared()
        by.load_state(str(tmp_path))
        assert kept(grace.integrations.accelerate.state_of(model)) == remembered != {}
        second = prepared()  # beside the first one, which is saved all the same
        by.save_state(str(tmp_path / "both"))
        by.wait_for_everyone()
        assert len(second) == len(list((tmp_path / "both").glob("custom_checkpoint*"))) == 2
