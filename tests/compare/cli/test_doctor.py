from __future__ import annotations

from compare.run import registry
from tests.compare.cli.command_line import command_line


def test_each_implementation_has_a_sentence_and_the_status_is_0(monkeypatch):
    monkeypatch.setattr(
        registry,
        "describe",
        lambda: [
            ("xla", "plain jax.numpy, no Pallas", None),
            ("pallas", "the Mosaic GPU kernel", "it needs a Hopper GPU and this one is an A100"),
        ],
    )
    found = command_line("doctor")
    assert found.status == 0
    assert "xla runs here: plain jax.numpy, no Pallas\n" in found.out
    assert "pallas doesn't run here: it needs a Hopper GPU and this one is an A100\n" in found.out


def test_every_name_of_the_registry_is_described_and_versions_are_shown():
    import jax
    import torch

    found = command_line("doctor")
    assert found.status == 0
    for name in [registry.ORACLE, *registry.TABLE]:
        assert f"\n{name} runs here: " in found.out or f"\n{name} doesn't run here: " in found.out
    for name, version in (("jax", jax.__version__), ("torch", torch.__version__.split("+")[0])):
        assert f"\n{name}: {version}" in found.out
