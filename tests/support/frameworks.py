"""What the tests of frameworks around torch share; it runs in the rank processes."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import grace
from tests.support.training import digest

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DO_NOT_TRACK": "1",
}


@contextlib.contextmanager
def torchrun() -> Iterator[None]:
    """What torchrun would have told this rank."""
    before, rank, size = dict(os.environ), str(grace.rank()), str(grace.size())
    os.environ.update(OFFLINE, RANK=rank, LOCAL_RANK=rank, GROUP_RANK="0", WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="none", ACCELERATE_USE_CPU="true")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def kept(state: Any) -> dict[str, str]:
    """Digests of what a hook's state remembers, by kind and variable."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is this rank's alone
        saved = state.state_dict()["state"]
    return {f"{kind} {name}": digest(v) for kind, values in saved.items() for name, v in values.items()}


def check_refused(misuses: dict[Callable[[], None], list[str]]) -> None:
    """Each raises an error of Grace's that has these words."""
    for misuse, words in misuses.items():
        with pytest.raises(grace.GraceError) as caught:
            misuse()
        assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
