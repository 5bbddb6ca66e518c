"""The model that a rank trains alone, as outer rounds read and change it: parameters, buffers, and the optimizer's
state."""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from grace.core.live_instances import live_instances
from grace.core.variable import Variable, unwrap_names
from grace.errors import warn
from grace.session.bucketing import make_buckets
from grace.session.outer_rounds import LocalModel
from grace.session.sharding import Shard
from grace.torch.lifecycle import averaged_buffers
from grace.torch.parameters import NamedParameters, local_part

FINITE = "the buffers that are finite"
"""Name of the flags that travel beside buffers."""


class TorchModel(LocalModel):
    """Model of a session. Buffers are averaged after outer rounds if the user gave the model itself.

    Args:
        session: the :class:`~grace.torch.session.Session`, which holds this object.
        given: ``named_parameters`` as the user gave them.

    Attributes:
        buffer_places: modules of the buffers, and the names there, by the model's names. Of several optimizers of one
            model the first one has them.
        first_buffers: the buffers' shapes and dtypes when the optimizer was made distributed.
    """

    def __init__(self, session: Any, given: NamedParameters):
        self.session = weakref.proxy(session)
        taken = averaged_buffers()
        self.buffer_places = {name: place for name, place in _places_of_buffers(given).items() if place not in taken}
        self.first_buffers = {name: buffer.to("meta") for name, buffer in self._current_buffers()}

    def read(self, shard: Shard) -> torch.Tensor:
        """Return the view of a parameter that a shard is."""
        return shard.slice_of(local_part(self.session.parameters[shard.whole.name].data))

    @torch.no_grad()
    def write(self, shard: Shard, value: torch.Tensor) -> None:
        group = self.session.shard_group
        if group is not None:
            group.modules[shard.whole.name].reshard()  # an evaluation leaves gathered values in use
        self.read(shard).copy_(value)

    def clear_optimizer(self, shard: Shard) -> None:
        """Clear what the optimizer keeps of a parameter, as of a new one, if it is not finite: a moment that is NaN
        would spoil the next update again."""
        state = self.session.optimizer.state.get(self.session.parameters[shard.whole.name], {})
        tensors = [local_part(value) for value in state.values() if isinstance(value, torch.Tensor)]
        lost = [tensor for tensor in tensors if not tensor.isfinite().all()]
        counters = [tensor for tensor in tensors if tensor.dim() == 0]  # for bias corrections, as of zeros
        for tensor in (*lost, *counters) if lost else ():
            tensor.zero_()

    def any_overflow(self, own: bool) -> bool:
        group = self.session.shard_group
        return own if group is None else group.any(own, place="the comparison of drifts")

    def _current_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of a module that exist, with their names."""
        for name, (module_ref, own_name) in self.buffer_places.items():
            buffer = getattr(module_ref(), own_name, None)
            if isinstance(buffer, torch.Tensor):
                yield name, buffer

    def read_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers of a module that have the shapes of the beginning. They are looked up each time, as in
        DDP: modules may assign other tensors, as ``self.mean = 0.9 * self.mean + 0.1 * x.mean(0)`` does."""
        first = self.first_buffers
        return {name: buffer for name, buffer in self._current_buffers() if buffer.shape == first[name].shape}

    @torch.no_grad()
    def write_buffers(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, buffer in self.read_buffers().items():
            if name in values:
                buffer.copy_(values[name])

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Replace each buffer by its mean over the ranks on which it is finite."""
        if not self.buffer_places:
            return
        session, own = self.session, self.read_buffers()
        finite = [name in own and bool(own[name].isfinite().all()) for name in self.first_buffers]
        # Statistics that overflowed on one rank would spoil those of all ranks, and stay so.
        device = next(iter(session.parameters.values())).device
        sent: dict[str, torch.Tensor] = {}
        for (name, first), sound in zip(self.first_buffers.items(), finite, strict=True):
            at = own[name].device if name in own else device
            sent[name] = own[name].to(first.dtype) if sound else torch.zeros_like(first, device=at)
        sent[FINITE] = torch.tensor(finite, dtype=torch.float32, device=next(iter(sent.values())).device)
        variables = [
            Variable(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), str(t.device))
            for name, t in sent.items()
        ]
        runner = session.runner
        means: dict[str, torch.Tensor] = {}
        for bucket in make_buckets([Shard(variable, variable, runner.averaging) for variable in variables]):
            values = [sent[name] for name in bucket.names]
            means.update(zip(bucket.names, runner.mean(bucket, values), strict=True))
        size = runner.backend.size
        for name, count in zip(self.first_buffers, (means[FINITE] * size).round().tolist(), strict=True):
            if name in own and count:  # a mask of infinities is not finite on any rank
                own[name].copy_(means[name] if count == size else means[name] * (size / count))
        if session.shard_group is not None:
            for buffer in own.values():
                buffer.copy_(session.shard_group.sum(buffer, "the mean of buffers") / len(session.shard_group.ranks))
        shared = runner.outer_rounds.shared_buffers.state
        shared.update({name: buffer.clone() for name, buffer in own.items()})
        shared.commit()

    def warn_of_buffers(self) -> None:
        """Warn of buffers that differ by rank while ranks train alone."""
        known = next(iter(self.buffer_places), None)
        if known:
            warn(
                f"the buffers of the model ({known}, ...) differ by rank while ranks train alone: their means over "
                "ranks replace them at each round"
            )
            return
        unknown = not self.session.sparse_known and next(unknown_buffers(self.session.parameters), None)
        if unknown:
            warn(
                f"the buffers of the model ({unknown}, ...) may differ by rank while ranks train alone, and are not "
                "averaged: pass the model itself as named_parameters, and their means replace them at each round"
            )


def _places_of_buffers(parameters: NamedParameters) -> dict[str, tuple[weakref.ref[torch.nn.Module], str]]:
    """Return the modules that have floating-point buffers, and the names there, by the model's name of the buffer; none
    if the parameters were given without their model."""
    if not isinstance(parameters, torch.nn.Module):
        return {}
    paths = [path for path, buffer in parameters.named_buffers() if buffer.is_floating_point()]
    places = {}
    for name, path in zip(unwrap_names(paths), paths, strict=True):
        module, _, own_name = path.rpartition(".")
        places[name] = weakref.ref(parameters.get_submodule(module)), own_name
    return places


def unknown_buffers(parameters: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yield the names of floating-point buffers in the modules that hold parameters, where the model was not given."""
    names = {id(p): name for name, p in parameters.items()}
    for module in live_instances(torch.nn.Module):
        own = vars(module)
        held = next((names[id(p)] for p in own.get("_parameters", {}).values() if id(p) in names), None)
        if held is not None:
            path = held.rpartition(".")[0]
            for name, buffer in own["_buffers"].items():
                if buffer is not None and buffer.is_floating_point():
                    yield f"{path}.{name}" if path else name
