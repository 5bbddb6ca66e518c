"""PowerSGD: low-rank compression by one step of power iteration."""

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass

from grace.core.compressor import Accumulating, BucketCodecSpec, Payload, PayloadSpec, Shape, Tensor, TensorSpec, Traits
from grace.kernels import kernels_of
from grace.kernels.constants import NARROW

SMALL = 1 << 14
"""Elements up to which the matrices of one shape are joined: copying them costs less than an operation on each."""


@dataclass
class PowerSGD(Accumulating):
    """Approximates the gradient, as a matrix, by P Q^T of the given rank, both averaged over ranks.

    M is the gradient as (first dimension) x (the rest), for convolutions output channels x the rest.

        1. P = M Q              (mean over ranks)
        2. P = orthogonalize(P)
        3. Q = M^T P            (mean over ranks; kept for the next step if ``warm_start``)
        4. C(M) = P Q^T, the same on every rank; the residual is M - P Q^T

    The first Q comes from the shared random stream, and so does any column that has become zero. Tensors
    of fewer than two dimensions, and those that it would not shrink, travel dense. Source: Vogels et al.,
    "PowerSGD", NeurIPS 2019, arXiv 1905.13727.

    Args:
        rank: columns of P and Q.
        warm_start: start from the last step's Q.

    >>> import numpy as np
    >>> m = np.outer(np.float32([1, 2, 3]), np.float32([1, -1]))
    >>> powersgd = PowerSGD(rank=1)
    >>> np.allclose(powersgd.decompress(*powersgd.compress(m, "w")), m, atol=1e-5)
    True
    """

    rank: int = 1
    warm_start: bool = True

    name = "powersgd"
    offered = ("powersgd(rank=4)",)
    stateful = True
    shared_state = True
    measured_loss = {"powersgd(rank=4)": {"adamw": 1.116, "sgd": 1.125}}
    traits = Traits(
        category="low-rank",
        fixed_size="by shape",
        contraction=True,
        summable=True,
        rounds=2,
        communicator="allreduce",
        memory="residual",
        needs_memory=True,
    )

    def __post_init__(self) -> None:
        self.check_integer("rank", 1)
        self.check_choice("warm_start", (False, True))

    def keeps(self, shape: Shape) -> Shape:
        _, columns, rank = self.sizes(shape)
        return columns, rank

    def exchange_all(
        self, tensors: Iterable[Tensor], names: Sequence[str]
    ) -> Generator[list[Payload], list[Payload], list[tuple[Payload, Shape]]]:
        starts = self._starts(names)
        originals: list[Tensor] = []
        products = _Products()
        for tensor, name in zip(tensors, names, strict=True):
            rows, columns, rank = self.sizes(tuple(tensor.shape))
            matrix = kernels_of(tensor).reshape(tensor, (rows, columns))
            products.add(matrix, starts(name, columns, rank, tensor))
            originals.append(tensor)
        means = yield [[p] for p in products.first()]
        ps = _orthogonalized([p for (p,) in means])
        means = yield [[q] for q in products.second(ps)]
        # The mean, and not this rank's: with unequal Qs the ranks' products could not be added up.
        for name, (q,) in zip(names, means, strict=True):
            self.keep(name, q)
        return [([p, q], tuple(tensor.shape)) for p, (q,), tensor in zip(ps, means, originals, strict=True)]

    def recall(self, name: str) -> tuple[float, Tensor | None, float]:
        """Return the last step's Q, with the factors of :meth:`grace.core.memory.ErrorFeedback.recall`."""
        # In a memory's form: fused codecs alternate two buffers of Q as they do of residuals.
        return 1.0, self.state.get(name), 1.0

    def keep(self, name: str, q: Tensor) -> None:
        """Store Q for the next step, if that starts from it."""
        if self.warm_start:
            self.state[name] = q

    def bucket_codec(self) -> BucketCodecSpec | None:
        return ("low rank", {}) if self.rank <= NARROW else None

    def round_specs(self, shape: Shape, step: int) -> list[PayloadSpec | None]:
        rows, columns, rank = self.sizes(shape)
        return [[TensorSpec("float32", (rows, rank))], [TensorSpec("float32", (columns, rank))]]

    def accumulate(self, payload: Payload, ctx: Shape, out: Tensor, weight: float = 1.0) -> Tensor:
        p, q = payload
        return kernels_of(out).matmul_add(out, p, q, weight)

    def aggregate(self, payloads: Sequence[Payload], ctx: Shape, out: Tensor, count: float) -> Tensor:
        (p, q), *others = payloads
        # Times 0: out may hold anything before, NaN too.
        out = kernels_of(out).matmul_add(out, p, q, 1.0 / count, 0.0)
        for payload in others:
            out = self.accumulate(payload, ctx, out, 1.0 / count)
        return out

    def sizes(self, shape: Shape) -> tuple[int, int, int]:
        """Return the rows and columns of the matrix, and the columns of P and Q."""
        rows, columns = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        # More columns than the matrix's rank could be would be zero once they are orthogonal to the others.
        return rows, columns, min(self.rank, rows, columns)

    def _starts(self, names: Sequence[str]) -> Callable[[str, int, int, Tensor], Tensor]:
        """Return a function that gives each variable's first Q: that of the last step, with zero columns renewed, or a
        random one."""
        last = [self.state[name] for name in names if name in self.state]
        # One look at all of them; as a rule no column has to be renewed.
        all_usable = bool(last) and not kernels_of(last[0]).zero_columns(last)

        def start(name: str, columns: int, rank: int, like: Tensor) -> Tensor:
            if all_usable and name in self.state:
                return self.state[name]
            # Shared, so that all ranks start from the same Q.
            k, stream = kernels_of(like), self.context.stream(name, shared=True)
            if name in self.state:
                return k.renew_columns(self.state[name], stream)
            return k.random_matrix(stream, (columns, rank), like)

        return start


