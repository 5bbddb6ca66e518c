"""What models and checkpoints save of a distributed optimizer, and how it comes back."""

from __future__ import annotations

import io
import json
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from grace.errors import ConfigError
from grace.session.checkpoint import check_mode, compare, say_whose
from grace.session.files import save_from_root
from grace.session.saved_form import MODEL, damaged

FILE = "grace_state.npz"
"""In the archive that Keras saves, among the assets of the optimizer."""
BESIDE = "grace_state"
"""In the file of weights of Keras's BackupAndRestore."""
WEIGHTS_ALONE = (
    "save_weights leaves out what Grace's memories and compressors remember: training that goes on from this file "
    "loses it. model.save, grace.tensorflow.save_model and keras.callbacks.BackupAndRestore save it"
)


def encode(state: Any) -> bytes:
    """Nested dicts and lists of numbers, text and tensors as bytes (JSON, and the tensors as .npy, in a zip).

    >>> decode(encode({"step": 3, "state": {"w": tf.constant([1.0])}}))["state"]["w"]
    array([1.], dtype=float32)
    """
    arrays: list[np.ndarray] = []

    def plain(value: Any) -> Any:
        if tf.is_tensor(value) or isinstance(value, np.ndarray):
            arrays.append(np.asarray(value))
            return {"tensor": len(arrays) - 1}
        if isinstance(value, dict):
            return {"dict": {key: plain(item) for key, item in value.items()}}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    text = json.dumps(plain(state))
    file = io.BytesIO()
    named: dict[str, Any] = {f"tensor{i}": array for i, array in enumerate(arrays)}
    np.savez(file, text=np.array(text), **named)
    return file.getvalue()


def decode(raw: bytes) -> Any:
    """The inverse of :func:`encode`, with arrays for tensors.

    Raises:
        ConfigError: it is damaged.
    """
    try:
        with np.load(io.BytesIO(raw), allow_pickle=False) as file:

            def full(value: Any) -> Any:
                if isinstance(value, dict):
                    if "tensor" in value:
                        return file[f"tensor{value['tensor']}"]
                    return {key: full(item) for key, item in value["dict"].items()}
                return [full(item) for item in value] if isinstance(value, list) else value

            found = full(json.loads(str(file["text"])))
    except Exception as error:  # of whatever kind, by the readers of zip files, arrays and JSON
        raise damaged(f"its bytes cannot be read: {error}") from error
    return found


class Remembered(tf.train.experimental.PythonState):
    """A session's state, as ``tf.train.Checkpoint`` finds it at the optimizer, and ``model.save`` through it.

    It lies beside the optimizer's own variables, so a program without Grace loads the same file.

    Args:
        session: whose state.
        everyone: the state of all ranks, gathered by :func:`save_model`.
    """

    def __init__(self, session: Any):
        super().__init__()
        self.session = session
        self.everyone: Any = None
        self.told = False

    def serialize(self) -> bytes:
        """The state, and the options that the session was made with."""
        session = self.session
        if self.everyone is None and session.exchanger is not None:
            say_whose(session.exchanger, "saving the model", "grace.tensorflow.save_model(model, path)")
        state = session.state() if self.everyone is None else self.everyone
        return encode({"options": session.options(), "state": state})

    def deserialize(self, string_value: bytes) -> None:
        """Go on from there."""
        found = decode(string_value)
        MODEL(found, "")
        if found["state"] is not None:
            self.session.restore(found["state"])

    def save_beside(self, store: Any) -> None:
        """Keras writes the optimizer's variables to ``store``: for BackupAndRestore put this rank's state into the same
        file, where plain Keras does not look; for whoever else saves weights alone say, once, that it is left out."""
        exchanger, saver = self.session.exchanger, _saver_of_weights()
        if exchanger is None or not saver:
            return
        if saver == "_save_model":
            store.h5_file[BESIDE] = np.frombuffer(encode({"state": self.session.state()}), np.uint8)
        elif not self.told and any(exchanger.state().values()):
            self.told = True
            warnings.warn(WEIGHTS_ALONE, stacklevel=3)

    def load_beside(self, store: Any) -> None:
        """Go on from there."""
        file: Any = getattr(store, "h5_file", ())
        if BESIDE in file:
            self.session.restore(decode(bytes(file[BESIDE]))["state"])


