"""What distributed optimizers save and restore, on every engine."""

import contextlib
import io
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from grace.core.backend import Backend
from grace.errors import ConfigError
from grace.exchange.bucket import Traffic
from grace.planner.explain import Plan
from grace.session import checkpoint, state_schema
from grace.session.metrics import metrics
from grace.strategy.execution import StrategyPlan
from grace.torch.session import Session
from grace.torch.step_hooks import DCP

KEY = "grace.rank"
"""With the rank, the name of its memories among the settings of the first parameter group, where
``torch.distributed.checkpoint`` looks after them."""


class StateMixin:
    """State and traffic of a distributed optimizer, beside those of the user's."""

    _grace: Session
    _memories_apart = False
    """Whether :class:`grace.torch.Memories` saves and loads what is remembered."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the groups of the exchange are fixed when the optimizer is made distributed."""
        raise ConfigError(
            "add the parameter group to the optimizer before grace.DistributedOptimizer, which fixes what is "
            "exchanged together"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: copies and pickles."""
        raise ConfigError(
            "a distributed optimizer cannot be copied or pickled: it has hooks on its parameters and a place among the "
            "ranks. Copy or save its state_dict(), and load that into a new optimizer made distributed"
        )

    def state_dict(self) -> dict[str, Any]:
        """The user's optimizer's state, and under "grace" what this rank remembers.

        Raises:
            ExchangeError: a step is under way.
        """
        checkpoint.check_settled(self._grace)
        asking = _asking()
        if asking is None:
            check_not_saved_directly(self._grace.runner, "the optimizer")
            between = sys._getframe(1).f_code.co_name == "state_dict"  # under Horovod
            better = "optimizer.full_state_dict()"
            checkpoint.warn_own_state(self._grace.runner, "optimizer.state_dict()", better, between)
            return rank_state(self)
        state = super().state_dict()  # type: ignore[misc]
        if self._memories_apart:
            return state
        if getattr(asking.f_locals.get("info"), "flatten_optimizer_state_dict", False):
            warnings.warn(
                "torch.distributed.checkpoint has no place for Grace's memories if flatten_optimizer_state_dict=True: "
                "they are not saved. Save grace.torch.Memories(optimizer) beside it, or leave the option out",
                stacklevel=2,
            )
            return state
        saved = checkpoint.save(self._grace.runner)
        state["param_groups"][0][f"{KEY}{saved['rank']}"] = packed_up(saved)
        return state

    def full_state_dict(self, packed: bool = False) -> dict[str, Any]:
        """Like ``state_dict()``, with every rank's memories, for one file that loads on any number of ranks.

        Every rank must call it; save it on one.

        Args:
            packed: the "grace" entry as one value, bytes, which ``torch.distributed.checkpoint`` loads whole.

        Raises:
            ExchangeError: a step is under way.
        """
        saved = checkpoint.gather(self._grace.runner, lambda: checkpoint.check_settled(self._grace))
        state = super().state_dict()  # type: ignore[misc]
        state["grace"] = packed_up(saved) if packed else saved
        return state

    def load_state_dict(self, state_dict: dict[str, Any], memory: str = "strict") -> None:
        """Restore. A run that is stopped and resumed continues bit for bit; what is refused on some rank changes
        nothing on any. Every rank must call it. Over Horovod each loads by itself, so that one may load for all if
        ``hvd.broadcast_optimizer_state`` follows; ranks that go on from different states are told at the next step.

        Args:
            state_dict: from ``state_dict()`` of the same rank, or from ``full_state_dict()``.
            memory: "strict"; "keep" to keep the memories that fit this run, and drop the others with a warning; or
                "reset" to start with empty ones.

        Raises:
            ConfigError: the memories belong to another rank, number of ranks or method, or are damaged.
            ExchangeError: a step is under way.
            RankError: it was refused on another rank, or the ranks load states of different saves.
        """
        if memory == "strict" and _asking() is not None:
            if self._memories_apart:
                with _plainly():
                    super().load_state_dict(state_dict)  # type: ignore[misc]
                return
            memory = "maybe"  # whoever calls torch's functions cannot say it
        load_state(self, state_dict, memory, self._grace.by_itself)
        self._grace.loaded()

    @property
    def strategy(self) -> Any:
        """The :class:`~grace.strategy.plan.Strategy` that is executed; None if there is one method for all."""
        return self._grace.strategy

    @property
    def plan(self) -> Plan | None:
        """Why ``strategy="auto"`` chose what it did; prints as a table. None as long as it measures, and where the user
        chose."""
        auto = self._grace.auto
        return None if auto is None or auto.plan is None else Plan.from_dict(auto.plan)

    def use_strategy(self, strategy: Any, resources: Any = None) -> None:
        """Go on by another strategy. Memories go along; what a residual holds that the new strategy has no memory for
        is applied, as its mean over ranks, at the next step. Every rank must call it, between two steps; rank 0's
        counts. Planning (``strategy="auto"``) ends.

        Args:
            strategy, resources: as ``DistributedOptimizer`` takes them: ``"uniform(compressor=powersgd(rank=2))"``.

        Raises:
            ConfigError: it does not suit this model or run, and the former strategy stays.
            ExchangeError: a step is under way.
            RankError: another rank refuses it.
        """
        self._grace.switch(StrategyPlan(strategy, self._grace.sparse_known, resources))
        if self._grace.auto is not None:
            self._grace.auto.stop()

    @property
    def traffic(self) -> Traffic:
        """What was exchanged so far, counted."""
        return self._grace.runner.traffic

    def metrics(self) -> dict[str, float]:
        """Numbers of this rank for a logger, since the last call; see :mod:`grace.session.metrics`. No collective."""
        return metrics(self._grace.runner, self.traffic)


def check_not_saved_directly(runner: Any, what: str) -> None:
    """Refuse to be part of a checkpoint of ``torch.distributed.checkpoint``'s, which would keep one rank's memories.

    Raises:
        ConfigError: its ``save`` or ``load`` calls the method that calls this.
    """
    caller = sys._getframe(2).f_globals.get("__name__", "")
    if caller.startswith(f"{DCP}_") and checkpoint.has_own_state(runner):
        raise ConfigError(
            f"{what} has memories that are each rank's own, of which torch.distributed.checkpoint would keep one "
            "rank's: save grace.torch.Memories(...) of it, and get_state_dict(model, optimizer) for torch's part"
        )


def rank_state(optimizer: Any) -> dict[str, Any]:
    """What ``state_dict()`` gives for this rank."""
    return {**super(StateMixin, optimizer).state_dict(), "grace": checkpoint.save(optimizer._grace.runner)}


def load_state(
    optimizer: Any, state_dict: Any, memory: str, alone: bool = False, beside: Sequence[Backend] = ()
) -> None:
    """Restore all of it or nothing.

    Args:
        memory: or "maybe": "keep" if there is nothing of Grace's in it, else "strict".
        alone: ask no other rank, unless the run plans its strategy.
        beside: other groups of ranks that load states of their own at the same moment, all or none (a pipeline's
            stages).
    """
    session, before = optimizer._grace, dict(vars(optimizer))
    former, saved, loaded, error = session.runner, None, None, None
    runner, resumed, plan = former, None, session.plan
    try:
        try:
            checkpoint.check_settled(session)
            with _plainly():
                plain, saved = _taken(state_dict, former.backend.rank)
            if memory == "maybe":
                memory = "keep" if saved is None else "strict"
        except Exception as raised:
            error = raised
        if session.auto is not None:  # a plan is gone on with by all ranks, or by none
            try:
                checkpoint.compare(former.backend, saved, memory, error)
                resumed = session.auto.found(saved)
                memory = "keep" if resumed is None and memory == "strict" else memory
                if resumed is not None:
                    runner, plan = session.beside(resumed.strategy)
            except Exception as raised:  # of all ranks that exchange; those beside are yet to hear of it
                error = raised
        try:
            if error is None:
                loaded = checkpoint.prepare(runner, saved, memory, lambda s: on_devices(s, session.parameters))
                with _plainly():
                    super(StateMixin, optimizer).load_state_dict(plain)
        except Exception as raised:
            error = raised
        if not alone or session.auto is not None:
            checkpoint.compare_everywhere([former.backend, *beside], saved, memory, error, alike=False)
        elif error is not None:
            raise error
        checkpoint.apply(runner, cast(checkpoint.Loaded, loaded))
    except BaseException:
        vars(optimizer).update(before)
        if runner is not former:
            runner.close()
        raise
    if resumed is not None:
        session.take(runner, plan)
        former.close()
        session.auto.resume(resumed)


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """The state of torch's own optimizer is read here, which torch uses before it looks at it."""
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        raise ConfigError(f"the checkpoint's part of the optimizer itself is damaged: {error!r}") from error


def packed_up(saved: dict[str, Any]) -> bytes:
    """A state as bytes, which ``torch.load`` reads with ``weights_only=True``."""
    file = io.BytesIO()
    torch.save(saved, file)
    return file.getvalue()


def unpacked(saved: Any) -> Any:
    """The inverse of :func:`packed_up`; what is not packed stays as it is."""
    if isinstance(saved, io.BytesIO):
        saved = saved.getvalue()
    if not isinstance(saved, bytes):
        return saved
    try:
        return torch.load(io.BytesIO(saved), weights_only=True)
    except Exception as error:  # of whatever kind, by torch's zip reader and its unpickler
        raise state_schema.damage_error(f"it is packed, and cannot be read: {str(error)[:200]}") from error


def _taken(state_dict: Any, rank: int) -> tuple[dict[str, Any], Any]:
    """A state dict as torch knows it, and what Grace remembers: this rank's, if there are several."""
    if not isinstance(state_dict, dict):
        raise ConfigError(f"a state dict is a dict, not {state_schema.short(state_dict)}")
    plain = {key: value for key, value in state_dict.items() if key != "grace"}
    groups, found = [], {}
    for group in plain.get("param_groups", ()):
        found.update({key: value for key, value in group.items() if key.startswith(KEY)})
        groups.append({key: value for key, value in group.items() if not key.startswith(KEY)})
    if groups:
        plain["param_groups"] = groups
    saved = state_dict.get("grace")
    if saved is None and found:
        saved = found.get(f"{KEY}{rank}", next(iter(found.values())))
    return plain, unpacked(saved)


def _asking() -> Any:
    """The frame of ``torch.distributed.checkpoint``'s function that called a method of the optimizer, if one did."""
    frame: Any = sys._getframe(2)
    if frame.f_code.co_name in ("state_dict", "load_state_dict"):  # of a class between, as under Horovod
        frame = frame.f_back
    return frame if frame.f_globals.get("__name__") == DCP else None


def _device_of(key: Any, parameters: dict[str, torch.nn.Parameter], usual: Any) -> Any:
    """Of a variable, or of one that a shard is of."""
    whole = key if key in parameters else str(key).rpartition("/part_")[0]
    return parameters[whole].device if whole in parameters else usual


def on_devices(saved: Any, parameters: dict[str, torch.nn.Parameter], device: Any = "cpu") -> Any:
    """The saved state with each variable's tensors on its parameter's device."""
    if isinstance(saved, torch.Tensor):
        return saved.to(device, copy=True)
    if isinstance(saved, dict):
        return {key: on_devices(value, parameters, _device_of(key, parameters, device)) for key, value in saved.items()}
    if isinstance(saved, list):
        return [on_devices(value, parameters, device) for value in saved]
    return saved
