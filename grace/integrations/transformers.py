"""Compressed gradients under the Trainer of Hugging Face's transformers."""

import contextlib
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grace.core.atomic_files import atomic_write
from grace.errors import ConfigError
from grace.integrations.wrapped import Chosen, wrap
from grace.session.agreement import failing_together
from grace.torch.wrappers import unwrap_compiled

FILE = "grace_memories.pt"
"""Name of the file with memories in each checkpoint's folder."""
WAY = "Leave deepspeed and fsdp out of TrainingArguments"


class GraceCallback(Chosen, TrainerCallback):
    """Callback that compresses the gradients that a ``Trainer``'s ranks exchange.

    The Trainer puts the model into DistributedDataParallel when there are several ranks; when training begins the
    callback registers its communication hook, and the optimizer is not changed. With ``outer``, or a strategy that has
    outer rounds, the Trainer's optimizer becomes a distributed one, and the wrapper exchanges nothing: the Trainer then
    evaluates and saves the anchors, and a last round ends training. Each ``checkpoint-N`` folder gets a
    file with the state of all ranks, ``grace_memories.pt``, which ``resume_from_checkpoint`` loads, on any number of
    ranks; trials of ``hyperparameter_search`` get none. Whenever the Trainer logs a loss, it logs the numbers of the
    exchange since the last time, as ``grace_bytes_sent``, ``grace_ratio`` and so on (:mod:`grace.session.metrics`). In
    one process nothing is exchanged, and a warning says so.

    Args:
        compressor, memory, communicator, strategy, hierarchical, compress_after, seed, bucket_bytes: as for
            :func:`grace.torch.register_ddp_hook`.
        outer, period: as for :func:`grace.DistributedOptimizer`.
        memory_state: treatment of memories on ``resume_from_checkpoint``: "strict" refuses a checkpoint without
            them, or of another method; "keep" keeps the memories that fit, and warns of the others; "reset" starts
            with empty ones.

    Attributes:
        state: the hook's :class:`~grace.torch.DDPState`, or the distributed optimizer if there are outer rounds; None
            before training, and in one process.

    Raises:
        ConfigError: when training begins: the model is wrapped otherwise, or the choices cannot work.

    Example::

        Trainer(model, args, train_dataset=data, callbacks=[GraceCallback(compressor="topk(ratio=0.01)")]).train()
    """

    trainer: Trainer | None = None
    model: torch.nn.Module | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Register the hook, unless this model has it from the last ``train()``, and load the state that a checkpoint
        holds. Move this callback behind the others."""
        trainer, checkpoint = _calling_trainer(self)
        if trainer is not self.trainer:  # once for each Trainer: a second train() finds its methods wrapped
            self.trainer = trainer
            self.at_anchor(trainer, "evaluate", "predict", "save_model")
        # The last round takes the parameters that others set when training ends, as an average of weights does. The
        # Trainer is going through the old list.
        handler = trainer.callback_handler
        handler.callbacks = sorted(handler.callbacks, key=lambda other: other is self)
        model = trainer.model_wrapped
        optimizer = kwargs["optimizer"]
        if self.wrapped is None or self.model is None or unwrap_compiled(self.model) is not unwrap_compiled(model):
            if self.wrapped is not None:  # another model, or a wrapper made anew for another batch size
                self.wrapped.close()
                self.wrapped = self.model = None  # an outer optimizer refuses parameters that two wrappers have
            self.wrapped = wrap(
                model,
                args.world_size,
                [optimizer],
                self.memory_state,
                WAY,
                "GraceCallback({})",
                partial(_progress, trainer),
                grad_scaler=getattr(optimizer, "scaler", None),
                **self.choices,
            )
            self.model = model
        elif self.wrapped.optimizer not in (None, optimizer.optimizer):
            raise ConfigError(
                "the Trainer has another optimizer than in its last train(), and the exchange stays with the former "
                "one: make a new Trainer"
            )
        self.training = True
        if checkpoint is not None:
            self._load(Path(checkpoint, FILE))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Run a last outer round, unless all ranks have the parameters of the best checkpoint."""
        best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        # Another callback may have put an average of each rank's own weights in their place since.
        has_best = best and self.wrapped is not None and self.wrapped.has_equal_parameters()
        self.end_training(flush=not has_best)
        if best and self.wrapped is not None and self.wrapped.rounds:
            self.model = None  # another train() begins anew, from the best parameters

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Put the state of all ranks into the checkpoint's folder."""
        if self.wrapped is None or args.save_only_model or state.is_hyper_param_search:
            return
        path = Path(args.output_dir, f"checkpoint-{state.global_step}", FILE)
        saved = self.wrapped.state_dict()
        with self._failing_together(f"could not save {path}"):
            if args.should_save:
                with atomic_write(path) as draft:
                    torch.save(saved, draft)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Log numbers of the exchange beside the loss."""
        if self.wrapped is None or not logs or "loss" not in logs:  # Trainer.log() below calls this method again
            return
        metrics = self.wrapped.metrics()
        if metrics and self.trainer is not None:
            self.trainer.log(metrics)

    def _load(self, path: Path) -> None:
        assert self.wrapped is not None
        saved: dict[str, object] = {}
        with self._failing_together("did not load its checkpoint"):
            try:
                if path.exists():
                    saved = torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:  # torch's zip reader and its unpickler raise errors of many kinds
                raise ConfigError(f"{path} cannot be read: {str(error)[:200]}") from error
        self.wrapped.load_state_dict(saved)

    def _failing_together(self, failed: str) -> contextlib.AbstractContextManager[None]:
        """Return a context for a checkpoint's file, in which an error on one rank is raised on all of them."""
        assert self.wrapped is not None
        if self.state is None:  # one process
            return contextlib.nullcontext()
        return failing_together(self.wrapped.runner.backend, "a Trainer's checkpoint", failed)


def _progress(trainer: Trainer) -> dict[str, int]:
    """Return the steps of a run as its checkpoints count them."""
    return {"global_step": trainer.state.global_step}


def _calling_trainer(callback: GraceCallback) -> tuple[Trainer, str | None]:
    """Return the Trainer whose training begins, and the folder that it resumes from.

    A callback gets neither as an argument, nor by an attribute; but one of the Trainer's own methods, which has both,
    is on the stack.
    """
    frame: FrameType | None = sys._getframe(2)  # behind this function and on_train_begin
    while frame is not None:
        trainer = frame.f_locals.get("self")
        if isinstance(trainer, Trainer) and "resume_from_checkpoint" in frame.f_locals:
            return trainer, frame.f_locals["resume_from_checkpoint"]
        frame = frame.f_back
    raise ConfigError("GraceCallback.on_train_begin is for Trainer.train() to call")
