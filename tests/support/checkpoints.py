"""A small run whose checkpoints tests look at; on real ranks."""

import warnings

import torch

import grace
from grace.session import state_schema
from tests.support.training import Given, copied, digest, train_given

SHAPES = {"w": (12, 8), "v": (40,)}


def made(compressor="topk(ratio=0.1)", memory=None, communicator=None, shapes=None, **options):
    """A model with gradients that a test makes up, and its optimizer."""
    model = Given(shapes or SHAPES)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer = grace.DistributedOptimizer(sgd, model.named_parameters(), compressor, memory, communicator, **options)
    return model, optimizer


def saved_by(*choices, everyone=True, **options):
    """A checkpoint after three steps."""
    model, optimizer = made(*choices, **options)
    train_given(model, optimizer, range(3))
    return copied(optimizer.full_state_dict() if everyone else optimizer.state_dict())


def sealed(saved):
    """Return a state with checksums of its present values, as if it had been saved so."""
    return {**saved, "grace": state_schema.seal(saved["grace"])}


def load(optimizer, saved, memory="strict"):
    """Load a state, and return its error or warnings; a refused load must change nothing."""
    before = digest(optimizer.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            optimizer.load_state_dict(saved, memory=memory)
        except Exception as error:
            assert digest(optimizer.state_dict()) == before, "a refused load changed something"
            return f"{type(error).__name__}: {error}"
    return " ".join(str(warning.message) for warning in caught)
