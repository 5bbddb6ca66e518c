"""What a pipeline's stages own, and the state of the whole model, under its names."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from grace.errors import ConfigError
from grace.session import saved_form
from grace.torch.pipeline.atoms import Atoms
from grace.torch.pipeline.stages import pieces


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
        """Load a whole model's state, of a plain program or of another plan.

        Raises:
            ConfigError: names or shapes are not the model's; nothing was changed.
        """
        self._planned()
        own, names = self.model.state_dict(), self._names()
        if own.keys() != state.keys():
            odd = sorted(own.keys() ^ state.keys())
            raise ConfigError(f"the state is of another model: {', '.join(map(repr, odd[:5]))} is on one side only")
        for name, tensor in own.items():
            if isinstance(tensor, torch.Tensor) and tensor.shape != state[name].shape:
                raise ConfigError(f"{name!r} has shape {tuple(tensor.shape)}, in the state {tuple(state[name].shape)}")
        tensors = {**self.parameters, **self.buffers}
        for name, tensor in own.items():
            if isinstance(tensor, torch.Tensor):
                target = tensors.get(names.get(name, name), tensor)
                if not target.is_meta:
                    target.copy_(state[name])

    # -- the optimizer ------------------------------------------------------------------------------------

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizers' state of all stages as one optimizer's of the whole model, whose parameters are numbered
        group by group in the model's order; with their ``names``, and what all replicas
        remember. Every rank must call it."""
        self._planned()
        optimizer, mine = self.gradients.optimizer, None
        if self.parameters:
            saved, names = optimizer.full_state_dict(), self._optimizer_names()
            if self.places.replica == 0:
                groups = [
                    {**{k: v for k, v in group.items() if k != "params"}, "names": [names[i] for i in group["params"]]}
                    for group in saved["param_groups"]
                ]
                mine = {names[i]: value for i, value in saved["state"].items()}, groups, saved["grace"]
        told = [one for one in self.places.backend.allgather_object(mine) if one is not None]
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

    def _optimizer_names(self) -> list[str]:
        known = {id(p): name for name, p in self.parameters.items()}
        return [known[id(p)] for group in self.gradients.optimizer.param_groups for p in group["params"]]

    def load_optimizer_state_dict(self, saved: Mapping[str, Any], memory: str = "strict") -> None:
        """Load what :meth:`optimizer_state_dict` gave, of this plan or another. Every rank must call it.

        Args:
            saved: of the whole model.
            memory: what becomes of memories that do not fit, as for a distributed optimizer's ``load_state_dict``.

        Raises:
            ConfigError: it is of another model.
        """
        self._planned()
        optimizer = self.gradients.optimizer
        if not self.parameters:
            return
        names = self._optimizer_names()
        numbers = {name: i for i, name in enumerate(saved.get("names", ()))}
        if left := [name for name in names if name not in numbers]:
            raise ConfigError(f"the optimizer's state knows no parameter {left[0]!r}: it is of another model")
        own = optimizer.full_state_dict()
        groups = []
        for group in own["param_groups"]:
            first = numbers[names[group["params"][0]]]
            found = next(one for one in saved["param_groups"] if first in one["params"])
            groups.append({**group, **{k: v for k, v in found.items() if k != "params"}})
        state = {i: saved["state"][numbers[name]] for i, name in enumerate(names) if numbers[name] in saved["state"]}
        remembered = saved.get("grace")
        if remembered is not None:
            remembered, whole = _part(remembered, names)
            if memory == "strict" and not (whole and remembered["components"] == own["grace"]["components"]):
                memory = "keep"  # a stage with one replica exchanges nothing, and others exchange in other ways
        optimizer.load_state_dict({"state": state, "param_groups": groups, "grace": remembered}, memory)


def _together(saved: Sequence[Any]) -> Any:
    """What the exchangers of all stages remember, as one's; as a list of several where stages exchange in different
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
    sealed = [saved_form.seal(one) for one in found]
    return sealed if len(sealed) > 1 else next(iter(sealed), None)


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether what two exchangers remember may be one's: a plan that was chosen is of one stage's variables."""
    same = one["components"] == other["components"] and one["size"] == other["size"]
    return same and "plan" not in one and "plan" not in other


def _joined(one: Mapping[str, Any], other: Mapping[str, Any], join: Any) -> dict[str, Any]:
    return {kind: join(one.get(kind, {}), other.get(kind, {})) for kind in (*one, *(k for k in other if k not in one))}


def _open(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Without its seal."""
    return {key: value for key, value in saved.items() if key not in ("checksum", "checksums", "holds")}


def _part(saved: Any, names: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """What is remembered of these parameters, by the exchanger that had most of them; and whether it had all."""
    kinds = saved if isinstance(saved, list) else [saved]
    part = _open(max(kinds, key=lambda one: sum(name in one["pieces"] for name in names)))
    own = {name for name in part["pieces"] if name in names}
    if own != part["pieces"].keys() or len(own) < len(names):
        part.pop("plan", None)  # which is of other variables
    of = lambda key: key in own or str(key).rpartition("/part_")[0] in own  # noqa: E731
    kept = lambda table: {kind: {k: v for k, v in values.items() if of(k)} for kind, values in table.items()}  # noqa: E731
    part["pieces"] = {name: piece for name, piece in part["pieces"].items() if name in own}
    part["shared"] = {kind: [name for name in values if of(name)] for kind, values in part["shared"].items()}
    part["state"], part["ranks"] = kept(part["state"]), [kept(one) for one in part["ranks"]]
    return saved_form.seal(part), len(own) == len(names) or not isinstance(saved, list)
