"""Saving and restoring what a runner remembers.

The rules: state is keyed by variable name; what torch's wrappers put into names is no part of them. Each component
says whether its state is the same on every rank (PowerSGD's Q), which loads anywhere, or a rank's own (residuals),
which loads on that rank of a run of the same size. From a checkpoint that holds all ranks it also loads on a
different number of ranks, where every rank starts with the mean over the saved ranks, which keeps the mean over ranks
of what is still to be sent; what shards' memories held goes back to residuals, and a communicator that nobody named is
chosen anew (:mod:`grace.communicators.choice`). What a destination keeps of its answers goes to the rank that is the
destination now. Where variables are cut otherwise memories are cut and joined as the new parts are
(:mod:`grace.session.reshard`).
Parameters of a compressor may change; what it kept itself starts anew if it does not fit them. Everything comes into
the units of this run's loss scale. A variable that is new starts with nothing.

``memory`` says what becomes of the rest: "strict" refuses it before anything is changed; "keep" keeps each memory that
fits (the same name and shape, and the same kind of memory, whatever else changed), and a warning says what was dropped;
"reset" starts with empty memories. The step counter is restored in each case.

Every save has an id, the same on all ranks, and the ranks compare what they are about to load: it must be of one save.
What a state looks like, and how it is known to be whole, stands in :mod:`grace.session.state_schema`.
"""

import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grace.communicators.choice import took_default
from grace.core.api_names import ApiNames
from grace.core.backend import Backend
from grace.core.transactional_dict import StatefulComponent
from grace.errors import ConfigError, ExchangeError, RankError
from grace.exchange.sparse_rows import SparseRows
from grace.session import state_schema
from grace.session.agreement import tell
from grace.session.reshard import Misfit, Partitions, Resharding, bare
from grace.session.step_runner import StepRunner

MODES = ("strict", "keep", "reset")
WITHOUT = "the checkpoint has no 'grace' entry: it was saved by a plain optimizer. To start with empty memories call "


def save(runner: StepRunner) -> dict[str, Any]:
    """This rank's state: plain numbers, text, and tensors.

    Raises:
        ExchangeError: a step is under way.
    """
    return state_schema.seal(_saved(runner))


def _saved(runner: StepRunner) -> dict[str, Any]:
    check_settled(runner)
    _say_unsaved(runner)
    context = runner.context
    pending = runner.pending()  # first: what is on its way may still change what a destination keeps
    return {
        "version": state_schema.VERSION,
        "id": f"{runner.run}.{context.step}",
        "components": runner.name,
        "pieces": partitions_of(runner),
        "step": context.step,
        "seed": context.seed,
        "loss_scale": context.loss_scale,
        "rank": runner.backend.rank,
        "size": runner.backend.size,
        "hierarchical": runner.hierarchical,
        "shared": shared(runner),
        "state": runner.state(),
        "pending": [{name: plain(value) for name, value in step.items()} for step in pending],
        **({"plan": plan} if (plan := runner.planned()) else {}),
    }


def _say_unsaved(runner: StepRunner) -> None:
    """Warn once of what users' parts keep elsewhere than in their state."""
    for communicator in runner.communicators:
        for part in communicator.named_components().values():
            attributes = part.unsaved() if isinstance(part, StatefulComponent) else []
            if attributes:
                warnings.warn(
                    f"the {part.kind} {part.spec} keeps something in its attribute {', '.join(attributes)} that is not "
                    "saved, nor taken back when a step overflows: keep it in self.state[name], as a tensor, a number, "
                    "or a dict of these",
                    stacklevel=5,
                )


def check_settled(runner: Any) -> None:
    """Refuse to save or load in the middle of a step.

    Args:
        runner: or a session, which knows more.

    Raises:
        ExchangeError: exchanges were begun, and the step that they belong to may still be dropped.
    """
    if runner.begun:
        raise ExchangeError(
            "an exchange is under way, and what it changes is not yet part of the state. Save and load after "
            f"optimizer.step(), or drop the step with {getattr(runner, 'dropping', 'optimizer.zero_grad()')} before"
        )


