"""The tensors that a pipeline's stages own, and the state of the whole model, under the model's names."""

import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypedDict

import torch

from grace.core.api_names import TORCH
from grace.errors import ConfigError, RankError
from grace.pipeline.torch.atomic_subcomponents import Atoms
from grace.pipeline.torch.capture import allocate_like, first_names
from grace.pipeline.torch.mesh import Mesh
from grace.pipeline.torch.stage_builder import stage_specs
from grace.pipeline.torch.stage_gradients import Gradients
from grace.session import checkpoint, state_schema
from grace.session.agreement import failing_together
from grace.session.state_schema import SavedState
from grace.torch.state_dict import load_state

ParameterState = dict[str, object]
"""State of an optimizer for one parameter, such as its momentum."""
_Group = tuple[dict[str, object], list[str]]
"""Settings of a parameter group, and names of its parameters."""
_LocalState = tuple[dict[str, ParameterState], list[_Group], SavedState]
"""State of a stage's optimizer by parameter name, its groups, and its Grace state."""
_Table = Mapping[str, Mapping[str, object]]
"""Values of components by kind, and by the variable's name."""


class OptimizerStateDict(TypedDict):
    """State of the optimizers of all stages, as that of one optimizer of the whole model.

    Attributes:
        state: by the numbers of parameters.
        param_groups: settings, with the numbers of the group's parameters under "params".
        names: names of the parameters, by number.
        grace: the Grace state of all replicas; several if stages exchange in different ways.
    """

    state: dict[int, ParameterState]
    param_groups: list[dict[str, Any]]
    names: list[str]
    grace: SavedState | list[SavedState] | None


