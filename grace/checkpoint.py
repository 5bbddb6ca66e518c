"""Saving and restoring what an exchanger remembers.

The rules: state is keyed by variable name. What is the same on every rank (PowerSGD's Q) loads anywhere. What
belongs to a rank (residuals) loads on that rank of a run of the same size; from a checkpoint that holds all
ranks it also loads on a different number of ranks, where every rank starts with the mean over the saved
ranks, which keeps the mean over ranks of what is still to be sent. What a destination keeps of its answers goes
to the rank that is the destination now. Under another strategy memories are cut and joined as its parts are
(:mod:`grace.recut`). Anything else is refused, not dropped.
"""

from __future__ import annotations

from typing import Any

from grace.errors import ConfigError
from grace.exchanger import Exchanger
from grace.recut import Cuts, recut
from grace.rows import Slices

VERSION = 1


def save(exchanger: Exchanger) -> dict[str, Any]:
    """This rank's state: plain numbers, text, and tensors."""
    context = exchanger.context
    pending = exchanger.pending()  # first: what is on its way may still change what a destination keeps
    return {
        "version": VERSION,
        "components": exchanger.name,
        "pieces": cuts_of(exchanger),
        "step": context.step,
        "seed": context.seed,
        "loss_scale": context.loss_scale,
        "rank": exchanger.backend.rank,
        "size": exchanger.backend.size,
        "hierarchical": exchanger.hierarchical,
        "state": exchanger.state(),
        "pending": [{name: plain(value) for name, value in step.items()} for step in pending],
    }


def cuts_of(exchanger: Exchanger) -> Cuts:
    """How each variable is cut, and what carries each piece, in plain words and numbers."""
    return {
        name: {
            "axis": pieces[0].axis,
            "sizes": [piece.stop - piece.start for piece in pieces],
            "methods": [piece.communicator.describe() for piece in pieces],
            "memories": [piece.communicator.memory.spec for piece in pieces],
            "destinations": [getattr(piece.communicator, "destination", None) for piece in pieces],
        }
        for name, pieces in exchanger.pieces_of.items()
    }


def gather(exchanger: Exchanger) -> dict[str, Any]:
    """All ranks' state in one; every rank must call it."""
    saved = save(exchanger)
    shared = _shared_kinds(exchanger)
    own = {kind: values for kind, values in saved["state"].items() if kind not in shared}
    everyone = exchanger.backend.allgather_object(own)
    return {**saved, "ranks": everyone}


def load(exchanger: Exchanger, saved: dict[str, Any] | None, memory: str = "strict") -> None:
    """Restore, by the rules above; ``memory="reset"`` starts with empty state but keeps the step counter.

    Raises:
        ConfigError: the checkpoint has no state, or it belongs to other components, another rank or
            another number of ranks; the message says what to do.
    """
    if memory not in ("strict", "reset"):
        raise ConfigError(f"memory must be 'strict' or 'reset', not {memory!r}")
    if saved is None:
        if memory == "reset":
            return
        raise ConfigError(
            "the checkpoint has no 'grace' entry: it was saved by a plain optimizer. To start with empty "
            "memories call load_state_dict(state, memory='reset')"
        )
    if saved.get("version") != VERSION:
        raise ConfigError(f"the checkpoint's format is version {saved.get('version')}, this Grace reads {VERSION}")
    context, now = exchanger.context, exchanger.name
    if memory == "strict":
        if saved["components"] != now and not any(name.startswith("strategy ") for name in (saved["components"], now)):
            raise ConfigError(
                f"the checkpoint was saved with {saved['components']}, this run uses {now}. Use the same, or "
                "call load_state_dict(state, memory='reset') to start with empty memories"
            )
        if saved["seed"] != context.seed:
            raise ConfigError(f"the checkpoint was saved with seed={saved['seed']}, this run has seed={context.seed}")
    values: dict[str, dict[str, Any]] = {}
    if memory == "strict":
        _check_names(exchanger, saved)
        if saved["components"] != now or saved["size"] != exchanger.backend.size:
            saved = recut(saved, cuts_of(exchanger), exchanger.backend.rank)
        values = {kind: _for_rank(exchanger, saved, kind) for kind in saved["state"]}
        _check_leader(exchanger, saved, values)
    names = {
        id(c): {p.variable.name for p in exchanger.pieces.values() if p.communicator is c}
        for c in exchanger.communicators
    }
    for _, component in exchanger.components:  # two communicators may share one, for dense gradients and for rows
        component.state.clear()
    for communicator in exchanger.communicators:
        for kind, component in communicator.keepers.items():
            own = names[id(communicator)]
            component.state.update({name: v for name, v in values.get(kind, {}).items() if name in own})
            component.state.commit()
    context.step, context.loss_scale = saved["step"], saved["loss_scale"]
    steps = saved.get("pending", []) if memory == "strict" else []  # of the rank whose weights these are
    exchanger.restore_pending([{name: rich(value) for name, value in step.items()} for step in steps])
    exchanger.resumed()


