"""Compressed gradients under Hugging Face's Accelerate."""

import contextlib
import copy
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from grace.core.communicator import CommunicatorArg, CompressorArg, MemoryArg
from grace.core.outer import OuterArg
from grace.errors import ConfigError
from grace.integrations.wrapped import NOTHING, ExchangeState, Wrapped, wrap
from grace.strategy.execution import StrategyArg
from grace.torch.wrappers import unwrap_compiled

WAY = "Start the program without FSDP, DeepSpeed and Megatron-LM"
_prepared: WeakKeyDictionary[torch.nn.Module, Wrapped] = WeakKeyDictionary()


class Registered:
    """State of a prepared model that an accelerator saves and loads. It does not keep the model alive.

    Args:
        model: the model, without the wrappers around its DistributedDataParallel.
    """

    def __init__(self, model: torch.nn.Module):
        self.model = ref(model)

    def state_dict(self) -> dict[str, object]:
        """Return the state of all ranks; every rank must call it."""
        model = self.model()
        return dict(NOTHING) if model is None else _prepared[model].state_dict()

    def load_state_dict(self, saved: dict[str, object]) -> None:
        """Load the state of all ranks; every rank must call it."""
        model = self.model()
        if model is not None:  # else the program dropped it, on all ranks
            _prepared[model].load_state_dict(saved)


def prepare(
    accelerator: Accelerator,
    *objects: object,
    compressor: CompressorArg | None = None,
    memory: MemoryArg | None = None,
    communicator: CommunicatorArg | None = None,
    outer: OuterArg | None = None,
    period: int | None = None,
    strategy: StrategyArg | None = None,
    hierarchical: bool = False,
    compress_after: int = 0,
    seed: int = 0,
    bucket_bytes: int | None = None,
    memory_state: str = "strict",
    **options: Any,
) -> Any:
    """Call ``accelerator.prepare(*objects)``, and let gradients be exchanged compressed.

    When there are several ranks Accelerate puts models into DistributedDataParallel; this function registers its
    communication hook, and the optimizer is not changed. With ``outer``, or a strategy that has outer rounds, the
    optimizer becomes a distributed one, and the wrapper exchanges nothing: evaluate in :func:`anchor`, and end training
    with :func:`flush`; ``save_state()`` saves the anchors. ``accelerator.save_state()`` and ``load_state()`` save and
    load the state of all ranks, on any number of ranks. In one process nothing is exchanged, and a warning says so.

    Args:
        accelerator: your Accelerator.
        objects: models, optimizers, loaders and schedulers, a model among them; objects that are prepared already stay
            so. Give the model's optimizer too, so that memories may follow it. Models that
            ``accelerator.free_memory()`` has dropped since are no longer saved.
        compressor, memory, communicator, strategy, hierarchical, compress_after, seed, bucket_bytes: as for
            :func:`grace.torch.register_ddp_hook`.
        outer, period: as for :func:`grace.DistributedOptimizer`.
        memory_state: treatment of memories in ``load_state()``: "strict" refuses those of another method; "keep"
            keeps the ones that fit, and warns of the others; "reset" starts with empty ones.
        options: further arguments of ``accelerator.prepare``.

    Returns:
        The result of ``accelerator.prepare``: one object, or a tuple.

    Raises:
        ConfigError: there is no model, or Accelerate wraps it otherwise, or the choices cannot work.

    Example::

        model, optimizer, loader = prepare(accelerator, model, optimizer, loader, compressor="topk(ratio=0.01)")
    """
    found = accelerator.prepare(*objects, **options)
    _unregister_freed(accelerator)
    # once for each accelerator, however many models it prepares
    if _save_anchors not in accelerator._save_model_state_pre_hook.values():
        accelerator.register_save_state_pre_hook(_save_anchors)
    all_found = found if len(objects) > 1 else (found,)
    models = [each for each in all_found if isinstance(each, torch.nn.Module)]
    if not models:
        raise ConfigError(
            "grace.integrations.accelerate.prepare needs the model, to prepare it together with its optimizer: "
            "prepare(accelerator, model, optimizer, ...). Loaders and schedulers may go to accelerator.prepare alone"
        )
    optimizers = [each for each in all_found if isinstance(each, torch.optim.Optimizer)]
    for model in models:
        if not any(p.requires_grad for p in model.parameters()):
            continue  # Accelerate does not wrap it either
        if unwrap_compiled(model) in _prepared:
            raise ConfigError("the model has Grace's hook already: call grace.integrations.accelerate.prepare once")
        wrapped = wrap(
            model,
            accelerator.num_processes,
            optimizers,
            memory_state,
            WAY,
            "grace.integrations.accelerate.prepare(..., {})",
            partial(_progress, accelerator),
            compressor=compressor,
            memory=memory,
            communicator=communicator,
            outer=outer,
            period=period,
            strategy=strategy,
            hierarchical=hierarchical,
            grad_scaler=accelerator.scaler,
            compress_after=compress_after,
            seed=seed,
            bucket_bytes=bucket_bytes,
        )
        _prepared[unwrap_compiled(model)] = wrapped
        accelerator.register_for_checkpointing(Registered(unwrap_compiled(model)))
    return found


