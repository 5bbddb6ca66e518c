"""Saving and restoring distributed optimizers, on every engine."""

import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, SupportsIndex, cast

import torch

from grace.core.backend import Backend
from grace.errors import ConfigError, warn
from grace.session import checkpoint, state_schema
from grace.session.state_schema import SavedState
from grace.session.step_runner import StepRunner
from grace.session.switching import returns_to_step
from grace.torch.initial_sync import broadcast_optimizer_state
from grace.torch.pickling import plain_copy
from grace.torch.session import Session
from grace.torch.step_hooks import DCP

KEY = "grace.rank"
"""Prefix of the key of a rank's memories. They lie among the settings of the first parameter group, which
``torch.distributed.checkpoint`` saves and loads."""
INNER = "grace.inner"
"""Key of the states of all ranks' own optimizers, as bytes, where ranks train alone between outer rounds."""


class StateMixin:
    """State of a distributed optimizer, in addition to that of the user's optimizer."""

    _grace: Session
    _memories_saved_separately = False
    """True if :class:`grace.torch.Memories` saves and loads the memories."""
    _memories_in_torchs_part = False
    """True if the last state that torch's functions for state dicts got has the memories."""
    _saved_by_framework = False
    """True if a framework saves and loads torch's part alone, and Grace's integration the rest."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        """Return the parts of a copy or a pickle: the user's own optimizer and its state, without the exchange."""
        return plain_copy, (type(self).__bases__[0],), super().__getstate__()  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """Return the user's optimizer's state, with this rank's Grace state under "grace".

        Raises:
            ExchangeError: a step is in progress.
        """
        checkpoint.check_settled(self._grace)
        if self._saved_by_framework:
            return super().state_dict()  # type: ignore[misc]
        dcp_frame = _dcp_caller()
        if dcp_frame is None:
            check_not_saved_directly(self._grace.runner, "the optimizer")
            if self._grace.shard_group is None:  # else no file of one rank has all parts of the parameters
                better = "optimizer.full_state_dict()"
                checkpoint.warn_own_state(self._grace.runner, "optimizer.state_dict()", better)
            return rank_state(self)
        state = super().state_dict()  # type: ignore[misc]
        self._memories_in_torchs_part = False
        if self._memories_saved_separately:
            return state
        if getattr(dcp_frame.f_locals.get("info"), "flatten_optimizer_state_dict", False):
            warn(
                "torch.distributed.checkpoint has no place for Grace's memories if flatten_optimizer_state_dict=True: "
                "they are not saved. Save grace.torch.Memories(optimizer) beside it, or leave the option out"
            )
            return state
        runner = self._grace.runner
        saved = checkpoint.save(runner)
        if runner.outer_rounds:  # of state that all ranks have, torch keeps one rank's
            inner: list[bytes | None] = [None] * runner.backend.size
            inner[runner.backend.rank] = pack_state(state)
            saved[INNER] = inner
        state["param_groups"][0][_key(runner)] = pack_state(saved)
        self._memories_in_torchs_part = True
        return state

    def full_state_dict(self, packed: bool = False) -> SavedState:
        """Return the state as ``state_dict()`` does, with every rank's memories, for one file that loads on any number
        of ranks.

        Every rank must call it; save it on one. With outer rounds it has the user's optimizers' states of all ranks,
        which as many ranks load; other numbers of ranks load that of the saving one. Any rank may save it, so each
        holds all of them: for Adam, two copies of the parameters for each rank. Where they do not fit let every rank
        save ``state_dict()`` in a file of its own. Of a sharded model it has the memories of this rank's parts alone:
        every rank must save it, or ``state_dict()``.

        Args:
            packed: True for a "grace" entry of one value, bytes, which ``torch.distributed.checkpoint`` loads whole.

        Raises:
            ExchangeError: a step is in progress.
        """
        runner = self._grace.runner
        saved = checkpoint.gather(runner, lambda: checkpoint.check_settled(self._grace))
        state = super().state_dict()  # type: ignore[misc]
        if runner.outer_rounds and self._grace.shard_group is None:
            state = {**state, INNER: runner.backend.allgather_object(pack_state(state))}
        return {**state, "grace": pack_state(saved) if packed else saved}

    def load_state_dict(self, state_dict: dict[str, Any], memory: str = "strict") -> None:
        """Restore a saved state. A run that is stopped and resumed continues bit for bit. If a rank refuses its state,
        nothing changes on any rank. Every rank must call it. Over Horovod each rank loads alone, so that one may load
        for all if ``hvd.broadcast_optimizer_state`` follows; if ranks resume from different states, the next step
        raises.

        Args:
            state_dict: from ``state_dict()`` of the same rank, or from ``full_state_dict()``.
            memory: "strict"; "keep" to keep the memories that fit this run, and drop the others with a warning; or
                "reset" to start with empty ones.

        Raises:
            ConfigError: the memories belong to another rank, number of ranks or method, or are damaged.
            ExchangeError: a step is in progress.
            RankError: another rank refused its state, or the ranks load states of different saves.
        """
        by_dcp = memory == "strict" and _dcp_caller() is not None
        separately = self._memories_saved_separately and not _has_memories(state_dict)
        if self._saved_by_framework or (by_dcp and separately):
            with _reporting_damage():
                super().load_state_dict(state_dict)  # type: ignore[misc]
            loaded, self._grace.loaded_memories = self._grace.loaded_memories, None
            if by_dcp and loaded is not None:  # this rank's part, over which torch has loaded one rank's
                load_memories(self, *loaded)
            return
        memory = "maybe" if by_dcp else memory  # torch's functions have no argument for it
        group = self._grace.shard_group
        others: Sequence[Backend] = () if group is None else group.backends
        load_state(self, state_dict, memory, self._grace.ranks_load_alone, others)
        self._grace.on_state_loaded()


