"""The tensors that start equal on all ranks, and how ranks compare them before they are broadcast."""

from collections.abc import Mapping, Sequence

import torch

from grace.core.variable import Variable, unwrap_names
from grace.errors import ConfigError
from grace.torch.parameters import NamedParameters, check_initialized, name_in_optimizer, named_tensors


def initial_tensors(optimizer: torch.optim.Optimizer, named_parameters: NamedParameters) -> dict[str, torch.Tensor]:
    """Return the tensors that must start equal on all ranks, by name: parameters, frozen ones too, and a module's
    buffers. Each tensor is listed once.

    >>> norm = torch.nn.BatchNorm1d(2)
    >>> list(initial_tensors(torch.optim.SGD(norm.parameters()), norm))
    ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    pairs = named_tensors(named_parameters) if named_parameters is not None else []
    groups = optimizer.param_groups
    own = [
        (name_in_optimizer(groups, f"{g}.{i}"), p)
        for g, group in enumerate(groups)
        for i, p in enumerate(group["params"])
    ]
    names: dict[torch.Tensor, str] = {}
    plain = zip(unwrap_names([name for name, _ in pairs]), (tensor for _, tensor in pairs), strict=True)
    for name, tensor in [*plain, *own]:
        names.setdefault(tensor, name)
    return {name: tensor for tensor, name in names.items()}


def initial_facts(start: Mapping[str, torch.Tensor], variables: Sequence[Variable]) -> list[tuple[str, str]]:
    """Return names and shapes of the tensors that must start equal, as facts for the ranks to compare.

    Args:
        start: the tensors, by name.
        variables: the variables of the trained tensors.

    Raises:
        ConfigError: a tensor cannot be broadcast.
    """
    trained = {variable.name: variable.describe() for variable in variables}
    facts = []
    check_initialized(start.items())
    for name, tensor in start.items():
        if tensor.layout is not torch.strided or tensor.is_meta:
            kind = "has no values yet (device meta)" if tensor.is_meta else f"is sparse ({tensor.layout})"
            raise ConfigError(
                f"{name!r} {kind} and cannot start from rank 0's. Pass model.named_parameters() instead of the model "
                "if it is a buffer, or broadcast=False, and see to it that the ranks start equal"
            )
        text = f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"
        kind = "frozen parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
        kind, text = ("variable", trained[name]) if name in trained else (kind, text)
        facts.append((f"{kind} {name!r}", text))
    return facts
