"""How ./crosscheck makes .venv, finds it again, and survives what goes wrong."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time

import pytest

BARE = ("jax", "torch", "numpy")


def test_makes_an_environment_once_and_starts_at_once_afterwards(machine):
    machine.python("python3", (3, 11, 7))
    machine.python("python3.12", lacks=BARE)
    first = machine.start("list")
    assert first.returncode == 0, first.stderr
    assert "torch brings about 6 GB" in first.stderr
    assert "python3 is Python 3.11" in first.stderr
    assert machine.started()[-1]["python"] == str(machine.venv_python)

    second = machine.start("list")
    assert (second.returncode, second.stderr) == (0, "")
    assert machine.installations() == 1
    assert machine.started()[-1]["python"] == str(machine.venv_python)


def test_standard_output_is_left_to_the_command(machine):
    machine.python("python3.12", lacks=BARE)
    assert machine.start("plan", "--json").stdout == ""


def test_no_fitting_python_is_one_line_that_says_what_to_install(machine):
    machine.python("python3", (3, 11, 7))
    machine.script("python3.12", 'echo "pyenv: python3.12: command not found" >&2; exit 127')
    machine.python("python3.13", (3, 15, 0))  # newer than the pinned versions have wheels for
    done = machine.start("list")
    assert done.returncode == 3
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "install Python 3.12" in done.stderr
    assert not (machine.checkout / ".venv").exists()


def test_shim_that_refuses_is_passed_over_for_a_python_later_on_path(machine):
    machine.script("python3.12", "exit 127")
    working = machine.python("later/python3.12", lacks=BARE)
    machine.start("list", PATH=f"{machine.folder / 'bin'}:{working.parent}")
    assert machine.started()[0]["python"] == str(working)


@pytest.mark.parametrize("root", ["home/.pyenv", "pyenv"])
def test_finds_a_python_of_pyenv_that_is_not_selected(machine, root):
    machine.python("python3", (3, 11, 7))
    machine.python(f"{root}/versions/3.11.7/bin/python3", (3, 11, 7))
    unselected = machine.python(f"{root}/versions/3.12.1/bin/python3", lacks=BARE)
    moved = {} if root.startswith("home") else {"PYENV_ROOT": machine.folder / root}
    done = machine.start("list", **moved)
    assert done.returncode == 0, done.stderr
    assert machine.started()[0]["python"] == str(unselected)


def test_installs_with_uv_where_there_is_one(machine):
    base = machine.python("python3.12", lacks=BARE)
    machine.script("uv", f'[ "$1" = --version ] || exec {base} from-uv "$@"')
    done = machine.start("list")
    assert done.returncode == 0, done.stderr
    words = [entry["arguments"][:3] for entry in machine.started()]
    assert words[0][:2] == ["from-uv", "venv"]
    assert words[1] == ["from-uv", "pip", "install"]


def test_pip_installs_where_uv_fails(machine):
    base = machine.python("python3.12", lacks=BARE)
    machine.script(
        "uv",
        f"case $1 in --version) ;; pip) echo no index >&2; exit 2 ;;"
        f' *) exec {base} from-uv "$@" ;; esac',
    )
    done = machine.start("list")
    assert done.returncode == 0, done.stderr
    assert "no index" in done.stderr and "trying pip" in done.stderr
    assert machine.started()[-1]["python"] == str(machine.venv_python)
    assert machine.start("list").stderr == ""


def test_asks_uv_for_a_python_where_none_is_on_path(machine):
    managed = machine.python("uv-keeps/python", lacks=BARE)
    machine.script(
        "uv",
        f'case "$1 $2" in --version*) ;; "python find") echo {managed} ;;'
        f' *) exec {managed} from-uv "$@" ;; esac',
    )
    done = machine.start("list")
    assert done.returncode == 0, done.stderr
    assert machine.started()[-1]["python"] == str(machine.venv_python)


def test_failed_installation_is_begun_anew(machine):
    machine.python("python3.12", lacks=BARE, install="fails")
    done = machine.start("list")
    assert done.returncode == 3
    assert "no such version" in done.stderr  # the package manager's own words
    (machine.checkout / ".venv/half-a-package").touch()

    machine.python("python3.12", lacks=BARE)
    assert machine.start("list").returncode == 0
    assert not (machine.checkout / ".venv/half-a-package").exists()


def start_and_wait_until_installing(machine) -> subprocess.Popen[str]:
    machine.python("python3.12", lacks=BARE, install="hangs")
    process = subprocess.Popen(
        [machine.checkout / "crosscheck", "list"],
        env=machine.environment(),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 30
    while not os.path.exists(f"{machine.venv_python}.hanging"):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    return process


def test_interrupted_installation_is_begun_anew(machine):
    process = start_and_wait_until_installing(machine)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted: the next start begins the installation anew" in said
    # Everything looks importable, and yet it must not be trusted.
    machine.python("checkout/.venv/bin/python")

    machine.python("python3.12", lacks=BARE)
    before = machine.installations()
    assert machine.start("list").returncode == 0
    assert machine.installations() == before + 1


@pytest.mark.skipif(shutil.which("flock") is None, reason="this machine has no flock")
def test_second_start_waits_for_the_one_that_installs(machine):
    first = start_and_wait_until_installing(machine)
    second = subprocess.Popen(
        [machine.checkout / "crosscheck", "list"],
        env=machine.environment(),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert second.stderr is not None
    assert "another start is installing" in second.stderr.readline()
    machine.python("python3.12", lacks=BARE)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=30)
    second.communicate(timeout=30)
    assert second.returncode == 0
    assert machine.started()[-1]["python"] == str(machine.venv_python)


def test_changed_lock_file_is_installed_over_the_old_versions(machine):
    machine.python("python3.12", lacks=BARE)
    machine.start("list")
    (machine.checkout / ".venv/kept").touch()
    with (machine.checkout / "requirements.lock").open("a") as lock:
        lock.write("another==1.0\n")
    assert machine.start("list").returncode == 0
    assert machine.start("list").stderr == ""
    assert machine.installations() == 2
    assert (machine.checkout / ".venv/kept").exists()


def test_environment_of_another_python_version_is_not_taken_for_finished(machine):
    machine.python("python3.12", lacks=BARE)
    machine.start("list")
    assert machine.stamp.read_text().endswith(" python 3.12\n")
    machine.python("checkout/.venv/bin/python", (3, 13, 0))
    machine.start("list")
    assert machine.installations() == 2
    assert machine.stamp.read_text().endswith(" python 3.13\n")


def test_environment_made_by_hand_is_used_and_never_changed(machine):
    machine.python("python3.12", lacks=BARE)
    own = machine.python("checkout/.venv/bin/python")
    assert machine.start("list").returncode == 0
    assert [entry["python"] for entry in machine.started()] == [str(own)]

    machine.python("checkout/.venv/bin/python", lacks=("typer",))
    done = machine.start("list")
    assert done.returncode == 3
    assert "lacks typer" in done.stderr and "was not made by this launcher" in done.stderr
    assert machine.installations() == 0
    assert own.exists()


@pytest.mark.parametrize(("free_gb", "warned"), [(7, True), (8, False)])
def test_says_when_the_disk_is_too_full(machine, free_gb, warned):
    machine.python("python3.12", lacks=BARE)
    (machine.folder / "bin/df").unlink()
    machine.script("df", f"echo header; echo disk 1 1 {free_gb * 1048576 + 5} 1% /")
    done = machine.start("list")
    assert done.returncode == 0
    assert (f"only {free_gb} GB are free" in done.stderr) is warned
