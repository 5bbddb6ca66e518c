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

from grace.bench.common.results import KINDS
from grace.bench.common.text import short
from grace.bench.report.figures import bars, style
from grace.bench.report.figures.step_figures import figures as step_figures
from grace.bench.report.figures.train_figures import figures as train_figures
from grace.bench.report.page import methods_looks, page, write_report
from grace.bench.report.plan_page import CANDIDATES, VARIABLES
from grace.bench.report.report_tables import KERNELS, step_columns, train_columns
from grace.errors import ConfigError
from tests.support.bench_results import METHODS, kernels, results, step, train
from tests.support.command import grace_command
from tests.support.limits import HANGS

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome is installed")
QUIET = "--disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update"
NASTY = "<script>document.body.dataset.bad=1</script>\"'><img src=x onerror=alert(1)> $\\frac{1}{2}$ & \x00${title}"

WRAPPER = """<!DOCTYPE html><html><body><iframe src="{page}" width="{width}" height="2000" style="border: 0"></iframe>
<script>window.onmessage = event => document.body.append(event.data)</script></body></html>"""
"""A page in a frame: a window of Chromium is never narrower than 500 pixels."""

PROBE = """<script>
const table = document.querySelector("table");
const column = [...table.tHead.rows[0].cells].findIndex(cell => cell.textContent.startsWith("step"));
const shown = () => column < 0 ? [] : [...table.tBodies[0].rows].map(row => row.cells[column].textContent);
const click = () => column < 0 || table.tHead.rows[0].cells[column].querySelector("button").click();
click(); const up = shown(); click(); const down = shown();
const words = [...document.querySelectorAll("svg")].flatMap(svg => {
  const box = svg.getBoundingClientRect();
  return [...svg.querySelectorAll("text")].filter(text => {
    const own = text.getBoundingClientRect();
    return own.left < box.left - 2 || own.right > box.right + 2 || own.top < box.top - 2 || own.bottom > box.bottom + 2;
  }).map(text => text.textContent);
});
const lines = word => new Set([...word.getClientRects()].map(box => Math.round(box.top))).size;
const boxes = [...document.querySelectorAll("h2, h3, h4, th, td, dt, .caption, .keys, .verdict")];
const broken = () => boxes.flatMap(box => {
  const texts = document.createTreeWalker(box, NodeFilter.SHOW_TEXT), found = [];
  while (texts.nextNode()) for (const word of texts.currentNode.data.matchAll(/[^\\s\\/-]+/g)) {
    const range = document.createRange();
    range.setStart(texts.currentNode, word.index);
    range.setEnd(texts.currentNode, word.index + word[0].length);
    if (lines(range) > 1) found.push(word[0]);
  }
  return found;
});
const smallest = () => Math.min(...[...document.querySelectorAll("svg text")].map(text => {
  const svg = text.closest("svg");
  return parseFloat(getComputedStyle(text).fontSize) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
}));
const give = text => parent === window ? document.body.append(text) : parent.postMessage(text, "*");
window.onload = () => give(JSON.stringify({
  broken: broken(), smallest: smallest(),
  loads: performance.getEntriesByType("resource").length, scripts: document.scripts.length, up, down, words,
  images: document.images.length, bad: "bad" in document.body.dataset, svgs: document.querySelectorAll("svg").length,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  hidden: Math.max(...[...document.querySelectorAll(".scroll")].map(box => box.scrollWidth - box.clientWidth)),
  card: getComputedStyle(document.querySelector(".panel")).backgroundColor,
  ink: getComputedStyle(document.querySelector(".panel svg text")).fill,
}).replace(/^/, "FOUND:") + ":END");
</script>"""


def run(*args, code=0):
    """Run the command at 80 columns; returns (stdout, stderr)."""
    ended, out, err = grace_command("report", *map(str, args))
    assert ended == code, err
    return out, err


