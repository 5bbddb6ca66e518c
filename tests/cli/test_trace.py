"""``grace trace``: putting ranks' files together, the summary, and the command on real ranks."""

import gzip
import importlib.util
import io
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

import grace
from grace.cli.main import main
from grace.exchange.tracing.summary import summarize
from grace.exchange.tracing.timeline import RankTrace, load, merged, missing
from tests.support.command import grace_command, grace_program
from tests.support.drawing import THOROUGH
from tests.support.engine_pools import BIN

PROGRAMS = Path(__file__).parents[1] / "programs"
MS = 1_000_000
RARE = pytest.mark.skipif(not THOROUGH, reason="left to `make thorough`: another engine is traced")


# -- files and numbers ------------------------------------------------------------------------------------------------


def event(name, kind, start, stop, track=2, **args):
    """Return an event of a trace. Times are in milliseconds."""
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "ts": start * MS,
        "dur": (stop - start) * MS,
        "tid": track,
        "args": args,
    }


GROUP = {"bucket": 0, "variables": "w", "communicator": "allgather, topk, residual"}


def rank_trace(rank=0, size=2, offset=0):
    """Two steps of 10 ms: 2 forward, 1 backward, 1 compress, 1 update, 3 of 5 waited, 1 decode, 1 optimizer."""
    events = []
    for start in (0, 10):
        flight = {"name": "collective", "cat": "collective", "id": start, "tid": 1}
        events += [
            event("step", "step", start, start + 10, track=0, step=start // 10),
            event("compress", "codec", start + 3, start + 4, variable="w"),
            {"ph": "i", "name": "payload", "cat": "payload", "ts": (start + 4) * MS, "tid": 2, "args": {"w": 100}},
            {"ph": "b", "ts": (start + 3.5) * MS, **flight, "args": {**GROUP, "bytes": 108, "label": "grace.1"}},
            event("update", "codec", start + 4, start + 5, variable="w"),
            event("synchronize", "part", start + 5, start + 9),
            event("wait", "wait", start + 5, start + 8, **GROUP),
            {"ph": "e", "ts": (start + 8) * MS, **flight},
            event("decode", "codec", start + 8, start + 9, variable="w"),
            event("decode", "codec", start, start + 9, track=3, variable="late"),
            event("optimizer", "optimizer", start + 9, start + 10, track=0),
        ]
    facts = {"rank": rank, "size": size, "host": "a", "engine": "MPI", "offset": offset}
    described = {"shape": [30, 10], "method": "topk(ratio=0.1)"}
    tracks = {"0": "steps", "1": "collectives", "2": "training", "3": "grace exchanges"}
    return RankTrace({**facts, "tracks": tracks, "variables": {"w": described, "late": described}}, events)


def written(folder, *ranks):
    for rank in ranks:
        lines = [{"grace_trace": 1, **rank.facts}, *rank.events]
        path = folder / f"rank{rank.facts['rank']}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_summary_adds_up():
    summary = summarize([rank_trace(0), rank_trace(1)])
    assert (summary.ranks, summary.steps, summary.step) == (2, 2, 10)
    assert summary.parts == pytest.approx({"rest": 3, "codec": 3, "wait": 3, "optimizer": 1})
    assert summary.under_way == pytest.approx(4.5)
    late, w = summary.variables  # what a exchange_thread does costs the variable, and not the step
    assert (late.name, late.ms["decode"]) == ("late", pytest.approx(9))
    assert (w.calls, w.nbytes, w.shape) == (1, 100, (30, 10))
    assert w.ms == pytest.approx({"compensate": 0, "compress": 1, "update": 1, "decode": 1})
    (group,) = summary.buckets
    assert (group.collectives, group.nbytes) == (1, 108)
    assert (group.under_way, group.waited) == (pytest.approx(4.5), pytest.approx(3))


def test_where_others_wait_nobody_says_how_long():
    rank = rank_trace(size=1)
    rank.facts["waits"] = "DistributedDataParallel"
    summary = summarize([rank])
    assert summary.parts == pytest.approx({"rest": 6, "codec": 3, "optimizer": 1})
    assert summary.sentence().startswith(
        "60 % of a step is forward, backward, waiting in DistributedDataParallel and the rest; 30 % compressing"
    )


def test_ranks_are_processes_on_one_clock():
    trace = merged([rank_trace(0, offset=1000 * MS), rank_trace(1, offset=1001 * MS)])
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    steps = [(e["pid"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["name"] == "step"]
    assert steps == [(0, 0, 10_000), (0, 10_000, 10_000), (1, 1000, 10_000), (1, 11_000, 10_000)]
    ids = Counter(e["id"] for e in trace["traceEvents"] if "id" in e)
    assert set(ids.values()) == {2}  # no rank's collective has another's number
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = written(tmp_path, rank_trace(1)) / "rank1.jsonl"
    path.write_text(path.read_text()[:-20])
    (rank,) = load(tmp_path)
    assert len(rank.events) == len(rank_trace().events) - 1
    assert missing([rank]) == [0]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (None, "there is no folder"),
        ({}, "no rank has left a trace in"),
        ({"rank0.jsonl": ""}, "is empty"),
        ({"rank0.jsonl": "{}\n"}, "rank0.jsonl, line 1: the first line must say what rank it is of"),
        ({"rank0.jsonl": '{"grace_trace": 1, "rank": 0}\nno\n{}\n'}, "rank0.jsonl, line 1: size is missing"),
        ({"rank0.jsonl": '{"grace_trace": 2, "rank": 0}\n'}, "by another version of Grace"),
        (
            {f"rank{n}.jsonl": json.dumps({"grace_trace": 1, **rank_trace(n, n + 1).facts}) for n in (0, 1)},
            "files of different runs (rank 0 of 1, rank 1 of 2)",
        ),
    ],
)
def test_folders_that_hold_no_trace_are_refused(tmp_path, names, message):
    folder = tmp_path / "traces"
    if names is not None:
        folder.mkdir()
        for name, text in names.items():
            (folder / name).write_text(text)
    with pytest.raises(grace.ConfigError) as error:
        load(folder)
    assert message in str(error.value)


def test_a_trace_without_steps_is_refused():
    rank = rank_trace()
    rank.events = [event for event in rank.events if event["name"] != "step"]
    with pytest.raises(grace.ConfigError, match="no step was recorded"):
        summarize([rank])


@pytest.mark.parametrize("program", [["python", "nothere.py"], ["./nothere"]])
def test_a_program_that_is_not_there_is_refused_before_ranks_start(tmp_path, program):
    code, out, err = grace_command("trace", "-n", "2", "--engine", "torch", "--", *program, folder=tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith(f"grace: cannot start {program[-1]}: ")
    assert err.count("\n") == 1


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_a_folder_becomes_a_file_and_tables(tmp_path):
    written(tmp_path, rank_trace(0), rank_trace(2, size=3), rank_trace(0, size=3))
    out = grace_program("trace", str(tmp_path), "-o", "new/t.json.gz", "--top", "1", cwd=tmp_path)[0]
    trace = json.loads(gzip.decompress((tmp_path / "new/t.json.gz").read_bytes()))
    assert len(trace["otherData"]["ranks"]) == 2
    for line in ("1 more variables: 3.00 ms", "Rank 1 left no file in", "Wrote new/t.json.gz"):
        assert line in out
    assert "30 % of a step is" in out
    assert max(map(len, out.splitlines())) <= 80


def test_letters_that_the_terminal_lacks_are_escaped(tmp_path, monkeypatch):
    folder = tmp_path / "straße"
    folder.mkdir()
    written(folder, rank_trace(0))
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "argv", ["grace", "trace", "straße"])
    with pytest.raises(SystemExit) as ended:
        main()
    out.seek(0)
    assert not ended.value.code
    assert r"Rank 1 left no file in stra\xdfe." in out.read()


def test_the_recording_is_not_overwritten(tmp_path):
    written(tmp_path, rank_trace(0))
    before = (tmp_path / "rank0.jsonl").read_text()
    code, out, err = grace_command("trace", str(tmp_path), "-o", str(tmp_path / "rank0.jsonl"))
    assert (code, out) == (2, "")
    assert "is a file that is read, and would be overwritten" in err
    assert (tmp_path / "rank0.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "grace: give a folder that ranks have left their traces in, or after -- a program to run"),
        (["folder", "--", "python"], "grace: give a folder that ranks have left their traces in, or after --"),
        (["--"], "grace: write the program to start after --"),
        (["folder"], "grace: there is no folder folder"),
        (["folder", "--steps", "3"], "grace: --steps is for a program that is run, which comes after --"),
        (["-o", "/dev/null/t.json", "--", "python", "a.py"], "grace: cannot write /dev/null/t.json"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, args, message):
    code, out, err = grace_command("trace", *args, folder=tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


def need(engine):
    package = {"torch": "torch", "horovod": "horovod", "mpi": "mpi4py"}[engine]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def payload_of(out):
    """Return the traffic that the program printed; launchers write their own words between."""
    line = next(line for line in out.splitlines() if "PAYLOAD" in line)
    return json.loads(line[line.index("{") : line.rindex("}") + 1])


def check(path, out, steps):
    """The file has both ranks' steps, and the bytes that rank 0 has counted; the names are in the table."""
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ms"
    found = Counter((e["pid"], e["name"]) for e in trace["traceEvents"])
    payload = payload_of(out)
    for rank in range(2):
        assert found[rank, "step"] == steps
        in_one_pass = found[rank, "encode"] > 0  # where loops are compiled
        for phase in ("encode", "decode") if in_one_pass else ("compensate", "compress", "update", "decode"):
            assert found[rank, phase] == steps * len(payload)
        assert found[rank, "collective"] >= 2 * steps
    sent: Counter = Counter()
    for one in trace["traceEvents"]:
        if one["name"] == "payload" and one["pid"] == 0:
            sent.update(one["args"])
    assert sent == payload
    assert "Milliseconds per step" in out
    for name in payload:
        assert name in out
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("engine", ["torch", pytest.param("horovod", marks=RARE)])
def test_a_program_is_run_and_its_ranks_are_traced(tmp_path, engine):
    need(engine)
    program = [str(BIN / "python"), str(PROGRAMS / "traced.py"), "topk(ratio=0.1)"]
    out = grace_program("trace", "-n", "2", "--engine", engine, "--skip", "0", "--", *program, cwd=tmp_path)[0]
    found = check(tmp_path / "trace.json", out, steps=6)
    for rank in range(2):
        assert found[rank, "optimizer"] == found[rank, "backward"] == 6


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(("engine", "how"), [("horovod", "graph"), pytest.param("mpi", "eager", marks=RARE)])
def test_keras_is_traced(tmp_path, engine, how):
    need(engine)
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    program = [str(BIN / "python"), str(PROGRAMS / "traced_keras.py"), how]
    out = grace_program("trace", "-n", "2", "--engine", engine, "--skip", "0", "--", *program, cwd=tmp_path)[0]
    check(tmp_path / "trace.json", out, steps=6)
    assert ("waiting in TensorFlow's graph" in " ".join(out.split())) == (engine == "horovod")


@pytest.mark.ranks
@pytest.mark.parametrize("engine", [pytest.param("torch", marks=RARE), "mpi"])
def test_what_a_program_that_fails_has_recorded_is_kept(tmp_path, engine):
    need(engine)
    program = [str(BIN / "python"), str(PROGRAMS / "traced.py"), "topk(ratio=0.1)", "1000", "7"]
    args = ["-n", "2", "--engine", engine, "--steps", "50", "--skip", "2", "--", *program]
    out, err = grace_program("trace", *args, cwd=tmp_path, code=1)
    assert "grace trace: rank 1 ended with exit code 1" in err
    assert "on average over 5 steps of 2 ranks" in out
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert Counter(e["pid"] for e in trace["traceEvents"] if e["name"] == "step") == {0: 5, 1: 5}


@pytest.mark.ranks
def test_a_program_that_leaves_no_trace_is_told_so(tmp_path):
    (tmp_path / "idle.py").write_text("")
    args = ["--engine", "torch", "--", str(BIN / "python"), "idle.py"]
    err = grace_program("trace", *args, cwd=tmp_path, code=2)[1]
    assert err.splitlines()[-1].startswith("grace: the program left no trace: it made no optimizer")
    assert not (tmp_path / "trace.json").exists()
