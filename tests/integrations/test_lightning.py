"""GraceCallback under the real Trainer of Lightning: digits on two ranks, stopped and resumed, and what is refused."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import grace
from tests.support.frameworks import OUTER, Recorded, check_refused, digits, kept, torchrun
from tests.support.frameworks import bits as parameter_bits
from tests.support.pools import on_ranks
from tests.support.training import digest

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")

TOPK = "topk(ratio=0.1)"


def net(seed: int = 0, optimizer: Any = None) -> Any:
    """A small one."""
    import lightning.pytorch as pl

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(seed)
            self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

        def training_step(self, batch, index):
            x, y = batch
            loss = torch.nn.functional.cross_entropy(self.layers(x), y)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, index):
            x, y = batch
            self.log("val_loss", torch.nn.functional.cross_entropy(self.layers(x), y), sync_dist=True)

        def configure_optimizers(self):
            made = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return optimizer(made, self) if optimizer else made

    return Net()


def loaders() -> list[Any]:
    """Return loaders of 4 steps an epoch, in one order: Lightning resumes at an epoch's first batch, with another
    order."""
    x, y = digits()
    sets = torch.utils.data.TensorDataset(x[:256], y[:256]), torch.utils.data.TensorDataset(x[1600:], y[1600:])
    own = [torch.utils.data.DistributedSampler(part, grace.size(), grace.rank(), shuffle=False) for part in sets]
    return [torch.utils.data.DataLoader(part, 16, sampler=s) for part, s in zip(sets, own, strict=True)]


def trainer(folder: Path, *callbacks: Any, strategy: Any = "ddp", **arguments: Any) -> Any:
    """One that accumulates two batches, clips, computes in bfloat16, validates and saves on the way."""
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger

    usual = {"max_steps": 12, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "log_every_n_steps": 4}
    usual["precision"] = "bf16-mixed"
    saving = pl.callbacks.ModelCheckpoint(folder, filename="{step}", save_on_train_epoch_end=True, save_top_k=-1)
    return pl.Trainer(
        accelerator="cpu",
        devices=grace.size(),
        strategy=strategy,
        use_distributed_sampler=False,
        callbacks=[saving, *callbacks],
        logger=CSVLogger(folder, version=0),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**usual, **arguments},
    )


def callback(compressor: str = TOPK, **choices: Any) -> Any:
    from grace.integrations.lightning import GraceCallback

    return GraceCallback(compressor, **choices)


def bits(model: Any) -> str:
    return digest(dict(model.state_dict()))


@on_ranks(2)
def test_a_run_that_is_resumed_goes_on_bit_for_bit(tmp_path):
    """A run, one resumed in its middle, and another fit()."""
    with torchrun():
        whole, first, model = trainer(tmp_path, own := callback()), own, net()
        whole.fit(model, *loaders())
        after = bits(model), kept(first.state)
        if grace.rank() == 0:
            lines = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
            names = lines[0].split(",")
            ratios = [line.split(",")[names.index("grace_ratio")] for line in lines[1:]]
            assert [float(ratio) > 2 for ratio in ratios if ratio] == [True] * 3
        resumed, second, other = trainer(tmp_path / "b", own := callback()), own, net(seed=1)
        resumed.fit(other, *loaders(), ckpt_path=str(tmp_path / "step=8.ckpt"))
        assert (bits(other), kept(second.state)) == after
        resumed.save_checkpoint(tmp_path / "end.ckpt")
        assert "grace" in torch.load(tmp_path / "end.ckpt", weights_only=True)
        try:
            raise KeyError("of one rank")
        except KeyError:
            with pytest.warns(UserWarning, match="because of an exception holds no memories"):
                resumed.save_checkpoint(tmp_path / "late.ckpt")
        resumed.fit_loop.epoch_loop.max_steps = 14
        resumed.fit(other, *loaders())  # once more, with a new wrapper
        assert second.state.runner.context.step == 2
        one = [*after[:1], bits(other)]
        assert one[0] != one[1]
        return one


@on_ranks(2)
def test_ranks_that_train_alone_go_the_way_of_the_loop_by_hand(tmp_path):
    """Twelve steps, a period of five, validated and saved after each four; one is resumed from the eighth."""
    recorded = []

    def record(made: Any, module: Any) -> Any:
        recorded.append(Recorded(module, made))
        return made

    def fitted(folder: Path, seed: int = 0, **options: Any) -> tuple[Any, Any]:
        own, model = callback(**choices), net(seed, record)
        made = trainer(folder, own)
        made.fit(model, *loaders(), **options)
        return parameter_bits(model), kept(own.state)

    choices = {**OUTER, "period": 5}
    with torchrun():
        whole = fitted(tmp_path)
        assert fitted(tmp_path / "b", seed=1, ckpt_path=str(tmp_path / "step=8.ckpt")) == whole
        hand, seen = net(), recorded[0].evaluated
        assert recorded[0].by_hand(hand, hand.configure_optimizers(), **choices) == whole[0]
        saved = torch.load(tmp_path / "step=8.ckpt", weights_only=True)["state_dict"]
        hand.load_state_dict(saved)
        assert parameter_bits(hand) == seen[8]
        return whole[0]


@on_ranks(2)
def test_the_last_round_takes_what_another_callback_sets_at_the_end(tmp_path):
    """An average of the rank's own weights, say, of a callback that was given after Grace's."""
    import lightning.pytorch as pl

    class Average(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            for p in pl_module.parameters():
                p.data.fill_(1.0 + 2 * grace.rank())

    with torchrun():
        model = net()
        made = trainer(tmp_path, callback(None, outer="none", period=5), Average())
        made.fit(model, *loaders())
        assert all(torch.allclose(p.detach(), torch.tensor(2.0)) for p in model.parameters())
        assert isinstance(made.callbacks[-1], pl.callbacks.ModelCheckpoint)
        return parameter_bits(model)


def on_gpus() -> Any:
    """A strategy that registers hooks as Lightning does on GPUs."""
    from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
    from lightning.pytorch.strategies import DDPStrategy

    class OnGPUs(DDPStrategy):
        def _register_ddp_hooks(self) -> None:
            _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)

    return OnGPUs


@on_ranks(2)
def test_what_cannot_work_is_refused_in_lightnings_words(tmp_path):
    """Training that follows the refusals must still work."""

    def wrapping() -> None:
        model = net(optimizer=lambda made, module: grace.DistributedOptimizer(made, module, TOPK))
        trainer(tmp_path).fit(model, *loaders())

    def without_memories() -> None:
        trainer(tmp_path, max_steps=8).fit(net(), *loaders())
        trainer(tmp_path, callback()).fit(net(), *loaders(), ckpt_path=str(tmp_path / "step=8.ckpt"))

    def another_step() -> None:
        saving = trainer(tmp_path / "steps", callback(), max_steps=8)
        saving.fit(net(), *loaders())

        def mix() -> None:
            one, two = (torch.load(tmp_path / "steps" / f"step={n}.ckpt", weights_only=True) for n in (4, 8))
            torch.save({**one, "grace": two["grace"]}, tmp_path / "steps" / "mixed.ckpt")

        grace.from_root(mix)
        trainer(tmp_path, callback()).fit(net(), *loaders(), ckpt_path=str(tmp_path / "steps" / "mixed.ckpt"))

    def without_callback() -> None:
        hook_with_lightnings_own(callback()).fit(net(), *loaders())

    def hook_with_lightnings_own(own: Any, *callbacks: Any) -> Any:
        return trainer(tmp_path, *callbacks, strategy=registering(own), max_steps=2)

    def registering(own: Any) -> Any:
        return on_gpus()(ddp_comm_state=own.ddp_comm_state, ddp_comm_hook=own.ddp_comm_hook)

    reset = "GraceCallback(memory_state='reset')"
    misuses = {
        wrapping: ["is in a DistributedDataParallel model", "Trainer(..., callbacks=[", "lightning.GraceCallback("],
        without_memories: ["saved by a plain optimizer", reset],
        another_step: ["were saved at global_step 8, and the run is at 4", reset],
        without_callback: ["without its state", "callbacks=[callback]"],
    }
    with torchrun():
        check_refused(misuses)
        by_nodes = callback(None, strategy=f"uniform(compressor={TOPK})", hierarchical=True)
        hook_with_lightnings_own(by_nodes, by_nodes).fit(net(), *loaders())
        assert by_nodes.state.runner.hierarchical
        assert by_nodes.state.traffic.sent_bytes > 0


@on_ranks(2)
def test_a_search_for_a_learning_rate_leaves_nothing_in_memories(tmp_path):
    """A plain fit() is like those that come after a search: by a Tuner, and in fit()."""
    import lightning.pytorch as pl
    from lightning.pytorch.tuner import Tuner

    class Finds(pl.callbacks.LearningRateFinder):
        def __init__(self):
            super().__init__(num_training_steps=3, update_attr=False)

    def fitted(search: Any = None, *callbacks: Any, **arguments: Any) -> tuple[Any, int]:
        made, model = trainer(tmp_path / "tuned", own := callback(), *callbacks, max_steps=4, **arguments), net()
        model.lr = 0.1
        if search:
            search(Tuner(made), model)
            model.load_state_dict(net().state_dict())
        made.fit(model, *loaders())
        return bits(model), own.state.runner.context.step

    def find(tuner: Any, model: Any) -> None:
        tuner.lr_find(model, *loaders(), num_training=3, update_attr=False)

    with torchrun():
        plain, *others = [fitted(), fitted(find), fitted(None, Finds())]
        assert others == [plain, plain]
        assert plain[1] == 4


@on_ranks(2)
def test_two_optimizers_by_hand_are_logged_as_often_as_lightning_logs(tmp_path):
    """Each batch makes two steps; loggers get all bytes that were sent."""

    def two(made: Any, module: Any) -> list[torch.optim.Optimizer]:
        module.automatic_optimization = False
        return [torch.optim.SGD(module.layers[i].parameters(), lr=0.1) for i in (0, 2)]

    def step(module: Any, batch: Any, index: int) -> None:
        for optimizer in module.optimizers():
            optimizer.zero_grad()
            module.manual_backward(torch.nn.functional.cross_entropy(module.layers(batch[0]), batch[1]))
            optimizer.step()
        module.zero_grad()  # gradients that the other optimizer's loss has left

    with torchrun():
        model, own = net(optimizer=two), callback()
        type(model).training_step = step
        plain = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "max_steps": 16}
        trainer(tmp_path, own, **plain).fit(model, loaders()[0])
        if grace.rank() == 0:
            lines = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
            sent = lines[0].split(",").index("grace_bytes_sent")
            logged = [float(line.split(",")[sent]) for line in lines[1:]]
            assert len(logged) == 2
            assert sum(logged) == own.state.traffic.sent_bytes
        return bits(model)


@on_ranks(2)
def test_ranks_that_train_alone_save_the_anchors_after_an_error_behind_backward(tmp_path):
    """The error is the program's own, and the checkpoint has the parameters of the last round."""
    import lightning.pytorch as pl

    def fail(optimizer: Any) -> None:
        if made.global_step == 4:
            raise KeyError("behind backward")

    with torchrun():
        model = net()
        model.on_before_optimizer_step = fail
        saving = pl.callbacks.OnExceptionCheckpoint(tmp_path, "late")
        made = trainer(tmp_path, callback(**OUTER), saving)
        with pytest.warns(UserWarning, match="holds no memories"), pytest.raises(KeyError, match="behind backward"):
            made.fit(model, *loaders())
        saved = torch.load(tmp_path / "late.ckpt", weights_only=True)
        alone = net()
        alone.load_state_dict(saved["state_dict"])
        assert bits(alone) not in (bits(net()), bits(model))
        return bits(alone)
