"""Saving and restoring what an exchanger remembers.

The rules: state is keyed by variable name; what torch's wrappers put into names is no part of them. Each component
says whether its state is the same on every rank (PowerSGD's Q), which loads anywhere, or a rank's own (residuals),
which loads on that rank of a run of the same size. From a checkpoint that holds all ranks it also loads on a
different number of ranks, where every rank starts with the mean over the saved ranks, which keeps the mean over ranks
of what is still to be sent. What a destination keeps of its answers goes to the rank that is the destination now.
Where variables are cut otherwise memories are cut and joined as the new parts are (:mod:`grace.carry`). Parameters of
a compressor may change; what it kept itself starts anew if it does not fit them. Everything comes into the units of
this run's loss scale. A variable that is new starts with nothing.

``memory`` says what becomes of the rest: "strict" refuses it before anything is changed; "keep" keeps each memory that
fits (the same name and shape, and the same kind of memory, whatever else changed), and a warning says what was dropped;
"reset" starts with empty memories. The step counter is restored in each case.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from grace.carry import HOW, Carrier, Cuts, Misfit, bare
from grace.errors import ConfigError, ExchangeError
from grace.exchanger import Exchanger
from grace.rows import Slices
from grace.variable import unwrapped

VERSION = 1
MODES = ("strict", "keep", "reset")
WITHOUT = (
    "the checkpoint has no 'grace' entry: it was saved by a plain optimizer. To start with empty memories call "
    "load_state_dict(state, memory='reset')"
)
FORM: dict[str, Any] = {
    **dict.fromkeys(("step", "seed", "rank", "size"), int),
    "loss_scale": (int, float),
    "components": str,
    "state": dict,
}
"""What a checkpoint must have."""


def save(exchanger: Exchanger) -> dict[str, Any]:
    """This rank's state: plain numbers, text, and tensors.

    Raises:
        ExchangeError: a step is under way.
    """
    check_settled(exchanger)
    context = exchanger.context
    pending = exchanger.pending()  # first: what is on its way may still change what a destination keeps
    saved = {
        "version": VERSION,
        "components": exchanger.name,
        "pieces": cuts_of(exchanger),
        "step": context.step,
        "seed": context.seed,
        "loss_scale": context.loss_scale,
        "rank": exchanger.backend.rank,
        "size": exchanger.backend.size,
        "hierarchical": exchanger.hierarchical,
        "shared": shared(exchanger),
        "state": exchanger.state(),
        "pending": [{name: plain(value) for name, value in step.items()} for step in pending],
    }
    return {**saved, "holds": list(_held(saved))}


def check_settled(exchanger: Any) -> None:
    """Refuse to save or load in the middle of a step.

    Args:
        exchanger: or a session, which knows more.

    Raises:
        ExchangeError: exchanges were begun, and the step that they belong to may still be dropped.
    """
    if exchanger.begun:
        raise ExchangeError(
            "an exchange is under way, and what it changes is not yet part of the state. Save and load after "
            f"optimizer.step(), or drop the step with {getattr(exchanger, 'dropping', 'optimizer.zero_grad()')} before"
        )


def cuts_of(exchanger: Exchanger) -> Cuts:
    """How each variable is cut, and what carries each piece, in plain words and numbers."""
    return {
        name: {
            "axis": pieces[0].axis,
            "shape": list(pieces[0].whole.shape),
            "sizes": [piece.stop - piece.start for piece in pieces],
            "methods": [piece.communicator.describe() for piece in pieces],
            "memories": [piece.communicator.memory.spec for piece in pieces],
            "destinations": [getattr(piece.communicator, "destination", None) for piece in pieces],
        }
        for name, pieces in exchanger.pieces_of.items()
    }


def shared(exchanger: Exchanger) -> dict[str, list[str]]:
    """By kind of state, the pieces of which any rank's copy restores all, as the components that serve them say."""
    found: dict[str, list[str]] = {}
    for name, piece in exchanger.pieces.items():
        for kind, component in piece.communicator.keepers.items():
            names = found.setdefault(kind, [])
            if component.shared_state:
                names.append(name)
    return found


def own_state(exchanger: Exchanger) -> bool:
    """Whether some component may remember something that is this rank's alone."""
    several = exchanger.backend.size > 1
    return several and any(
        part.shared_state is False and getattr(part, "stateful", False) for _, part in exchanger.components
    )