def browse(path, *flags, width=1280):
    """Show a file in a browser; returns its document, and what the console said."""
    for _ in range(2):  # a browser that was killed for memory, or hangs, may do better the second time
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            contextlib.suppress(subprocess.TimeoutExpired),
        ):
            command = [
                BROWSER,
                "--headless",
                "--no-sandbox",
                *QUIET.split(),
                "--disable-sync",
                "--enable-logging=stderr",
            ]
            command += [f"--user-data-dir={folder}", f"--window-size={width},2000", *flags, "--dump-dom", path.as_uri()]
            done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
            if "</html>" in done.stdout:
                return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    pytest.fail(f"the browser showed nothing: {done.stderr[-2000:]}")


def probed(path, text, *flags, width=1280):
    """What the probe finds in a page, with the console's lines."""
    import json

    path.write_text(text.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    if width < 500:
        frame = path.with_suffix(".frame.html")
        frame.write_text(WRAPPER.format(page=path.as_uri(), width=width))
        path, flags = frame, (*flags, "--virtual-time-budget=5000")
    shown, said = browse(path, *flags, width=width)
    found = re.findall(r"FOUND:(.*?):END", shown, re.DOTALL)
    return json.loads(html.unescape(found[-1])), said


def small(kind, methods):
    """Results of a kind of few methods, in as few cases as all figures need."""
    cases = {"step": {"bandwidths": [1e8, 1e9], "ranks": [2, 4]}, "kernels": {"tensors": ["gaussian", "captured"]}}
    return results(kind, methods=methods, **cases.get(kind, {}))


@pytest.fixture(scope="module")
def whole():
    """The page of results of all kinds."""
    return page([step(), train(), kernels()])


# -- the command ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_writes_a_file_for_a_folder_or_a_file(kind, tmp_path):
    few = ["none", "qsgd", "topk(ratio=0.01) | qsgd(levels=127)"]
    file, _ = small(kind, few).save(tmp_path / "run")
    out = tmp_path / "new" / "page.html"
    said, err = run(file if kind == "step" else file.parent, "-o", out)
    assert err == ""
    assert re.fullmatch(rf"Wrote {re.escape(str(out))} \(\d+\nkB\)\.\n|Wrote .* \(\d+ kB\)\.\n", said)
    text = out.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert text.count("<svg") == text.count('role="img"') >= 2
    assert all(html.escape(method) in text for method in few)
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]


def test_several_results_become_sections_of_one_small_file(whole):
    assert re.findall(r"<h2>(.*?)</h2>", whole) == ["Step time: resnet50", "Training: digits", "Compressors alone: cpu"]
    assert len(whole) < 500_000


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "cannot be read"), ("{", "is not JSON"), ('{"grace_bench": 1, "rows": 3}', "is damaged")],
)
def test_files_that_are_no_results_are_named(tmp_path, text, says):
    path = tmp_path / "results.json"
    if text is not None:
        path.write_text(text)
    out, err = run(path, "-o", tmp_path / "report.html", code=2)
    assert out == ""
    assert says in err
    assert str(path) in err
    assert "Traceback" not in err
    assert not (tmp_path / "report.html").exists()