def check_not_saved_directly(runner: StepRunner, what: str) -> None:
    """Refuse to be saved by ``torch.distributed.checkpoint`` directly, which would keep one rank's memories.

    Raises:
        ConfigError: the caller's caller is ``save`` or ``load`` of ``torch.distributed.checkpoint``.
    """
    caller = sys._getframe(2).f_globals.get("__name__", "")
    if caller.startswith(f"{DCP}_") and checkpoint.has_own_state(runner):
        raise ConfigError(
            f"{what} has memories that are each rank's own, of which torch.distributed.checkpoint would keep one "
            "rank's: save grace.torch.Memories(...) of it, and get_state_dict(model, optimizer) for torch's part"
        )


def rank_state(optimizer: Any) -> SavedState:
    """Return the result of ``state_dict()`` for this rank."""
    return {**super(StateMixin, optimizer).state_dict(), "grace": checkpoint.save(optimizer._grace.runner)}


def load_memories(optimizer: Any, saved: object, memory: str) -> None:
    """Restore Grace's part of a state, packed or not; with outer rounds also this rank's optimizer, if it is there."""
    optimizer.load_state_dict({**super(StateMixin, optimizer).state_dict(), "grace": saved}, memory)


def load_state(
    optimizer: Any,
    state_dict: Any,
    memory: str,
    alone: bool = False,
    other_groups: Sequence[Backend] = (),
) -> None:
    """Restore a state completely, or change nothing. Errors are kept until all ranks have compared: a rank that raised
    earlier would let the others hang.

    1. Split the state into torch's part and Grace's.
    2. If the run plans its strategy, compare with the other ranks, and build the runner of the saved plan.
    3. Check Grace's part whole, and let the user's optimizer load torch's.
    4. Compare with the other ranks: all load, or none does.
    5. Write Grace's part, which cannot fail. An error in any step restores the optimizer's attributes.

    Args:
        memory: as for ``load_state_dict``, or "maybe": "keep" if the state has no part of Grace's, else "strict".
        alone: True to compare with no other rank, unless the run plans its strategy.
        other_groups: other groups of ranks that load states of their own at the same time, all or none (a pipeline's
            stages, or the ranks that shard a model).
    """
    session = optimizer._grace
    attributes_before = dict(vars(optimizer))
    runner = former = session.runner
    plan = session.plan
    saved = loaded = resumed = error = None
    try:
        # 1.
        try:
            checkpoint.check_settled(session)
            with _reporting_damage():
                plain, saved = _split_state(state_dict, former)
            if memory == "maybe":
                memory = "keep" if saved is None else "strict"
        except Exception as raised:
            error = raised
        # 2. All ranks resume a saved plan, or none does.
        if session.driver is not None:
            try:
                checkpoint.compare(former.backend, saved, memory, error)
                resumed = session.driver.resumed_from(saved)
                memory = "keep" if session.driver.is_elsewhere(resumed) and memory == "strict" else memory
                if resumed is not None:
                    runner, plan = session.build_runner(resumed.strategy)
            except Exception as raised:  # known to all ranks of this group; other groups hear of it below
                error = raised
        # 3.
        try:
            if error is None:
                loaded = checkpoint.prepare(runner, saved, memory, lambda s: move_to_devices(s, session.parameters))
                with _reporting_damage():
                    if session.shard_group is not None:
                        plain = _on_own_meshes(plain, optimizer)
                    super(StateMixin, optimizer).load_state_dict(plain)
        except Exception as raised:
            error = raised
        # 4.
        if not alone or session.driver is not None:
            alike = session.shard_group is not None  # its ranks are at one step
            checkpoint.compare_everywhere([former.backend, *other_groups], saved, memory, error, alike)
            checkpoint.drop_where_others_did(runner, cast(checkpoint.Loaded, loaded), memory)
        elif error is not None:
            raise error
        else:
            checkpoint.name_what_is_kept(runner, cast(checkpoint.Loaded, loaded), memory)
        # 5.
        checkpoint.apply(runner, cast(checkpoint.Loaded, loaded))
        if not alone and saved is not None and returns_to_step(saved["state"].get("anchor", ()), runner):
            broadcast_optimizer_state(optimizer, 0, runner.backend)
    except BaseException:
        vars(optimizer).update(attributes_before)
        if runner is not former:
            runner.close()
        raise
    if resumed is not None:
        session.switch_runner(runner, plan)
        former.close()
        session.driver.resume(resumed)