def partitions_of(runner: StepRunner) -> Partitions:
    """How each variable is cut, and what carries each shard, in plain words and numbers."""
    return {
        name: {
            "axis": shards[0].axis,
            "shape": list(shards[0].whole.shape),
            "sizes": [shard.stop - shard.start for shard in shards],
            "methods": [shard.communicator.describe() for shard in shards],
            "memories": [shard.communicator.memory.spec for shard in shards],
            "destinations": [getattr(shard.communicator, "destination", None) for shard in shards],
        }
        for name, shards in runner.shards_of.items()
    }


def shared(runner: StepRunner) -> dict[str, list[str]]:
    """By kind of state, the shards of which any rank's copy restores all, as the components that serve them say."""
    found: dict[str, list[str]] = {}
    for name, shard in runner.shards.items():
        for kind, component in shard.communicator.stateful_parts.items():
            names = found.setdefault(kind, [])
            if component.shared_state:
                names.append(name)
    return found


def own_state(runner: StepRunner) -> bool:
    """Whether some component may remember something that is this rank's alone."""
    several = runner.backend.size > 1
    return several and any(
        part.shared_state is False and getattr(part, "stateful", False) for _, part in runner.components
    )


def say_whose(runner: StepRunner, called: str, better: str, between: int = 0) -> None:
    """Warn once, on rank 0, that a state holds this rank's memories only; ``between`` functions of Grace's lie between
    the user's and the one that calls this."""
    if runner.backend.rank == 0 and not runner.told and own_state(runner):
        runner.told = True
        warnings.warn(
            f"{called} holds the memories of this rank alone. That is right if every rank saves its own; for one file "
            f"that rank 0 saves let every rank call {better}, which holds those of all ranks",
            stacklevel=3 + between,
        )


def gather(runner: StepRunner, settle: Callable[[], Any] = lambda: None) -> dict[str, Any]:
    """All ranks' state in one; every rank must call it.

    Args:
        settle: called first; it raises if a step is under way of which the runner does not know.

    Raises:
        ExchangeError: a step is under way.
        RankError: another rank failed to save.
    """
    saved: dict[str, Any] = {}
    own: dict[str, dict[str, Any]] = {}
    error: Exception | None = None
    try:
        settle()
        saved = _saved(runner)
        shared_by = saved["shared"]
        own = {
            kind: {name: value for name, value in values.items() if name not in shared_by.get(kind, ())}
            for kind, values in saved["state"].items()
        }
    except Exception as raised:
        error = raised
    return state_schema.seal({**saved, "ranks": tell(runner.backend, "a state to save", own, error, "could not save")})


@dataclass
class Loaded:
    """What a checkpoint brings, once it is known to fit: state by kind and shard, and the rest."""

    step: int | None
    id: str | None = None
    loss_scale: float = 1.0
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    pending: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


def load(
    runner: StepRunner,
    read: Callable[[], Any],
    memory: str = "strict",
    inside: Callable[[Any], Any] = lambda saved: saved,
    beside: Sequence[Backend] = (),
) -> None:
    """Restore, by the rules above; nothing changes if that is refused on some rank. Every rank must call it.

    Args:
        read: gives what was saved; it raises if that cannot be read, or a step is under way of which the runner
            does not know.
        inside: what was saved, as the exchange computes with it.
        beside: other groups of ranks of which all load, or none; see :func:`compare_everywhere`.

    Raises:
        ConfigError: the checkpoint has no state, or it belongs to other components, another rank or
            another number of ranks; the message says what to do.
        ExchangeError: a step is under way.
        RankError: it was refused on another rank, or the ranks load different ones.
    """
    saved, loaded, error = None, None, None
    try:
        saved = read()
        loaded = prepare(runner, saved, memory, inside)
    except Exception as raised:
        error = raised
    compare_everywhere([runner.backend, *beside], saved, memory, error)
    assert loaded is not None
    apply(runner, loaded)


