from __future__ import annotations

from compare.goldens import files
from compare.goldens.format import DamagedGolden
from compare.run import registry
from compare.suites.table import SUITES, default_cases, full_cases, parse_case
from tests.compare.cli.command_line import command_line

PLANS = ("prefill-plan:seq=4,q=4", "prefill-plan:seq=5,q=4")


def test_a_suite_s_cases_are_lines_that_run_takes():
    for words, cases in (
        (["list", "sparse-prefill"], default_cases("sparse-prefill")),
        (["list", "sparse-prefill", "--full"], full_cases("sparse-prefill")),
    ):
        found = command_line(*words)
        assert found.status == 0
        assert [parse_case(line) for line in found.out.splitlines()] == list(cases)


def test_without_words_it_shows_suites_keys_implementations_and_recorded_results(monkeypatch):
    monkeypatch.setattr(
        registry, "describe", lambda: [("xla", "plain jax", None), ("pallas", "kernel", "no GPU")]
    )
    monkeypatch.setattr(files, "available", lambda: ["h200/flash_mla"])
    monkeypatch.setattr(files, "golden_cases", lambda name: PLANS)
    found = command_line("list")
    assert found.status == 0
    lines = [line.split() for line in found.out.splitlines()]
    for name in SUITES:
        assert any(line[:1] == [f"{name}:"] for line in lines)
    assert ["topk", "128", "a", "whole", "number", "from", "1", "to", "2147483647"] in lines
    assert ["xla", "yes", "plain", "jax"] in lines
    assert ["pallas", "no", "kernel"] in lines
    assert ["golden:h200/flash_mla", "2", "cases"] in lines


def test_a_damaged_manifest_is_said_in_its_line(monkeypatch):
    def damaged(name):
        raise DamagedGolden("manifest.json is damaged: its seal is broken")

    monkeypatch.setattr(registry, "describe", lambda: [])
    monkeypatch.setattr(files, "available", lambda: ["h200/flash_mla"])
    monkeypatch.setattr(files, "golden_cases", damaged)
    monkeypatch.setattr("compare.commands.listing.catalogue_cases", lambda suite, full: ())
    found = command_line("list")
    assert found.status == 0
    assert "its seal is broken" in found.out
