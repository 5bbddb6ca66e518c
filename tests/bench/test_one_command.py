"""tools/on_device.py: in Triton's interpreter on the CPU, so that on a GPU only the device is new."""

import doctest
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.limits import HANGS, gone, until
from tools.device import events, tables
from tools.device.driver import Run
from tools.device.parts import PARTS, Part

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, str(ROOT / "tools/on_device.py")]
PARTS_OF_TESTS = "tests.programs.device_parts"


def started(*options, program=COMMAND, **environment):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([*program, *options], env=env, capture_output=True, text=True, timeout=HANGS, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.ranks
def test_every_part_finds_something_out_in_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    pytest.importorskip("transformers")
    program = [sys.executable, "-m", "tests.programs.device_here"]  # parts' own processes are tried below
    given = ["--interpret", "--methods", "fp16", "--sizes", "1024", "--out", str(tmp_path)]
    done = started(*given, program=program, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    report, page = json.loads((tmp_path / "on_device.json").read_text()), (tmp_path / "on_device.md").read_text()
    assert done.returncode == 0, done.stdout + page
    assert report["ended"] == "whole"
    assert [part["name"] for part in report["parts"]] == [part.name for part in PARTS]
    for part in report["parts"]:
        assert part["state"] == "done", part
        assert {item["state"] for item in part["items"]} <= {"done", "skipped"}, part
        assert tables.done(part), part
        assert f"\n{part['name']}: " in f"\n{done.stdout}"
    found = {part["name"]: tables.done(part) for part in report["parts"]}
    (row,) = found["bandwidth"]
    assert row["at_once"]
    assert row["bits"] == pytest.approx(16, abs=0.1)
    assert all(row[f"{part}_fraction"] > 0 for part in tables.PARTS if part != "decode")  # a difference of two
    assert [row["equal"] for row in found["captured"]] == [True, True]
    ranks = [(row["model"], row["ranks"], [one["name"] for one in row["rows"]]) for row in found["steps"]]
    assert [(model, n) for model, n, _ in ranks] == [("gpt2", 1), ("resnet50", 2)]
    assert all({"DDP", "DDP fp16 hook", "fp16"} <= set(names) for _, n, names in ranks if n == 2)
    states = {name: state for name, (state, _) in report["goals"].items()}
    assert [states.pop(name) for name in list(states) if "copy" in name] == ["missed"]  # by far, in an interpreter
    assert set(states.values()) == {"met"}
    for title in ("Whole steps of", "Replays of captured", "PowerSGD's exchange", "| goal |"):
        assert title in page


@pytest.mark.ranks
def test_what_fails_hangs_or_crashes_is_written_down_and_the_rest_goes_on(tmp_path):
    def part(name, limit=HANGS):
        return Part(name, f"what {name}", HANGS, limit, 1, f"{PARTS_OF_TESTS}:{name}")

    shown, names = io.StringIO(), ["fails", "crashes", "never_starts", "hangs", "well"]
    parts = [part(name, 2.0 if name == "hangs" else HANGS) for name in names]
    assert Run(parts, {}, tmp_path, Console(file=shown, width=200))() == 1
    report, page = json.loads((tmp_path / "on_device.json").read_text()), (tmp_path / "on_device.md").read_text()
    found = {part["name"]: {item["item"]: item for item in part["items"]} for part in report["parts"]}
    states = {name: [item["state"] for item in items.values()] for name, items in found.items()}
    some = {name: ["failed", "done"] for name in ("fails", "crashes", "hangs")}
    assert states == {**some, "never_starts": ["failed"], "well": ["done", "done"]}
    assert "ArithmeticError: it does not add up" in found["fails"]["raises"]["error"]
    assert found["fails"]["raises"]["begun"]
    for words in ("Segmentation fault", "in crashes", "its process was ended by SIGSEGV"):
        assert words in found["crashes"]["crashes"]["error"]
    for words in ("in hangs", "it did not end within 2 s"):
        assert words in found["hangs"]["hangs"]["error"]
    assert "nothing of that name" in found["never_starts"]["the start of never_starts"]["error"]
    assert found["well"]["two"]["number"] == 3
    for words in ("| fails | done | 1 of 2 done, 1 failed |", "### hangs failed: hangs", "it does not add up"):
        assert words in page
    assert "well: 2 of 2 done" in shown.getvalue()


@pytest.mark.ranks
def test_a_part_that_takes_too_long_is_ended_and_the_next_begins(tmp_path):
    parts = [Part("endless", "", 0.0, HANGS, 1, f"{PARTS_OF_TESTS}:endless")]
    parts.append(Part("well", "", HANGS, HANGS, 2, f"{PARTS_OF_TESTS}:well"))  # whose items two processes share
    run = Run(parts, {}, tmp_path, Console(file=io.StringIO()))
    assert run() == 1
    assert [part["state"] for part in run.report["parts"]] == ["out of time", "done"]
    assert sorted(item["item"] for item in run.report["parts"][1]["items"]) == ["one", "two"]


@pytest.mark.ranks
def test_a_run_that_is_cut_off_tells_what_it_has_and_leaves_no_process(tmp_path):
    program = [sys.executable, "-m", PARTS_OF_TESTS, str(tmp_path)]
    running = subprocess.Popen(program, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        pid = until(lambda: next((item["pid"] for item in items(tmp_path) if item["item"] == "ends"), None))
        page = tmp_path / "on_device.md"  # is written again now and then
        until(lambda: "| endless | under way | 1 of 2 done |" in page.read_text())
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    assert "not to its end" in page.read_text()
    assert json.loads((tmp_path / "on_device.json").read_text())["ended"] == "cut off"
    until(lambda: gone(pid))


def items(folder):
    file = folder / "on_device.json"
    return json.loads(file.read_text())["parts"][0]["items"] if file.exists() else []


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--interpret", "--only", "bits,speed"], "--only speed: there is no such part; parts are versions, bits"),
        (["--interpret", "--methods", "topq"], "topq"),
        (["--interpret", "--sizes", "many"], "a size is a number of elements"),
        (["--interpret", "--patience", "none"], "could not convert string to float: 'none'"),
        (["--interpret", "--out", "/dev/null/new"], "--out /dev/null/new: "),
        ([], "torch sees no GPU here"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path, options, says):
    import torch

    if not options and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = started("--out", str(tmp_path / "new"), *options)
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.ranks
def test_its_help_names_the_parts_whose_seconds_are_less_than_nine_minutes():
    shown = started("--help").stdout
    assert all(f"{part.name} " in shown and part.about in shown for part in PARTS)
    assert sum(part.seconds for part in PARTS) < 540


def test_its_examples_are_true():
    assert [doctest.testmod(module).failed for module in (tables, events)] == [0, 0]
