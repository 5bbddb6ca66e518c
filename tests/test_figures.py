"""Numbers of pages are those of the rows in benchmarks/results/; benchmarks/README.md says how they are marked."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import grace
from grace.bench.report.rows import identity

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
MARKER = re.compile(r"(?P<text>[^\n|]*)<!-- results: (?P<files>[^|\n]+)\|(?P<rows>[^|\n]*)\|(?P<columns>[^|\n]*)-->")
NUMBER = re.compile(r"-?(?:\d[\d,]*\.?\d*|\.\d+)")

Row = dict[str, Any]


def parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(";")]


def name_of(text: str) -> str:
    """The name of a row, of methods without what is their default anyway."""
    text = text.strip().strip("*").strip("`").replace("\\|", "|")
    try:
        return grace.make("compressor", text).spec
    except grace.GraceError:
        return text


def rows_of(file: str, conditions: list[str]) -> dict[str, Row]:
    """The rows of a file that meet all conditions, ``key=value`` each, by their names."""
    rows = json.loads((RESULTS / f"{file}.json").read_text())["rows"]
    for key, value in (condition.split("=", 1) for condition in conditions):
        rows = [row for row in rows if str(row[key]) == value or is_number(row[key], value)]
    found = {name_of(identity(row)): row for row in rows}
    assert len(found) == len(rows), f"{file}.json has several rows of one name where {conditions}"
    return found


def is_number(recorded: Any, text: str) -> bool:
    try:
        return recorded == float(text)
    except ValueError:
        return False


def value_of(rows: dict[str, Row], name: str, expression: str) -> float:
    """The value of ``key``, of ``key / NAME``, which is relative to that row's, or of ``key / number``."""
    key, *below = (part.strip() for part in expression.split("/"))
    value = rows[name][key]
    for divisor in below:
        value /= float(divisor) if NUMBER.fullmatch(divisor) else rows[name_of(divisor)][key]
    return value


def wrong_numbers(text: str) -> Iterator[str]:
    """Sentences about numbers of a page that its rows do not have, or not rounded like this."""
    for marker in MARKER.finditer(text):
        files, columns = parts(marker["files"]), parts(marker["columns"])
        conditions = [part for part in parts(marker["rows"]) if re.match(r"\w+=", part)]
        names = [part for part in parts(marker["rows"]) if part and part not in conditions]
        found = [rows_of(file, conditions) for file in files]
        if names:
            lines = [[names[0], marker["text"].rstrip()]]
        else:
            table = text[marker.end() :].lstrip("\n").split("\n\n")[0].splitlines()
            assert len(table) > 2, f"no table follows {marker[0]}"
            lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table[2:]]
        for name, *cells in lines:
            for cell, expression in zip(cells, columns, strict=False):
                numbers = NUMBER.findall(cell)
                if not expression or not numbers:
                    continue
                key, _, file = (part.strip() for part in expression.partition("@"))
                read = [found[files.index(file)]] if file else found
                numbers = numbers[-1:] if names else numbers[: len(read)]
                if len(numbers) == 1:
                    numbers *= len(read)  # the same in all
                for shown, rows in zip(numbers, read, strict=True):
                    value = value_of(rows, name_of(name), key)
                    digits = len(shown.partition(".")[2])
                    if abs(float(shown.replace(",", "")) - value) > 0.5001 * 10**-digits:
                        yield f"{name.strip()}: {expression} is {value:.{digits + 2}f}, not {shown}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if MARKER.search(page.read_text())], ids=lambda page: page.name
)
def test_marked_numbers_are_those_of_the_recorded_rows(page):
    assert list(wrong_numbers(page.read_text())) == []


TABLE = """
<!-- results: few_bits_steps_1; few_bits_steps_2 | bandwidth=1e9; ranks=2 | step_ms; step_ms / DDP;; codec_ms / 1000 -->
| method | ms | of DDP | | codec, s |
| --- | --- | --- | --- | --- |
| **`block(bits=4)`** | 334, 393 | .45, .51 | 1, 2 | .04, 0.05 |
| DDP | 749, 765 | 1 and 1.00 | 7 | |
"""


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("393", "394", "`block(bits=4)`**: step_ms is 392.63, not 394"),
        (".45,", ".446,", ""),
        (".45,", ".447,", "step_ms / DDP is 0.44632, not .447"),
        (".04,", ".05,", "codec_ms / 1000 is 0.0436, not .05"),
        ("1, 2", "3, 4", ""),  # a column without an expression is not read
    ],
)
def test_numbers_of_a_table_are_compared(right, wrong, says):
    assert list(wrong_numbers(TABLE)) == []
    found = "".join(wrong_numbers(TABLE.replace(right, wrong)))
    assert says in found
    assert bool(found) == bool(says)


def test_a_column_may_be_of_one_file():
    text = TABLE.replace("; step_ms / DDP;;", "; step_ms / DDP @ few_bits_steps_2;;").replace(".45, .51", ".51")
    assert list(wrong_numbers(text)) == []
    assert "".join(wrong_numbers(text.replace(" .51", " .45"))).endswith("is 0.5130, not .45")


@pytest.mark.parametrize(("shown", "good"), [("1.457", True), ("1.46", True), ("1.458", False)])
def test_a_number_in_a_sentence_is_compared(shown, good):
    text = f"Of 2 ranks the loss is {shown}<!-- results: few_bits_sgd | block(bits=4) | quality --> and 7 are 8."
    assert (list(wrong_numbers(text)) == []) == good


def test_a_marker_of_no_row_or_key_fails():
    for rows, column in (("block(bits=5)", "quality"), ("none", "qualities"), ("none; optimizer=adamw", "quality")):
        with pytest.raises(KeyError):
            list(wrong_numbers(f"1<!-- results: few_bits_sgd | {rows} | {column} -->"))