def _on_own_meshes(plain: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a sharded optimizer's state with its tensors on the meshes of this run's parameters. A run with another
    number of replicas had other meshes, whose tensors torch does not compute with beside these.

    Raises:
        ConfigError: a tensor is of another part of its parameter.
    """
    from torch.distributed.tensor import DTensor

    def on_mesh_of(p: Any, value: Any) -> Any:
        """Return a value of a parameter's state, on the parameter's mesh if it is sharded."""
        if not (isinstance(value, DTensor) and isinstance(p, DTensor)) or value.device_mesh == p.device_mesh:
            return value
        local = value.to_local()
        if local.shape != p.to_local().shape:
            raise ConfigError(
                f"the optimizer's state has a part of shape {tuple(local.shape)} of a parameter, and this rank has one "
                f"of {tuple(p.to_local().shape)}: it was saved with another number of shards"
            )
        return DTensor.from_local(
            local, p.device_mesh, p.placements, run_check=False, shape=value.shape, stride=value.stride()
        )

    params = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [key for group in plain["param_groups"] for key in group["params"]]
    state = dict(plain["state"])
    for key, p in zip(keys, params, strict=False):  # torch refuses another number of parameters itself
        if key in state:
            state[key] = {name: on_mesh_of(p, value) for name, value in state[key].items()}
    return {**plain, "state": state}


@contextlib.contextmanager
def _reporting_damage() -> Iterator[None]:
    """Convert errors of torch's ``load_state_dict``, which does not validate a state, to a ConfigError."""
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        raise ConfigError(f"the checkpoint's part of the optimizer itself is damaged: {error!r}") from error


def pack_state(saved: SavedState) -> bytes:
    """Return a state as bytes that ``torch.load`` reads with ``weights_only=True``."""
    file = io.BytesIO()
    torch.save(saved, file)
    return file.getvalue()


def unpack_state(saved: object) -> Any:
    """Return the state that :func:`pack_state` packed; return anything else as it is."""
    if isinstance(saved, io.BytesIO):
        saved = saved.getvalue()
    if not isinstance(saved, bytes):
        return saved
    try:
        return torch.load(io.BytesIO(saved), weights_only=True)
    except Exception as error:  # torch's zip reader and its unpickler raise errors of many kinds
        raise state_schema.damage_error(f"it is packed, and cannot be read: {str(error)[:200]}") from error


def _key(runner: StepRunner) -> str:
    """Return the key of this rank's memories."""
    return f"{KEY}{runner.backend.rank}" + (f".{runner.shard_label}" if runner.shard_label else "")


def _has_memories(state_dict: object) -> bool:
    """Return True if torch's part of a state has memories, as it has if there was no ``Memories`` when it was saved."""
    groups = state_dict.get("param_groups", ()) if isinstance(state_dict, dict) else ()
    return any(str(key).startswith(KEY) for group in groups for key in group)


def _split_state(state_dict: object, runner: StepRunner) -> tuple[dict[str, Any], SavedState | None]:
    """Return a state dict as torch knows it, and Grace's part of it: this rank's, if there are several."""
    if not isinstance(state_dict, dict):
        raise ConfigError(f"a state dict is a dict, not {state_schema.short(state_dict)}")
    plain = {key: value for key, value in state_dict.items() if key not in ("grace", INNER)}
    groups = []
    found = {}
    for group in plain.get("param_groups", ()):
        ours = {key: value for key, value in group.items() if str(key).startswith(KEY)}
        found.update(ours)
        groups.append({key: value for key, value in group.items() if key not in ours})
    if groups:
        plain["param_groups"] = groups
    saved = state_dict.get("grace")
    if saved is None and found:
        saved = found.get(_key(runner), next(iter(found.values())))
    saved = unpack_state(saved)
    inner = state_dict.get(INNER, ())
    if isinstance(saved, dict) and INNER in saved:
        inner = saved[INNER]
        saved = {key: value for key, value in saved.items() if key != INNER}
        if len(inner) != runner.backend.size:  # torch's part may have tensors of several ranks, which do not fit
            first = next((own for own in inner if own is not None), None)  # of a rank's own entry its own
            inner = [first] * runner.backend.size
    if runner.outer_rounds and len(inner) == runner.backend.size:  # ranks in step need equal states: the saving rank's
        own = inner[runner.backend.rank]
        plain = plain if own is None else {**plain, **unpack_state(own)}
    return plain, saved


def _dcp_caller() -> FrameType | None:
    """Return the frame of the function of ``torch.distributed.checkpoint`` that called the optimizer's method; None if
    no such function did."""
    frame: FrameType | None = sys._getframe(2)
    # A class between calls it by super(), as under Horovod.
    if frame is not None and frame.f_code.co_name in ("state_dict", "load_state_dict"):
        frame = frame.f_back
    return frame if frame is not None and frame.f_globals.get("__name__") == DCP else None


def _device_of(
    key: str | int, parameters: dict[str, torch.nn.Parameter], default: torch.device | str
) -> torch.device | str:
    """Return the device of a variable, or of the variable that a shard belongs to; a default for other keys."""
    whole = key if key in parameters else str(key).rpartition("/part_")[0]
    return parameters[whole].device if whole in parameters else default


def move_to_devices(saved: Any, parameters: dict[str, torch.nn.Parameter], device: torch.device | str = "cpu") -> Any:
    """Return the saved state with each variable's tensors on its parameter's device."""
    if isinstance(saved, torch.Tensor):
        return saved.to(device, copy=True)
    if isinstance(saved, dict):
        return {
            key: move_to_devices(value, parameters, _device_of(key, parameters, device)) for key, value in saved.items()
        }
    if isinstance(saved, list):
        return [move_to_devices(value, parameters, device) for value in saved]
    return saved
