"""The names of implementations, in one table: what each is, where it runs, and how it is made."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import cast

from compare.run.implementations import Implementation, UnknownImplementation

GOLDEN = "golden:"
ORACLE = "oracle"
_PREFILL = frozenset({"sparse-prefill"})
_PLAN = frozenset({"prefill-plan"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One implementation. what: for `list` and `doctor`, a few words. make: builds it for a device
    in this process. isolated: it runs in a process of its own, since a fault in a GPU kernel would
    take the judge's own context with it."""

    name: str
    suites: frozenset[str]
    what: str
    make: Callable[[str | None], Implementation]
    isolated: bool = False


def _jax(backend: str) -> Callable[[str | None], Implementation]:
    def make(device: str | None) -> Implementation:
        from compare.run.jax_implementations import JaxSparsePrefill

        return JaxSparsePrefill(backend, device)

    return make


def _torch(device: str | None) -> Implementation:
    from compare.run.torch_implementations import TorchSparsePrefill

    return TorchSparsePrefill("torch", device)


def _flash_mla(device: str | None) -> Implementation:
    from compare.run.cuda_implementations import FlashMla

    return FlashMla("flash_mla", device)


def _jax_planner(device: str | None) -> Implementation:
    from compare.run.jax_implementations import jax_planner

    return jax_planner()


def _torch_planner(name: str, rules: str) -> Callable[[str | None], Implementation]:
    def make(device: str | None) -> Implementation:
        from compare.run.torch_implementations import torch_planner

        return torch_planner(name, rules)

    return make


def _vllm(device: str | None) -> Implementation:
    from compare.run.torch_implementations import vllm_planner

    return vllm_planner()


TABLE = {
    entry.name: entry
    for entry in (
        Entry(
            name="torch",
            suites=_PREFILL,
            what="eager PyTorch in the kernel's precision recipe; the judge's yardstick",
            make=_torch,
        ),
        Entry(
            name="xla",
            suites=_PREFILL,
            what="plain jax.numpy, no Pallas",
            make=_jax("xla"),
        ),
        Entry(
            name="pallas",
            suites=_PREFILL,
            what="the Mosaic GPU kernel",
            make=_jax("pallas"),
            isolated=True,
        ),
        Entry(
            name="pallas-interpret",
            suites=_PREFILL,
            what="the same kernel under Pallas' GPU interpreter, small cases",
            make=_jax("pallas-interpret"),
        ),
        Entry(
            name="flash_mla",
            suites=_PREFILL,
            what="the FlashMLA build that is importable",
            make=_flash_mla,
            isolated=True,
        ),
        Entry(
            name="jax-planner",
            suites=_PLAN,
            what="chunk planner of jax_impl, the fixed rules",
            make=_jax_planner,
        ),
        Entry(
            name="torch-planner",
            suites=_PLAN,
            what="chunk planner of torch_ref, the fixed rules",
            make=_torch_planner("torch-planner", "fixed"),
        ),
        Entry(
            name="vllm-0.33.0",
            suites=_PLAN,
            what="chunk planner of torch_ref, the rules that vLLM 0.33.0 ships",
            make=_torch_planner("vllm-0.33.0", "vllm-0.33.0"),
        ),
        Entry(
            name="vllm",
            suites=_PLAN,
            what="chunk planner of the vLLM that is importable",
            make=_vllm,
        ),
    )
}


def names() -> list[str]:
    """Every name that can be looked up without a file or module of one's own."""
    from compare.tools import golden

    return [*TABLE, *(GOLDEN + name for name in golden.available())]


def find(name: str, device: str | None = None) -> Implementation:
    """The implementation of a name: one of `names()`, MODULE:FUNCTION or FILE.py:FUNCTION.

    device: cpu, cuda or cuda:N; None: a GPU where there is one. Whether it can run here is another
    question: `supports`. UnknownImplementation names the nearest; a user's module is imported in
    its worker, to know whether the function exists.
    """
    from compare.run.user import is_user_name

    if is_user_name(name) or (name in TABLE and TABLE[name].isolated):
        from compare.run.worker import Isolated

        entry = TABLE.get(name)
        implementation = Isolated(name, device, None if entry is None else entry.make(device))
        if entry is None:
            implementation.check()
        return implementation
    return in_process(name, device)


def in_process(name: str, device: str | None = None) -> Implementation:
    """The same, never in a process of its own: a fault in it is a fault of this process."""
    from compare.run import user
    from compare.tools import golden

    if name in TABLE:
        return TABLE[name].make(device)
    if name.startswith(GOLDEN) and name.removeprefix(GOLDEN) in golden.available():
        return cast(Implementation, golden.GoldenImplementation(name.removeprefix(GOLDEN)))
    if user.is_user_name(name):
        return user.UserImplementation(user.load(name), name, device)
    raise UnknownImplementation(_nothing_called(name))


def reason(name: str, device: str | None = None) -> str | None:
    """Why the implementation of that name can't run on this machine at all; None if it can."""
    if name not in TABLE:
        return None if name in names() else _nothing_called(name)
    try:
        unavailable = getattr(TABLE[name].make(device), "unavailable", None)
        return None if unavailable is None else unavailable()
    except ImportError as error:
        return f"it needs a package that isn't installed here ({error})"


def here(suite: str, device: str | None = None) -> list[str]:
    """The candidates of a run that names none: all of this project's own that can run here. The
    interpreter is left out where the kernel itself runs."""
    if suite == "prefill-plan":
        return ["jax-planner", "torch-planner"]
    if reason("pallas", device) is None:
        return ["pallas", "xla"]
    return ["xla", "pallas-interpret"]


def default_reference(suite: str, device: str | None = None) -> str | None:
    """The reference of a run that names none: the live CUDA kernel, else its recorded results. Of
    plans: those recorded from vLLM 0.33.0, else an importable vLLM. None: the oracle alone."""
    if suite == "prefill-plan":
        order = (GOLDEN + "engine/vllm-0.33.0", "vllm")
    else:
        order = ("flash_mla", GOLDEN + "h200/flash_mla")
    known = names()
    return next((n for n in order if n in known and reason(n, device) is None), None)


def describe(device: str | None = None) -> list[tuple[str, str, str | None]]:
    """(name, what it is, None or why it can't run here) of everything that can be named."""
    rows: list[tuple[str, str, str | None]] = [
        (ORACLE, "PyTorch in float64; a column of every table, not a candidate", None)
    ]
    rows += [(entry.name, entry.what, reason(entry.name, device)) for entry in TABLE.values()]
    rows += [(name, "recorded results", None) for name in names() if name not in TABLE]
    rows.append(("MODULE:FUNCTION, FILE.py:FUNCTION", "a function of one's own", None))
    return rows


def _nothing_called(name: str) -> str:
    if name == ORACLE:
        return "the oracle judges every candidate; it isn't one itself"
    known = names()
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    return (
        f"no implementation is called {name!r}; the nearest is {close!r} "
        f"(known: {', '.join(known)}, MODULE:FUNCTION, FILE.py:FUNCTION)"
    )
