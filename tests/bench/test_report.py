"""``grace report``: what is in the file, that it is safe and needs no network, and how a browser shows it."""

import contextlib
import html
import re
import shutil
import subprocess
import sys
import tempfile

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from grace.bench.report.figures import bars, figures, looks_of
from grace.bench.report.page import methods_looks, report_sections, write_report
from grace.errors import ConfigError
from tests.support.bench_results import KINDS, METHODS, kernels, pictures, results, step, train
from tests.support.command import grace_command
from tests.support.limits import HANGS

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome is installed")
QUIET = "--disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update"
NASTY = "<script>document.body.dataset.bad=1</script>\"'><img src=x onerror=alert(1)> $\\frac{1}{2}$ & \x00{title}"
FEW = ["none", "qsgd", "topk(ratio=0.01) | qsgd(levels=127)"]


def run(*args, code=0):
    """Run the command at 80 columns; returns (stdout, stderr)."""
    ended, out, err = grace_command("report", *map(str, args))
    assert ended == code, err
    return out, err


def small(kind, methods=FEW):
    """Results of a kind of few methods, in as few cases as all figures need."""
    cases = {"step": {"bandwidths": [1e8, 1e9], "ranks": [2, 4]}, "kernels": {"tensors": ["gaussian", "captured"]}}
    return results(kind, methods=methods, **cases.get(kind, {}))