def say_whose(exchanger: Exchanger, called: str, better: str) -> None:
    """Warn once, on rank 0, that a state holds this rank's memories only."""
    if exchanger.backend.rank == 0 and not exchanger.told and own_state(exchanger):
        exchanger.told = True
        warnings.warn(
            f"{called} holds the memories of this rank alone. That is right if every rank saves its own; for one file "
            f"that rank 0 saves let every rank call {better}, which holds those of all ranks",
            stacklevel=3,
        )


def gather(exchanger: Exchanger) -> dict[str, Any]:
    """All ranks' state in one; every rank must call it."""
    saved = save(exchanger)
    own = {
        kind: {name: value for name, value in values.items() if name not in saved["shared"].get(kind, ())}
        for kind, values in saved["state"].items()
    }
    full = {**saved, "ranks": exchanger.backend.allgather_object(own)}
    return {**full, "holds": list(_held(full))}


def _held(saved: dict[str, Any]) -> Iterator[str]:
    """What the entry holds, item by item, so that one from which something is missing is known."""
    for whose, state in [
        ("", saved["state"]),
        *((f" of rank {i}", one) for i, one in enumerate(saved.get("ranks", ()))),
    ]:
        yield from (f"the {kind} of {name!r}{whose}" for kind, values in state.items() for name in values)
    for i, step in enumerate(saved.get("pending", ())):
        yield from (f"mean {i} of {name!r}" for name in step)


@dataclass
class Loaded:
    """What a checkpoint brings, once it is known to fit: state by kind and piece, and the rest."""

    step: int | None
    loss_scale: float = 1.0
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    pending: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


def load(exchanger: Exchanger, saved: dict[str, Any] | None, memory: str = "strict") -> None:
    """Restore, by the rules above; nothing changes if that is refused.

    Raises:
        ConfigError: the checkpoint has no state, or it belongs to other components, another rank or
            another number of ranks; the message says what to do.
        ExchangeError: a step is under way.
    """
    apply(exchanger, prepare(exchanger, saved, memory))


def prepare(exchanger: Exchanger, saved: dict[str, Any] | None, memory: str = "strict") -> Loaded:
    """What :func:`load` would load; it changes nothing."""
    check_mode(memory)
    check_settled(exchanger)
    if saved is None:
        if memory == "strict":
            raise ConfigError(WITHOUT)
        dropped = [] if memory == "reset" else ["everything: it was saved by a plain optimizer"]
        return Loaded(None, dropped=dropped)
    _check_form(saved)
    loaded = Loaded(saved["step"], float(saved["loss_scale"]))
    if memory == "reset":
        return loaded
    strict = memory == "strict"
    missing = sorted(set(saved.get("holds", ())) - set(_held(saved)))
    if missing:
        why = (
            f"the checkpoint should hold {missing[0]}"
            + (f" and {len(missing) - 1} values more" if len(missing) > 1 else "")
            + ", and does not. torch.distributed.checkpoint loads only what is in the dict that it is given: save "
            "full_state_dict(packed=True), and let it load into that of the new optimizer"
        )
        if strict:
            raise ConfigError(f"{why}; {HOW}")
        loaded.dropped.append(why)
    saved, context, now = _renamed(saved, list(exchanger.pieces_of)), exchanger.context, exchanger.name
    if strict:
        by_strategy = any(name.startswith("strategy ") for name in (saved["components"], now))
        if bare(saved["components"]) != bare(now) and not by_strategy:
            raise ConfigError(
                f"the checkpoint was saved with {saved['components']}, this run uses {now}. Use the same, {HOW}"
            )
        if saved["seed"] != context.seed:
            raise ConfigError(
                f"the checkpoint was saved with seed={saved['seed']}, this run has seed={context.seed}. Use the same, "
                f"{HOW}"
            )
    carrier = Carrier(saved, cuts_of(exchanger), exchanger, strict)
    loaded.values, loaded.pending = carrier.values(), carrier.pending()
    loaded.dropped += carrier.dropped
    try:
        _check_leader(exchanger, saved, loaded.values)
    except Misfit as why:
        if strict:
            raise ConfigError(f"{why}, {HOW}") from None
        loaded.values = {}
        loaded.dropped.append(str(why))
    return loaded