@pytest.mark.ranks
def test_without_matplotlib_it_says_what_to_install(tmp_path):
    step(methods=["qsgd"]).save(tmp_path)
    hide = "import sys; sys.modules['matplotlib'] = None; import grace.cli.main; grace.cli.main.main()"
    done = subprocess.run(
        [sys.executable, "-c", hide, "report", tmp_path], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stderr == 'grace: matplotlib is not installed; install it with: pip install "grace-compress[bench]"\n'


def test_rows_without_what_identifies_them_are_named(tmp_path):
    broken = step()
    del broken.rows[4]["bandwidth"]
    with pytest.raises(ConfigError, match="row 5 of the step results has no bandwidth"):
        write_report(tmp_path / "x.html", [broken])
    with pytest.raises(ConfigError, match="at least one"):
        write_report(tmp_path / "x.html", [])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write"):
        write_report(tmp_path / "file" / "x.html", [step(["qsgd"], [1e9], [2])])


# -- what is in it -------------------------------------------------------------------------------------------


def test_it_says_what_was_measured_where_and_how(whole):
    head = html.unescape(whole[: whole.index("Where the time")])
    for text in ("12 of 13 methods pay", "16 cores", "torch 2.13.0", "grace bench step", "2026-01-02 03:04:05 UTC"):
        assert text in head
    assert head.index("12 of 13 methods pay") < head.index("16 cores")  # the verdict comes first
    assert "Incomplete" not in whole
    stopped = step(["qsgd"], [1e9], [2])
    stopped.complete = False
    assert "Incomplete: interrupted" in page([stopped])


def test_every_figure_has_a_caption_and_words_for_those_who_cannot_see_it(whole):
    assert whole.count("<figure>") == whole.count("<figcaption") >= 7
    spoken = re.findall(r'<svg[^>]*aria-label="([^"]+)"', whole)
    assert len(spoken) == whole.count("<svg")
    assert any("qsgd 359 ms" in text for text in spoken)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_are_enough(kind, count):
    some = results(kind)
    some.rows = some.rows[:count]
    assert ("<table>" in page([some])) == bool(count)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_unknown_values_are_dashes(kind, every):
    some = small(kind, list(METHODS)[:5])
    kept = {"name", "kind", "method", "engine", "ranks", "bandwidth", "tensor"}
    for i, row in enumerate(some.rows[::every]):
        for key in row.keys() - kept:
            row[key] = [None, float("nan"), float("inf")][i % 3]
    some.settings = {}
    shown = page([some]).partition("<main>")[2].partition("</main>")[0]
    assert not re.search(r"\b(nan|inf|None)\b", shown)
    assert ("\u2013</td>" in shown) == (every == 2)  # a column without any value is left out


def test_one_color_for_each_method_in_all_figures_and_tables(whole):
    all_looks = methods_looks([step(), train(), kernels()])
    assert len(set(all_looks.values())) == len(all_looks)
    classes = dict(re.findall(r"\.(k\d+)\{background:(.*?)\}", whole))
    seen = {}
    for name, text in re.findall(r'<td class="text"><b class="(k\d+)"></b>(.*?)</td>', whole):
        seen.setdefault(html.unescape(text), set()).add(classes[name])
    assert set(seen) == set(all_looks)
    assert seen == {name: {style.themed(look.color)} for name, look in all_looks.items()}
    assert all(all_looks[name].color in style.GREYS for name in ("DDP", "DDP fp16 hook", "no communication"))
    only = page([train(methods=["none", "qsgd"])])
    (used,) = {color for color in map(style.themed, style.PALETTE) if f"fill: {color.lower()}" in only}
    assert used == style.themed(all_looks["cast"].color)  # the first that is not none


def test_bars_are_as_long_as_what_was_measured():
    look = style.Look("#123456")
    rows = [
        bars.Bar("a", [(10, "rest"), (5, "full"), (1, "half")], "16", look),
        bars.Bar("b", [(90, "full")], "90", look),
    ]
    axes = bars.horizontal(rows, "ms", [("plain", 12, "--")]).axes[0]
    assert [(patch.get_x(), patch.get_width()) for patch in axes.patches] == [(0, 10), (10, 5), (15, 1), (0, 90)]
    assert axes.get_xlim()[1] > 90
    cut = bars.horizontal(rows, "ms", clip=20).axes[0]
    assert cut.patches[-1].get_width() == pytest.approx(20.4) == cut.get_xlim()[1]


def test_figures_and_tables_scroll_where_they_do_not_fit(whole):
    drawings = re.findall(r'<div class="drawing"><svg viewBox="0 0 (\d+) \d+" class="(k\d+)"', whole)
    assert len(drawings) == whole.count("<svg")
    for width, name in drawings:
        assert f".{name}{{min-width: {style.SMALLEST * int(width):.0f}px}}" in whole
    assert len(re.findall(r'<div class="scroll"[^>]*><table>', whole)) == whole.count("<table>") == 3
    assert re.search(r"^\.drawing \{ overflow-x: auto;", whole, re.MULTILINE)
    assert re.search(r"^\.scroll \{ overflow: auto;", whole, re.MULTILINE)
    assert re.findall(r"^t[hd]\b.*anywhere", whole, re.MULTILINE) == []  # it would break words of a narrow column


def test_labels_and_headings_differ():
    names = [f"topk(ratio=0.01, chunk={size}) | qsgd(levels=127, norm=max)" for size in (1024, 1025)]
    assert len({short(name) for name in names}) == 1
    look = style.Look("#123456")
    axes = bars.horizontal([bars.Bar(name, [(1, "full")], "1", look) for name in names], "ms").axes[0]
    assert len({label.get_text() for label in axes.get_yticklabels()}) == 2
    for columns in (step_columns([]), train_columns({"optimizers": ["sgd", "adamw"]}), KERNELS, CANDIDATES, VARIABLES):
        titles = [column.title for column in columns]
        assert len(set(titles)) == len(titles)
    few = ["none", "qsgd"]
    twice = page([step(few, [1e9], [2]), step(few, [1e8], [2])])
    assert re.findall(r"<h2>(.*?)</h2>", twice) == ["Step time: resnet50 (1)", "Step time: resnet50 (2)"]
    for spoken in (r'<div class="scroll"[^>]*aria-label="([^"]+)"', r'<a href="#[^>]*>([^<]+)<'):
        assert len(set(re.findall(spoken, twice))) == 2


@pytest.mark.parametrize("kind", ["kernels", "step"])
def test_one_method_far_from_the_others_does_not_stretch_the_axis(kind):
    some = small(kind, ["none", "cast", "natural", "qsgd"])
    key = {"kernels": "encode_copies", "step": "step_ms"}[kind]
    some.rows[-1][key] *= 1000
    if kind == "step":
        some.rows[-1]["kind"] = "baseline"  # one that is slow
    shown = page([some])
    assert "cut where a gap is" in " ".join(shown.split())
    bars = next(figure for figure in shown.split("<figure>") if "Bars of the time" in figure)
    panel = bars.split("<svg")[-1]
    ticks = [float(text.replace(",", "")) for text in re.findall(r">([\d,.]+)</text>", panel)]
    assert sorted(ticks)[-2] < 0.1 * max(ticks)  # the number at the end of its bar is far beyond the axis


def test_one_thread_is_no_plural():
    one, several = (kernels(["none"], ["gaussian"]) for _ in range(2))
    one.settings["threads"], several.settings["threads"] = 1, 2
    assert "1 thread," in page([one])
    assert "2 threads," in page([several])


def test_every_panel_names_all_methods(whole):
    for drawing in re.findall(r"<svg.*?</svg>", whole, re.DOTALL):
        words = {html.unescape(text).removesuffix(" (exact)") for text in re.findall(r">([^<>]+)</text>", drawing)}
        assert {short(method) for method in METHODS} <= words


def test_which_figures_there_are_depends_on_what_was_measured():
    few = ["qsgd", "topk(ratio=0.01)", "randomk(ratio=0.01)"]
    looks = methods_looks([step(few)])
    one = step(few, bandwidths=[None], ranks=[2])
    assert [figure.title for figure in step_figures(one.rows, looks, "s")] == ["Where the time of a step goes"]
    titles = [figure.title for figure in step_figures(small("step", few).rows, looks, "s")]
    assert titles[1:] == ["Speedup against bandwidth", "Throughput against the number of ranks"]
    some = train(few)
    *_, target = train_figures(some.rows, some.settings, looks, "t")
    assert "randomk(ratio=0.01) not reached (0 of 3 seeds)" in target.panels[0].about
    assert "relative to none" not in page([some])  # which was not trained


# -- safety --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nasty():
    """A page whose every text tries to be more than text."""
    methods = list(METHODS)[:4]
    some = [step(methods, [1e9], [2]), train(methods), kernels(methods, ["gaussian"])]
    for each in some:
        for row in each.rows[:3]:
            row.update({key: NASTY + value for key, value in row.items() if isinstance(value, str) and key != "kind"})
        each.command = each.when = NASTY
        each.machine = dict.fromkeys(each.machine, NASTY) | {"gpus": [NASTY]}
        each.versions = {NASTY: NASTY}
        each.settings |= {key: NASTY for key, value in each.settings.items() if isinstance(value, str)}
        each.settings["verdict"] = {NASTY: NASTY}
    return page(some)


def test_texts_of_files_stay_text(nasty):
    assert nasty.count("<script") == nasty.count("</script>") == 1
    assert "<img" not in nasty
    assert "\x00" not in nasty
    assert "${title}" in nasty


def test_nothing_is_loaded_from_elsewhere(whole):
    assert not re.search(r"https?://|@import|<link|<img|<iframe|<object|\bsrc=", whole)
    assert re.findall(r"url\((?!#)", whole) == []
    assert re.findall(r'href="(?!#)', whole) == []
    ids = re.findall(r'\bid="([^"]+)"', whole)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(|href=")#([\w-]+)', whole)) <= set(ids)


# -- in a browser --------------------------------------------------------------------------------------------


@browser
@pytest.mark.ranks
def test_a_browser_shows_it_without_errors_and_without_a_network(whole, tmp_path):
    found, said = probed(tmp_path / "whole.html", whole)
    assert said == []
    assert (found["loads"], found["images"]) == (0, 0)
    assert found["svgs"] == whole.count("<svg")
    assert found["overflow"] <= 0
    assert found["hidden"] <= 0  # no table is cut
    assert found["words"] == []  # no text leaves its figure
    assert found["broken"] == []
    assert found["smallest"] >= 11
    numbers = [float(text.replace(",", "")) for text in found["up"]]
    assert numbers == sorted(numbers)
    assert [float(text.replace(",", "")) for text in found["down"]] == sorted(numbers, reverse=True)
    assert (found["card"], found["ink"]) == ("rgb(255, 255, 255)", "rgb(89, 99, 110)")


@browser
@pytest.mark.ranks
def test_a_phone_in_the_dark_shows_it_too(whole, tmp_path):
    found, said = probed(tmp_path / "whole.html", whole, "--blink-settings=preferredColorScheme=0", width=390)
    assert said == []
    assert found["overflow"] <= 0
    assert found["hidden"] > 0  # tables scroll
    assert found["broken"] == []
    assert found["smallest"] >= 9.3  # pixels of the smallest letters of figures, which scroll
    assert (found["card"], found["ink"]) == ("rgb(23, 27, 33)", "rgb(154, 164, 175)")


@browser
@pytest.mark.ranks
def test_a_browser_runs_nothing_of_the_files_texts(nasty, tmp_path):
    found, said = probed(tmp_path / "nasty.html", nasty)
    assert said == []
    assert (found["bad"], found["images"], found["scripts"]) == (False, 0, 2)  # the page's own and the probe


@browser
@pytest.mark.ranks
def test_errors_and_loads_of_a_page_would_be_noticed(tmp_path):
    rest = '<div class="panel"><svg><text>x</text></svg></div><table><thead><tr><th>x</th></tr></thead></table>'
    bad = f'<!DOCTYPE html><html><body><main>{rest}</main><img src="http://127.0.0.1:1/x.png">'
    bad += "<script>nothing.there</script></body></html>"
    found, said = probed(tmp_path / "bad.html", bad)
    assert any("nothing is not defined" in line for line in said)
    assert (found["loads"], found["images"]) == (1, 1)
