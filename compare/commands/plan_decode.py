"""``plan --decode``: the rows of a decode batch under the rules that vLLM ships and under the fixed
ones, side by side: whose keys each row sees, below which bound, how many of them on each rank."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Annotated, Any

import typer
from rich.console import Console

from compare.commands.two_plans import AsJson, TwoPlans, planned, suite_of_command
from compare.commands.words import UsageError, command, lengths
from compare.judging.plans import DecodePlanInputs, DecodePlanResult
from compare.protocol.case import LARGEST
from compare.report import console as terminal
from compare.report import summary

_RANKS_SHOWN = 256
_COLUMNS = ("row", "token", "shipped", "bound", "keys", "", "fixed", "bound", "keys")


@command
def plan_decode(
    total_lens: Annotated[
        str,
        typer.Option(help="Keys of each request on all ranks, this step's tokens included."),
    ],
    query_lens: Annotated[
        str, typer.Option(help="This step's tokens of each request; zeros are allowed.")
    ],
    max_query_len: Annotated[
        int,
        typer.Option(
            min=1, max=LARGEST, help="The most tokens that the engine promises for any request."
        ),
    ],
    world: Annotated[int, typer.Option(min=1, max=LARGEST, help="Ranks that share the keys.")],
    rank: Annotated[
        int | None,
        typer.Option(
            min=0, max=LARGEST, help="Show this rank's key counts; without it all ranks'."
        ),
    ] = None,
    interleave: Annotated[
        int, typer.Option(min=1, max=LARGEST, help="Neighbouring positions that lie on one rank.")
    ] = 1,
    pad_rows: Annotated[
        int, typer.Option(min=0, max=LARGEST, help="Rows of q after the last token.")
    ] = 0,
    causal: Annotated[
        bool,
        typer.Option(
            "--causal/--no-causal",
            help="Without: tokens see all keys of their request, as a draft.",
        ),
    ] = True,
    as_json: AsJson = False,
) -> int:
    """Print the shipped and the fixed rows of a decode batch, and say what goes wrong.

    Lists are joined by commas, plus signs or blanks. Exit status: 1 if a plan goes wrong, 0 if both
    are right, 2 if the words are off.
    """
    case_type: Any = suite_of_command("plan --decode").case_type
    case = case_type(
        lens=lengths("--total-lens", total_lens),
        q=lengths("--query-lens", query_lens),
        max_q=max_query_len,
        world=world,
        rank=rank or 0,
        interleave=interleave,
        causal=causal,
        pad_rows=pad_rows,
    )
    case.check()
    if rank is None and world > _RANKS_SHOWN:
        raise UsageError(
            f"--world {world} without --rank: accepted are up to {_RANKS_SHOWN} ranks side by "
            "side; choose one with --rank"
        )
    plans = compare_rows(case, tuple(range(world)) if rank is None else (rank,))
    return plans.print(as_json=as_json)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowPlans(TwoPlans):
    """Both plans of one batch; see the suite's explain.py. case: the batch, of rank 0 or of the one
    that is shown."""

    case: Any
    inputs: DecodePlanInputs
    ranks: tuple[int, ...]
    shipped: DecodePlanResult | None
    fixed: DecodePlanResult
    shipped_counts: tuple[tuple[int, ...], ...]
    fixed_counts: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...]

    def json(self) -> str:
        return self._json(
            arguments={
                "total_lens": self.inputs.total_lens,
                "query_lens": self.case.q,
                "max_query_len": self.inputs.max_query_len,
                "world": self.inputs.dcp_world,
                "ranks": self.ranks,
                "interleave": self.inputs.interleave,
                "causal": self.inputs.causal,
                "num_rows": self.inputs.num_rows,
            },
            case=str(self.case),
            shipped=_as_data(self.shipped, self.shipped_counts, self.ranks),
            fixed=_as_data(self.fixed, self.fixed_counts, self.ranks),
            notes=self.notes,
        )

    def show(self, console: Console) -> None:
        self._say_head(
            console,
            case=str(self.case),
            shipped="no plan" if self.shipped is None else self._view(self.shipped),
            fixed=self._view(self.fixed),
        )
        which = " + ".join(f"rank {rank}" for rank in self.ranks)
        terminal.say(console, f"keys: those that a row sees on {which}", style="dim")
        self._table(console)
        self._say_wrong(console)
        for sentence in self.notes:
            terminal.say(console, sentence)
        self._say_right(console, "Both plans are right." if self.shipped is not None else None)

    def _view(self, plan: DecodePlanResult) -> str:
        rows = summary.plural(len(plan.bound), "row")
        if plan.ragged:
            return f"{rows}, ragged: one row per token"
        each = len(plan.bound) // max(len(self.inputs.total_lens), 1)
        each = each if plan is self.shipped else self.inputs.max_query_len
        return f"{rows}, uniform: {each} per request"

    def _table(self, console: Console) -> None:
        lines, styles = [], []
        for t, token in enumerate(_tokens(self.inputs)):
            fixed = self._cells(self.fixed, self.fixed_counts, t)
            shipped = ("", "", "")
            if self.shipped is not None:
                shipped = self._cells(self.shipped, self.shipped_counts, t)
            wrong = self.shipped is not None and shipped != fixed
            lines.append((str(t), token, *shipped, "" if wrong else "=", *fixed))
            styles.append("red" if wrong else "")
        if self.shipped is None:
            lines = [(*line[:2], *line[6:]) for line in lines]
            columns = (*_COLUMNS[:2], *_COLUMNS[6:])
        else:
            columns = _COLUMNS
        if lines:
            text = {i for i, name in enumerate(columns) if name not in ("row", "bound", "keys")}
            terminal.print_table(console, columns, lines, styles, text_columns=text)

    @staticmethod
    def _cells(
        plan: DecodePlanResult, counts: tuple[tuple[int, ...], ...], t: int
    ) -> tuple[str, str, str]:
        if plan.padding[t]:
            return "padding", "", "+".join(str(column[t]) for column in counts)
        keys = "+".join(str(column[t]) for column in counts)
        return f"request {plan.request[t]}", str(plan.bound[t]), keys


def compare_rows(case: Any, ranks: tuple[int, ...]) -> RowPlans:
    """The shipped and the fixed rows of a batch, judged on these ranks. UsageError for arguments
    that no planner accepts."""
    return RowPlans(**vars(suite_of_command("plan --decode").explain(case, ranks, planned)))


def _tokens(inputs: DecodePlanInputs) -> list[str]:
    """Of each row the request and its token, in words."""
    starts = inputs.query_start_loc
    named = [
        f"request {i}, {t - start + 1} of {end - start}"
        for i, (start, end) in enumerate(pairwise(starts))
        for t in range(start, end)
    ]
    return named + ["padding"] * (inputs.num_rows - starts[-1])


def _as_data(
    plan: DecodePlanResult | None, counts: tuple[tuple[int, ...], ...], ranks: tuple[int, ...]
) -> dict[str, Any]:
    if plan is None:
        return {"ragged": None, "rows": None}
    rows = zip(plan.request, plan.bound, plan.padding, strict=True)
    return {
        "ragged": plan.ragged,
        "rows": [
            {
                "request": None if padding else request,
                "bound": None if padding else bound,
                "padding": padding,
                "local_counts": {
                    str(rank): column[t] for rank, column in zip(ranks, counts, strict=True)
                },
            }
            for t, (request, bound, padding) in enumerate(rows)
        ],
    }
