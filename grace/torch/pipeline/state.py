"""What a pipeline's stages own, and the state of the whole model, under its names."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from grace.core.api_names import TORCH
from grace.errors import ConfigError, RankError
from grace.session import checkpoint, state_schema
from grace.session.agreement import tell
from grace.torch.pipeline.atoms import Atoms
from grace.torch.pipeline.stages import pieces
from grace.torch.state_dict import load_state


class StateOfStages:
    """Names and owners of parameters and buffers, and what is saved of them."""

    model: torch.nn.Module
    places: Any
    plan: Any
    nodes: Sequence[Sequence[str]]
    gradients: Any
    device: Any

    def _own_tensors(self, atoms: Atoms) -> None:
        """List the tensors of each stage by name, and this rank's. What no stage reads is the first one's."""
        parameters, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        read = [set(piece.attributes) for piece in pieces(atoms, self.nodes)]
        for name in (*parameters, *buffers):
            if not any(name in own for own in read):
                read[0].add(name)
        self.owned = [[name for name in parameters if name in own] for own in read]
        self.buffer_holders = {name: tuple(i for i, own in enumerate(read) if name in own) for name in buffers}
        mine = set().union(*(read[stage] for stage in self.places.stages))
        self.parameters = {name: p for name, p in parameters.items() if name in mine}
        self.buffers = {name: buffer for name, buffer in buffers.items() if name in mine}

    @torch.no_grad()
    def _materialize(self, init: Any) -> None:
        """Give this rank's tensors that are on ``meta`` memory on the device, and what ``init`` or
        ``reset_parameters`` of the first module that holds them writes there."""
        made: dict[int, torch.Tensor] = {}
        held, filled = list[torch.nn.Module](), set[int]()
        for own in (self.parameters, self.buffers):
            for name, tensor in own.items():
                if tensor.is_meta:
                    fresh: Any = torch.empty_like(tensor, device=self.device)
                    if isinstance(tensor, torch.nn.Parameter):
                        fresh = torch.nn.Parameter(fresh, tensor.requires_grad)
                    made[id(tensor)] = own[name] = fresh  # type: ignore[index]
        for module in self.model.modules():
            for table in (module._parameters, module._buffers):
                for key, old in table.items():
                    if id(old) in made:
                        table[key] = made[id(old)]  # type: ignore[assignment]
                        if id(old) not in filled:
                            filled.add(id(old))
                            held.append(module)
        for module in dict.fromkeys(held):
            write = (lambda: init(module)) if init is not None else getattr(module, "reset_parameters", None)  # noqa: B023
            if write is None:
                raise ConfigError(
                    f"{type(module).__name__} is on meta and has no reset_parameters(): give init=, a function that is "
                    "called with each module whose tensors were made, and fills them"
                )
            write()

    def _planned(self) -> None:
        if self.plan is None:
            raise ConfigError("the model is not cut yet: give example_inputs, or make the first step before")

    def _names(self) -> dict[str, str]:
        """The name under which a tensor is known, of each name that it has in the model's state."""
        every = dict(self.model.named_buffers(remove_duplicate=False))
        every |= dict(self.model.named_parameters(remove_duplicate=False))
        first = {id(t): name for name, t in [*self.model.named_buffers(), *self.model.named_parameters()]}
        return {name: first[id(tensor)] for name, tensor in every.items()}

    def _source(self, name: str) -> int:
        """The rank whose copy counts: replica 0 of the first stage that has it."""
        holders = {**self.gradients.holders, **self.buffer_holders}
        if name not in holders:
            raise ConfigError(f"the model has no parameter or buffer {name!r}; it has {', '.join(holders)}")
        return int(self.places.ranks[holders[name][0]][0])

    def _fetched(self, value: torch.Tensor | None, like: torch.Tensor, rank: int) -> torch.Tensor:
        own = self.places.rank == rank and value is not None
        copy = (
            value.detach().contiguous().clone()
            if own and value is not None
            else torch.zeros(like.shape, dtype=like.dtype)
        )
        return self.places.from_rank(copy, rank)  # type: ignore[no-any-return]

    def parameter(self, name: str) -> torch.Tensor:
        """A copy of a parameter or buffer, on every rank, from where it is. Every rank must call it."""
        self._planned()
        name = self._names().get(name, name)
        source = self._source(name)
        like = dict([*self.model.named_buffers(), *self.model.named_parameters()])[name]
        return self._fetched({**self.parameters, **self.buffers}.get(name), like, source)

    def gradient(self, name: str) -> torch.Tensor:
        """A copy of a parameter's gradient, zeros where there is none. Every rank must call it."""
        self._planned()
        name = self._names().get(name, name)
        source = self._source(name)
        if name in self.buffer_holders:
            raise ConfigError(f"{name!r} is a buffer, which has no gradient")
        own = self.parameters.get(name)
        return self._fetched(None if own is None else own.grad, dict(self.model.named_parameters())[name], source)

    def state_dict(self) -> dict[str, Any]:
        """The whole model's state, as ``model.state_dict()`` has it, on every rank; buffers are replica 0's. Every rank
        must call it."""
        self._planned()
        names, found, fetched = self._names(), self.model.state_dict(), dict[str, torch.Tensor]()
        for name in found:
            if name in names:
                known = names[name]
                if known not in fetched:
                    fetched[known] = self.parameter(known)
                found[name] = fetched[known]
        return found

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a whole model's state, of a plain program or of another plan. Every rank must call it, with the same.

        Raises:
            ConfigError: names, shapes or kinds are not the model's; nothing was changed.
            RankError: another rank refused it, or was given another one; nothing was changed.
        """
        self._planned()
        own: Mapping[str, Any] = self.model.state_dict()
        names, tensors = self._names(), {**self.parameters, **self.buffers}
        targets = {name: tensors.get(names.get(name, name), one) for name, one in own.items()}
        sums, error = list[int](), None
        try:
            _check_model(targets, state)
            sums = [_checksum(state[name]) for name, one in own.items() if isinstance(one, torch.Tensor)]
        except Exception as raised:
            error = raised
        told = tell(self.places.backend, "a model's state", sums, error, "did not load the model's state")
        compared = [name for name, one in own.items() if isinstance(one, torch.Tensor)]
        for name, every in zip(compared, zip(*told, strict=True), strict=True):
            known = [(rank, one) for rank, one in enumerate(every) if one >= 0]
            if odd := next((rank for rank, one in known if one != known[0][1]), None):
                raise RankError(
                    f"rank {odd} loads another state of the model than rank {known[0][0]}: {name!r} differs. Let every "
                    "rank load the same file"
                )
        for name, target in targets.items():
            if isinstance(target, torch.Tensor) and not target.is_meta:
                target.copy_(state[name])

    # -- the optimizer ------------------------------------------------------------------------------------

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizers' state of all stages as one optimizer's of the whole model, whose parameters are numbered
        group by group in the model's order; with their ``names``, and what all replicas
        remember. Every rank must call it."""
        self._planned()
        mine, error = None, None
        try:
            mine = self._own_optimizer_state() if self.gradients.steps else None
        except Exception as raised:
            error = raised
        every = tell(self.places.backend, "a state to save", mine, error, "could not save")
        told = [one for one in every if one is not None]
        order = {name: i for i, (name, _) in enumerate(self.model.named_parameters())}
        merged: list[tuple[dict[str, Any], list[str]]] = []
        for group in (group for _, groups, _ in told for group in groups):
            settings, own = {k: v for k, v in group.items() if k != "names"}, group["names"]
            same = next((names for known, names in merged if known == settings), None)
            if same is None:
                merged.append((settings, same := []))
            same += [name for name in own if name not in same]
        by_name = {name: value for state, _, _ in reversed(told) for name, value in state.items()}
        names = [name for _, own in merged for name in sorted(own, key=order.__getitem__)]
        numbers = {name: i for i, name in enumerate(names)}
        return {
            "state": {numbers[name]: value for name, value in sorted(by_name.items(), key=lambda one: numbers[one[0]])},
            "param_groups": [{**settings, "params": sorted(numbers[name] for name in own)} for settings, own in merged],
            "names": names,
            "grace": _together([remembered for _, _, remembered in told]),
        }

    def _own_optimizer_state(self) -> tuple[dict[str, Any], list[dict[str, Any]], Any] | None:
        """Return the state by name, the groups, and what is remembered, of replica 0 of this rank's stages."""
        saved, names = self.gradients.optimizer.full_state_dict(), self._optimizer_names()
        if self.places.replica:
            return None
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "names": [names[i] for i in group["params"]]}
            for group in saved["param_groups"]
        ]
        return {names[i]: value for i, value in saved["state"].items()}, groups, saved["grace"]

    def _optimizer_names(self) -> list[str]:
        known = {id(p): name for name, p in self.parameters.items()}
        return [known[id(p)] for group in self.gradients.optimizer.param_groups for p in group["params"]]

    def load_optimizer_state_dict(self, saved: Mapping[str, Any], memory: str = "strict") -> None:
        """Load what :meth:`optimizer_state_dict` gave, of this plan or another. Every rank must call it.

        Args:
            saved: of the whole model.
            memory: what becomes of memories that do not fit, as for a distributed optimizer's ``load_state_dict``.

        Raises:
            ConfigError: it is of another model, or damaged; nothing was changed.
            RankError: another rank refused it, or they load different ones; nothing was changed.
        """
        self._planned()
        backend, optimizer, error = self.places.backend, self.gradients.optimizer, None
        given, whole, kinds, dropped = dict[str, Any](), True, list[Any](), list[str]()
        try:
            checkpoint.check_mode(memory)
            kinds, dropped = _remembered(saved, memory)
            if self.gradients.steps:
                given, whole = self._part_of(saved, kinds)
        except Exception as raised:
            error = raised
        # All ranks are given one document: that is compared, and then each stage's ranks load their part of it.
        checkpoint.compare(backend, kinds[0] if kinds else None, memory, error)
        if self.gradients.steps:
            part, name = given["grace"], optimizer._grace.runner.name
            if part is not None and memory == "strict" and not (whole and part["components"] == name):
                memory = "keep"  # a stage with one replica exchanges nothing, and others exchange in other ways
            load_state(optimizer, given, memory, other_groups=[backend])
            optimizer._grace.on_state_loaded()
        else:
            checkpoint.compare(backend, None, memory)
        checkpoint.say_dropped(dropped)

    def _part_of(self, saved: Mapping[str, Any], kinds: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], bool]:
        """Return what this rank's optimizer loads of a whole model's state; and whether what is remembered is of all
        its parameters."""
        names, numbers = self._optimizer_names(), {name: i for i, name in enumerate(saved["names"])}
        if left := [name for name in names if name not in numbers and self.parameters[name].requires_grad]:
            raise ConfigError(f"the optimizer's state knows no parameter {left[0]!r}: it is of another model")
        groups = []
        for group in torch.optim.Optimizer.state_dict(self.gradients.optimizer)["param_groups"]:
            known = [names[i] for i in group["params"] if names[i] in numbers]  # frozen ones may be left out
            firsts = [numbers[name] for name in known[:1]]
            found = next((one for one in saved["param_groups"] if set(firsts) & set(one["params"])), None)
            if firsts and found is None:
                raise ConfigError(f"the optimizer's state is damaged: no group of it has {names[group['params'][0]]!r}")
            groups.append({**group, **{k: v for k, v in (found or {}).items() if k != "params"}})
        state = {i: saved["state"][at] for i, at in enumerate(map(numbers.get, names)) if at in saved["state"]}
        part, whole = _part(kinds, names) if kinds else (None, True)
        return {"state": state, "param_groups": groups, "grace": part}, whole