def _unregister_freed(accelerator: Accelerator) -> None:
    """Unregister the states of models that ``accelerator.free_memory()`` has dropped, as before another try."""
    models = [_module_of(model) for model in accelerator._models]
    accelerator._custom_objects = [
        each
        for each in accelerator._custom_objects
        if not isinstance(each, Registered) or any(_module_of(each.model()) is model for model in models)
    ]


def _module_of(model: torch.nn.Module | None) -> torch.nn.Module | None:
    """Return a model without wrappers; None if it is gone. Accelerate lists models as they were before it wrapped
    them."""
    if model is None:
        return None
    plain: torch.nn.Module = unwrap_compiled(model)
    return plain.module if isinstance(plain, DistributedDataParallel) else plain


def _progress(accelerator: Accelerator) -> dict[str, int]:
    """Return the steps of a run as schedulers and optimizers count them; Accelerate's own counts are one rank's
    alone."""
    found: dict[str, int] = {}
    for number, scheduler in enumerate(accelerator._schedulers):
        inner = getattr(scheduler, "scheduler", scheduler)  # under Accelerate's wrapper
        last = getattr(inner, "last_epoch", None)
        if isinstance(last, int):
            found[f"last_epoch of scheduler {number}"] = last
    for number, optimizer in enumerate(accelerator._optimizers):
        steps = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
        if steps:
            found[f"step of optimizer {number}"] = max(steps)
    return found


def _save_anchors(models: list[torch.nn.Module], weights: list[dict[str, object]], folder: str) -> None:
    """Replace the weights that ``save_state()`` is about to save by the anchors. Accelerate calls it."""
    prepared = {_module_of(model): wrapped for model, wrapped in _prepared.items()}
    for i, model in enumerate(models[: len(weights)]):
        wrapped = prepared.get(_module_of(model))
        if wrapped is not None and wrapped.rounds:
            with wrapped.anchor():
                weights[i] = copy.deepcopy(weights[i])  # which are views of the parameters


def state_of(model: torch.nn.Module) -> ExchangeState | None:
    """Return the state of a prepared model's hook, or the distributed optimizer if there are outer rounds; both have
    ``traffic``. None in one process."""
    return _wrapped_of(model).state


def anchor(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a prepared model has the parameters that all ranks share, to evaluate and save. Without
    outer rounds it changes nothing. No collective.

    Raises:
        ExchangeError: a step is in progress.
    """
    return _wrapped_of(model).anchor()


def flush(model: torch.nn.Module) -> None:
    """Run a last outer round at the end of training, after which all ranks have equal parameters. Every rank must call
    it, after as many steps. Without outer rounds it does nothing.

    Raises:
        StepError: ranks have made other numbers of steps.
    """
    _wrapped_of(model).flush()


def metrics(model: torch.nn.Module) -> dict[str, float]:
    """Return numbers of a prepared model's exchange since the last call, for ``accelerator.log``: ``grace_bytes_sent``,
    ``grace_ratio`` and so on (:mod:`grace.session.metrics`); empty in one process."""
    return _wrapped_of(model).metrics()


def _wrapped_of(model: torch.nn.Module) -> Wrapped:
    if unwrap_compiled(model) not in _prepared:
        raise ConfigError("the model is not one that grace.integrations.accelerate.prepare returned")
    return _prepared[unwrap_compiled(model)]