def page(some, path):
    """The text of a report, and of the pictures in it."""
    text = write_report(path / "report.html", some).read_text()
    return text, pictures(text)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The report of results of all kinds."""
    return page([small(kind) for kind in KINDS], tmp_path_factory.mktemp("report"))


def test_the_command_writes_a_file_for_a_folder_and_a_file(tmp_path):
    (folder, _), (file, _) = (small(kind).save(tmp_path / kind) for kind in ("train", "kernels"))
    out = tmp_path / "new" / "page.html"
    said, err = run(folder.parent, file, "-o", out)
    assert err == ""
    assert re.fullmatch(rf"Wrote {re.escape(str(out))}\s\(\d+\s+kB\)\.\n", said)
    text = out.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert text.count("<img") == text.count("<figcaption>") >= 2
    assert all(html.escape(method) in text for method in FEW)
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]


def test_results_are_not_overwritten_by_their_report(tmp_path):
    file, _ = small("kernels").save(tmp_path)
    before = file.read_text()
    assert "is one of the results" in run(tmp_path, "-o", file, code=2)[1].replace("\n", " ")
    assert file.read_text() == before


@pytest.mark.ranks
def test_without_matplotlib_it_says_what_to_install(tmp_path):
    step(methods=["qsgd"]).save(tmp_path)
    hide = "import sys; sys.modules['matplotlib'] = None; import grace.cli.main; grace.cli.main.main()"
    done = subprocess.run(
        [sys.executable, "-c", hide, "report", tmp_path], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stderr == 'grace: matplotlib is not installed; install it with: pip install "grace-compress[bench]"\n'


def test_rows_that_cannot_be_shown_are_named(tmp_path):
    broken = step()
    del broken.rows[4]["step_ms"]
    broken.save(tmp_path / "run")
    assert "run is damaged, or of another kind (KeyError: 'step_ms')" in " ".join(
        run(tmp_path / "run", code=2)[1].split()
    )
    with pytest.raises(ConfigError, match="at least one"):
        write_report(tmp_path / "x.html", [])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write"):
        write_report(tmp_path / "file" / "x.html", [step(["qsgd"], [1e9], [2])])


def test_it_says_what_was_measured_where_and_how(whole, tmp_path):
    text = html.unescape(whole[0])
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["Compressors alone: cpu", "Step time: resnet50", "Training: digits"]
    for words in ("16 cores", "torch 2.13.0", "grace bench step", "2026-01-02T03:04:05Z"):
        assert words in text
    assert re.search(r"\d of 3 methods pay", text)
    assert "interrupted" not in text
    stopped = step(["qsgd"], [1e9], [2])
    stopped.complete = False
    assert "incomplete: interrupted" in page([stopped], tmp_path)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_every_figure_names_all_methods(kind, whole):
    drawn = [picture for picture in whole[1] if kind == "step" or "no communication" not in picture]
    for picture in drawn:
        words = " ".join(html.unescape(text) for text in re.findall(r">([^<>]+)</text>", picture))
        assert all(method in words for method in ("qsgd", "topk(0.01) | qsgd(127)"))


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_are_enough(kind, count):
    some = results(kind)
    some.rows = some.rows[:count]
    (section,) = report_sections([some])
    assert ("─" in section) == bool(count)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_unknown_values_are_dashes(kind, every):
    some = small(kind)
    kept = {"name", "kind", "method", "engine", "ranks", "bandwidth", "tensor", "optimizer"}
    for i, row in enumerate(some.rows[::every]):
        for key in row.keys() - kept:
            row[key] = [None, float("nan"), float("inf")][i % 3]
    some.settings = {}
    (section,) = report_sections([some])
    assert not re.search(r"\b(nan|inf|None)\b", re.sub(r'"data:[^"]*"', "", section))


def test_which_figures_there_are_depends_on_what_was_measured():
    def titles(some):
        return [figure.title for figure in figures(some, methods_looks([some]))]

    assert titles(step(FEW, bandwidths=[None], ranks=[2])) == ["Where the time of a step goes"]
    assert titles(small("step"))[1:] == ["Speedup against bandwidth", "Throughput against the number of ranks"]
    assert titles(small("train")) == ["Final accuracy against bytes and against speed", "Accuracy while training"]


def test_a_method_has_one_look_in_all_figures():
    looks = methods_looks([step(), train(), kernels()])
    assert len({tuple(look.items()) for name, look in looks.items() if name in METHODS}) == len(METHODS)
    assert all(looks[name]["color"] == "grey" for name in ("DDP", "DDP fp16 hook", "no communication"))
    assert looks_of(["qsgd", "none"])["none"]["color"] == "black"


def test_bars_are_as_long_as_what_was_measured_and_long_ones_are_cut():
    axes = Figure().subplots()
    bars(axes, "ms", {"a": [10, 5], "b": [90, 0]}, {"compute": "grey", "codec": "C1"}, 20)
    assert [(patch.get_x(), patch.get_width()) for patch in axes.patches] == [(0, 10), (0, 90), (10, 5), (90, 0)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a  15.0", "b  90.0"]
    assert axes.get_xlim() == (0, 20)


def test_names_that_are_alike_when_short_stay_whole():
    names = [f"topk(ratio=0.01, chunk={size}) | qsgd(levels=127, norm=max)" for size in (1024, 1025)]
    axes = Figure().subplots()
    bars(axes, "ms", {name: [1.0] for name in names})
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"{name}  1.00" for name in names]


def test_texts_of_files_stay_text(tmp_path):
    some = [kernels(FEW[:2], ["gaussian"]), step(FEW[:2], [None], [2]), train(FEW[:2])]  # in few figures
    for each in some:
        for row in each.rows[:3]:
            row.update({key: NASTY + value for key, value in row.items() if isinstance(value, str) and key != "kind"})
        each.command = each.when = NASTY
        each.machine = dict.fromkeys(each.machine, NASTY) | {"gpus": [NASTY], "memory_bytes": 1}
        each.versions = {NASTY: NASTY}
        each.settings |= {key: NASTY for key, value in each.settings.items() if isinstance(value, str)}
    text, drawn = page(some, tmp_path)
    assert "<script" not in text
    assert "<img src=x" not in text
    assert "\x00" not in text
    assert "{title}" in text
    assert not any("<script" in picture or "mathdefault" in picture for picture in drawn)


def test_nothing_is_loaded_from_elsewhere(whole):
    text, drawn = whole
    assert not re.search(r'@import|<link|<script|<iframe|<object|href=|\bsrc="(?!data:image/svg)', text)
    assert not re.search(r'href="(?!#)', "".join(drawn))


@browser
@pytest.mark.ranks
def test_a_browser_shows_it_without_errors_and_without_a_network(whole, tmp_path):
    path = tmp_path / "whole.html"
    path.write_text(whole[0])
    for _ in range(2):  # a browser that was killed for memory, or hangs, may do better the second time
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            contextlib.suppress(subprocess.TimeoutExpired),
        ):
            command = [BROWSER, "--headless", "--no-sandbox", *QUIET.split(), "--enable-logging=stderr"]
            command += [f"--user-data-dir={folder}", f"--screenshot={folder}/page.png", "--window-size=1280,8000"]
            done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=HANGS)
            if "written to file" in done.stderr:
                break
    assert "written to file" in done.stderr
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []


def test_names_with_brackets_are_shown_whole():
    some = step(["qsgd"], [1e9], [2])
    some.rows[-1]["name"] = "strategy auto(methods=[fp16])"
    assert "strategy auto(methods=[fp16])" in html.unescape(report_sections([some])[0])
