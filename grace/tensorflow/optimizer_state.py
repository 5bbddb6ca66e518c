"""State of a distributed optimizer, as Keras and tf.train.Checkpoint save it beside the optimizer's variables."""

import io
import json
import sys
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from grace.core.compressor import Tensor
from grace.errors import ConfigError, warn
from grace.session import state_schema
from grace.session.checkpoint import warn_own_state
from grace.session.reshard import join_parts, shard_names
from grace.session.state_schema import BESIDE_WEIGHTS, MODEL, SavedState, damage_error
from grace.tensorflow.session import Session
from grace.tensorflow.variables import is_overwritten, names_as_saved, names_of, value_of

if TYPE_CHECKING:
    from keras.src.saving.saving_lib import H5IOStore

FILE = "grace_state.npz"
"""Name of the state's file in the archive that Keras saves, among the assets of the optimizer."""
BESIDE = "grace_state"
"""Name of the state's data set in the file of weights of Keras's BackupAndRestore."""
BFLOAT16 = tf.bfloat16.as_numpy_dtype
"""NumPy's dtype for bfloat16."""
WEIGHTS_ALONE = (
    "save_weights leaves out what Grace's memories and compressors remember: training that goes on from this file "
    "loses it. model.save, grace.tensorflow.save_model and keras.callbacks.BackupAndRestore save it"
)


def encode(state: Any) -> bytes:
    """Encode nested dicts and lists of numbers, text and tensors as bytes (JSON, and the tensors as .npy, in a zip).

    >>> decode(encode({"step": 3, "state": {"w": tf.constant([1.0])}}))["state"]["w"]
    array([1.], dtype=float32)
    """
    arrays: list[np.ndarray] = []

    def plain(value: Any) -> Any:
        if tf.is_tensor(value) or isinstance(value, np.ndarray):
            array = np.asarray(value)
            as_float32 = array.dtype == BFLOAT16  # which files of arrays do not know
            arrays.append(array.astype(np.float32) if as_float32 else array)
            return {"tensor": len(arrays) - 1, **({"dtype": "bfloat16"} if as_float32 else {})}
        if isinstance(value, dict):
            return {"dict": {key: plain(item) for key, item in value.items()}}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    text = json.dumps(plain(state))
    file = io.BytesIO()
    named: dict[str, Any] = {f"tensor{i}": array for i, array in enumerate(arrays)}
    np.savez(file, text=np.array(text), **named)
    return file.getvalue()


def decode(raw: bytes) -> Any:
    """Decode the bytes of :func:`encode`, with arrays for tensors.

    Raises:
        ConfigError: the bytes are damaged.
    """
    try:
        with np.load(io.BytesIO(raw), allow_pickle=False) as file:

            def full(value: Any) -> Any:
                if isinstance(value, dict):
                    if "tensor" in value:
                        array = file[f"tensor{value['tensor']}"]
                        return array.astype(BFLOAT16) if value.get("dtype") == "bfloat16" else array
                    return {key: full(item) for key, item in value["dict"].items()}
                return [full(item) for item in value] if isinstance(value, list) else value

            found = full(json.loads(str(file["text"])))
    except Exception as error:  # the readers of zip files, arrays and JSON raise errors of many kinds
        raise damage_error(f"its bytes cannot be read: {error}") from error
    return found


class GraceState(tf.train.experimental.PythonState):
    """State of a session, as ``tf.train.Checkpoint`` finds it at the optimizer, and ``model.save`` through it.

    It lies beside the optimizer's own variables, so a program without Grace loads the same file.

    Args:
        session: the session that has the state.

    Attributes:
        everyone: the state of all ranks, gathered by :func:`save_model`; else None.
        slots: the slots of all ranks' optimizers, gathered likewise, if ranks train alone.
    """

    def __init__(self, session: Session):
        super().__init__()
        self.session = session
        self.everyone: SavedState | None = None
        self.slots: list[list[Tensor]] | None = None
        self.warned = False

    def serialize(self) -> bytes:
        """Return the bytes of the state and of the options that the session was made with."""
        session = self.session
        if self.everyone is None and session.runner is not None:
            warn_own_state(session.runner, "saving the model", "grace.tensorflow.save_model(model, path)")
        state = session.state() if self.everyone is None else self.everyone
        alone = {} if self.slots is None else {"slots": self.slots}
        return encode({"options": session.options(), "state": state, **alone})

    def deserialize(self, string_value: bytes) -> None:
        """Continue from the state in the bytes of :meth:`serialize`."""
        decoded = decode(string_value)
        MODEL(decoded, "")
        if decoded["state"] is not None:
            self.session.restore(decoded["state"])

    def save_beside(self, store: "H5IOStore") -> None:
        """Write this rank's state into the file of the optimizer's variables, for Keras's BackupAndRestore.

        Plain Keras does not read that part of the file. Other callers that save weights alone are warned, once, that
        the state is left out.

        Args:
            store: the file that Keras writes the optimizer's variables to.
        """
        runner, saver = self.session.runner, _saver_of_weights()
        if runner is None or not saver:
            return
        if saver == "_save_model":
            store.h5_file[BESIDE] = np.frombuffer(encode({"state": self.session.state()}), np.uint8)
        elif not self.warned and any(runner.state().values()):
            self.warned = True
            warn(WEIGHTS_ALONE)

    def load_beside(self, store: "H5IOStore") -> SavedState | None:
        """Continue from the state that :meth:`save_beside` wrote, and return it; None if the file has none.

        Raises:
            ConfigError: that part of the file is damaged.
        """
        file: Mapping[str, np.ndarray] = getattr(store, "h5_file", {})  # a store of another format has none
        if BESIDE not in file:
            return None
        decoded = decode(file[BESIDE][()].tobytes())  # in one read: a dataset iterates by one per byte
        BESIDE_WEIGHTS(decoded, "")
        state: SavedState | None = decoded["state"]
        self.session.restore(state)
        return state


