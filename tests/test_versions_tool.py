"""The tool that tries Grace with other releases."""

import platform
import subprocess
import sys

from tests.support.warm import REAL
from tools import versions


def test_an_interpreter_is_named_by_its_version_since_all_may_be_called_python(tmp_path):
    (tmp_path / "python").symlink_to(REAL)
    (trial,) = versions.trials([], [str(tmp_path / "python")])
    assert trial.name == f"python-{platform.python_version()}"


def test_a_program_that_is_not_there_is_refused_before_anything_is_installed():
    said = subprocess.run([sys.executable, versions.__file__, "--python", "python3.99"], capture_output=True, text=True)
    assert said.returncode == 2
    assert "python3.99" in said.stderr
