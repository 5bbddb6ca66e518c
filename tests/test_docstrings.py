"""Docstrings of functions begin with a verb or a noun, and stand alone."""

import ast
import re

from tests.test_floors import FILES, ROOT

SCRIPTS = sorted(
    file for folder in ("benchmarks", "examples", "tests", "tools") for file in ROOT.glob(f"{folder}/**/*.py")
)

RIDDLE = re.compile(
    r"(What|Whether|Those|The same|As|Of|It|Its|That|Which|Who|Where|How|All of|Likewise|See|One of|Nothing|By|In|"
    r"From) "
)
"""Openings that describe a thing without naming it."""


def test_no_docstring_of_a_function_is_a_riddle():
    riddles = []
    for file in [*FILES, *SCRIPTS]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node) or ""
                if RIDDLE.match(text):
                    riddles.append(f"{file.relative_to(ROOT)}:{node.lineno} {node.name}: {text.splitlines()[0]}")
    assert not riddles, "\n".join(riddles)


def test_no_class_calls_itself_a_part_of_another():
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                text = (ast.get_docstring(node) or "").lower()
                assert not text.startswith(("a part of", "the part of")), f"{file.relative_to(ROOT)}:{node.lineno}"
