"""ARCHITECTURE.md's ways through grace/, against tools/trace_step.py, the source and the tests that it names."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.engine_pools import command, environment
from tests.support.limits import HANGS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()


def steps_of(heading: str) -> list[tuple[str, str]]:
    """Return file and function of each line of the list under a heading."""
    section = PAGE.partition(f"{heading}\n")[2].partition("\n##")[0]
    found = re.findall(r"^ {4}(\S+\.py) +(\w+)", section, re.MULTILINE)
    assert found
    return found


def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / "grace" / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def traced(steps_before: int) -> list[tuple[str, str]]:
    """Return file and name of the functions that a step on two ranks passes, in order."""
    program = command("torchrun", 2, str(ROOT / "tools" / "trace_step.py"), "topk(ratio=0.1)", str(steps_before))
    done = subprocess.run(program, capture_output=True, text=True, timeout=HANGS, env=environment())
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("grace/")]
    return [(place.removeprefix("grace/").partition(":")[0], name) for place, name in lines]


@pytest.mark.ranks
def test_a_gradient_goes_the_way_that_the_page_tells_in_the_first_step_too():
    usual, first = traced(steps_before=3), traced(steps_before=0)
    places = [usual.index(step) for step in steps_of("## The way of a gradient")]
    assert places == sorted(places)
    assert len({file for file, _ in usual}) <= 21
    # 93 since the kinds of round trips have one base class, whose constructor is a function of its own.
    assert len(usual) <= 93, "a step passes more functions than before: inline one, or raise the bound and say why"
    assert set(usual) <= set(first)
    assert len(first) <= 1.3 * len(usual)


@pytest.mark.parametrize(
    "heading", ["Other ways", "When a gradient overflows", "Saving and loading", "When a rank fails"]
)
def test_functions_of_the_other_ways_are_there(heading):
    for file, function in steps_of(f"### {heading}"):
        assert function in functions_of(file), f"{file} {function}"


def test_other_entrances_are_there():
    for file, name in re.findall(r"`(\w+/\w+\.py) (\w+)`", PAGE):
        assert re.search(rf"\b{name}\b", (ROOT / "grace" / file).read_text()), f"{file} {name}"


def test_each_invariant_names_tests_that_are_there():
    section = PAGE.partition("## What must always hold\n")[2].partition("\n##")[0]
    invariants = re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]
    assert len(invariants) == 12
    for text in invariants:
        paths = re.findall(r"`(tests/[\w/]+(?:\.py)?)`", text)
        assert paths, text
        assert all((ROOT / path).exists() for path in paths), text
