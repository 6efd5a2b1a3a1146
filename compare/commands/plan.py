"""``plan``: the chunks of a prefill batch under the rules that vLLM ships and under the fixed ones,
side by side, and in words what goes wrong."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.console import Console

from compare.commands.two_plans import AsJson, TwoPlans, planned, suite_of_command
from compare.commands.words import command, lengths
from compare.judging.plans import PlanChunk, PlanResult, PrefillPlanInputs
from compare.protocol.case import LARGEST
from compare.report import console as terminal
from compare.report import summary

_CHUNK_COLUMNS = ("shipped", "requests", "tokens", "N", "M", "")


@command
def plan(
    seq_lens: Annotated[
        str, typer.Option(help="Context of each prefill request, this step's tokens included.")
    ],
    query_lens: Annotated[
        str, typer.Option(help="This step's tokens of each request; zeros are allowed.")
    ],
    compress_ratio: Annotated[
        int,
        typer.Option(min=0, max=LARGEST, help="Tokens per compressed entry; 0, 1: window only."),
    ],
    max_model_len: Annotated[
        int, typer.Option(min=1, max=LARGEST, help="vLLM's max_model_len, in tokens.")
    ],
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, max=LARGEST, help="vLLM's max_num_batched_tokens.")
    ],
    window: Annotated[
        int, typer.Option(min=1, max=LARGEST, help="Sliding window, in tokens.")
    ] = 128,
    chunk_size: Annotated[
        int, typer.Option(min=1, max=LARGEST, help="vLLM's PREFILL_CHUNK_SIZE.")
    ] = 4,
    has_compressed: Annotated[
        bool | None,
        typer.Option(
            "--has-compressed/--no-compressed",
            help="Whether the layer has compressed entries; without it: a ratio above 1.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Print the shipped and the fixed prefill plan of a batch, and say what goes wrong.

    Lists are joined by commas, plus signs or blanks. Exit status: 1 if a plan goes wrong, 0 if both
    are right, 2 for a usage error.
    """
    inputs = PrefillPlanInputs(
        seq_lens=lengths("--seq-lens", seq_lens),
        query_lens=lengths("--query-lens", query_lens),
        compress_ratio=compress_ratio,
        window=window,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        chunk_size=chunk_size,
        has_compressed=has_compressed,
    )
    return compare_plans(inputs).print(as_json=as_json)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plans(TwoPlans):
    """Both plans of one batch."""

    case: str
    inputs: PrefillPlanInputs
    shipped: PlanResult
    fixed: PlanResult

    @property
    def agree(self) -> bool:
        return self.shipped.chunks == self.fixed.chunks

    def json(self) -> str:
        arguments = dataclasses.asdict(self.inputs)
        del arguments["case"]
        return self._json(
            arguments=arguments,
            case=self.case,
            shipped={"chunks": [dataclasses.asdict(chunk) for chunk in self.shipped.chunks]},
            fixed={"chunks": [dataclasses.asdict(chunk) for chunk in self.fixed.chunks]},
            agree=self.agree,
        )

    def show(self, console: Console) -> None:
        self._say_head(
            console,
            case=self.case,
            shipped=summary.plural(len(self.shipped.chunks), "chunk"),
            fixed=summary.plural(len(self.fixed.chunks), "chunk"),
        )
        self._table(console)
        self._say_wrong(console)
        both = "The two plans are equal and right."
        if not self.agree:
            both = (
                "The two plans differ and both are right: batches with zero-query requests have "
                "more than one right plan."
            )
        self._say_right(console, both)

    def _table(self, console: Console) -> None:
        """Both plans side by side, chunks that begin with the same request on one line."""
        shipped = {chunk.start: (i, chunk) for i, chunk in enumerate(self.shipped.chunks)}
        fixed = {chunk.start: (i, chunk) for i, chunk in enumerate(self.fixed.chunks)}
        if not shipped | fixed:
            return
        lines, styles = [], []
        for start in sorted(shipped | fixed):
            left, right = shipped.get(start), fixed.get(start)
            equal = left and right and left[1] == right[1]
            lines.append((*_chunk(left), "=" if equal else "", *_chunk(right)))
            styles.append("red" if left and left[1].query_end <= left[1].query_start else "")
        columns = (*_CHUNK_COLUMNS, "", *("fixed", *_CHUNK_COLUMNS[1:]))
        text_columns = {i for i, column in enumerate(columns) if column not in ("N", "M")}
        terminal.print_table(console, columns, lines, styles, text_columns=text_columns)


def compare_plans(inputs: PrefillPlanInputs) -> Plans:
    """The shipped and the fixed plan of a batch, judged. UsageError for arguments that no planner
    accepts."""
    return Plans(**vars(suite_of_command("plan").explain(inputs, planned)))


def _chunk(numbered: tuple[int, PlanChunk] | None) -> tuple[str, ...]:
    """One chunk in _CHUNK_COLUMNS; one without a query token is marked."""
    if numbered is None:
        return ("",) * len(_CHUNK_COLUMNS)
    number, chunk = numbered
    return (
        f"chunk {number}",
        f"[{chunk.start}, {chunk.end})",
        f"[{chunk.query_start}, {chunk.query_end})",
        str(chunk.compressed_rows),
        str(chunk.workspace_rows),
        "" if chunk.query_end > chunk.query_start else "EMPTY",
    )
