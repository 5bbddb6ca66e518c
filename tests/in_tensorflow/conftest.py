"""Pools of TensorFlow's ranks. Where it is not installed none of these tests is collected."""

import importlib.util

import pytest

from tests.support.pools import launched

if importlib.util.find_spec("tensorflow") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def mpi():
    """2 ranks over MPI."""
    return launched("mpirun-mpi", 2, "tensorflow")


@pytest.fixture(scope="module")
def horovod():
    """2 ranks under horovodrun."""
    return launched("horovodrun-gloo", 2, "tensorflow")
