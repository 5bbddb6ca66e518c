"""Compressed gradients under Lightning."""

import contextlib
import sys
from functools import cached_property, partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

import grace.backends.openmpi  # noqa: F401 - where mpi4py is installed, a Trainer calls MPI to find its launcher
from grace.errors import warn
from grace.integrations.wrapped import KEY, NOTHING, Chosen, wrap
from grace.torch.ddp import EarlyState, grace_hook

WAY = 'Give Trainer(strategy="ddp")'


class GraceCallback(Chosen, Callback):
    """Callback that compresses the gradients that the ranks of a ``Trainer(strategy="ddp")`` exchange.

    When training starts it registers its hook with the DistributedDataParallel model that Lightning has made; the
    optimizer is not changed. With ``outer``, or a strategy that has outer rounds, Lightning's optimizer becomes a
    distributed one, and the wrapper exchanges nothing: the anchors are validated and saved, and a last round ends
    training. Lightning's checkpoints hold the state of all ranks under ``"grace"``, which
    ``fit(ckpt_path=...)`` loads, on any number of ranks. Every ``log_every_n_steps`` steps the numbers of the exchange
    since the last time are logged, as ``grace_bytes_sent``, ``grace_ratio`` and so on (:mod:`grace.session.metrics`).
    In one process nothing is exchanged, and a warning says so.

    Args:
        compressor, memory, communicator, strategy, hierarchical, compress_after, seed, bucket_bytes: as for
            :func:`grace.torch.register_ddp_hook`.
        outer, period: as for :func:`grace.DistributedOptimizer`.
        memory_state: treatment of the memories in a checkpoint: "strict" refuses one without them, or of another
            method; "keep" keeps the memories that fit, and warns of the others; "reset" starts with empty ones.

    Attributes:
        state: the hook's :class:`~grace.torch.DDPState`, or the distributed optimizer if there are outer rounds; None
            before training, and in one process.
        ddp_comm_state, ddp_comm_hook: arguments for a ``DDPStrategy`` of your own, beside the callback. Lightning
            registers them on GPUs only; on CPUs the callback does.

    Raises:
        ConfigError: when training starts: the model is wrapped otherwise, or the choices cannot work.

    Example::

        Trainer(strategy="ddp", devices=2, callbacks=[GraceCallback(compressor="topk(ratio=0.01)")]).fit(model, loader)
    """

    ddp_comm_hook = staticmethod(grace_hook)
    loaded: dict[str, object] | None = None
    trainer: Trainer | None = None
    validating: contextlib.ExitStack | None = None
    """Context of the anchors during validation."""

    @cached_property
    def ddp_comm_state(self) -> EarlyState:
        """Placeholder for the hook's state until there are optimizers."""
        return EarlyState()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the hook of the last fit(): Lightning wraps the model, and makes optimizers, anew for each. Move this
        callback behind the others."""
        self.training = False
        if stage == "fit":
            # The last round takes the parameters that others set when training ends, as an average of weights does.
            # Lightning keeps those that save behind all others. It is going through the old list.
            trainer.callbacks = sorted(  # type: ignore[attr-defined]
                trainer.callbacks,  # type: ignore[attr-defined]
                key=lambda other: (isinstance(other, Checkpoint), other is self),
            )
            if self.wrapped is not None:
                self.wrapped.close()
            self.wrapped = self.loaded = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register the hook, and load the state that a checkpoint held. The optimizers have their states by now."""
        model = trainer.strategy.model
        assert model is not None  # of a Trainer that fits
        self.wrapped = wrap(
            model,
            trainer.world_size,
            trainer.optimizers,
            self.memory_state,
            WAY,
            "GraceCallback({})",
            partial(_progress, trainer),
            grad_scaler=getattr(trainer.precision_plugin, "scaler", None),
            **self.choices,
        )
        loaded = self.loaded
        self.loaded = None
        if loaded is not None:
            self.wrapped.load_state_dict(loaded)
        if trainer is not self.trainer:  # once for each Trainer: a second fit() finds its method wrapped
            self.trainer = trainer
            self.at_anchor(trainer, "save_checkpoint")
        self.training = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run a last outer round."""
        self.end_training(flush=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate the parameters that all ranks share."""
        self.validating = contextlib.ExitStack()
        self.validating.enter_context(self.anchor())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Return to this rank's own parameters."""
        if self.validating is not None:
            self.validating.close()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, object]) -> None:
        """Hold the state in a checkpoint until the model is wrapped."""
        if trainer.state.fn == "fit":  # validate() and test() exchange nothing
            self.loaded = {KEY: checkpoint[KEY]} if KEY in checkpoint else {}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, object]) -> None:
        """Put the state of all ranks into the checkpoint. Lightning calls it on all of them."""
        if self.wrapped is None:  # a Tuner saves before training, and restores it after its trials
            checkpoint.update(NOTHING if self.loaded is None else self.loaded)
            return
        # gathering the state is a collective, and after an exception other ranks may not come here
        if sys.exc_info()[0] is not None:
            warn(
                "a checkpoint that is saved because of an exception holds no memories: other ranks may not have come "
                "as far. Load it with GraceCallback(memory_state='reset')"
            )
            return
        checkpoint.update(self.wrapped.state_dict())

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *ignored: object) -> None:
        """Log numbers of the exchange, as often as Lightning logs."""
        # Lightning's loggers take what is logged in these batches alone, and count batches, not steps of optimizers.
        logs = trainer._logger_connector.should_update_logs and not trainer.fit_loop._should_accumulate()
        if self.wrapped is not None and logs:
            pl_module.log_dict(self.wrapped.metrics())


def _progress(trainer: Trainer) -> dict[str, int]:
    """Return the steps of a run as its checkpoints count them."""
    return {"global_step": trainer.global_step}
