"""``grace report`` and ``grace bench compare`` on results with wrong values: a refusal, or a page."""

import dataclasses
import json
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from grace.cli.main import app
from grace.errors import GraceError
from tests.support import bench_results as samples
from tests.support.examples import examples
from tests.support.mutations import mutated

DOCUMENTS = {
    kind: json.loads(json.dumps({"grace_bench": 1, **dataclasses.asdict(samples.results(kind))}))
    for kind in ("step", "train", "kernels")
}
for _document in DOCUMENTS.values():
    del _document["rows"][3:]


def runs(document, command):
    """Run a command on results with this content; what it says, and whether it did."""
    with tempfile.TemporaryDirectory() as made:
        path, good = Path(made, "results.json"), Path(made, "good.json")
        path.write_text(json.dumps(document), encoding="utf-8", errors="replace")
        kind = document.get("kind") if isinstance(document, dict) else None
        good.write_text(json.dumps(DOCUMENTS[kind if isinstance(kind, str) and kind in DOCUMENTS else "step"]))
        out = [f"--out={made}/r.html"] if command == ["report"] else [str(good)]
        ran = CliRunner().invoke(app, [*command, str(path), *out])
        if ran.exception is not None and not isinstance(ran.exception, SystemExit):
            assert isinstance(ran.exception, GraceError), repr(ran.exception)
            return str(ran.exception)
        return ""


@pytest.mark.parametrize("kind", DOCUMENTS)
@examples(4)
@given(st.data())
def test_wrong_values_are_refused_or_shown(kind, data):
    document = data.draw(mutated(DOCUMENTS[kind]))
    command = data.draw(st.sampled_from([["report"], *[["bench", "compare"]] * 3]))  # a page takes a second
    assert len(runs(document, command)) < 3000


@pytest.mark.parametrize(
    ("kind", "place", "value"),
    [
        ("step", ("settings", "verdict"), [1]),
        ("train", ("rows", 0, "curve", 0), [0.5]),
        ("train", ("rows", 0, "curve"), 1),
        ("kernels", ("machine", "gpus"), 3),
    ],
)
def test_a_file_with_a_wrong_value_is_named(kind, place, value):
    document = json.loads(json.dumps(DOCUMENTS[kind]))
    owner = document
    for key in place[:-1]:
        owner = owner[key]
    owner[place[-1]] = value
    assert re.search(
        r"results\.json is damaged, or of another kind \((TypeError|AttributeError|IndexError|ValueError): ",
        runs(document, ["report"]),
    )


def test_a_machine_of_unknown_gpus_is_shown():
    document = json.loads(json.dumps(DOCUMENTS["kernels"]))
    document["machine"]["gpus"] = None
    assert runs(document, ["report"]) == ""
