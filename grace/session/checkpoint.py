"""Saving and restoring the state of a runner.

The rules: state is keyed by variable name, without the parts of names that torch's wrappers add. Each component
declares whether its state is the same on every rank (PowerSGD's Q), which loads anywhere, or a rank's own (residuals),
which loads on that rank of a run of the same size. From a checkpoint of all ranks a rank's own state also loads on
another number of ranks: every rank starts with the mean over the saved ranks, so that the mean over ranks of the
unsent gradients stays the same. State of shards' memories is then added to residuals, and a communicator that the user
did not name is chosen again (:mod:`grace.communicators.choice`). The memory for a destination's answers goes to the
rank that is the destination now. If variables are cut into other parts, memories are joined and cut likewise
(:mod:`grace.session.reshard`).
Parameters of a compressor may change; its own state starts empty if it does not fit them. All state is converted to
the units of this run's loss scale. A new variable starts without state.

``memory`` decides how state that does not fit is handled: "strict" refuses the checkpoint before anything is changed;
"keep" keeps each memory that fits (the same name and shape, and the same kind of memory), and a warning lists the
dropped ones; "reset" starts with empty memories. The step counter is restored in each case. State that all ranks share,
such as anchors, is dropped on all ranks if it is damaged on one.

Every save has an id, the same on all ranks. Ranks compare the ids that they are about to load, which must be equal.
The form of a state, and its checksums, are in :mod:`grace.session.state_schema`.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from grace.communicators.choice import took_default
from grace.core.api_names import ApiNames
from grace.core.backend import Backend
from grace.core.component import Component, is_ours
from grace.core.compressor import Tensor
from grace.core.state import Values
from grace.core.transactional_dict import StatefulComponent, TransactionalDict
from grace.errors import ConfigError, ExchangeError, RankError, warn
from grace.exchange.sparse_rows import Gradient, SparseRows
from grace.session import state_schema
from grace.session.agreement import gather_or_raise
from grace.session.reshard import Misfit, Partitions, Resharding, without_parameters
from grace.session.state_schema import SavedState, ValuesByKind
from grace.session.step_runner import StepRunner

MODES = ("strict", "keep", "reset")
NO_GRACE_ENTRY = (
    "the checkpoint has no 'grace' entry: it was saved by a plain optimizer, or without the optimizer's state. To "
    "start with empty memories call "
)


def save(runner: StepRunner) -> SavedState:
    """Return this rank's state: plain numbers, text, and tensors.

    Raises:
        ConfigError: a user's part keeps something that cannot be loaded.
        ExchangeError: a step is under way.
    """
    return state_schema.seal(_assemble_state(runner))


def _assemble_state(runner: StepRunner) -> SavedState:
    check_settled(runner)
    _warn_unsaved(runner)
    context = runner.context
    # Delayed round trips must end before the state is read: they may still change a destination's memory.
    pending = runner.pending_means()
    _check_saveable(runner)
    plan = runner.callbacks.planned()
    return {
        "version": state_schema.VERSION,
        "id": f"{runner.run_id}.{context.step}",
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
        "pending": [{name: mean_to_saved(value) for name, value in step.items()} for step in pending],
        **({"plan": plan} if plan else {}),
        **({"part": runner.shard_label} if runner.shard_label else {}),
    }


def _warn_unsaved(runner: StepRunner) -> None:
    """Warn once of attributes of users' parts that change during training and are not saved."""
    for communicator in runner.communicators:
        for part in communicator.named_components().values():
            attributes = part.unsaved() if isinstance(part, StatefulComponent) else []
            if attributes:
                warn(
                    f"the {part.kind} {part.spec} keeps something in its attribute {', '.join(attributes)} that is not "
                    "saved, nor taken back when a step overflows: keep it in self.state[name], as a tensor, a number, "
                    "or a dict of these"
                )


def _check_saveable(runner: StepRunner) -> None:
    """Refuse to save what users' parts keep if it could not be loaded."""
    for kind, part in runner.components:
        if is_ours(type(part)) and not isinstance(part, TransactionalDict):
            continue  # built-in parts keep only what can be saved
        for name, value in part.state.committed.items():
            why = state_schema.describe_unsaveable(value)
            if why:
                raise ConfigError(
                    f"the {kind} {part.spec} keeps {why} for {name!r}, which no checkpoint can hold: keep in "
                    "self.state[name] a finite number, a tensor of finite numbers or truth values, or a dict of these"
                )