class _Products:
    """Products of a bucket's matrices: large ones are computed at once, while they are in the cache; small ones of one
    shape together."""

    def __init__(self) -> None:
        self.factors: list[Tensor] = []
        self.matrices: list[Tensor] = []
        self.results: list[Tensor] = []
        self.small: dict[Shape, list[int]] = {}
        """Indices of the small matrices of each shape."""
        self.joined: dict[Shape, Tensor] = {}

    def add(self, matrix: Tensor, factor: Tensor) -> None:
        """Add a matrix M and its Q."""
        shape = tuple(matrix.shape)
        if 0 < math.prod(shape) <= SMALL:
            self.small.setdefault(shape, []).append(len(self.matrices))
            self.results.append(None)
        else:
            self.results.append(kernels_of(matrix).matmul(matrix, factor))
        self.matrices.append(matrix)
        self.factors.append(factor)

    def first(self) -> list[Tensor]:
        """Return M Q of each matrix."""
        for shape, indices in self.small.items():
            self.joined[shape] = _joined([self.matrices[i] for i in indices])
            self._multiply(shape, [self.factors[i] for i in indices], False)
        return self.results

    def second(self, factors: list[Tensor]) -> list[Tensor]:
        """Return M^T P of each matrix."""
        self.results = [
            None if tuple(m.shape) in self.joined else kernels_of(m).matmul(m, p, True)
            for m, p in zip(self.matrices, factors, strict=True)
        ]
        for shape, indices in self.small.items():
            self._multiply(shape, [factors[i] for i in indices], True)
        return self.results

    def _multiply(self, shape: Shape, factors: list[Tensor], transpose: bool) -> None:
        matrices = self.joined[shape]
        products = kernels_of(matrices).matmul(matrices, _joined(factors), transpose)
        for product, i in zip(_split(products), self.small[shape], strict=True):
            self.results[i] = product


def _orthogonalized(matrices: list[Tensor]) -> list[Tensor]:
    """Return an orthonormal basis of each matrix's columns, computed for matrices of one shape together."""
    shapes: dict[Shape, list[int]] = {}
    for i, matrix in enumerate(matrices):
        shapes.setdefault(tuple(matrix.shape), []).append(i)
    found = list(matrices)
    for indices in shapes.values():
        if len(indices) == 1:
            found[indices[0]] = kernels_of(matrices[indices[0]]).orthogonalize(matrices[indices[0]])
            continue
        joined = _joined([matrices[i] for i in indices])
        for one, i in zip(_split(kernels_of(joined).orthogonalize(joined)), indices, strict=True):
            found[i] = one
    return found


def _joined(matrices: list[Tensor]) -> Tensor:
    """Return matrices of one shape as one tensor of three dimensions."""
    k = kernels_of(matrices[0])
    return k.concat([k.reshape(matrix, (1, *matrix.shape)) for matrix in matrices], 0)


def _split(joined: Tensor) -> list[Tensor]:
    """Return the matrices that were joined."""
    k, (count, *shape) = kernels_of(joined), tuple(joined.shape)
    return [k.reshape(part, tuple(shape)) for part in k.split(k.flat(joined), [math.prod(shape)] * count)]
