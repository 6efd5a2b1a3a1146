"""Words that are off: exit status 2, a sentence on stderr with the nearest word, no stdout."""

from __future__ import annotations

import pytest

from compare.run import runner
from tests.compare.cli.command_line import command_line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "sparse-prefil"], "the nearest is 'sparse-prefill'"),
        (["run", "sparse-prefil:s_q=2"], "the nearest is 'sparse-prefill'"),
        (["run", "prefill-plans"], "the nearest is 'prefill-plan'"),
        (["run", "sparse-prefill:sq=2"], "no key 'sq'; the nearest is 's_q'"),
        (["run", "sparse-prefill:s_q=2,s_q=3"], "s_q is given twice"),
        (["run", "sparse-prefill:s_q"], "s_q has no value"),
        (["run", "sparse-prefill:d=513"], "d=513 isn't accepted; accepted: 512 | 576"),
        (["run", "sparse-prefill:length=129"], "length=129 exceeds topk=128"),
        (["run", "prefill-plan:seq=4,q=5"], "q=5 tokens of seq=4"),
        (["run", "--report", "html"], "there is no 'html'"),
        (["run", "--report", "html"], "(accepted: json, junit, md)"),
        (["run", "--report", "json,jnit"], "the nearest is 'junit'"),
        (["run", "--profile", "flash-mla"], "the nearest is 'flashmla'"),
        (["run", "--device", "gpu"], "accepted are cpu, cuda and cuda:N"),
        (["run", "sparse-prefill:s_q=2", "--candidate", "xlaa"], "the nearest is 'xla'"),
        (["run", "sparse-prefill:s_q=2", "--reference", "flashmla"], "the nearest is 'flash_mla'"),
        (["run", "sparse-prefill:s_q=2", "--candidate", "nowhere.py:f"], "nowhere.py"),
        (["list", "sparse-prefil"], "the nearest is 'sparse-prefill'"),
        (["record", "sparse-prefil"], "the nearest is 'sparse-prefill'"),
        (["compare", "nowhere.safetensors"], "there is no file nowhere.safetensors"),
        (["compare", "nowhere.safetensors", "--report", "html"], "accepted: json, junit, md"),
    ],
)
def test_a_sentence_with_the_nearest_word(words, said):
    found = command_line(*words)
    assert (found.status, found.out) == (2, "")
    sentences = [line for line in found.err.splitlines() if line.startswith("mla-crosscheck: ")]
    assert len(sentences) == 1
    assert said in sentences[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rnu"], "Did you mean 'run'?"),
        (["run", "--profil", "both"], "--profile"),
        (["run", "--require", "-1"], "--require"),
        (["run", "--jobs", "two"], "--jobs"),
        (["run", "--timeout", "0"], "--timeout"),
        (["run", "--repeat", "0"], "--repeat"),
        (["plan", "--seq-lens", "4"], "--query-lens"),
        (["plan", "--decode"], "--decode"),
    ],
)
def test_options_that_the_parser_refuses(words, said):
    found = command_line(*words)
    assert found.status == 2
    assert said in found.err
    assert "Traceback" not in found.err


def test_a_folder_that_cannot_be_made_is_said_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "run", lambda *a, **k: pytest.fail("it ran"))
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    found = command_line("run", "--report", "json", "--out", str(in_the_way / "out"))
    assert found.status == 2
    assert f"--out {in_the_way / 'out'}: no folder can be made there" in found.err


def test_a_report_that_cannot_be_written_is_said_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "run", lambda *a, **k: pytest.fail("it ran"))
    (tmp_path / "report.json").mkdir()
    found = command_line("run", "--report", "md,json", "--out", str(tmp_path))
    assert found.status == 2
    assert f"{tmp_path / 'report.json'} can't be written to" in found.err


@pytest.mark.parametrize("lengths", ["40,,40", "40,", ",40", "40,+5", "\u0664"])
def test_a_gap_between_lengths_is_no_length(lengths):
    sizes = "--compress-ratio 4 --window 8 --max-model-len 64 --max-num-batched-tokens 16"
    found = command_line("plan", "--seq-lens", lengths, "--query-lens", "1,1", *sizes.split())
    assert found.status == 2
    assert "isn't accepted; accepted: whole numbers from 0" in found.err


def test_no_words_and_help_print_the_commands():
    for words in (["--help"], ["-h"]):
        found = command_line(*words)
        assert found.status == 0
        for name in ("run", "list", "doctor", "plan", "record", "compare"):
            assert name in found.out


def test_the_version_is_the_package_s():
    from compare._version import version

    assert command_line("--version").out == f"mla-crosscheck {version()}\n"
