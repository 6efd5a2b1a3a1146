"""Which interpreter ./crosscheck takes, and what it starts with it."""

from __future__ import annotations

import os
import sys

import pytest

NO_JAX = ("jax", "jaxlib")


def test_named_interpreter_comes_before_active_environment_and_python3(machine):
    named = machine.python("elsewhere/python")
    machine.python("active/bin/python")
    machine.python("python3")
    done = machine.start("list", MLA_CROSSCHECK_PYTHON=named, VIRTUAL_ENV=machine.folder / "active")
    assert done.returncode == 0, done.stderr
    assert [entry["python"] for entry in machine.started()] == [str(named)]


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_active_environment_comes_before_python3(machine, variable):
    active = machine.python("active/bin/python")
    machine.python("python3")
    machine.start("list", **{variable: machine.folder / "active"})
    assert [entry["python"] for entry in machine.started()] == [str(active)]


def test_unfit_active_environment_is_passed_over_for_python3(machine):
    machine.python("active/bin/python", lacks=NO_JAX)
    fit = machine.python("python3")
    machine.start("list", VIRTUAL_ENV=machine.folder / "active")
    assert [entry["python"] for entry in machine.started()] == [str(fit)]


def test_fitting_interpreter_means_that_nothing_is_made_or_installed(machine):
    machine.python("python3")
    done = machine.start("list")
    assert (done.returncode, done.stderr, machine.installations()) == (0, "", 0)
    assert not (machine.checkout / ".venv").exists()
    assert not (machine.checkout / ".venv.lock").exists()


def test_unfit_named_interpreter_is_an_error_that_names_what_it_lacks(machine):
    machine.python("elsewhere/python", lacks=("jax", "typer"))
    machine.python("python3")
    done = machine.start("list", MLA_CROSSCHECK_PYTHON=machine.folder / "elsewhere/python")
    assert done.returncode == 3
    assert done.stderr.endswith("elsewhere/python lacks jax, typer\n")
    assert machine.started() == []


def test_named_interpreter_that_does_not_exist_is_an_error(machine):
    machine.python("python3")
    done = machine.start("list", MLA_CROSSCHECK_PYTHON="/no/such/python")
    assert done.returncode == 3
    assert done.stderr == (
        "crosscheck: MLA_CROSSCHECK_PYTHON=/no/such/python is not a program that can be run\n"
    )


@pytest.mark.parametrize("version", [(2, 7, 18), (3, 6, 15), (3, 11, 7)])
def test_named_interpreter_that_is_too_old_is_an_error(machine, version):
    old = machine.python("elsewhere/python", version)
    done = machine.start("list", MLA_CROSSCHECK_PYTHON=old)
    assert done.returncode == 3
    assert f"is Python {version[0]}.{version[1]}, and 3.12 is the oldest" in done.stderr


def test_module_that_is_too_old_does_not_fit(machine):
    old = machine.python("elsewhere/python", has={"jax": "0.11.1", "torch": "2.11.0+cu130"})
    done = machine.start("list", MLA_CROSSCHECK_PYTHON=old)
    assert done.returncode == 3
    assert done.stderr.endswith(" lacks jax >= 0.11.2 (has 0.11.1)\n")


def test_local_and_development_versions_are_read_as_numbers(machine):
    built = machine.python("python3", has={"jax": "0.12.0.dev20260801", "torch": "2.11.0a0+nv26"})
    machine.start("list")
    assert [entry["python"] for entry in machine.started()] == [str(built)]


def test_tests_need_test_tools_and_the_command_line_does_not(machine):
    bare = machine.python("elsewhere/python", lacks=("pytest", "hypothesis"))
    assert machine.start("run", MLA_CROSSCHECK_PYTHON=bare).returncode == 0
    done = machine.start("test", MLA_CROSSCHECK_PYTHON=bare)
    assert done.returncode == 3
    assert done.stderr.endswith(" lacks pytest, hypothesis\n")


def test_words_go_to_the_command_line_in_the_callers_folder(machine):
    machine.python("python3")
    here = machine.folder / "here"
    here.mkdir()
    machine.start("run", "a case:x=1", "--quiet", cwd=here, PYTHONPATH="/mine")
    (entry,) = machine.started()
    assert entry["arguments"][:2] == ["-P", "-c"]
    assert entry["arguments"][3:] == ["run", "a case:x=1", "--quiet"]
    assert entry["cwd"] == str(here)
    assert entry["environment"]["PYTHONPATH"] == f"{machine.checkout}:/mine"


def test_test_runs_pytest_in_the_checkout_and_passes_its_arguments_on(machine):
    machine.python("elsewhere/python")
    machine.start("test", "-k", "a or b", MLA_CROSSCHECK_PYTHON="elsewhere/python")
    (entry,) = machine.started()
    assert entry["arguments"][:2] == ["-m", "pytest"]
    assert entry["arguments"][-2:] == ["-k", "a or b"]
    assert entry["cwd"] == str(machine.checkout)
    assert entry["environment"]["OMP_NUM_THREADS"] == "1"


def test_exit_status_of_the_command_line_is_passed_on(machine):
    machine.script("python3", "case $1 in -c) echo 3.12 ;; *) exit 7 ;; esac")
    assert machine.start("run").returncode == 7


def test_works_through_a_relative_symlink_and_from_another_folder(machine):
    machine.python("python3")
    links = machine.folder / "links"
    links.mkdir()
    os.symlink("../checkout/crosscheck", links / "first")
    os.symlink("first", links / "second")
    done = machine.start("list", program=links / "second", cwd=links)
    assert done.returncode == 0, done.stderr
    assert machine.started()[0]["environment"]["PYTHONPATH"] == str(machine.checkout)


def test_folders_of_the_working_directory_hide_neither_modules_nor_this_project(machine):
    """With the interpreter of these tests instead of a fake one."""
    package = machine.checkout / "compare"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "cli.py").write_text("import sys\ndef main(): print(__file__, sys.argv); return 5\n")
    here = machine.folder / "here"
    for name in ("compare", "torch", "jax"):
        (here / name).mkdir(parents=True)
        (here / name / "__init__.py").write_text("raise RuntimeError('the wrong one')\n")
    done = machine.start("list", cwd=here, MLA_CROSSCHECK_PYTHON=sys.executable)
    assert (done.returncode, done.stderr) == (5, "")
    assert done.stdout == f"{package / 'cli.py'} ['crosscheck', 'list']\n"


def test_folders_of_the_working_directory_are_not_taken_for_installed_modules(machine):
    bare = machine.script("bare/python", f'exec {sys.executable} -S "$@"')
    here = machine.folder / "here"
    for name in ("jax", "torch"):
        (here / name).mkdir(parents=True)
        (here / name / "__init__.py").touch()
    done = machine.start("list", cwd=here, MLA_CROSSCHECK_PYTHON=bare)
    assert done.returncode == 3
    assert "lacks jax, jaxlib, torch, numpy," in done.stderr
