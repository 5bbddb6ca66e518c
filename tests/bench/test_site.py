"""The site's page of recorded results."""

import html
import importlib.util
import types
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from grace.bench.common.results import load
from grace.bench.report.figures import Figure
from tests.support.drawing import THOROUGH

ROOT = Path(__file__).parents[2]


@pytest.fixture
def conf():
    """The module by which Sphinx builds the site."""
    spec = importlib.util.spec_from_file_location("conf", ROOT / "docs" / "conf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "name"), [("compressors", "topk.TopK"), ("memories", "loco.LoCo"), ("outer", "none.NoOuter")]
)
def test_the_reference_has_all_parts_of_a_kind(conf, page, name):
    source = [(ROOT / "docs" / "api" / f"{page}.md").read_text()]
    conf.with_parts(None, f"api/{page}", source)
    assert f"\n.. autoclass:: grace.{page}.{name}\n" in source[0]


def test_types_in_quotes_are_found_by_the_names_that_modules_import_them_by(conf):
    pytest.importorskip("torch", reason="without torch all of its names are taken as they are")
    node = {"refdomain": "py", "reftype": "class", "reftarget": "dist.ProcessGroup"}
    assert conf.plain_name(None, None, node, "text") == "text"
    assert conf.plain_name(None, None, {**node, "reftarget": "dist.Missing"}, "text") is None


def test_a_property_with_a_colon_says_no_type(conf):
    napoleon = pytest.importorskip("sphinx.ext.napoleon", reason="the site's packages are not installed")
    lines = ["True if it trains. An example: ``model.norm``.", ""]
    conf.as_rst(None, "property", "training", None, {}, lines)
    assert ":type:" not in str(napoleon.GoogleDocstring(lines, napoleon.Config(), None, "property", "training"))


@pytest.mark.slow
def test_the_site_has_a_report_of_all_recorded_results(tmp_path, monkeypatch, conf):
    draw, drawn = Figure.html, set()

    def drawn_once(figure):
        """Draw a figure; `make test` draws one of each title, since drawing takes most of the time."""
        if figure.title in drawn and not THOROUGH:
            return figure.title
        drawn.add(figure.title)
        return draw(figure)

    monkeypatch.setattr(Figure, "html", drawn_once)
    conf.build_pages(types.SimpleNamespace(srcdir=tmp_path))
    text = (tmp_path / "benchmarks.html").read_text()
    names = ("steps-resnet50-1gbit", "train-chargpt-sgd", "codecs")
    for each in (load(ROOT / "benchmarks" / "results" / f"{name}.json") for name in names):
        assert html.escape(each.command) in text