class StageTensors:
    """The tensors of this rank's stage, and the whole model's state. Every rank must make one.

    Attributes:
        parameter_holders, buffer_holders: numbers of the stages that have each parameter, and each buffer, by its name.
            A tensor that no stage reads belongs to a stage of its module, or else to the first stage.
        parameters, buffers: this rank's, by name.
    """

    def __init__(self, model: torch.nn.Module, atoms: Atoms, nodes: Sequence[Sequence[str]], mesh: Mesh):
        self.model = model
        self.mesh = mesh
        parameters: dict[str, torch.nn.Parameter] = dict(model.named_parameters())
        buffers: dict[str, torch.Tensor] = dict(model.named_buffers())
        read = [spec.attributes for spec in stage_specs(atoms, nodes)]
        holders = {
            name: tuple(stage for stage, own in enumerate(read) if name in own) for name in (*parameters, *buffers)
        }
        # a frozen batch norm's counter is not read, until the norm trains
        stage_of_module = {name.rpartition(".")[0]: stages[:1] for name, stages in holders.items() if stages}
        holders = {name: own or stage_of_module.get(name.rpartition(".")[0], (0,)) for name, own in holders.items()}
        self.parameter_holders = {name: holders[name] for name in parameters}
        self.buffer_holders = {name: holders[name] for name in buffers}
        self.parameters = {name: p for name, p in parameters.items() if mesh.stage in holders[name]}
        self.buffers = {name: buffer for name, buffer in buffers.items() if mesh.stage in holders[name]}

    @torch.no_grad()
    def materialize(self, init: Callable[[torch.nn.Module], object] | None) -> None:
        """Allocate this rank's tensors that are on ``meta``, and fill them by ``init`` or ``reset_parameters`` of the
        first module that holds them."""
        fresh: dict[int, torch.Tensor] = {}
        holders: dict[int, torch.nn.Module] = {}
        for own in (self.parameters, self.buffers):
            for name, tensor in own.items():
                if tensor.is_meta:
                    own[name] = fresh[id(tensor)] = allocate_like(tensor, self.mesh.device)  # type: ignore
        for module in self.model.modules():
            for table in (module._parameters, module._buffers):
                for key, old in table.items():
                    if id(old) in fresh:  # a tied tensor is in several modules
                        table[key] = fresh[id(old)]  # type: ignore[assignment]
                        holders.setdefault(id(old), module)
        for module in dict.fromkeys(holders.values()):
            write = (lambda: init(module)) if init is not None else getattr(module, "reset_parameters", None)  # noqa: B023
            if write is None:
                raise ConfigError(
                    f"{type(module).__name__} is on meta and has no reset_parameters(): give init=, a function that is "
                    "called with each module whose tensors were made, and fills them"
                )
            write()

    def parameter(self, name: str) -> torch.Tensor:
        """Return a copy of a parameter or buffer; see :meth:`grace.torch.Pipeline.parameter`."""
        return self._fetch(name, {**self.parameters, **self.buffers})

    def gradient(self, name: str) -> torch.Tensor:
        """Return a copy of a parameter's gradient; see :meth:`grace.torch.Pipeline.gradient`."""
        if name in self.buffer_holders:
            raise ConfigError(f"{name!r} is a buffer, which has no gradient")
        return self._fetch(name, {key: p.grad for key, p in self.parameters.items()})

    def _fetch(self, name: str, own: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        """Return a copy of a tensor on every rank, from replica 0 of the first stage that has it; zeros if that rank
        has none. ``own`` are this rank's, by name."""
        holders = {**self.parameter_holders, **self.buffer_holders}
        name = first_names(self.model).get(name, name)
        if name not in holders:
            raise ConfigError(f"the model has no parameter or buffer {name!r}; it has {', '.join(holders)}")
        rank = self.mesh.ranks[holders[name][0]][0]
        value = own.get(name)
        if value is not None and self.mesh.rank == rank:
            copy = value.detach().contiguous().clone()
        else:
            like = dict([*self.model.named_buffers(), *self.model.named_parameters()])[name]
            copy = torch.zeros(like.shape, dtype=like.dtype, device=self.mesh.device)
        return self.mesh.broadcast(copy, rank)

    def state_dict(self) -> dict[str, object]:
        """Return the whole model's state; see :meth:`grace.torch.Pipeline.state_dict`."""
        names = first_names(self.model)
        state: dict[str, object] = self.model.state_dict()
        fetched = dict[str, torch.Tensor]()
        for name in state:  # in the model's order on all ranks, since parameter() is a collective
            if name in names:
                canonical = names[name]
                if canonical not in fetched:  # a tied tensor travels once
                    fetched[canonical] = self.parameter(canonical)
                state[name] = fetched[canonical]
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load a whole model's state; see :meth:`grace.torch.Pipeline.load_state_dict`."""
        own: Mapping[str, object] = self.model.state_dict()
        names = first_names(self.model)
        tensors = {**self.parameters, **self.buffers}
        targets = {name: tensors.get(names.get(name, name), one) for name, one in own.items()}
        with failing_together(self.mesh.backend, "a model's state", "did not load the model's state"):
            values = _model_tensors(targets, state, own.keys() - names.keys())
            sums = [-1 if one.is_meta else state_schema.checksum(one) for one in values.values()]  # -1: no values here
        received: list[list[int]] = self.mesh.backend.allgather_object(sums)
        for name, every in zip(values, zip(*received, strict=True), strict=True):
            # a rank may have a state with values for its own stage alone, and the others on meta
            known = [(rank, one) for rank, one in enumerate(every) if one >= 0]
            odd = next((rank for rank, one in known if one != known[0][1]), None)
            if odd:  # never 0: rank 0, if it has values, is the first one
                raise RankError(
                    f"rank {odd} loads another state of the model than rank {known[0][0]}: {name!r} differs. Let every "
                    "rank load the same file"
                )
        for name, value in values.items():
            target = targets[name]
            if isinstance(target, torch.Tensor) and not target.is_meta:
                target.copy_(value)


def optimizer_state_dict(tensors: StageTensors, gradients: Gradients) -> OptimizerStateDict:
    """Return the optimizers' state of all stages as that of one optimizer; see
    :meth:`grace.torch.Pipeline.optimizer_state_dict`."""
    with failing_together(tensors.mesh.backend, "a state to save", "could not save"):
        local = _local_optimizer_state(tensors, gradients) if gradients.has_optimizer else None
    every: list[_LocalState | None] = tensors.mesh.backend.allgather_object(local)
    received = [one for one in every if one is not None]
    order = {name: i for i, (name, _) in enumerate(tensors.model.named_parameters())}
    merged: list[_Group] = []
    for _, groups, _ in received:
        _merge_groups(merged, groups)
    # reversed: of a tied parameter the first stage's state counts
    by_name = {name: value for state, _, _ in reversed(received) for name, value in state.items()}
    names = [name for _, own in merged for name in sorted(own, key=order.__getitem__)]
    numbers = {name: i for i, name in enumerate(names)}
    return {
        "state": {numbers[name]: value for name, value in sorted(by_name.items(), key=lambda one: numbers[one[0]])},
        "param_groups": [{**settings, "params": sorted(numbers[name] for name in own)} for settings, own in merged],
        "names": names,
        "grace": _merge_states([remembered for _, _, remembered in received]),
    }


def _merge_groups(merged: list[_Group], groups: Sequence[_Group]) -> None:
    """Merge the parameter groups of one more stage: groups of equal settings on several stages were one group of the
    user's function, and on one stage they are several."""
    free = list(merged)
    for settings, own in groups:
        found = next((one for one in free if one[0] == settings), None)
        if found is None:
            found = settings, []
            merged.append(found)
        else:
            free.remove(found)
        found[1].extend(name for name in own if name not in found[1])


def _local_optimizer_state(tensors: StageTensors, gradients: Gradients) -> _LocalState | None:
    """Return the state by name, the groups, and the Grace state, on replica 0 of this rank's stage; None on all
    others."""
    saved = gradients.optimizer.full_state_dict()  # a collective of all replicas
    names = _optimizer_names(tensors, gradients)
    if tensors.mesh.replica:  # replicas have equal states
        return None
    groups = [
        ({k: v for k, v in group.items() if k != "params"}, [names[i] for i in group["params"]])
        for group in saved["param_groups"]
    ]
    return {names[i]: value for i, value in saved["state"].items()}, groups, saved["grace"]


def _optimizer_names(tensors: StageTensors, gradients: Gradients) -> list[str]:
    """Return the names of the parameters of this rank's optimizer, in its order."""
    known = {id(p): name for name, p in tensors.parameters.items()}
    return [known[id(p)] for group in gradients.optimizer.param_groups for p in group["params"]]


def load_optimizer_state_dict(
    tensors: StageTensors, gradients: Gradients, saved: OptimizerStateDict, memory: str
) -> None:
    """Load a result of :func:`optimizer_state_dict`, of this plan or another; see
    :meth:`grace.torch.Pipeline.load_optimizer_state_dict`."""
    backend = tensors.mesh.backend
    optimizer = gradients.optimizer
    error = None
    own_state = SavedState()
    whole = True
    kinds = list[SavedState]()
    dropped = list[str]()
    try:
        checkpoint.check_mode(memory)
        kinds, dropped = _undamaged_states(saved, memory)
        if gradients.has_optimizer:
            own_state, whole = _select_state(tensors, gradients, saved, kinds)
    except Exception as raised:  # the comparison raises it on all ranks
        error = raised
    # All ranks get one document. They compare it, and then the ranks of each stage load their part of it.
    checkpoint.compare(backend, kinds[0] if kinds else None, memory, error, other_states=kinds[1:])
    if gradients.has_optimizer:
        part = own_state["grace"]
        name = optimizer._grace.runner.name
        if part is not None and memory == "strict" and not (whole and part["components"] == name):
            memory = "keep"  # stages may exchange in different ways; one with a single replica does not exchange
        load_state(optimizer, own_state, memory, other_groups=[backend])
        optimizer._grace.on_state_loaded()
    else:  # load_state compares over the same ranks, and all must call it
        checkpoint.compare(backend, None, memory)
    checkpoint.warn_dropped(dropped)


def _select_state(
    tensors: StageTensors, gradients: Gradients, saved: OptimizerStateDict, kinds: Sequence[SavedState]
) -> tuple[SavedState, bool]:
    """Return the part of a whole model's state that this rank's optimizer loads, and True if the Grace state covers
    all its parameters."""
    names = _optimizer_names(tensors, gradients)
    numbers = {name: i for i, name in enumerate(saved["names"])}
    left = [name for name in names if name not in numbers and tensors.parameters[name].requires_grad]
    if left:
        raise ConfigError(f"the optimizer's state knows no parameter {left[0]!r}: it is of another model")
    groups = []
    for group in torch.optim.Optimizer.state_dict(gradients.optimizer)["param_groups"]:
        known = [names[i] for i in group["params"] if names[i] in numbers]  # frozen ones may be left out
        # the settings are those of the saved group that has this group's first parameter
        firsts = [numbers[name] for name in known[:1]]
        found = next((one for one in saved["param_groups"] if set(firsts) & set(one["params"])), None)
        if firsts and found is None:
            raise ConfigError(f"the optimizer's state is damaged: no group of it has {names[group['params'][0]]!r}")
        groups.append({**group, **{k: v for k, v in (found or {}).items() if k != "params"}})
    saved_numbers = enumerate(map(numbers.get, names))
    state = {i: saved["state"][number] for i, number in saved_numbers if number in saved["state"]}
    part, whole = _select_parameters(kinds, names) if kinds else (None, True)
    return {"state": state, "param_groups": groups, "grace": part}, whole


def _model_tensors(targets: Mapping[str, object], state: object, extras: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's state, by name. Those of other ranks may be on meta, without values.

    Args:
        targets: the model's own tensors and extra states, by name.
        state: the state to load.
        extras: names of modules' extra states, which must be equal already.

    Raises:
        ConfigError: the state is not of this model; the message names the entry.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"a model's state is a dict of tensors, not {state_schema.short(state)}")
    if targets.keys() != state.keys():
        odd = sorted(map(str, targets.keys() ^ state.keys()))
        raise ConfigError(f"the state is of another model: {', '.join(map(repr, odd[:5]))} is on one side only")
    values = dict[str, torch.Tensor]()
    for name, target in targets.items():
        value = state[name]
        if name in extras:
            # Stages were captured from the model as it was, so a later change might not reach them.
            if not _equal(target, value):
                raise ConfigError(
                    f"{name!r}, what a module's get_extra_state() returns, differs from the model's, whose stages are "
                    "cut already: load it before grace.torch.Pipeline(model, ...), by model.load_state_dict(state)"
                )
            continue
        if not isinstance(target, torch.Tensor) or not isinstance(value, torch.Tensor):
            raise ConfigError(f"{name!r} should be a tensor, and in the state it is {state_schema.short(value)}")
        if target.shape != value.shape:
            raise ConfigError(f"{name!r} has shape {tuple(target.shape)}, in the state {tuple(value.shape)}")
        if value.layout != torch.strided or (value.is_meta and not target.is_meta):
            where = "on meta, without values" if value.is_meta else f"of layout {value.layout}"
            raise ConfigError(f"{name!r} should be a dense tensor, and in the state it is {where}")
        if value.is_complex() and not target.is_complex():
            raise ConfigError(f"{name!r} is of {target.dtype}, and in the state of {value.dtype}")
        values[name] = value
    return values


def _equal(one: object, other: object) -> bool:
    """Return True if two extra states are equal: tensors, other values that can be saved, or lists and dicts of
    these."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return pickle.dumps(one) == pickle.dumps(other)  # == of arrays is no truth value, and of many classes is identity


def _undamaged_states(saved: object, memory: str) -> tuple[list[SavedState], list[str]]:
    """Return the Grace states of a whole model's stages, and the descriptions of damaged parts that were dropped. A
    ConfigError says what is no such state."""
    if not isinstance(saved, Mapping):
        raise ConfigError(f"a state of the pipeline's optimizer is a dict, not {state_schema.short(saved)}")
    names = saved.get("names")
    groups = saved.get("param_groups")
    state = saved.get("state")
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ConfigError("the optimizer's state is damaged: 'names' should be a list of the parameters' names")
    if not isinstance(groups, (list, tuple)) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups
    ):
        raise ConfigError("the optimizer's state is damaged: 'param_groups' should be a list of dicts with 'params'")
    if not isinstance(state, Mapping) or not all(isinstance(value, Mapping) for value in state.values()):
        raise ConfigError("the optimizer's state is damaged: 'state' should be a dict of dicts")
    entry = saved.get("grace")
    if entry is None:
        kinds = []
    else:
        kinds = entry if isinstance(entry, list) else [entry]
    states = list[SavedState]()
    dropped = list[str]()
    for one in kinds:
        whole, left_out = checkpoint.without_damaged(one, memory, TORCH)
        if "ranks" not in whole or "pieces" not in whole:
            raise ConfigError("the checkpoint's 'grace' entry is of one rank, and a pipeline's is of all: save that of "
                              "engine.optimizer_state_dict()")  # fmt: skip
        states.append(whole)
        dropped += left_out
    return states, dropped


def _merge_states(saved: Sequence[SavedState]) -> SavedState | list[SavedState] | None:
    """Merge the Grace states of the runners of all stages to one, or to a list of several if stages exchange in
    different ways. Stages with one replica have no state to merge, unless all stages have one replica."""
    several = [one for one in saved if one["size"] > 1] or list(saved)
    found = list[SavedState]()
    for one in map(_without_seal, several):
        first = next((other for other in found if _is_mergeable(one, other)), None)
        if first is None:
            found.append(one)
            continue
        first["pieces"] = {**one["pieces"], **first["pieces"]}
        shared, more = first["shared"], one["shared"]
        first["shared"] = {
            kind: list(dict.fromkeys([*shared.get(kind, ()), *more.get(kind, ())])) for kind in {**shared, **more}
        }
        first["state"] = _merge_tables(first["state"], one["state"])
        first["ranks"] = list(map(_merge_tables, first["ranks"], one["ranks"]))
    # checksums were of the states of single stages
    sealed = [state_schema.seal(one) for one in found]
    return sealed if len(sealed) > 1 else next(iter(sealed), None)


def _is_mergeable(one: SavedState, other: SavedState) -> bool:
    """Return True if the states of two runners can be merged. A state with a plan can not: the plan is for one stage's
    variables."""
    same = one["components"] == other["components"] and one["size"] == other["size"]
    return same and "plan" not in one and "plan" not in other


def _merge_tables(one: _Table, other: _Table) -> dict[str, dict[str, object]]:
    """Merge two tables of values; the first one's value counts where both have one."""
    return {kind: {**other.get(kind, {}), **one.get(kind, {})} for kind in {**one, **other}}


def _without_seal(saved: SavedState) -> SavedState:
    """Return a state without its checksums."""
    return {key: value for key, value in saved.items() if key not in ("checksum", "checksums", "holds")}


def _select_parameters(kinds: Sequence[SavedState], names: Sequence[str]) -> tuple[SavedState, bool]:
    """Return the Grace state of these parameters, from the runner that had most of them, and True if that runner had
    all of them."""
    part = _without_seal(max(kinds, key=lambda one: sum(name in one["pieces"] for name in names)))
    own = {name for name in part["pieces"] if name in names}
    if own != part["pieces"].keys() or len(own) < len(names):
        part.pop("plan", None)  # it is for other variables

    def belongs(key: str) -> bool:
        """Return True for the key of one of these parameters, or of a shard of one."""
        return key in own or str(key).rpartition("/part_")[0] in own

    def select(table: _Table) -> dict[str, dict[str, object]]:
        """Return the entries of these parameters in a table by kind."""
        return {kind: {k: v for k, v in values.items() if belongs(k)} for kind, values in table.items()}

    part["pieces"] = {name: piece for name, piece in part["pieces"].items() if name in own}
    part["shared"] = {kind: [name for name in values if belongs(name)] for kind, values in part["shared"].items()}
    part["state"] = select(part["state"])
    part["ranks"] = [select(one) for one in part["ranks"]]
    return state_schema.seal(part), len(own) == len(names) or len(kinds) == 1
