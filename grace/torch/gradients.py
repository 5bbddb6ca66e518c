"""A parameter's gradient as an exchange reads it: a dense tensor, or rows."""

import torch

from grace.errors import ConfigError
from grace.exchange.sparse_rows import SparseRows


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
    # Elements share memory, as gradients of sums do, or memory holds their negatives, as after conj(): means could not
    # be written into it.
    if 0 in p.grad.stride() or p.grad.is_neg():
        p.grad = p.grad.resolve_neg().contiguous()
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