def _check_model(targets: Mapping[str, Any], state: Any) -> None:
    """Refuse what is no state of this model. Of tensors that are on other ranks it may lack the values, on meta.

    Raises:
        ConfigError: the message names the entry.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"a model's state is a dict of tensors, not {state_schema.short(state)}")
    if targets.keys() != state.keys():
        odd = sorted(map(str, targets.keys() ^ state.keys()))
        raise ConfigError(f"the state is of another model: {', '.join(map(repr, odd[:5]))} is on one side only")
    for name, target in targets.items():
        if not isinstance(target, torch.Tensor):
            continue
        value = state[name]
        if not isinstance(value, torch.Tensor):
            raise ConfigError(f"{name!r} should be a tensor, and in the state it is {state_schema.short(value)}")
        if target.shape != value.shape:
            raise ConfigError(f"{name!r} has shape {tuple(target.shape)}, in the state {tuple(value.shape)}")
        if value.layout != torch.strided or (value.is_meta and not target.is_meta):
            where = "on meta, without values" if value.is_meta else f"of layout {value.layout}"
            raise ConfigError(f"{name!r} should be a dense tensor, and in the state it is {where}")
        if value.is_complex() and not target.is_complex():
            raise ConfigError(f"{name!r} is of {target.dtype}, and in the state of {value.dtype}")


def _checksum(tensor: torch.Tensor) -> int:
    """Return a CRC-32 of a tensor's bytes; -1 if it has none here."""
    if tensor.is_meta:
        return -1
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _remembered(saved: Any, memory: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what the runners of a whole model's stages remember, which is what was saved, and what was left out for
    being damaged.

    Raises:
        ConfigError: it is no such state, or is damaged.
    """
    if not isinstance(saved, Mapping):
        raise ConfigError(f"a state of the pipeline's optimizer is a dict, not {state_schema.short(saved)}")
    names, groups, state = saved.get("names"), saved.get("param_groups"), saved.get("state")
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ConfigError("the optimizer's state is damaged: 'names' should be a list of the parameters' names")
    if not isinstance(groups, (list, tuple)) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups
    ):
        raise ConfigError("the optimizer's state is damaged: 'param_groups' should be a list of dicts with 'params'")
    if not isinstance(state, Mapping) or not all(isinstance(value, Mapping) for value in state.values()):
        raise ConfigError("the optimizer's state is damaged: 'state' should be a dict of dicts")
    given = saved.get("grace")
    kinds = given if isinstance(given, list) else [] if given is None else [given]
    found, dropped = list[dict[str, Any]](), list[str]()
    for one in kinds:
        whole, left_out = checkpoint.undamaged(one, memory, TORCH)
        if "ranks" not in whole or "pieces" not in whole:
            raise ConfigError("the checkpoint's 'grace' entry is of one rank, and a pipeline's is of all: save that of "
                              "engine.optimizer_state_dict()")  # fmt: skip
        found.append(whole)
        dropped += left_out
    return found, dropped


def _together(saved: Sequence[Any]) -> Any:
    """What the runners of all stages remember, as one's; as a list of several where stages exchange in different
    ways. Stages with one replica have nothing to remember, unless all do."""
    several = [one for one in saved if one["size"] > 1] or list(saved)
    found = list[dict[str, Any]]()
    for one in map(_open, several):
        first = next((other for other in found if _alike(one, other)), None)
        if first is None:
            found.append(one)
            continue
        first["pieces"] = {**one["pieces"], **first["pieces"]}
        first["shared"] = _joined(first["shared"], one["shared"], lambda a, b: list(dict.fromkeys([*a, *b])))
        first["state"] = _joined(first["state"], one["state"], lambda a, b: {**b, **a})
        ranks = zip(first["ranks"], one["ranks"], strict=True)
        first["ranks"] = [_joined(a, b, lambda a, b: {**b, **a}) for a, b in ranks]
    sealed = [state_schema.seal(one) for one in found]
    return sealed if len(sealed) > 1 else next(iter(sealed), None)


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether what two runners remember may be one's: a plan that was chosen is of one stage's variables."""
    same = one["components"] == other["components"] and one["size"] == other["size"]
    return same and "plan" not in one and "plan" not in other


def _joined(one: Mapping[str, Any], other: Mapping[str, Any], join: Any) -> dict[str, Any]:
    return {kind: join(one.get(kind, {}), other.get(kind, {})) for kind in (*one, *(k for k in other if k not in one))}


def _open(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Without its seal."""
    return {key: value for key, value in saved.items() if key not in ("checksum", "checksums", "holds")}


def _part(kinds: Sequence[dict[str, Any]], names: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """What is remembered of these parameters, by the runner that had most of them; and whether it had all."""
    part = _open(max(kinds, key=lambda one: sum(name in one["pieces"] for name in names)))
    own = {name for name in part["pieces"] if name in names}
    if own != part["pieces"].keys() or len(own) < len(names):
        part.pop("plan", None)  # which is of other variables
    of = lambda key: key in own or str(key).rpartition("/part_")[0] in own  # noqa: E731
    kept = lambda table: {kind: {k: v for k, v in values.items() if of(k)} for kind, values in table.items()}  # noqa: E731
    part["pieces"] = {name: piece for name, piece in part["pieces"].items() if name in own}
    part["shared"] = {kind: [name for name in values if of(name)] for kind, values in part["shared"].items()}
    part["state"], part["ranks"] = kept(part["state"]), [kept(one) for one in part["ranks"]]
    return state_schema.seal(part), len(own) == len(names) or len(kinds) == 1
