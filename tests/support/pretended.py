"""A backend of one process that pretends to be one of several ranks, all of which send what this one sends."""

import numpy as np

from grace.core.backend import Backend, Handle


def there(result) -> Handle:
    """A collective that is done."""
    return Handle(lambda: None, result)


def sent_by(works, rank: int) -> float:
    """Bytes that leave a rank, in a step."""
    return sum(t.root_nbytes if t.root == rank else t.nbytes for work in works for t in work.transfers)


class Pretended(Backend):
    """Counts bytes as the contract of backends says, over NumPy arrays."""

    name = "pretended"

    def __init__(self, size: int, rank: int = 0, by_ring: bool = False, concatenates: bool = False):
        self.size, self.rank, self.by_ring, self.concatenates = size, rank, by_ring, concatenates
        self.log: list[tuple[str, int]] = []
        """Kind and bytes of what was started."""
        self.own: np.ndarray | None = None
        """Tensor that this rank broadcast last; others of its size are taken to be like it."""

    def noted(self, kind: str, tensor: np.ndarray, share: float) -> None:
        self.log.append((kind, tensor.nbytes))
        self.count(share * tensor.nbytes)

    def allreduce(self, tensor):
        self.noted("allreduce", tensor, 2 * (self.size - 1) / self.size)
        return there(np.asarray(tensor * self.size, tensor.dtype))

    def allgather(self, tensor):
        self.noted("allgather", tensor, self.size - 1)
        return there([tensor] * self.size)

    def concatenate(self, tensor):
        self.noted("allgather", tensor, self.size - 1)
        return there([np.concatenate([tensor] * self.size)])

    def alltoall(self, tensor):
        self.noted("alltoall", tensor, (self.size - 1) / self.size)
        return there([tensor.reshape(self.size, -1)[self.rank]] * self.size)

    def broadcast(self, tensor, root):
        self.noted("broadcast", tensor, (self.size - 1) * (root == self.rank))
        if root == self.rank:
            self.own = tensor

        def received():
            like = self.own is not None and (self.own.shape, self.own.dtype) == (tensor.shape, tensor.dtype)
            return self.own if like else tensor

        return Handle(lambda: None, later=received)

    def gather(self, tensor, root):
        self.noted("gather", tensor, root != self.rank)
        return there([tensor] * self.size if root == self.rank else [])

    def allgather_object(self, value):
        return [value] * self.size

    def duplicate(self):
        return Pretended(self.size, self.rank, self.by_ring, self.concatenates)

    def split(self, ranks):
        engine = self.by_ring, self.concatenates
        return Pretended(len(ranks), list(ranks).index(self.rank), *engine) if self.rank in ranks else None


class Meta(Pretended):
    """A pretended backend over torch's tensors on the meta device, which have no numbers: reading one raises."""

    def allreduce(self, tensor):
        return there(tensor)

    def allgather(self, tensor):
        return there([tensor] * self.size)

    def alltoall(self, tensor):
        return there(list(tensor.view(self.size, -1).unbind()))


class Among(Pretended):
    """A backend of one of several ranks in one process over torch's tensors, which go on together: a collective brings
    what they all sent, as soon as all have started it.

    Args:
        sent: of all of them, by the kind of collective, what each rank sent in it last.
    """

    def __init__(self, rank, sent):
        super().__init__(len(sent["alltoall"]), rank)
        self.sent = sent

    def allgather(self, tensor):
        self.sent["allgather"][self.rank] = tensor.clone()
        return Handle(lambda: None, later=lambda: list(self.sent["allgather"]))

    def alltoall(self, tensor):
        self.sent["alltoall"][self.rank] = tensor.clone()
        return Handle(lambda: None, later=lambda: [one.view(self.size, -1)[self.rank] for one in self.sent["alltoall"]])