def check_settled(runner: Any, why: str = "") -> None:
    """Refuse to save or load during a step.

    Args:
        runner: a runner, or a session, which also knows of steps that the runner does not.
        why: the end of the error's first sentence.

    Raises:
        ExchangeError: exchanges are under way, whose step may still be dropped.
    """
    if runner.in_progress:
        names = runner.context.api_names
        raise ExchangeError(
            f"the exchange of a step is under way, and the state does not have its result yet{why}. Save and load "
            f"after {names.step}{names.drop and f', or drop the step before, with {names.drop}'}"
        )


def partitions_of(runner: StepRunner) -> Partitions:
    """Return, by variable, how it is cut, and the description of each shard's communicator; built-in types only."""
    return {
        name: {
            "axis": shards[0].axis,
            "shape": list(shards[0].whole.shape),
            "sizes": [shard.stop - shard.start for shard in shards],
            "methods": [shard.communicator.describe() for shard in shards],
            "memories": [
                # of another scale than a gradient's residual, which must not become that of drifts
                shard.communicator.memory.spec + ("" if shard.outer is None else " of drifts")
                for shard in shards
            ],
            "destinations": [getattr(shard.communicator, "destination", None) for shard in shards],
        }
        for name, shards in runner.shards_of.items()
    }


def shared(runner: StepRunner) -> dict[str, list[str]]:
    """Return, by kind of state, the shards whose state is the same on all ranks; see ``Component.shared_state``."""
    found: dict[str, list[str]] = {}
    for name, shard in runner.shards.items():
        for kind, component in runner.stateful_parts(shard).items():
            names = found.setdefault(kind, [])
            if component.shared_state:
                names.append(name)
    for kind, component in runner.outer_rounds.buffer_parts.items() if runner.outer_rounds else ():
        found[kind] = list(component.state) if component.shared_state else []
    return found


def has_own_state(runner: StepRunner) -> bool:
    """Return True if a component may keep state that differs by rank."""
    several = runner.backend.size > 1
    return several and any(
        part.shared_state is False and getattr(part, "stateful", False) for _, part in runner.components
    )


def warn_own_state(runner: StepRunner, called: str, better: str) -> None:
    """Warn once, on rank 0, that a state holds this rank's memories only.

    Args:
        runner: the runner whose state was saved.
        called: the call that saved it.
        better: the call that saves the state of all ranks.
    """
    if runner.backend.rank == 0 and not runner.warned_own_state and has_own_state(runner):
        runner.warned_own_state = True
        warn(
            f"{called} holds the memories of this rank alone. That is right if every rank saves its own; for one file "
            f"that rank 0 saves let every rank call {better}, which holds those of all ranks"
        )


def gather(runner: StepRunner, settle: Callable[[], object] = lambda: None) -> SavedState:
    """Return the state of all ranks in one; every rank must call it.

    Args:
        settle: called first; it raises an error if a step is under way that the runner does not know.

    Raises:
        ExchangeError: a step is under way.
        RankError: another rank failed to save.
    """
    saved: SavedState = {}
    own: ValuesByKind = {}
    error: Exception | None = None
    try:
        # Its error is kept, too, until the collective below, in which the other ranks wait for this one.
        settle()
        saved = _assemble_state(runner)
        shared_by = saved["shared"]
        # Pickled on a GPU, they would be unpickled on all ranks on the GPU of this rank's number.
        own = {
            kind: {name: _on_host(value) for name, value in values.items() if name not in shared_by.get(kind, ())}
            for kind, values in saved["state"].items()
        }
    except Exception as raised:
        error = raised
    ranks = gather_or_raise(runner.backend, "a state to save", own, error, "could not save")
    return state_schema.seal({**saved, "ranks": ranks})


def _on_host(value: Any) -> Any:
    """Return a saved value, or a dict of them, with its tensors on the host."""
    if isinstance(value, dict):
        return {name: _on_host(one) for name, one in value.items()}
    return value.cpu() if hasattr(value, "cpu") else value


@dataclass
class Loaded:
    """Values of a checkpoint that fit this run, ready to be applied.

    Attributes:
        step: the step counter; None if the checkpoint has no state.
        id: the id of the save.
        loss_scale: the loss scale in whose units the values are.
        values: state by kind and shard.
        pending_means: means that are still to be applied, oldest step first.
        dropped: descriptions of state that does not fit, for a warning.
    """

    step: int | None
    id: str | None = None
    loss_scale: float = 1.0
    values: ValuesByKind = field(default_factory=dict)
    pending_means: list[Values] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