def _saver_of_weights() -> str:
    """Return the name of the function on the stack that saves weights without the rest of a model: that of Keras's
    BackupAndRestore, or save_weights; empty if there is none."""
    frame: FrameType | None = sys._getframe(2)
    found = ""
    while frame is not None:
        name = frame.f_code.co_name
        if name == "_save_model" and isinstance(frame.f_locals.get("self"), keras.callbacks.BackupAndRestore):
            return name
        found = name if name == "save_weights_only" else found
        frame = frame.f_back
    return found


def without_loss_scale(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return the optimizer inside a LossScaleOptimizer, or else the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def accumulators(optimizer: keras.optimizers.Optimizer) -> "list[keras.Variable]":
    """Return the variables that hold this rank's accumulated gradients until they are exchanged; none without
    ``gradient_accumulation_steps``."""
    found = getattr(without_loss_scale(optimizer), "_accumulated_gradients", ())
    return [variable for variable in found if variable is not None]


def variables_to_broadcast(optimizer: keras.optimizers.Optimizer) -> "list[keras.Variable]":
    """Return the variables that all ranks must begin with equal values of, besides those that gradients are exchanged
    for.

    They are the optimizer's slots of each variable (some begin as copies of the model's), and variables that gradients
    overwrite.
    """
    accumulated = {id(variable) for variable in accumulators(optimizer)}
    overwritten = [v for v in optimizer._trainable_variables if is_overwritten(v)]
    return [*overwritten, *(variable for variable in slots(optimizer) if id(variable) not in accumulated)]


def slots(optimizer: keras.optimizers.Optimizer) -> "list[keras.Variable]":
    """Return the optimizer's variables for each of the model's, and accumulated gradients among them."""
    # Counters and rates are equal on all ranks, which compare them at the first exchange.
    skipped = {id(optimizer._iterations), id(optimizer._learning_rate)}
    return [variable for variable in optimizer.variables if id(variable) not in skipped]


def assign_own(
    optimizer: keras.optimizers.Optimizer, state: SavedState, slots_of_ranks: list[list[Tensor]] | None = None
) -> None:
    """Assign the variables that this rank had alone, in the middle of a period, and its slots, if as many ranks saved
    them; other numbers of ranks have those of rank 0. The first exchange loads all else, and comes too late for these:
    eagerly a gradient was computed, or accumulated, before it.

    Args:
        slots_of_ranks: the slots of all ranks' optimizers, if the file has them.
    """
    try:
        state_schema.check(state)
    except ConfigError:  # the first exchange refuses it on all ranks
        return
    session, anchors = optimizer._grace, state["state"].get("anchor")
    ranks = state.get("ranks")
    if not anchors or (ranks is not None and len(ranks) != session.backend.size):
        return
    mine = state["state"] if ranks is None else ranks[session.backend.rank]
    own = {**anchors, **mine.get("local", {})}
    variables = [variable for variable in optimizer._trainable_variables if not is_overwritten(variable)]
    for name, variable in zip(names_as_saved(names_of(variables), variables, state), variables, strict=True):
        cut = state["pieces"].get(name)
        if cut is None or list(cut["shape"]) != list(variable.shape):  # the first exchange refuses it on all ranks
            continue
        parts = [own[part] for part in shard_names(name, cut) if part in own]
        if len(parts) == len(cut["sizes"]):  # others are exchanged in every step
            variable.assign(join_parts(parts, cut["axis"], cut["sizes"]))
    if slots_of_ranks is not None:
        for slot, value in zip(slots(optimizer), slots_of_ranks[session.backend.rank], strict=True):
            value_of(slot).assign(value)


def register_as(made: type, cls: type) -> None:
    """Register a class that was made of a user's class so that Keras saves its objects as it saves the user's."""
    name = keras.saving.get_registered_name(cls)
    if name != cls.__name__:  # registered: Keras finds the name by the class, and by the name the user's class
        package, _, short = name.partition(">")
        keras.saving.register_keras_serializable(package, short)(made)
        keras.saving.get_custom_objects()[name] = cls


def distributed_in(optimizer: keras.optimizers.Optimizer) -> "list[keras.optimizers.Optimizer]":
    """Return the distributed optimizers that this is, or that are in it: in a LossScaleOptimizer, a MultiOptimizer, or
    a wrapper of the user's."""
    found: list[keras.optimizers.Optimizer] = []
    waiting, seen = [optimizer], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
        elif isinstance(value, keras.optimizers.Optimizer) and id(value) not in seen:
            seen.add(id(value))
            if isinstance(getattr(value, "grace_state", None), GraceState):
                found.append(value)
            else:
                waiting.extend(vars(value).values())
    return found


def distributed(optimizer: keras.optimizers.Optimizer) -> "keras.optimizers.Optimizer | None":
    """Return the optimizer if it is distributed, or else the distributed one inside this LossScaleOptimizer; None if
    there is none.
    """
    inner = without_loss_scale(optimizer)
    return inner if isinstance(getattr(inner, "grace_state", None), GraceState) else None
