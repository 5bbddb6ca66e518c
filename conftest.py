"""What pytest leaves out: modules without doctests, and those whose optional packages are not installed."""

import contextlib
from importlib.util import find_spec

import pytest
from _pytest.doctest import DoctestItem, DoctestModule

with contextlib.suppress(ImportError):
    import triton  # noqa: F401 - where TensorFlow was imported before, it ends the process: both bring an LLVM

MODULES = {
    "tensorflow": [
        "grace/tensorflow/*",
        "grace/kernels/tensorflow/*",
        "grace/backends/horovod_tensorflow.py",
    ],
    "horovod": ["grace/backends/horovod_*.py", "grace/torch/horovod.py", "grace/torch/elastic.py"],
    "triton": ["grace/kernels/triton/*"],
    "mpi4py": ["grace/backends/mpi.py"],
    **{name: [f"grace/integrations/{name}.py"] for name in ("transformers", "lightning", "accelerate")},
    "pydantic": ["grace/strategy/*", "grace/launch/*", "grace/core/schema_words.py", "grace/pipeline/planning/*"],
}

collect_ignore_glob = [path for package, paths in MODULES.items() if find_spec(package) is None for path in paths]


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path):
    """Nobody looks for examples where there are none: every worker would import all frameworks for it."""
    found = yield
    if not any(isinstance(one, DoctestModule) for one in found) or ">>>" in file_path.read_text():
        return found
    return [one for one in found if not isinstance(one, DoctestModule)]


@pytest.fixture(autouse=True)
def registrations(request):
    """Take back what an example registers: later tests list all components."""
    if not isinstance(request.node, DoctestItem):
        yield
        return
    from tests.support.own_parts import registered

    with registered():
        yield