def load(
    runner: StepRunner,
    read: Callable[[], SavedState | None],
    memory: str = "strict",
    to_framework: Callable[[SavedState], SavedState] = lambda saved: saved,
    other_backends: Sequence[Backend] = (),
) -> None:
    """Restore a checkpoint by the rules of this module; nothing changes if a rank refuses it. Every rank must call it.

    Args:
        read: returns the saved state; it raises an error if that cannot be read, or if a step is under way that the
            runner does not know.
        to_framework: converts the saved state to the tensors that the exchange computes with.
        other_backends: backends over other groups of ranks that must load, or refuse, together; see
            :func:`compare_everywhere`.

    Raises:
        ConfigError: the checkpoint has no state, or it belongs to other components, another rank or
            another number of ranks; the message says what to do.
        ExchangeError: a step is under way.
        RankError: another rank refused its checkpoint, or the ranks load different ones.
    """
    saved, loaded, error = None, None, None
    try:
        saved = read()
        loaded = prepare(runner, saved, memory, to_framework)
    except Exception as raised:
        error = raised
    # A rank that raised before this collective would let the others wait in it.
    compare_everywhere([runner.backend, *other_backends], saved, memory, error)
    assert loaded is not None
    drop_where_others_did(runner, loaded, memory)
    apply(runner, loaded)


NOTHING: SavedState = {}
"""Placeholder for the checkpoint of a rank that loads none."""


def compare_everywhere(
    backends: Sequence[Backend],
    saved: SavedState | None,
    memory: str,
    error: Exception | None = None,
    alike: bool = True,
) -> None:
    """Compare checkpoints that are about to be loaded over several groups of ranks, one after the other, such as the
    shards and replicas of a model, or a pipeline's stages. If one rank refuses its checkpoint all refuse. Every rank
    must call it.

    Args:
        backends: first the ranks that exchange with each other, whose states are of one save; then other groups.
        saved, memory, error: see :func:`compare`.
        alike: False if states of the other groups may be of other steps.

    Raises:
        RankError: another rank refused its checkpoint, or the checkpoints are not of one save.
    """
    for i, backend in enumerate(backends):
        try:
            compare(backend, saved if alike or i == 0 else None, memory, error, one_save=i == 0)
        except Exception as raised:
            error = raised  # told in the next groups' comparisons, too, where their ranks wait
    if error is not None:
        raise error


def compare(
    backend: Backend,
    saved: SavedState | None,
    memory: str,
    error: BaseException | None = None,
    one_save: bool = True,
    other_states: Sequence[SavedState] = (),
) -> None:
    """Compare the checkpoints that ranks are about to load. Every rank must call it, with its error if it refused.

    Args:
        backend: the ranks.
        saved: this rank's checkpoint; None if a plain optimizer saved it.
        memory: the mode of loading.
        error: this rank's error, if it refused the checkpoint.
        one_save: True if the ranks exchange with each other, so that their states have one id; else only the step
            must be equal.
        other_states: checkpoints of other runners in the same save, which were checked before.

    Raises:
        RankError: another rank refused its checkpoint, or the checkpoints are not of one save.
    """
    facts = ["no checkpoint"] if saved is NOTHING else ["a checkpoint of a plain optimizer"]
    if error is None and saved:  # a run with strategy='auto' calls this before it has checked the state
        try:
            state_schema.check(saved)
        except ConfigError as raised:
            error = raised
    if error is None and saved:
        known = [f"of step {saved['step']}"]
        if one_save:
            known += [f"of {saved['size']} ranks", f"of the save {saved['id']}"]
        known.append(f"with memory={memory!r}")
        for other in other_states:
            known += [f"of step {other['step']}", f"of the save {other['id']}"]
        facts = [f"a checkpoint {fact}" for fact in known]
    received = gather_or_raise(backend, "a checkpoint", facts, error, "did not load its checkpoint")
    for rank, loaded in enumerate(received):
        for mine, theirs in zip_longest(received[0], loaded, fillvalue="a checkpoint of fewer stages"):
            if mine != theirs:
                first, other_rank = backend.number_of(0), backend.number_of(rank)
                raise RankError(
                    f"rank {first} loads {mine}, rank {other_rank} {theirs}. Let every rank load what was saved at the "
                    "same moment: the same file, or its own of one save"
                )


