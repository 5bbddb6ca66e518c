"""A communicator, a builder and a rule as users write them; they are registered where a test wants them."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import grace
from grace import Communicator, Compressor, Traits
from grace.core import registry
from grace.core.backend import Handle
from grace.kernels import kernels_of
from grace.strategy import ShardPlan, Sync, VariablePlan
from grace.strategy.builder import Builder
from grace.strategy.rule import Rule


class InPieces(Communicator):
    """Gathers a payload in pieces of at most so many bytes.

    Args:
        most: bytes.
    """

    name = "in_pieces"
    cost = "(W-1)p"
    sent = 0

    def __init__(self, compressor="none", memory=None, most: int = 64):
        super().__init__(compressor, memory)
        if most < 1:
            raise ValueError("most must be positive")
        self.most = most

    def communicate(self, wire):
        n = wire.shape[0]
        handles = [self.backend.allgather(wire[i : i + self.most]) for i in range(0, n, self.most)]
        type(self).sent += len(handles)
        join = kernels_of(wire).join
        return Handle.all(handles).map(lambda pieces: [join(list(of_rank)) for of_rank in zip(*pieces, strict=True)])


class Whole(Compressor):
    """A method that sends all of a gradient, in a payload that nobody sums."""

    name = "whole"
    traits = Traits(category="quantization", unbiased=True)

    def compress(self, tensor, name):
        return [tensor], None

    def decompress(self, payload, ctx):
        return payload[0]


class Shrinking(Whole):
    """The same, flat; one element less where a test says so."""

    name = ""
    wrong = False

    def compress(self, tensor, name):
        return [tensor.reshape(-1)[: tensor.numel() - self.wrong]], tuple(tensor.shape)

    def decompress(self, payload, ctx):
        return payload[0].reshape(ctx)


@dataclass
class PiecesOf(Builder):
    """Large variables in pieces.

    Args:
        most: bytes of a piece.
    """

    most: int = 16

    name = "pieces_of"

    def build(self, variables, resources):
        sync = Sync("in_pieces", options={"most": self.most})
        parts = [ShardPlan(sync, *self.choice(v)) for v in variables]
        return self.strategy([VariablePlan(v, (part,)) for v, part in zip(variables, parts, strict=True)], resources)


@dataclass
class Named(Rule):
    """Variables whose names end so.

    Args:
        end: of the name.
    """

    end: str

    name = "named"

    def fits(self, variable):
        return variable.name.endswith(self.end)


@contextlib.contextmanager
def registered(*classes: type) -> Iterator[None]:
    """Known by name, here and for now."""
    before = {kind: dict(found) for kind, found in registry._registered.items()}
    try:
        for cls in classes:
            grace.register(cls)
        yield
    finally:
        for kind, found in before.items():
            registry._registered[kind] = found