NOTHING: dict[str, Any] = {}
"""Instead of a checkpoint, where a rank loads none."""


def compare_everywhere(
    backends: Sequence[Backend], saved: Any, memory: str, error: Exception | None = None, alike: bool = True
) -> None:
    """Compare what is about to be loaded over several groups of ranks, one after the other, as the shards and replicas
    of a model are, or a pipeline's stages: what one of them refuses all refuse. Every rank must call it.

    Args:
        backends: first the ranks that exchange with each other, whose states are of one save; then the others.
        saved, memory, error: as :func:`compare` takes them.
        alike: False if the others' states may be of other steps.

    Raises:
        RankError: another rank refused, or they are not of one save.
    """
    for i, backend in enumerate(backends):
        try:
            compare(backend, saved if alike or i == 0 else None, memory, error, one_save=i == 0)
        except Exception as raised:
            error = raised
    if error is not None:
        raise error


def compare(
    backend: Backend, saved: Any, memory: str, error: BaseException | None = None, one_save: bool = True
) -> None:
    """Compare over the ranks what they are about to load; every rank must call it, with the error if it refused.

    Args:
        one_save: True if the ranks gave their states one id, as those do that exchange with each other; else the step
            must be the same.

    Raises:
        RankError: another rank refused, or they are not of one save.
    """
    facts = ["no checkpoint"] if saved is NOTHING else ["a checkpoint of a plain optimizer"]
    if error is None and saved:  # runs that plan their strategy come here before anything else was looked at
        try:
            state_schema.check(saved)
        except ConfigError as raised:
            error = raised
    if error is None and saved:
        known = [f"of step {saved['step']}"]
        if one_save:
            known += [f"of {saved['size']} ranks", f"of the save {saved.get('id')}"]
        facts = [f"a checkpoint {fact}" for fact in (*known, f"with memory={memory!r}")]
    told = tell(backend, "a checkpoint", facts, error, "did not load its checkpoint")
    for rank, other in enumerate(told):
        for mine, theirs in zip(told[0], other, strict=False):
            if mine != theirs:
                raise RankError(
                    f"rank 0 loads {mine}, rank {rank} {theirs}. Let every rank load what was saved at the same "
                    "moment: the same file, or its own of one save"
                )


def prepare(
    runner: StepRunner,
    saved: dict[str, Any] | None,
    memory: str = "strict",
    inside: Callable[[Any], Any] = lambda saved: saved,
) -> Loaded:
    """What :func:`load` would load; it changes nothing."""
    check_mode(memory)
    check_settled(runner)
    if saved is None:
        if memory == "strict":
            raise ConfigError(WITHOUT + runner.context.api_names.reset)
        dropped = [] if memory == "reset" else ["everything: it was saved by a plain optimizer"]
        return Loaded(None, dropped=dropped)
    strict, how = memory == "strict", runner.context.api_names.otherwise
    saved, dropped = undamaged(saved, memory, runner.context.api_names)
    loaded = Loaded(saved["step"], saved.get("id"), float(saved["loss_scale"]), dropped=dropped)
    if memory == "reset":
        return loaded
    saved = inside(saved)
    saved, context, now = state_schema.renamed(saved, list(runner.shards_of)), runner.context, runner.name
    if strict:
        by_strategy = any(name.startswith("strategy ") for name in (saved["components"], now))
        by_default = any(took_default(c, bare(saved["components"]), bare(now)) for c in runner.communicators)
        if bare(saved["components"]) != bare(now) and not by_strategy and not by_default:
            raise ConfigError(
                f"the checkpoint was saved with {saved['components']}, this run uses {now}. Use the same, {how}"
            )
        if saved["seed"] != context.seed:
            raise ConfigError(
                f"the checkpoint was saved with seed={saved['seed']}, this run has seed={context.seed}. Use the same, "
                f"{how}"
            )
    resharding = Resharding(saved, partitions_of(runner), runner, strict)
    loaded.values, loaded.pending = resharding.values(), resharding.pending()
    loaded.dropped += resharding.dropped
    try:
        _check_leader(runner, saved, loaded.values)
    except Misfit as why:
        if strict:
            raise ConfigError(f"{why}, {how}") from None
        loaded.values = {}
        loaded.dropped.append(str(why))
    return loaded