def prepare(
    runner: StepRunner,
    saved: SavedState | None,
    memory: str = "strict",
    to_framework: Callable[[SavedState], SavedState] = lambda saved: saved,
) -> Loaded:
    """Validate a saved state, and return the values that :func:`load` applies; change nothing.

    Args:
        runner, memory, to_framework: see :func:`load`.
        saved: the saved state; None if a plain optimizer saved the checkpoint.
    """
    check_mode(memory)
    check_settled(runner)
    if saved is None:
        if memory == "strict":
            raise ConfigError(NO_GRACE_ENTRY + runner.context.api_names.reset)
        dropped = [] if memory == "reset" else ["everything: it was saved by a plain optimizer"]
        return Loaded(None, dropped=dropped)
    strict = memory == "strict"
    how = runner.context.api_names.otherwise
    saved, dropped = without_damaged(saved, memory, runner.context.api_names)
    loaded = Loaded(saved["step"], saved["id"], float(saved["loss_scale"]), dropped=dropped)
    if memory == "reset":
        return loaded
    if saved.get("part", "") != runner.shard_label:
        before, now = (part or "whole parameters" for part in (saved.get("part"), runner.shard_label))
        why = f"the checkpoint is of {before}, and this rank has {now}"
        if strict:
            raise ConfigError(f"{why}. Let every rank load its own, {how}")
        loaded.dropped.append(why)
        return loaded
    saved = to_framework(saved)
    saved = state_schema.rename_variables(saved, list(runner.shards_of))
    context = runner.context
    now = runner.name
    if strict:
        # A strategy is named by its id; Resharding compares the memories of its variables one by one.
        by_strategy = any(name.startswith("strategy ") for name in (saved["components"], now))
        before, after = without_parameters(saved["components"]), without_parameters(now)
        by_default = any(took_default(communicator, before, after) for communicator in runner.communicators)
        if before != after and not by_strategy and not by_default:
            raise ConfigError(
                f"the checkpoint was saved with {saved['components']}, this run uses {now}. Use the same, {how}"
            )
        if saved["seed"] != context.seed:
            raise ConfigError(
                f"the checkpoint was saved with seed={saved['seed']}, this run has seed={context.seed}. Use the same, "
                f"{how}"
            )
    resharding = Resharding(saved, partitions_of(runner), runner, strict)
    loaded.values = resharding.values()
    loaded.pending_means = resharding.pending_means()
    loaded.dropped += resharding.dropped
    try:
        _check_leader(runner, saved, loaded.values)
    except Misfit as why:
        if strict:
            raise ConfigError(f"{why}, {how}") from None
        loaded.values = {}
        loaded.dropped.append(str(why))
    return loaded


def without_damaged(saved: SavedState, memory: str, calls: ApiNames) -> tuple[SavedState, list[str]]:
    """Return a state without damaged values, and descriptions of these values (which only ``memory="keep"`` drops).

    A caller that splits a state, or joins several, must use the state that this function returns, and seal the result.

    Raises:
        ConfigError: the state is damaged; with "reset" damaged values are ignored.
    """
    state_schema.check(saved)
    spoilt = state_schema.damaged_values(saved, calls.partial) if memory != "reset" else {}
    if spoilt and memory == "strict":
        more = f" ({len(spoilt) - 1} values more are missing or damaged)" if len(spoilt) > 1 else ""
        raise ConfigError(f"{next(iter(spoilt.values()))}{more}; {calls.otherwise}")
    state_schema.check_facts(saved)
    return (state_schema.without_values(saved, spoilt) if spoilt else saved), list(spoilt.values())


def drop_where_others_did(runner: StepRunner, loaded: Loaded, memory: str) -> None:
    """Drop values of state that is the same on all ranks, such as anchors, if another rank has dropped them because
    they are damaged there: else ranks would differ. Every rank must call it, after :func:`compare`.

    Args:
        runner, memory: see :func:`load`.
        loaded: the values of :func:`prepare`, which are changed.
    """
    if memory != "keep" or loaded.step is None:
        return
    values_by_kind, mine = _shared_values(runner, loaded)
    on_all = set(mine).intersection(*gather_or_raise(runner.backend, "shared state to keep", mine))
    for kind, name in mine:
        if (kind, name) not in on_all:
            del values_by_kind[kind][name]
            loaded.dropped.append(f"the {kind} of {name!r}, which another rank has dropped")


