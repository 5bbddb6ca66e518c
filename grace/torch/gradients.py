"""A parameter's gradient as an exchange reads it (a dense tensor, or rows), and checks that it was not changed
since."""

from collections.abc import Mapping
from typing import Any

import torch

from grace.errors import ConfigError, ExchangeError
from grace.exchange.sparse_rows import SparseRows
from grace.torch.wrappers import check_unwrapped


def dense_gradient(name: str, p: torch.nn.Parameter, sparse_as_dense: bool) -> torch.Tensor:
    """Return a parameter's gradient as a contiguous dense tensor; zeros if there is none.

    Raises:
        ConfigError: the gradient is sparse, and may not be made dense.
    """
    if p.grad is None:
        return torch.zeros_like(p)
    if p.grad.layout is not torch.strided:
        if not sparse_as_dense:
            raise ConfigError(
                f"the gradient of {name!r} is sparse ({p.grad.layout}); pass the model itself as "
                "named_parameters to exchange it by rows, or sparse_as_dense=True to exchange it as a dense one, "
                "or make the layer dense (Embedding(sparse=False))"
            )
        p.grad = p.grad.to_dense()
    return p.grad.detach().contiguous()  # after backward(create_graph=True) it has a graph


def gradient_rows(name: str, p: torch.nn.Parameter) -> SparseRows:
    """Return a gradient's rows: those of a sparse one, all rows of a dense one, no rows if there is no gradient.

    Raises:
        ConfigError: the gradient is sparse in another way than by rows.
    """
    gradient = None if p.grad is None else p.grad.detach()
    if gradient is None:
        return SparseRows(p.new_zeros((0, *p.shape[1:])), torch.zeros(0, dtype=torch.int64, device=p.device))
    if gradient.layout is torch.strided:
        return SparseRows(gradient, torch.arange(p.shape[0], device=p.device))
    if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
        raise ConfigError(f"the gradient of {name!r} is sparse in another way than by rows ({gradient.layout})")
    return SparseRows(gradient._values(), gradient._indices()[0])


def check_unchanged_parameters(frozen: Mapping[str, torch.Tensor], narrow: Mapping[str, torch.Tensor]) -> None:
    """Refuse parameters that were changed in a way that exchanges cannot follow.

    Args:
        frozen: the parameters that required no gradients, by name.
        narrow: the parameters whose dtype was not float64, by name.

    Raises:
        ConfigError: a frozen parameter requires gradients now, or a narrow one is float64 now.
    """
    for name, p in frozen.items():
        if p.requires_grad:
            raise ConfigError(
                f"the parameter {name!r} requires gradients now, and did not when the optimizer was made "
                "distributed: they would not be exchanged, and the ranks would drift apart. Let it require them "
                "before grace.DistributedOptimizer (you may freeze it afterwards), or call optimizer.close() and "
                "make the optimizer distributed anew"
            )
    for name, p in narrow.items():
        if p.dtype is torch.float64:
            raise ConfigError(
                f"the parameter {name!r} is float64 now, and was not when the optimizer was made distributed, which "
                "settled what is exchanged. Call model.to(torch.float64) before grace.DistributedOptimizer, or call "
                "optimizer.close() and make the optimizer distributed anew"
            )


def check_unchanged_gradients(session: Any) -> None:
    """Compare gradients whose exchange has begun with their identity and version at that time.

    Raises:
        ExchangeError: a gradient was changed after its exchange began.
    """
    states = getattr(session.grad_scaler, "_per_optimizer_states", {})  # unscale_() does not increase _version
    unscaled = getattr(states.get(id(session.optimizer), {}).get("stage"), "name", "") == "UNSCALED"
    in_graph = getattr(session, "in_graph", ())  # a compiled graph replaces the tensors in p.grad
    for index, (held, versions) in session.versions.items():
        for (_, name, p, _), gradient, version in zip(session.bucket_contents[index], held, versions, strict=True):
            if gradient is None:
                continue
            unchanged = name in in_graph or (gradient._version == version and p.grad is gradient)
            if unchanged and not unscaled:
                continue
            check_unwrapped(session.parameters)  # DDP may have wrapped the model since; that error says more
            raise ExchangeError(
                f"the gradient of {name!r} was changed after its exchange began (by clipping, unscaling or "
                "another backward pass). Call optimizer.synchronize() after backward and before you change "
                "gradients; step() then uses them as they are"
            )
