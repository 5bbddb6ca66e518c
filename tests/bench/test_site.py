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


@pytest.mark.slow
def test_the_site_has_a_report_of_all_recorded_results(tmp_path, monkeypatch):
    draw, drawn = Figure.html, set()

    def drawn_once(figure):
        """Draw a figure; `make test` draws one of each title, since drawing takes most of the time."""
        if figure.title in drawn and not THOROUGH:
            return figure.title
        drawn.add(figure.title)
        return draw(figure)

    monkeypatch.setattr(Figure, "html", drawn_once)
    spec = importlib.util.spec_from_file_location("conf", ROOT / "docs" / "conf.py")
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    conf.build_pages(types.SimpleNamespace(srcdir=tmp_path))
    text = (tmp_path / "benchmarks.html").read_text()
    names = ("steps-resnet50-1gbit", "train-chargpt-sgd", "codecs")
    for each in (load(ROOT / "benchmarks" / "results" / f"{name}.json") for name in names):
        assert html.escape(each.command) in text
