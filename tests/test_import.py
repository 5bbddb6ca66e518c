"""``import grace`` is light, and needs NumPy alone."""

import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

import grace
from tests.support import warm
from tests.support.limits import HANGS

ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if not key.startswith("COV")},
    "PYTHONPATH": str(Path(grace.__file__).parents[1]),
}

BLOCK = """
    import sys

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ABSENT:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Absent())
"""


def run(script: str, absent: tuple[str, ...] = (), python: str = warm.REAL) -> str:
    script = f"ABSENT = {absent!r}\n" + textwrap.dedent(BLOCK) + textwrap.dedent(script)
    done = subprocess.run(
        [python, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=HANGS, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


HEAVY = ("torch", "tensorflow", "numba", "typer", "rich", "pydantic", "scipy", "matplotlib", "mpi4py", "horovod")


INSTALL = '{0} is not installed; install it with: pip install "grace-compress[{0}]"'
FORKED = sys.executable  # frameworks take seconds to import; see test_warm.py for what it knows of them
TENSORFLOW = pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")


def refused(use: str) -> str:
    """A program that prints what an expression is refused with."""
    return f"""
        import grace
        try:
            {use}
        except grace.GraceError as error:
            print(error)
    """


@pytest.mark.slow
@pytest.mark.parametrize("use", ["import grace", "import grace; grace.make('compressor', 'topk'); grace.init('local')"])
def test_import_loads_no_optional_package(use):
    assert run(f"{use}; print(sorted({set(HEAVY)!r} & set(sys.modules)))") == "[]"


def test_import_loads_contracts_engines_and_kernels_alone():
    loaded = run("import grace; print(*(m for m in sys.modules if m.partition('.')[0] == 'grace'))").split()
    assert len(loaded) < 60
    rooms = {name.split(".")[1] for name in loaded if "." in name}
    assert rooms == {"backends", "core", "errors", "kernels", "session"}
    assert {"grace.session.by_hand", "grace.session.step_runner"}.isdisjoint(loaded)


@pytest.mark.ranks
def test_the_planner_is_loaded_only_by_who_asks_for_it():
    pytest.importorskip("torch", reason="torch is not installed")
    rooms = ("grace.planner", "grace.pipeline", "grace.bench", "grace.cli")
    use = """
        import sys, torch, grace, grace.torch
        grace.init("local")
        model = torch.nn.Linear(2, 2)
        grace.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, compressor="topk")
    """
    show = f"print([m for m in sys.modules if m.startswith({rooms!r})])"
    assert run(f"{textwrap.dedent(use)}\n{show}", python=FORKED) == "[]"


@pytest.mark.parametrize(
    ("use", "absent", "said"),
    [
        ("grace.init('torch')", "torch", INSTALL.format("torch")),
        ("import grace.torch", "torch", INSTALL.format("torch")),
        ("import grace.tensorflow", "tensorflow", INSTALL.format("tensorflow")),
        ("grace.tensorflow", "tensorflow", INSTALL.format("tensorflow")),
        ("grace.init('horovod', framework='tensorflow')", "tensorflow", INSTALL.format("tensorflow")),
        (
            "grace.DistributedOptimizer(object())",  # a torch object is recognised only when torch is there
            "torch",
            "grace.DistributedOptimizer takes an optimizer of torch or Keras, not an object of builtins.object",
        ),
    ],
)
def test_what_needs_a_package_that_is_not_there_says_how_to_install_it(use, absent, said):
    assert run(refused(use), (absent,)) == said


def test_a_missing_package_is_an_import_error():
    assert issubclass(grace.MissingExtraError, ImportError)
    assert issubclass(grace.MissingExtraError, grace.GraceError)


def test_numpy_alone_is_enough_to_compress():
    script = """
        import numpy as np, grace
        from grace.communicators import Allgather
        grace.init()
        print(Allgather("topk(ratio=0.5)").step(np.float32([4, 1]), "w").tolist(), grace.rank(), grace.size())
    """
    assert run(script, HEAVY) == "[4.0, 0.0] 0 1"


def test_strategies_are_built_without_the_packages_that_read_files():
    script = """
        from grace.core.registry import make
        from grace.core.variable import Variable
        from grace.strategy.builder import OneNode
        print(len(make("builder", "all_reduce").build([Variable("w", (2,))], OneNode(2)).id))
    """
    assert run(script, ("pydantic", "yaml")) == "64"


@pytest.mark.ranks
@TENSORFLOW
def test_without_horovod_tensorflow_works_loads_no_torch_and_asking_for_it_names_what_builds_it():
    script = """
        import sys, keras, grace
        print(grace.init().name, grace.tensorflow.GradientExchange("topk").options()["compressor"]["name"])
        grace.DistributedOptimizer(keras.optimizers.SGD(0.1), compressor="topk")
        try:
            grace.init("horovod")
        except grace.MissingExtraError as error:
            print("make horovod" in str(error), "torch" in sys.modules)
    """
    assert run(script, ("horovod", "mpi4py"), FORKED).splitlines() == ["local topk", "True False"]


@pytest.mark.ranks
@pytest.mark.parametrize("absent", [(), ("numba",)])
def test_torch_tensors_load_no_tensorflow_and_without_numba_use_the_plain_kernels(absent):
    pytest.importorskip("torch", reason="torch is not installed")
    script = """
        import sys, torch, grace
        from grace.communicators import Allgather
        print(grace.kernels_of(torch.zeros(1)).name)
        print(Allgather("qsgd(levels=1)").step(torch.tensor([2.0, 0.0, -2.0]), "w").tolist())
        print("tensorflow" in sys.modules)
    """
    kernels, *rest = run(script, absent, FORKED).splitlines()
    assert (kernels == "torch") == bool(absent)
    assert rest == ["[2.0, 0.0, -2.0]", "False"]


def test_every_public_name_exists():
    assert sorted(name for name in grace.__all__ if not hasattr(grace, name)) == []