def apply(exchanger: Exchanger, loaded: Loaded) -> None:
    """Go on from what :func:`prepare` gave."""
    if loaded.dropped:
        more = f", and {len(loaded.dropped) - 3} things more" if len(loaded.dropped) > 3 else ""
        warnings.warn(
            f"of what the checkpoint remembers, this was dropped: {'; '.join(loaded.dropped[:3])}{more}", stacklevel=4
        )
    for _, component in exchanger.components:  # two communicators may share one, for dense gradients and for rows
        component.state.clear()
    for kind, values in loaded.values.items():
        for name, value in values.items():
            exchanger.pieces[name].communicator.keepers[kind].state[name] = value
    for _, component in exchanger.components:
        component.state.commit()
    if loaded.step is None:
        return
    exchanger.context.step, exchanger.context.loss_scale = loaded.step, loaded.loss_scale
    exchanger.restore_pending([{name: rich(value) for name, value in step.items()} for step in loaded.pending])
    exchanger.resumed()


def check_mode(memory: str) -> None:
    """Refuse a word that is none of ``MODES``."""
    if memory not in MODES:
        raise ConfigError(f"memory must be 'strict', 'keep' or 'reset', not {memory!r}")


def plain(value: Any) -> Any:
    """A mean as it is saved: rows as a dict of tensors."""
    return {"values": value.values, "rows": value.rows} if isinstance(value, Slices) else value


def rich(value: Any) -> Any:
    """The inverse of :func:`plain`."""
    return Slices(value["values"], value["rows"]) if isinstance(value, dict) else value


def _check_form(saved: Any) -> None:
    """Refuse what no Grace has saved, or another version."""
    if isinstance(saved, dict) and saved.get("version", VERSION) != VERSION:
        raise ConfigError(f"the checkpoint's format is version {saved.get('version')}, this Grace reads {VERSION}")
    for key, kind in FORM.items():
        if not isinstance(saved, dict) or not isinstance(saved.get(key), kind):
            raise ConfigError(f"the checkpoint's 'grace' entry is none: its {key!r} is missing or damaged")
    states = [saved["state"], *saved.get("ranks", ())]
    if not all(isinstance(values, dict) for state in states for values in state.values()):
        raise ConfigError("the checkpoint's 'grace' entry is none: its 'state' is damaged")
    if "ranks" in saved and len(saved["ranks"]) != saved["size"]:
        raise ConfigError(
            f"the checkpoint's 'grace' entry is damaged: it is of {saved['size']} ranks and holds {len(saved['ranks'])}"
        )


def _renamed(saved: dict[str, Any], now: list[str]) -> dict[str, Any]:
    """The same under this run's names, where they differ only by what wrappers put into them."""
    pieces = saved.get("pieces") or {}
    before = list(pieces) or list(dict.fromkeys(name for values in saved["state"].values() for name in values))
    ours = dict(zip(unwrapped(now), now, strict=True))
    new = {old: old if old in now else ours.get(name, old) for old, name in zip(before, unwrapped(before), strict=True)}
    if all(old == name for old, name in new.items()) or len(set(new.values())) != len(new):
        return saved
    names = {f"{old}/part_{i}": f"{new[old]}/part_{i}" for old in pieces for i in range(len(pieces[old]["sizes"]))}
    called: Callable[[dict], dict] = lambda values: {  # noqa: E731
        {**new, **names}.get(name, name): value for name, value in values.items()
    }
    renamed = {**saved, "pieces": called(pieces), "pending": [called(step) for step in saved.get("pending", ())]}
    for key in ("state", "shared"):
        if key in saved:
            renamed[key] = {
                kind: called(values) if isinstance(values, dict) else list(called(dict.fromkeys(values)))
                for kind, values in saved[key].items()
            }
    if "ranks" in saved:
        renamed["ranks"] = [{kind: called(values) for kind, values in one.items()} for one in saved["ranks"]]
    return renamed


def _check_leader(exchanger: Exchanger, saved: dict[str, Any], values: dict[str, dict[str, Any]]) -> None:
    """With hierarchical reduction memories live where a rank speaks for its node."""
    hierarchy, before = exchanger.hierarchy, bool(saved.get("hierarchical"))
    moved = hierarchy is not None and (not hierarchy.leads or saved["size"] != exchanger.backend.size)
    if any(values.values()) and (moved or before != exchanger.hierarchical):
        raise Misfit(
            "the checkpoint holds memories of ranks that speak for their nodes (hierarchical reduction), and the nodes "
            "are others now, or the reduction is. Resume on the same cluster with the same setting"
        )
