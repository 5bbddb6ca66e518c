"""``python -m benchmarks.readme_figures``."""

import json
import re
import sys

import pytest

from benchmarks import readme_figures
from grace.bench.kernels import kernels_command
from grace.bench.link.emulation import possible
from grace.bench.step import step_command
from grace.bench.train import train_command
from tests.support.bench_results import METHODS, results
from tests.support.command import grace_command

LOSSES = readme_figures.LOSSES["chargpt-adamw"]


def told(monkeypatch, folder, *words):
    """The exit code of the program, which keeps rows and the picture in a folder."""
    where = ["--folder", str(folder), "--picture", str(folder / "picture.svg")]
    monkeypatch.setattr(sys, "argv", ["readme_figures", *words, *where])
    return readme_figures.main()


@pytest.mark.skipif(bool(possible()), reason=f"no link can be emulated here: {possible()}")
@pytest.mark.parametrize("smallest", [False, True])
def test_grace_bench_takes_the_command_of_every_part(monkeypatch, smallest):
    taken = []

    def run(settings, out, *_, **__):
        taken.append(out.name)
        raise SystemExit(0)

    for module in (step_command, train_command, kernels_command):
        monkeypatch.setattr(module, "run", run)
    found = readme_figures.parts(smallest)
    for part in found:
        program, *words = readme_figures.command(part, readme_figures.RESULTS / part.name)
        assert program == "grace"
        assert grace_command(*words) == (0, "", "")
    assert taken == [part.name for part in found]
    assert len(set(taken)) == len(taken)


def made(part, folder):
    """Write rows of the part's kind, as if they had been measured; those of the picture have its methods."""
    few = [method for method in METHODS if method in ("none", "topk(ratio=0.01)", "powersgd(rank=4)")]
    found = results(part.arguments[0], methods=few)
    for row in found.rows:
        if row.get("optimizer"):
            loss = {"none": 1.706, "topk(ratio=0.01)": 2.316}.get(row["method"], 1.854)
            seed = part.arguments[part.arguments.index("--seeds") + 1] == "1,2"  # other seeds have other losses
            run = {"seed": int(seed), "quality": loss + (0.02 if seed else -0.02), "bits_per_element": 1.0}
            row["runs"] = [row["runs"][0] | run]
    found.save(folder / part.name)
    (folder / part.name / "results.json").rename(folder / f"{part.name}.json")
    return 0


def test_it_goes_on_where_it_ended_and_draws_the_picture_when_its_rows_are_there(monkeypatch, tmp_path, capsys):
    measured = []

    def measure(part, folder):
        measured.append(part.name)
        return 3 if part.name == "steps-transformer-100mbit" and len(measured) == 2 else made(part, folder)

    monkeypatch.setattr(readme_figures, "measure", measure)
    assert told(monkeypatch, tmp_path, "--only", "steps") == 3  # the second part fails
    assert told(monkeypatch, tmp_path, "--only", "steps-transformer-1") == 0
    first, second = "steps-transformer-1gbit", "steps-transformer-100mbit"
    assert measured == [first, second, second, "steps-transformer-10gbit"]
    assert f"The picture needs {first}, {second}, {', '.join(LOSSES)}." in capsys.readouterr().out
    assert told(monkeypatch, tmp_path, "--only", LOSSES[1]) == 0
    assert measured[4:] == [*LOSSES]
    picture = (tmp_path / "picture.svg").read_text()
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", picture)
    assert [text for text in texts if text.endswith("bit/s")] == ["1 Gbit/s", "100 Mbit/s"]
    assert {"DDP", "DDP, torch's fp16 hook", "topk(ratio=0.01)", "powersgd(rank=4)"} <= set(texts)
    assert sum(text.endswith(" s, loss 1.71") for text in texts) == 2  # DDP, beside whose bars stands the loss of none
    assert sum(text.endswith(" s, loss 2.32") for text in texts) == 2
    assert told(monkeypatch, tmp_path, "--draw") == 0
    assert (tmp_path / "picture.svg").read_text() == picture
    assert len(measured) == 6
    rows = json.loads((tmp_path / "losses-chargpt-adamw.json").read_text())["rows"]
    (topk,) = (row for row in rows if row["method"] == "topk(ratio=0.01)")
    assert (topk["seeds"], topk["quality"], topk["spread"]) == (2, pytest.approx(2.316), pytest.approx(0.02))
    (start,) = {run["curve"][0][-1] for run in results("train", methods=["none"]).rows[0]["runs"]}
    assert topk["lacking"] == pytest.approx(100 * (2.316 - 1.706) / (start - 1.706))


def test_what_would_be_measured_is_listed(monkeypatch, tmp_path, capsys):
    assert told(monkeypatch, tmp_path, "--list") == 0
    said = capsys.readouterr().out
    assert "train-chargpt-adamw\n    grace bench train --task chargpt --optimizer adamw --seeds 1,2 --methods" in said
    assert list(tmp_path.iterdir()) == []
