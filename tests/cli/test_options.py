"""Options that several commands have mean the same in all of them."""

from pathlib import Path

import pytest

import grace
from grace.bench.common.user_functions import load_function
from grace.cli.terminal import check_outputs, check_writable
from tests.support.command import grace_command

BENCHES = ["step", "train", "kernels", "all"]
WRITING = [*(f"bench {name}" for name in BENCHES), "demo", "report", "trace", "strategy build"]
HELPS = {
    "": ["│ list ", "│ describe ", "│ demo ", "│ bench "],
    "demo": ["--ranks", "--out"],
    "bench": [f"│ {command} " for command in (*BENCHES, "compare", "link")],
    "bench train": ["--task", "--methods", "--ranks", "--epochs", "--seeds", "--lr", "--out", "--quick", "--bandwidth"],
    "plan": [
        *("grace plan --model train:net -n 8 --bandwidth 1gbit --latency 50us -o s.yaml", "--calibration"),
        *("--quality", "--report", "--json", "grace launch -n 8 --strategy s.yaml", "3 % faster"),
    ],
    "calibrate": [
        *("torchrun --nproc-per-node 4 --no-python grace calibrate", "--quick", "--methods", "--show", "30 days"),
    ],
    "trace": ["ui.perfetto.dev", "chrome://tracing", "--steps", "--skip", "--top", "GRACE_TRACE"],
    "launch": ["--resources", "--engine", "--ranks", "--strategy", "--dry-run", "--port", "python train.py"],
}


@pytest.mark.parametrize("command", HELPS)
def test_help_names_options_and_how_to_start(command):
    code, out, _ = grace_command(*command.split(), "--help")
    assert code == 0
    assert [word for word in HELPS[command] if word not in " ".join(out.split())] == []
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("command", WRITING)
def test_what_is_written_goes_to_out_or_o(command):
    code, text, _ = grace_command(*command.split(), "--help")
    assert code == 0
    (line,) = [line for line in text.splitlines() if "--out " in line]
    assert " -o " in line


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("torch.nn.Linear(2, 2)", r"returns a model alone, .* grace bench needs its loss too"),
        ("7", r"must return \(model, loss\) or \(model, loss, samples\)"),
        ("(torch.nn.Linear(2, 2), 3)", "must return a loss that takes the model, not int"),
    ],
)
def test_bench_says_what_a_model_lacks(tmp_path, monkeypatch, made, message):
    pytest.importorskip("torch")
    from grace.bench.workloads.models import workload

    name = f"mine_{len(made)}"  # folders stay on the import path
    (tmp_path / f"{name}.py").write_text(f"import torch\n\ndef net():\n    return {made}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(grace.ConfigError, match=message):
        workload(f"{name}:net", rank=0)


def test_a_check_of_what_will_be_written_removes_nothing(tmp_path):
    (tmp_path / "empty").touch()
    check_writable(tmp_path / "empty")
    check_writable(tmp_path / "new" / "file")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    check_writable(tmp_path / "link")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "link", "new"]
    assert not list((tmp_path / "new").iterdir())
    with pytest.raises(grace.ConfigError, match="No such file or directory"):
        check_writable(tmp_path / "missing" / "file", make_folder=False)


def test_two_results_in_one_file_are_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "plan")
    check_outputs(tmp_path / "plan", None, tmp_path / "other")
    check_outputs(Path("/dev/null"), Path("/dev/null"))
    with pytest.raises(grace.ConfigError, match="plan is named for two results"):
        check_outputs(tmp_path / "plan", tmp_path / "link")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise RuntimeError('no data here')", "RuntimeError: no data here"),
        ("def net(:", "SyntaxError"),
        ("", "no fun"),
    ],
)
def test_what_a_users_module_raises_is_quoted(tmp_path, monkeypatch, text, why):
    name = f"broken_{len(text)}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(grace.ConfigError, match=why):
        load_function(f"{name}:net", "model", [])