def _saver_of_weights() -> str:
    """The function on the stack that saves weights without the rest of a model: Keras's BackupAndRestore's, or
    save_weights's; empty if there is none."""
    frame: Any = sys._getframe(2)
    found = ""
    while frame is not None:
        name = frame.f_code.co_name
        if name == "_save_model" and isinstance(frame.f_locals.get("self"), keras.callbacks.BackupAndRestore):
            return name
        found = name if name == "save_weights_only" else found
        frame = frame.f_back
    return found


def distributed(optimizer: Any) -> Any:
    """The distributed optimizer that this is, or that is inside this LossScaleOptimizer; None if there is none."""
    for candidate in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if isinstance(getattr(candidate, "grace_state", None), Remembered):
            return candidate
    return None


def save_model(model: keras.Model, path: str | Path) -> None:
    """Save the whole model in one ``.keras`` file, with the memories of all ranks; every rank must call it.

    Rank 0 writes it, beside what is there, and then puts it in its place: if that fails, or the program is killed, the
    last good file stays. ``model.save`` writes in place, and on a single rank saves that rank's memories only.

    Args:
        model: compiled with a distributed optimizer.
        path: ends in ``.keras``.

    Raises:
        ConfigError: its optimizer is not a distributed one.
        RankError: rank 0, where the error itself is raised, could not write it.
    """
    optimizer = distributed(model.optimizer)
    if optimizer is None:
        raise ConfigError("the model's optimizer is not a distributed one; save it with model.save(path)")
    remembered, session = optimizer.grace_state, optimizer._grace
    remembered.everyone = session.state(everyone=True)
    try:
        save_from_root(path, model.save, backend=session.backend)
    finally:
        remembered.everyone = None


def load_model(
    path: str | Path, *choices: Any, memory_state: str = "strict", custom_objects: Any = None, **options: Any
):
    """Load a model that was saved with a distributed optimizer; its optimizer is distributed again, and goes on.

    Every rank must call it. What is refused on one is refused on all.

    Args:
        path: what ``model.save`` wrote on this rank, or :func:`save_model` on rank 0.
        choices: compressor, memory and communicator; as they were, if all are left out (and ``strategy`` is).
        memory_state: "strict"; "keep" to keep the memories that fit this run, and drop the others with a warning; or
            "reset" to start with empty ones.
        custom_objects: for ``keras.saving.load_model``.
        options: further ones of :func:`~grace.tensorflow.DistributedOptimizer`; as they were, if left out.

    Raises:
        ConfigError: the file is damaged, holds no compiled model, or memories that do not go with this run.
        RankError: it was refused on another rank, or the ranks load files of different saves.
    """
    from grace.tensorflow.optimizer import engine_of

    model = saved = error = None
    try:
        saved = _saved_in(Path(path))
        model = _loaded(path, saved, choices, memory_state, custom_objects, options)
    except Exception as raised:
        error = raised
    ranks = engine_of(options.get("process_set"), options.get("backend"))
    compare(ranks, saved and saved["state"], memory_state, error)
    return model


def _loaded(
    path: str | Path, saved: Any, choices: Any, memory_state: str, custom_objects: Any, options: dict[str, Any]
) -> Any:
    """The model; ``saved`` is what its file holds of Grace's."""
    from grace.tensorflow.optimizer import DistributedOptimizer

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
        parts = {"compressor", "memory", "communicator", "strategy"}
        chosen = parts if choices or options.keys() & parts else set()  # all, or none of them
        options = {**{key: value for key, value in saved["options"].items() if key not in chosen}, **options}
    DistributedOptimizer(model.optimizer, *choices, **options)
    if saved is not None and saved["state"] is not None:
        distributed(model.optimizer)._grace.restore(saved["state"], memory_state)
    return model


def _saved_in(path: Path) -> dict[str, Any] | None:
    """What a model's file holds of Grace's; None if there is nothing.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    if not path.exists():
        raise ConfigError(f"there is no file {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            if (bad := archive.testzip()) is not None:
                raise ConfigError(f"its {bad} is not what was written")
            for where in ("optimizer", "optimizer/inner_optimizer"):
                if f"assets/{where}/{FILE}" in archive.namelist():
                    found = decode(archive.read(f"assets/{where}/{FILE}"))
                    MODEL(found, "")
                    return found
    except Exception as error:  # of whatever kind, by Python's zip reader
        raise ConfigError(f"{path} is damaged or not complete: {error}") from error
    return None
