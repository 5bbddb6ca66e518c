"""A fork of a Python that has imported its framework is, to who starts it, a new Python (warm.py)."""

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.drawing import THOROUGH
from tests.support.engine_pools import ENGINES, available
from tests.support.limits import HANGS, gone, until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="on Linux only"),
    pytest.mark.ranks,
    pytest.mark.every,
]
BOTH = pytest.mark.parametrize(
    "python", [pytest.param(sys.executable, id="warm"), *([pytest.param(warm.REAL, id="real")] if THOROUGH else [])]
)
"""A new Python shows that what is asked of a fork is what that does: `make thorough` asks it too."""


def run(python, *args, **options):
    return subprocess.run([python, *args], capture_output=True, text=True, timeout=HANGS, **options)


def test_this_is_about_another_python():
    assert sys.executable != warm.REAL
    assert Path(sys.executable).name == "python"


@BOTH
def test_arguments_files_folder_and_environment_are_the_callers(python, tmp_path):
    code = "import os, sys; print(sys.argv, os.getcwd(), os.environ['A'], sys.stdin.read()); sys.stderr.write('e')"
    done = run(python, "-c", code, "x", "-y", input="in", cwd=tmp_path, env={"A": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, f"['-c', 'x', '-y'] {tmp_path.resolve()} 1 in\n", "e")


@BOTH
def test_programs_and_modules_find_what_lies_beside_them(python, tmp_path):
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    (tmp_path / "program.py").write_text("import sys, beside; print(beside.WORD, __name__, __file__, sys.argv)")
    file = str(tmp_path / "program.py")
    assert run(python, file, "a", cwd="/").stdout == f"found __main__ {file} {[file, 'a']}\n"
    assert run(python, "-m", "program", "a", cwd=tmp_path).stdout == f"found __main__ {file} {[file, 'a']}\n"
    found = run(python, "-c", "import beside; print(beside.WORD)", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert found.stdout == "found\n", found.stderr


@BOTH
@pytest.mark.parametrize(
    ("code", "ends", "said"),
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('why')", 1, "why\n"),
        ("import os; os._exit(3)", 3, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'bye')", 0, "bye"),
        (
            "1 / 0",
            1,
            'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\nZeroDivisionError: d',
        ),
    ],
)
def test_it_ends_as_its_program_does(python, code, ends, said):
    done = run(python, "-c", code)
    assert done.returncode == ends
    assert done.stderr.startswith(said)
    assert bool(done.stderr) == bool(said)


@BOTH
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL])
def test_signals_reach_the_program_and_nobody_outlives_its_caller(python, number):
    code = """
        import os, signal, time
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(5))
        print(os.getpid(), flush=True)
        for _ in range(600):
            time.sleep(0.1)  # Python may hear of a signal after its next sleep only
    """
    with subprocess.Popen(
        [python, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(20) == (5 if number == signal.SIGUSR1 else -number)
    until(lambda: gone(pid))


def test_a_program_and_its_caller_may_be_killed_at_the_same_time():
    code = "import os, time; print(os.getpid(), os.getppid(), flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as caller:
        pid, server = map(int, caller.stdout.readline().split())
        os.kill(server, signal.SIGSTOP)  # so that it hears of both ends at once
        os.kill(pid, signal.SIGKILL)
        until(lambda: Path("/proc", str(pid), "stat").read_text().rpartition(") ")[2][0] == "Z")
        caller.kill()
        caller.wait()
        os.kill(server, signal.SIGCONT)
    assert run(sys.executable, "-c", "print('well')").stdout == "well\n"


KILLED = """
import os, sys, time
from tests.support import warm
warm.BEFOREHAND = [name for name in warm.BEFOREHAND if name.partition(".")[0] in ("numpy", "numba", "torch", "horovod")]
warm.install()
from tests.support.engine_pools import Launched
from tests.support.pool import Ranks
pools = [Ranks(2), *(Launched(engine, 2) for engine in sys.argv[1:])]
print(*(pid for pool in pools for pid in pool.run(os.getpid)), flush=True)
time.sleep(60)
"""


def test_no_rank_outlives_tests_that_are_killed():
    env = {name: value for name, value in os.environ.items() if name != "GRACE_WARM"}
    engines = [engine for engine in (ENGINES if THOROUGH else ("mpirun-mpi",)) if available(engine)]
    program = [warm.REAL, "-c", KILLED, *engines]
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    with subprocess.Popen(program, stdout=subprocess.PIPE, env=env, text=True) as tests:
        ranks = tests.stdout.readline().split()
        assert len(ranks) == 2 * len(["gloo", *engines])
        tests.kill()
    until(lambda: gone(*ranks))


@BOTH
def test_what_a_program_has_not_imported_is_not_there(python):
    code = "import sys; print([name in sys.modules for name in ('numpy', 'torch', 'numba', 'horovod', 'grace')]);"
    assert run(python, "-c", code).stdout == "[False, False, False, False, False]\n"
    assert run(python, "-c", f"import numpy; {code}").stdout == "[True, False, False, False, False]\n"
    pytest.importorskip("torch")
    found = run(python, "-c", f"import torch.nn as nn; nn.Linear; {code}").stdout
    assert found.endswith(", True, False, False, False]\n")


@pytest.mark.slow
@BOTH
def test_what_a_framework_brought_along_does_not_stand_for_it(python):
    """grace.init() asks which frameworks a program has imported."""
    pytest.importorskip("tensorflow")
    code = "import sys, grace; print([name in sys.modules for name in ('torch', 'tensorflow')]);"
    assert run(python, "-c", code).stdout == "[False, False]\n"
    assert run(python, "-c", f"import importlib.util as u; u.find_spec('torch'); {code}").stdout == "[False, False]\n"
    assert run(python, "-c", f"import keras; {code}").stdout == "[False, True]\n"


@BOTH
def test_packages_are_found_where_they_lie(python):
    pytest.importorskip("torch")
    code = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin, *s.submodule_search_locations)"
    file = Path(importlib.util.find_spec("torch").origin)
    assert run(python, "-c", code).stdout == f"{file} {file.parent}\n"


def test_threads_are_as_many_as_the_environment_says():
    pytest.importorskip("torch")
    code = "import torch; print(torch.get_num_threads())"
    assert run(sys.executable, "-c", code, env={**os.environ, "OMP_NUM_THREADS": "1"}).stdout == "1\n"


def test_random_numbers_differ():
    code = "import random; a = random.random(); import numpy; print(a, numpy.random.random())"
    first, second = (run(sys.executable, "-c", code).stdout.split() for _ in range(2))
    assert first[0] != second[0]
    assert first[1] != second[1]