def plain(value: Any) -> Any:
    """A mean as it is saved: rows as a dict of tensors."""
    return {"values": value.values, "rows": value.rows} if isinstance(value, Slices) else value


def rich(value: Any) -> Any:
    """The inverse of :func:`plain`."""
    return Slices(value["values"], value["rows"]) if isinstance(value, dict) else value


def _check_names(exchanger: Exchanger, saved: dict[str, Any]) -> None:
    whole_of = {
        f"{name}/part_{i}": name for name, cut in saved.get("pieces", {}).items() for i in range(len(cut["sizes"]))
    }
    for kind, values in saved["state"].items():
        for name in values:
            if whole_of.get(name, name) not in exchanger.pieces_of:
                raise ConfigError(
                    f"the checkpoint holds the {kind} of {name!r}, which this run does not exchange. Give the "
                    "parameters the names that they were saved with, or call load_state_dict(state, memory='reset')"
                )


def _check_leader(exchanger: Exchanger, saved: dict[str, Any], values: dict[str, dict[str, Any]]) -> None:
    """With hierarchical reduction memories live where a rank speaks for its node."""
    hierarchy = exchanger.hierarchy
    moved = hierarchy is not None and not hierarchy.leads
    if any(values.values()) and (moved or bool(saved.get("hierarchical")) != exchanger.hierarchical):
        raise ConfigError(
            "the checkpoint holds memories of ranks that speak for their nodes (hierarchical reduction), and the nodes "
            "are others now, or the reduction is. Resume on the same cluster with the same setting, or call "
            "load_state_dict(state, memory='reset')"
        )


def _shared_kinds(exchanger: Exchanger) -> set[str]:
    """What any rank's copy restores on all. A kind is shared if all components of that kind that keep something are."""
    kinds = {kind for kind, part in exchanger.components if part.shared_state}
    return kinds - {kind for kind, part in exchanger.components if not part.shared_state and len(part.state)}


def _for_rank(exchanger: Exchanger, saved: dict[str, Any], kind: str) -> dict[str, Any]:
    context, rank, size = exchanger.backend, saved["rank"], saved["size"]
    own = saved["state"][kind]
    if kind in _shared_kinds(exchanger):
        return own
    if "ranks" in saved:
        everyone = [state[kind] for state in saved["ranks"]]
        if size == context.size:
            return everyone[context.rank]
        if kind == "answer_memory":  # cut for this rank: what a destination keeps is no mean over ranks
            return own
        if kind == "shard_memory" and any(everyone):
            raise ConfigError(
                f"the checkpoint holds {size} shards' memories of the second compression of scatter_reduce, this run "
                f"has {context.size} ranks. Resume on {size}, or call load_state_dict(state, memory='reset')"
            )
        return _mean(everyone)
    if own and (rank, size) != (context.rank, context.size):
        raise ConfigError(
            f"the checkpoint holds the {kind} of rank {rank} of {size}, this is rank {context.rank} of "
            f"{context.size}. Save one file per rank, or save full_state_dict(), which holds all ranks and loads "
            "on any number of them; or call load_state_dict(state, memory='reset') to start with empty memories"
        )
    return own


def _mean(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean over ranks of each value; a rank without one counts as zero."""
    names = sorted({name for state in everyone for name in state})
    return {name: _mean_value([s[name] for s in everyone if name in s], len(everyone)) for name in names}


def _mean_value(values: list[Any], count: int) -> Any:
    if isinstance(values[0], dict):
        return {key: _mean_value([value[key] for value in values], count) for key in values[0]}
    if isinstance(values[0], (int, float)):
        return sum(values) / len(values)
    return sum(values[1:], start=values[0]) / count