def undamaged(saved: Any, memory: str, calls: ApiNames) -> tuple[dict[str, Any], list[str]]:
    """Return a state that is what was saved, and what was left out of it for being damaged (if ``memory`` is "keep").

    Whoever takes a state apart, or joins several, does so with what this returns, and seals the result.

    Raises:
        ConfigError: it is damaged; with "reset" the values that it holds do not matter.
    """
    state_schema.check(saved)
    spoilt = state_schema.spoilt(saved, calls.partial) if memory != "reset" else {}
    if spoilt and memory == "strict":
        more = f" ({len(spoilt) - 1} values more are missing or damaged)" if len(spoilt) > 1 else ""
        raise ConfigError(f"{next(iter(spoilt.values()))}{more}; {calls.otherwise}")
    state_schema.check_facts(saved)
    return (state_schema.without(saved, spoilt) if spoilt else saved), list(spoilt.values())


def apply(runner: StepRunner, loaded: Loaded) -> None:
    """Go on from what :func:`prepare` gave."""
    say_dropped(loaded.dropped)
    for _, component in runner.components:  # two communicators may share one, for dense gradients and for rows
        component.state.clear()
    for kind, values in loaded.values.items():
        for name, value in values.items():
            runner.shards[name].communicator.stateful_parts[kind].state[name] = value
    for _, component in runner.components:
        component.state.commit()
    if loaded.step is None:
        return
    runner.run = f"{zlib.crc32(f'{runner.run} {loaded.id}'.encode()):08x}"  # what follows has other ids
    runner.context.step, runner.context.loss_scale = loaded.step, loaded.loss_scale
    runner.restore_pending([{name: rich(value) for name, value in step.items()} for step in loaded.pending])
    runner.resumed()


def say_dropped(dropped: Sequence[str], between: int = 2) -> None:
    """Warn of what is not loaded; ``between`` functions of Grace's lie between the user's and the one that calls
    this."""
    if dropped:
        more = f", and {len(dropped) - 3} things more" if len(dropped) > 3 else ""
        warnings.warn(
            f"of what the checkpoint remembers, this was dropped: {'; '.join(dropped[:3])}{more}",
            stacklevel=3 + between,
        )


def check_mode(memory: str) -> None:
    """Refuse a word that is none of ``MODES``."""
    if memory not in MODES:
        raise ConfigError(f"memory must be 'strict', 'keep' or 'reset', not {memory!r}")


def plain(value: Any) -> Any:
    """A mean as it is saved: rows as a dict of tensors."""
    return {"values": value.values, "rows": value.rows} if isinstance(value, SparseRows) else value


def rich(value: Any) -> Any:
    """The inverse of :func:`plain`."""
    return SparseRows(value["values"], value["rows"]) if isinstance(value, dict) else value


def _check_leader(runner: StepRunner, saved: dict[str, Any], values: dict[str, dict[str, Any]]) -> None:
    """With hierarchical reduction memories live where a rank speaks for its node."""
    hierarchy, before, now = runner.hierarchy, saved.get("hierarchical", False), runner.hierarchical
    told = [runner.shards if some is True else some or () for some in (before, now)]
    led = [name for some in told for name in some]
    held = any(f"{key}/".startswith(f"{name}/") for kind in values.values() for key in kind for name in led)
    moved = hierarchy is not None and (not hierarchy.leads or saved["size"] != runner.backend.size)
    if held and (moved or before != now):
        raise Misfit(
            "the checkpoint holds memories of ranks that speak for their nodes (hierarchical reduction), and the nodes "
            "are others now, or the reduction is. Resume on the same cluster with the same setting"
        )
