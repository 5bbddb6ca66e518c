"""Components of other packages: registered, or found through entry points."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import grace
from grace import Compressor, ConfigError, Memory, register
from grace.communicators import Allgather
from grace.core import registry
from tests.support.command import installed
from tests.support.limits import HANGS


@pytest.fixture(autouse=True)
def restored():
    before = {kind: dict(classes) for kind, classes in registry._registered.items()}
    yield
    registry._registered.update(before)


def test_a_registered_component_is_known_by_its_name():
    @register
    class Mine(Memory):
        name = "mine"
        stateful = False

        def compensate(self, tensor, name):
            return tensor

        def update(self, tensor, name, compressor, payload, ctx):
            pass

    assert grace.known("memory")["mine"] is Mine
    assert "mine" not in grace.known("compressor")
    assert type(Allgather("topk", "mine").memory) is Mine


@pytest.mark.parametrize("name", ["topk", "fp16"])
def test_a_taken_name_is_refused(name):
    cls = type("Other", (Compressor,), {"name": name})
    with pytest.raises(ConfigError, match=f"the compressor name '{name}' is "):
        register(cls)
    assert type(grace.make("compressor", name)) is not cls


def test_a_name_registered_twice_is_refused_unless_it_is_the_same_class():
    register(type("First", (Compressor,), {"name": "twice"}))
    again = register(type("First", (Compressor,), {"name": "twice"}))  # a module that was loaded anew
    assert grace.known("compressor")["twice"] is again
    with pytest.raises(ConfigError, match=r"'twice' is taken by .*\.First"):
        register(type("Second", (Compressor,), {"name": "twice"}))


@pytest.mark.parametrize("name", ["", "no word", "1st"])
def test_a_component_without_a_usable_name_is_refused(name):
    with pytest.raises(ConfigError, match="Nameless needs a class attribute name"):
        register(type("Nameless", (Compressor,), {"name": name}))


PLUGIN = """
    from dataclasses import dataclass
    from grace import Compressor, Memory, Traits

    @dataclass
    class Half(Compressor):
        scale: float
        name = "half"
        traits = Traits(category="quantization", memory="forgetful")
        def compress(self, tensor, name):
            return [tensor.astype("float16") * self.scale], None
        def decompress(self, payload, ctx):
            return payload[0].astype("float32")

    class Forgetful(Memory):
        name = "forgetful"
        stateful = False
        def compensate(self, tensor, name):
            return tensor
        def update(self, *args):
            pass

    class Usurper(Compressor):
        name = "topk"
"""
POINTS = """
    [grace.compressors]
    half = grace_plugin:Half
    topk = grace_plugin:Usurper

    [grace.memories]
    forgetful = grace_plugin:Forgetful
    misplaced = grace_plugin:Half

    [grace.strategy.rules]
    broken = gone:Rule
"""


def run(script, folder):
    """A program that finds what is in a folder."""
    path = os.pathsep.join([str(folder), str(Path(grace.__file__).parents[1])])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=HANGS,
    )  # fmt: skip


@pytest.mark.ranks
def test_an_installed_package_s_entry_points_are_found(tmp_path):
    (tmp_path / "grace_plugin.py").write_text(textwrap.dedent(PLUGIN))
    installed(tmp_path, "grace-plugin", textwrap.dedent(POINTS))
    script = """
        import numpy as np, grace
        from grace.communicators import Allgather
        allgather = Allgather("half(scale=2.0)")
        print(allgather.describe(), allgather.step(np.float32([1, 0.5]), "w").tolist())
        print(grace.known("compressor")["topk"].__module__)
        try:
            grace.make("compressor", "half")
        except grace.ConfigError as error:
            print(error)
        for kind, name in (("memory", "misplaced"), ("rule", "broken")):
            try:
                grace.make(kind, name)
            except grace.ConfigError as error:
                print(error, "|", repr(error.__cause__))
    """
    done = run(script, tmp_path)
    package = "in the package grace-plugin 1.0"
    why = "ModuleNotFoundError: No module named 'gone'"
    assert done.stdout.splitlines() == [
        "allgather, half(scale=2.0), forgetful [2.0, 1.0]",
        "grace.compressors.topk",
        "compressor half needs scale",
        f"the entry point misplaced = grace_plugin:Half of grace.memories {package} is no memory | None",
        f"the entry point broken = gone:Rule of grace.strategy.rules {package} cannot be loaded: {why} | "
        "ModuleNotFoundError(\"No module named 'gone'\")",
    ], done.stderr


@pytest.mark.ranks
def test_a_compressor_and_its_memory_may_share_a_file(tmp_path):
    (tmp_path / "half.py").write_text(textwrap.dedent(PLUGIN).replace("topk", "usurper"))
    script = f"""
        import numpy as np, grace, grace.compressors
        grace.compressors.__path__.append({str(tmp_path)!r})
        from grace.communicators import Allgather
        allgather = Allgather("half(scale=2.0)")
        print(allgather.describe(), allgather.step(np.float32([1, 0.5]), "w").tolist())
        print("forgetful" in grace.known("memory"), "forgetful" in grace.known("compressor"))
        from grace.cli.main import app
        app(["list"])
    """
    done = run(script, tmp_path)
    assert done.stdout.splitlines()[:2] == ["allgather, half(scale=2.0), forgetful [2.0, 1.0]", "True False"], (
        done.stderr
    )
    memories = done.stdout.partition("\nmemory ")[2].partition("\ncommunicator ")[0]
    assert "\nforgetful " in memories, done.stdout
    assert done.returncode == 0, done.stderr
