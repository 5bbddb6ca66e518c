"""Plugin of pytest for environments without torch and TensorFlow: skips the files that import them.

``make test`` does not use it: there a framework that is missing is a failure.
"""

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Turn the failed import of a framework, or of another test's file that was skipped, into a skip."""
    report = yield
    error = str(report.longrepr)
    missing = "No module named 'torch" in error or "(" + str(collector.config.rootpath / "tests") in error
    if report.outcome == "failed" and missing:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, "needs torch")
    return report
