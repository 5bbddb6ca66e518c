"""``grace trace`` on folders that were damaged: it says where, and goes on with the rest."""

import json
import re
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from grace.cli.main import app
from tests.cli.test_trace import rank_trace
from tests.support.examples import examples
from tests.support.mutations import JSON, mutated


def lines_of(rank: int) -> list[dict]:
    """A file of two steps, whose facts come in several lines."""
    trace = rank_trace(rank, offset=10**18 + rank)
    facts = dict(trace.facts)
    tracks, variables = facts.pop("tracks"), facts.pop("variables")
    ours = {number: tracks.pop(number) for number in ("2", "3")}
    return [
        {"grace_trace": 1, **facts},
        {"tracks": tracks},
        {"variables": variables, "waits": "DDP"},
        {"tracks": ours},
        *trace.events,
    ]


RANKS = [[json.dumps(line) for line in lines_of(rank)] for rank in (0, 1)]


@st.composite
def damaged(draw):
    """Both files with some lines changed, as bytes."""
    files = [list(lines) for lines in RANKS]
    for _ in range(draw(st.integers(1, 3))):
        lines = files[draw(st.integers(0, 1))]
        at = draw(st.integers(0, len(lines) - 1))
        how = draw(st.sampled_from(["value", "value", "value", "line", "cut", "drop", "twice", "bytes"]))
        if how == "value":
            lines[at] = json.dumps(draw(mutated(json.loads(RANKS[0][min(at, len(RANKS[0]) - 1)]))))
        elif how == "line":
            lines[at] = json.dumps(draw(JSON))
        elif how == "cut":
            lines[at] = lines[at][: draw(st.integers(0, len(lines[at])))]
        elif how == "drop" and len(lines) > 1:
            del lines[at]
        elif how == "twice":
            lines.insert(draw(st.integers(0, len(lines))), lines[at])
        elif how == "bytes":
            lines[at] += draw(st.text(st.characters(codec="utf-8"), max_size=3))
    return ["\n".join(lines).encode("utf-8", "replace") + b"\n" for lines in files]


@examples(20)
@given(damaged())
def test_a_damaged_folder_is_read_as_far_as_it_goes(files):
    with tempfile.TemporaryDirectory() as made:
        for rank, raw in enumerate(files):
            Path(made, f"rank{rank}.jsonl").write_bytes(raw)
        ran = CliRunner().invoke(app, ["trace", made, "--out", f"{made}/trace.json"])
        if ran.exception is not None:
            assert type(ran.exception).__name__ == "ConfigError", repr(ran.exception)
            said = str(ran.exception)
            assert re.search(r"rank\d\.jsonl(, line \d+:| is empty)|no step was recorded|different runs", said), said
            return
        told = [line for line in ran.stderr.splitlines() if "left out" in line]
        assert all(re.search(r"rank\d\.jsonl(, line \d+|: another file| is empty)", line) for line in told), told
        json.loads(Path(made, "trace.json").read_text())


def test_the_rest_of_a_damaged_file_counts(tmp_path):
    lines = list(RANKS[1])
    lines[4] = lines[4].replace('"dur": 10000000', '"dur": "long"')
    lines[6] = lines[6][:20]
    (tmp_path / "rank0.jsonl").write_text("\n".join(RANKS[0]) + "\n")
    (tmp_path / "rank1.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "rank7.jsonl").write_text("nothing\n")
    ran = CliRunner().invoke(app, ["trace", str(tmp_path), "--out", str(tmp_path / "trace.json")])
    assert ran.exit_code == 0, ran.output
    assert "on average over 2 steps of 2 ranks" in ran.stdout
    assert f"left out {tmp_path / 'rank1.jsonl'}, line 5: dur must be a number from 1 on, not 'long'" in ran.stderr
    assert f"left out {tmp_path / 'rank1.jsonl'}, line 7: " in ran.stderr
    assert f"left out {tmp_path / 'rank7.jsonl'}, line 1: " in ran.stderr
