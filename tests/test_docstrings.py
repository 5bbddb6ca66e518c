"""Docstrings begin with a verb or a noun, and stand alone."""

import ast
import re
from itertools import pairwise

from tests.test_floors import FILES, ROOT

SCRIPTS = sorted(
    file for folder in ("benchmarks", "examples", "tests", "tools") for file in ROOT.glob(f"{folder}/**/*.py")
)

RIDDLE = re.compile(
    r"(What|Whether|Those|The same|As|Of|It|Its|That|Which|Who|Where|How|All of|Likewise|See|One of|Nothing|By|In|"
    r"From) "
)
"""Openings that describe a thing without naming it."""


def docstrings(tree):
    """Yield the line and the text of the docstrings of functions, classes, modules, and constants."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
        if isinstance(node, (ast.ClassDef, ast.Module)):
            for one, after in pairwise(node.body):
                constant = isinstance(one, (ast.Assign, ast.AnnAssign)) and isinstance(after, ast.Expr)
                if constant and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                    yield after.lineno, after.value.value


def test_no_docstring_is_a_riddle():
    riddles = []
    for file in [*FILES, *SCRIPTS]:
        for line, text in docstrings(ast.parse(file.read_text())):
            if RIDDLE.match(text):
                riddles.append(f"{file.relative_to(ROOT)}:{line}: {text.splitlines()[0]}")
    assert not riddles, "\n".join(riddles)


def test_names_of_arguments_stand_on_one_line_with_their_colon():
    """The API reference reads them so."""
    for file in FILES:
        for line, text in docstrings(ast.parse(file.read_text())):
            for section in re.findall(r"^(?:Args|Attributes):\n((?: +.*\n?|\n)+)", text, re.MULTILINE):
                entries = re.findall(r"^    (\S.*)", section, re.MULTILINE)
                assert all(":" in entry for entry in entries), f"{file.relative_to(ROOT)}:{line}"


def test_no_class_calls_itself_a_part_of_another():
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                text = (ast.get_docstring(node) or "").lower()
                assert not text.startswith(("a part of", "the part of")), f"{file.relative_to(ROOT)}:{node.lineno}"
