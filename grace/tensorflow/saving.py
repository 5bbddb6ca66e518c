"""Models in one file, with the memories of all ranks."""

import contextlib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras

from grace.core.backend import Backend
from grace.errors import ConfigError
from grace.session.checkpoint import check_mode, compare
from grace.session.files import save_from_root
from grace.session.state_schema import MODEL, SavedState
from grace.tensorflow.optimizer import DistributedOptimizer
from grace.tensorflow.optimizer_state import FILE, accumulators, assign_own, decode, distributed
from grace.tensorflow.reductions import assign_means, engine_of


def save_model(model: keras.Model, path: str | Path) -> None:
    """Save the whole model in one ``.keras`` file, with the memories of all ranks; every rank must call it.

    If ranks train alone between outer rounds, it holds the optimizers' slots of all ranks, which as many ranks load;
    other numbers of ranks load rank 0's. Rank 0 writes a temporary file, and then renames it: if that fails, or the
    program is killed, the last good file stays. ``model.save`` writes in place, and on a single rank saves that rank's
    memories only.

    Args:
        model: compiled with a distributed optimizer.
        path: ends in ``.keras``.

    Raises:
        ConfigError: the model's optimizer is not a distributed one, or the path ends otherwise.
        RankError: rank 0, where the error itself is raised, could not write it.
    """
    plain = getattr(model, "optimizer", None)
    optimizer = distributed(plain)
    if optimizer is None:
        said = "the model is not compiled" if plain is None else "the model's optimizer is not a distributed one"
        raise ConfigError(
            f"{said}; save it with model.save(path). If your loop has the optimizer, or the model has "
            "distributed optimizers as attributes, as a GAN has, save all in a tf.train.Checkpoint on every rank"
        )
    if Path(path).suffix != ".keras":
        raise ConfigError(f"{path} does not end in .keras; Keras's other formats have no room for memories")
    remembered, session = optimizer.grace_state, optimizer._grace
    remembered.everyone = session.state(everyone=True)
    remembered.slots = session.slots()
    try:
        with _mean_of_accumulated(optimizer, session.backend):
            save_from_root(path, model.save, backend=session.backend)
    finally:
        remembered.everyone = remembered.slots = None


@contextlib.contextmanager
def _mean_of_accumulated(optimizer: keras.optimizers.Optimizer, backend: Backend) -> Iterator[None]:
    """Return a context in which accumulated gradients are their means over ranks: a file that all ranks load has one
    value for them, which must add to their mean as their own ones do."""
    found = accumulators(optimizer)
    own = [variable.numpy() for variable in found]
    try:
        assign_means(backend, found, "grace.accumulated")
        yield
    finally:
        for variable, value in zip(found, own, strict=True):
            variable.assign(value)


def load_model(
    path: str | Path,
    *choices: Any,
    memory_state: str = "strict",
    custom_objects: dict[str, Any] | None = None,
    **options: Any,
) -> keras.Model:
    """Load a model that was saved with a distributed optimizer, make its optimizer distributed again, and continue.

    Every rank must call it. A file that one rank refuses is refused on all ranks.

    Args:
        path: the file that ``model.save`` wrote on this rank, or :func:`save_model` on rank 0.
        choices: compressor, memory and communicator; as they were, if all are left out (and ``strategy`` is).
        memory_state: "strict"; "keep" to keep the memories that fit this run, and drop the others with a warning; or
            "reset" to start with empty ones.
        custom_objects: for ``keras.saving.load_model``.
        options: further ones of :func:`~grace.tensorflow.DistributedOptimizer`; as they were, if left out.

    Raises:
        ConfigError: the file is damaged, holds no compiled model, or memories that do not go with this run.
        RankError: it was refused on another rank, or the ranks load files of different saves.
    """
    model = saved = error = None
    try:
        saved = _read_saved(Path(path))
        model = _loaded(path, saved, choices, memory_state, custom_objects, options)
    except Exception as raised:
        error = raised
    ranks = engine_of(options.get("process_set"), options.get("backend"))
    compare(ranks, saved and saved["state"], memory_state, error)
    return model


def _loaded(
    path: str | Path,
    saved: SavedState | None,
    choices: Sequence[Any],
    memory_state: str,
    custom_objects: dict[str, Any] | None,
    options: dict[str, Any],
) -> keras.Model:
    """Load the model and continue from its saved state.

    Args:
        saved: the part of the model's file that Grace wrote; None if it has none.
    """
    check_mode(memory_state)
    model = keras.saving.load_model(path, custom_objects=custom_objects)
    if model.optimizer is None:
        raise ConfigError(f"{path} holds a model that was not compiled; load it with keras.saving.load_model")
    if saved is None and memory_state == "strict":
        raise ConfigError(
            f"{path} was saved with a plain optimizer. Load it with keras.saving.load_model and make its optimizer "
            "distributed, or pass memory_state='reset'"
        )
    if saved is not None:
        parts = {"compressor", "memory", "communicator", "outer", "period", "strategy"}
        # The user chooses all of these, or none: a saved memory may not fit another compressor.
        chosen = {*parts, "resources"} if choices or options.keys() & parts else set()
        options = {**{key: value for key, value in saved["options"].items() if key not in chosen}, **options}
    DistributedOptimizer(model.optimizer, *choices, **options)
    if saved is not None and saved["state"] is not None:
        optimizer = distributed(model.optimizer)
        assert optimizer is not None
        optimizer._grace.restore(saved["state"], memory_state)
        optimizer._grace.saved_slots = saved.get("slots")
        # With "keep" this run may have no outer rounds: then ranks must become equal again by the first broadcast.
        if memory_state == "strict" or (memory_state == "keep" and optimizer._grace.needs_broadcast):
            assign_own(optimizer, saved["state"], saved.get("slots"))
    return model


def _read_saved(path: Path) -> SavedState | None:
    """Return the part of a model's file that Grace wrote; None if there is none.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    if not path.exists():
        raise ConfigError(f"there is no file {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
            if bad is not None:
                raise ConfigError(f"its {bad} is not what was written")
            for folder in ("optimizer", "optimizer/inner_optimizer"):  # the latter of a LossScaleOptimizer
                if f"assets/{folder}/{FILE}" in archive.namelist():
                    saved = decode(archive.read(f"assets/{folder}/{FILE}"))
                    MODEL(saved, "")
                    return saved
    except Exception as error:  # Python's zip reader raises errors of many kinds
        raise ConfigError(f"{path} is damaged or not complete: {error}") from error
    return None
