"""Signum: SignSGD of a momentum."""

from dataclasses import dataclass

from grace.compressors.signsgd import SignSGD
from grace.core.compressor import BucketCodecSpec, Compressor, Payload, Shape, Tensor
from grace.kernels import kernels_of


@dataclass
class Signum(SignSGD):
    """Sends the signs of a momentum that each rank keeps; the aggregate is the majority's sign.

        m = momentum m + (1 - momentum) x,    C(x) = sign(m),    aggregate = sign(sum_i sign(m_i))

    m starts at 0. The optimizer's own momentum must be 0: refused otherwise. Votes, ties and step sizes are those of
    :class:`~grace.compressors.signsgd.SignSGD`, which this is for momentum 0. Source: Bernstein et al.,
    "signSGD: compressed optimisation for non-convex problems", arXiv 1802.04434.

    Args:
        momentum: the part of m that is kept at each step, in [0, 1].

    >>> import numpy as np
    >>> signum = Signum(momentum=0.5)
    >>> for gradient in ([3, -1], [-1, -1]):
    ...     payload, ctx = signum.compress(np.float32(gradient), "w")
    >>> signum.decompress(payload, ctx), signum.state["w"]
    (array([ 1., -1.], dtype=float32), array([ 0.25, -0.75], dtype=float32))
    """

    momentum: float = 0.9

    name = "signum"
    stateful = True
    owns_momentum = True

    def __post_init__(self) -> None:
        self.check_number("momentum", 0, 1)

    def keeps(self, shape: Shape) -> Shape:
        return shape

    def answering(self) -> Compressor:
        """Return the compressor of answers: votes have no momentum of their own."""
        return SignSGD()

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Shape]:
        k = kernels_of(tensor)
        momentum, last, share = self.recall(name)
        # Without an m yet, 0 times the tensor: no zeros need to be made.
        moment = k.combine(share, tensor, *((0.0, tensor) if last is None else (momentum, last)))
        self.keep(name, moment)
        return super().compress(moment, name)

    def recall(self, name: str) -> tuple[float, Tensor | None, float]:
        """Return momentum, m, and the factor of x: without the loss scale, which may change between steps."""
        return self.momentum, self.state.get(name), (1 - self.momentum) / self.context.loss_scale

    def keep(self, name: str, moment: Tensor) -> None:
        """Store m."""
        self.state[name] = moment

    def bucket_codec(self) -> BucketCodecSpec:
        return "signs", {"form": "moment"}
