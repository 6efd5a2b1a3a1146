"""The names of implementations, in one table: what each is, where it runs, and how it is made."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import cast

from compare.goldens import files
from compare.goldens.implementation import GoldenImplementation
from compare.protocol.implementation import Implementation, UnknownImplementation
from compare.protocol.suite import Offer
from compare.run.together import Together
from compare.suites.table import SUITES

GOLDEN = "golden:"
ORACLE = "oracle"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One name: what stands behind it in each of the suites that offer it, at least one."""

    name: str
    offers: Mapping[str, Offer]

    @property
    def suites(self) -> frozenset[str]:
        return frozenset(self.offers)

    @property
    def what(self) -> str:
        """A few words, for `list` and `doctor`."""
        return next((offer.what for offer in self.offers.values() if offer.what), "")

    @property
    def isolated(self) -> bool:
        """Whether it runs in a process of its own."""
        return any(offer.isolated for offer in self.offers.values())

    def make(self, device: str | None) -> Implementation:
        """The implementation of all its suites."""
        parts = {suite: offer.implementation(device) for suite, offer in self.offers.items()}
        return next(iter(parts.values())) if len(parts) == 1 else Together(self.name, parts)


def _table() -> dict[str, Entry]:
    """By name, in the order in which the suites offer them."""
    offers: dict[str, dict[str, Offer]] = {}
    for suite in SUITES.values():
        for offer in suite.offers:
            offers.setdefault(offer.name, {})[suite.name] = offer
    return {name: Entry(name=name, offers=by_suite) for name, by_suite in offers.items()}


TABLE = _table()


def names() -> list[str]:
    """Every name that can be looked up without a file or module of one's own."""
    return [*TABLE, *(GOLDEN + name for name in files.available())]


def find(name: str, device: str | None = None) -> Implementation:
    """The implementation of a name: one of `names()`, MODULE:FUNCTION or FILE.py:FUNCTION.

    device: cpu, cuda or cuda:N; None: a GPU where there is one. Whether it can run here is another
    question: `supports`. UnknownImplementation names the nearest; a user's module is imported in
    its worker, to know whether the function exists.
    """
    from compare.user.load import is_user_name

    if is_user_name(name) or (name in TABLE and TABLE[name].isolated):
        from compare.isolation.worker import Isolated

        entry = TABLE.get(name)
        local = None if entry is None else entry.make(device)
        implementation = Isolated(name, device, local, finder=f"{__name__}:{in_process.__name__}")
        if entry is None:
            implementation.check()
        return implementation
    return in_process(name, device)


def in_process(name: str, device: str | None = None) -> Implementation:
    """The same, never in a process of its own: a fault in it is a fault of this process."""
    from compare.user.implementation import UserImplementation
    from compare.user.load import is_user_name, load

    if name in TABLE:
        return TABLE[name].make(device)
    if name.startswith(GOLDEN) and name.removeprefix(GOLDEN) in files.available():
        return cast(Implementation, GoldenImplementation(name.removeprefix(GOLDEN), SUITES))
    if is_user_name(name):
        return UserImplementation(load(name), name, device)
    raise UnknownImplementation(_nothing_called(name))


def reason(name: str, device: str | None = None, suite: str | None = None) -> str | None:
    """Why the implementation of that name can't run on this machine at all; None if it can. With
    `suite`, whether it can serve that one of its suites."""
    if name not in TABLE:
        return None if name in names() else _nothing_called(name)
    entry = TABLE[name]
    if suite is not None and suite not in entry.suites:
        return f"{name} isn't for {suite}"
    make = entry.make if suite is None else entry.offers[suite].implementation
    try:
        unavailable = getattr(make(device), "unavailable", None)
        return None if unavailable is None else unavailable()
    except ImportError as error:
        return f"it needs a package that isn't installed here ({error})"


def here(suite: str, device: str | None = None) -> list[str]:
    """The candidates of a run that names none: all of this project's own that can run here. The
    interpreter is left out where the kernel itself runs."""
    known = SUITES[suite]
    runs = {n for n in known.candidates if reason(n, device, suite) is None}
    offers = [offer for name in known.candidates if (offer := known.offer(name)) and name in runs]
    return [offer.name for offer in offers if offer.stands_in_for not in runs]


def default_reference(suite: str, device: str | None = None) -> str | None:
    """The reference of a run that names none: the live CUDA kernel, else its recorded results. Of
    chunk plans and single stages: those recorded from vLLM 0.33.0, else an importable vLLM. None:
    the oracle alone; plans of decode rows are judged by rules and an independent planner."""
    known = names()
    for name in SUITES[suite].references:
        if name in known and reason(name, device, suite if name in TABLE else None) is None:
            return name
    return None


def default_candidates(suites: Sequence[str], device: str | None) -> list[str]:
    """The candidates of a run of these suites that names none."""
    return list(dict.fromkeys(name for suite in suites for name in here(suite, device)))


def default_references(suites: Sequence[str], device: str | None) -> dict[str, str]:
    """By suite the reference of a run that names none, where there is one."""
    defaults = {suite: default_reference(suite, device) for suite in suites}
    return {suite: name for suite, name in defaults.items() if name is not None}


def recorded_references(suite: str) -> list[str]:
    """The recorded results that a run which names no reference falls back to, in this order, for a
    case that its default reference has nothing for."""
    known = names()
    return [n for n in SUITES[suite].references if n.startswith(GOLDEN) and n in known]


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
    if name.endswith(".py"):
        return f"{name!r} lacks the function; write {name}:FUNCTION"
    known = names()
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    return (
        f"no implementation is called {name!r}; the nearest is {close!r} "
        f"(known: {', '.join(known)}, MODULE:FUNCTION, FILE.py:FUNCTION)"
    )
