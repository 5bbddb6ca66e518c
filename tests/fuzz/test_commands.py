"""Command lines with anything in them: the commands that read do so or refuse, those that train are not begun."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from grace.cli.main import app
from grace.errors import GraceError
from tests.support.examples import examples
from tests.support.mutations import WORDS

READ = ["list", "describe", "strategy build", "strategy show", "strategy check", "bench compare"]
ODD = ["--help", "-", "--", "s.yaml", ".", "..", "/", "nan", "-1", "9" * 400, "a" * 5000, "json:loads", "mine:net"]
SPECS = ["topk(ratio=1e999)", "parallax(compressor=topk(ratio=2))", "qsgd(levels=" * 300]
WORD = st.sampled_from([*WORDS, *ODD, *SPECS]) | st.text(st.characters(exclude_characters="\0"), max_size=8)


def command(path: str) -> Any:
    found = typer.main.get_command(app)
    for word in path.split():
        found = found.commands[word]
    return found


def everything(group: Any, path: str = "") -> list[str]:
    """The paths of all commands."""
    if not hasattr(group, "commands"):
        return [path]
    return [each for word, inner in group.commands.items() for each in everything(inner, f"{path} {word}".strip())]


@st.composite
def lines(draw: Any, path: str) -> list[str]:
    """A command line with some of this command's own options."""
    options = [name for parameter in command(path).params for name in parameter.opts if name.startswith("-")]
    words = []
    for _ in range(draw(st.integers(0, 5))):
        words += [draw(st.sampled_from(options))] if options and draw(st.booleans()) else []
        words += [draw(WORD)]
    return words


@pytest.mark.parametrize("path", READ)
@examples(8)
@given(st.data())
def test_a_command_reads_or_refuses(path, data):
    words, before = data.draw(lines(path)), Path.cwd()
    with tempfile.TemporaryDirectory() as made:
        os.chdir(made)
        try:
            Path("s.yaml").write_text("version: 1\nvariables: {w: {shape: [2], sync: {type: allreduce}}}")
            ran = CliRunner().invoke(app, [*path.split(), *words])
        finally:
            os.chdir(before)
    if not isinstance(ran.exception, GraceError | OSError | SystemExit | None):
        raise ran.exception
    assert len(str(ran.exception)) < 8000
    assert "Traceback" not in ran.output


@pytest.mark.parametrize("path", sorted({*everything(typer.main.get_command(app))} - {*READ}))
@examples(8)
@given(st.data())
def test_the_words_of_a_command_that_trains_are_taken_or_refused(path, data):
    words, refused = data.draw(lines(path)), None
    try:
        command(path).make_context(path, list(words))
    except Exception as error:
        refused = error
    assert isinstance(refused, GraceError | None) or type(refused).__module__.startswith(("click", "typer"))
    assert len(str(refused)) < 8000 + sum(map(len, words))  # click repeats all words that are too many