def name_what_is_kept(runner: StepRunner, loaded: Loaded, memory: str) -> None:
    """Let the next exchange refuse ranks that loaded alone, and have dropped other values than each other of state that
    is the same on all ranks: what a rank goes on from gets another name.

    Args:
        runner, memory: see :func:`load`.
        loaded: the values of :func:`prepare`, whose id is changed.
    """
    if memory == "keep" and loaded.step is not None:
        loaded.id = f"{loaded.id} {sorted(_shared_values(runner, loaded)[1])}"


def _shared_values(runner: StepRunner, loaded: Loaded) -> tuple[ValuesByKind, list[tuple[str, str]]]:
    """Return all values that are to be loaded, by kind; and kinds and names of those that are the same on all ranks."""
    steps = {f"pending {i}": step for i, step in enumerate(loaded.pending_means)}
    values_by_kind: ValuesByKind = {**loaded.values, **steps}
    shared_by_all = [
        (kind, name)
        for kind, values in values_by_kind.items()
        for name in values
        if kind in steps or _part_of(runner, kind, name).shared_state
    ]
    return values_by_kind, shared_by_all


def _part_of(runner: StepRunner, kind: str, name: str) -> Component:
    """Return the part that keeps a kind of state of a shard, or of a buffer of the model."""
    of_buffers = runner.outer_rounds.buffer_parts
    return of_buffers[kind] if kind in of_buffers else runner.stateful_parts(runner.shards[name])[kind]


def apply(runner: StepRunner, loaded: Loaded) -> None:
    """Apply the values that :func:`prepare` returned to the runner."""
    warn_dropped(loaded.dropped)
    for _, component in runner.components:  # two communicators may share one, for dense gradients and for rows
        component.state.clear()
    for kind, values in loaded.values.items():
        for name, value in values.items():
            _part_of(runner, kind, name).state[name] = value
    for _, component in runner.components:
        component.state.commit()
    if loaded.step is not None:
        runner.run_id = f"{zlib.crc32(f'{runner.run_id} {loaded.id}'.encode()):08x}"  # later saves need other ids
        runner.context.step, runner.context.loss_scale = loaded.step, loaded.loss_scale
    # After the loss scale is set, in whose units the means are.
    steps = [{name: mean_from_saved(value) for name, value in step.items()} for step in loaded.pending_means]
    runner.restore_pending_means(steps)
    runner.on_resume()


def warn_dropped(dropped: Sequence[str]) -> None:
    """Warn of state that was not loaded, by its descriptions."""
    if dropped:
        more = f", and {len(dropped) - 3} things more" if len(dropped) > 3 else ""
        warn(f"of what the checkpoint remembers, this was dropped: {'; '.join(dropped[:3])}{more}")


def check_mode(memory: str) -> None:
    """Raise ConfigError if ``memory`` is none of ``MODES``."""
    if memory not in MODES:
        raise ConfigError(f"memory must be 'strict', 'keep' or 'reset', not {memory!r}")


def mean_to_saved(value: Gradient) -> Tensor | dict[str, Tensor]:
    """Return a mean in the form that is saved: rows become a dict of tensors."""
    return {"values": value.values, "rows": value.rows} if isinstance(value, SparseRows) else value


def mean_from_saved(value: Tensor | dict[str, Tensor]) -> Gradient:
    """Return a mean from its saved form; the inverse of :func:`mean_to_saved`."""
    return SparseRows(value["values"], value["rows"]) if isinstance(value, dict) else value


def _check_leader(runner: StepRunner, saved: SavedState, values: ValuesByKind) -> None:
    """Refuse memories of hierarchical reduction, which only the leaders of nodes have, if leaders or nodes changed.

    Raises:
        Misfit: they changed, or the reduction did.
    """
    hierarchy = runner.hierarchy
    before = saved["hierarchical"]
    now = runner.hierarchical
    reduced_by_node = [runner.shards if some is True else some or () for some in (before, now)]
    led = [name for some in reduced_by_node for name in some]
    # Outer rounds keep anchors, and each rank's own parameters, on all ranks.
    of_leaders = {name for shard in runner.shards.values() for name in shard.communicator.stateful_parts}
    kept = [key for kind in of_leaders for key in values.get(kind, ())]
    held = any(f"{key}/".startswith(f"{name}/") for key in kept for name in led)
    moved = hierarchy is not None and (not hierarchy.leads or saved["size"] != runner.backend.size)
    if held and (moved or before != now):
        raise Misfit(
            "the checkpoint holds memories of ranks that speak for their nodes (hierarchical reduction), and the nodes "
            "are others now, or the reduction is. Resume on the same cluster with the same setting"
        )
