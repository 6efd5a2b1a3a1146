"""What a candidate may have done instead: each hypothesis says what its tensors would then be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Bool, Int64

from compare.judging.attention_call import SparsePrefillInputs
from compare.judging.evidence import Evidence
from compare.judging.metrics import to_float64
from compare.judging.result_view import ResultView
from compare.judging.rows import OracleRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A fault: its slug, a sentence, and the oracle's tensors on the sample if it were so.

    silent: of which of the sample's tokens it can't tell what they would be; known when rows has
    run. None: of none. by_value: what speaks for it are values; that a row is NaN as it has it, as
    it would be after whatever reads NaN, is not enough.
    """

    name: str
    sentence: str
    rows: Callable[[], OracleRows]
    silent: Callable[[], Bool[np.ndarray, " n"]] | None = None
    by_value: bool = False


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Sample:
    """The tokens on which hypotheses are tried, with what the contract says there."""

    evidence: Evidence
    view: ResultView
    tokens: Int64[np.ndarray, " n"]
    contract: OracleRows

    @property
    def heads(self) -> int:
        return self.evidence.heads


def hypotheses(sample: Sample, inputs: SparsePrefillInputs) -> Iterator[Hypothesis]:
    """All faults that are possible with these inputs. Names are stable; reports rely on them."""
    yield from _variants(sample, inputs)
    yield from head_orders(sample)
    yield from neighbour_tokens(sample)
    contract = sample.contract
    yield Hypothesis(
        name="lse-times-ln-2",
        sentence="lse is the natural one times ln 2, as if it had been in base 2",
        rows=lambda: dataclasses.replace(contract, lse=contract.lse * np.log(2.0)),
    )
    yield Hypothesis(
        name="out-all-zero",
        sentence="out is 0 everywhere",
        rows=lambda: dataclasses.replace(contract, out=np.zeros_like(contract.out)),
    )


def _variants(sample: Sample, inputs: SparsePrefillInputs) -> Iterator[Hypothesis]:
    """The deviations that torch_ref's oracle computes itself."""
    from torch_ref import Variant

    tokens = sample.tokens
    scale, S = inputs.sm_scale, len(inputs.kv)
    found = [
        ("lse-base-2", "lse is in base 2: the natural one times 1.4427", Variant(lse_base2=True)),
        ("scale-twice", "scores are multiplied by sm_scale twice", Variant(scale_power=2)),
        (
            "max-before-scaling",
            "max_logits is taken before the product with sm_scale",
            Variant(max_logits="unscaled"),
        ),
    ]
    if inputs.attn_sink is not None:
        found += [
            ("sink-omitted", "the sink is left out of the denominator", Variant(sink="omitted")),
            ("sink-in-lse", "lse counts the sink, which belongs to out", Variant(sink="in_lse")),
            (
                "sink-times-sm-scale",
                "the sink is multiplied by sm_scale; it is in natural-log units already",
                Variant(sink="times_scale"),
            ),
        ]
    indices = inputs.indices[tokens]
    if ((indices < 0) & (indices >= -S)).any():
        found.append(
            (
                "minus-one-wraps",
                "a negative index counts from the end of kv instead of naming no key",
                Variant(index="minus_one_wraps"),
            )
        )
    if inputs.topk_length is not None:
        found += [
            (
                "length-ignored",
                "slots at and past topk_length are attended to",
                Variant(length="ignored"),
            ),
            ("length-off-by-one", "each row takes one slot too many", Variant(length="plus_one")),
            ("length-off-by-one", "each row takes one slot too few", Variant(length="minus_one")),
        ]
    # At D = 512 the columns wrap around; at 576 these are the last 512.
    found.append(
        (
            "wrong-value-columns",
            "V starts 64 columns too far; it is the first 512 columns of kv",
            Variant(v_offset=64),
        )
    )
    for name, sentence, variant in found:
        if scale == 1.0 and name in ("scale-twice", "max-before-scaling", "sink-times-sm-scale"):
            continue
        yield Hypothesis(
            name=name,
            sentence=sentence,
            rows=lambda variant=variant: sample.evidence.oracle(tokens, variant),
        )


def head_orders(sample: Sample) -> Iterator[Hypothesis]:
    """Heads in another order: the order that fits out best, and the one that fits lse best."""
    H = sample.heads
    if H == 1:
        return
    at, out = sample.view.out(sample.tokens)
    if len(at) != len(sample.tokens) * H:
        return
    out = to_float64(out).reshape(len(sample.tokens), H, -1)
    lse = to_float64(sample.view.statistics(sample.tokens)["lse"])
    contract = sample.contract
    orders = []
    for mine, theirs in ((out, contract.out), (lse[..., None], contract.lse[..., None])):
        orders += _likely_orders(mine, theirs)
    seen: set[bytes] = {np.arange(H).tobytes()}
    for order in orders:
        if order.tobytes() in seen:
            continue
        seen.add(order.tobytes())
        shift = (-int(order[0])) % H
        rotated = (order == (np.arange(H) - shift) % H).all()
        name = "heads-rotated" if rotated else "heads-permuted"
        what = f"head h holds head (h - {shift}) mod {H}" if rotated else "heads are out of order"
        yield Hypothesis(
            name=name,
            sentence=f"{what} in every output",
            rows=lambda order=order: OracleRows(
                out=contract.out[:, order],
                max_logits=contract.max_logits[:, order],
                lse=contract.lse[:, order],
                p2=contract.p2[:, order],
            ),
        )
        yield Hypothesis(
            name=name,
            sentence=f"{what} in out, not in lse",
            rows=lambda order=order: dataclasses.replace(
                contract, out=contract.out[:, order], p2=contract.p2[:, order]
            ),
        )
        yield Hypothesis(
            name=name,
            sentence=f"{what} in lse and max_logits, not in out",
            rows=lambda order=order: dataclasses.replace(
                contract,
                max_logits=contract.max_logits[:, order],
                lse=contract.lse[:, order],
            ),
        )


def _likely_orders(mine: np.ndarray, theirs: np.ndarray) -> list[np.ndarray]:
    """Of [n, H, X] tensors: the rotation of heads with the least squared distance, and the order
    that pairs each head with its nearest, where that is a permutation.
    """
    fine = np.isfinite(mine).all(axis=(1, 2)) & np.isfinite(theirs).all(axis=(1, 2))
    mine, theirs = mine[fine], theirs[fine]
    if len(mine) == 0:
        return []
    H = mine.shape[1]
    product = np.einsum("nhx,ngx->hg", mine, theirs)
    square = np.einsum("ngx,ngx->g", theirs, theirs)
    apart = square[None, :] - 2.0 * product  # of my head h to their head g, less |mine|^2
    heads = np.arange(H)
    rotations = [(heads - shift) % H for shift in range(H)]
    orders = [min(rotations, key=lambda order: apart[heads, order].sum())]
    nearest = apart.argmin(axis=1)
    if len(np.unique(nearest)) == H:
        orders.append(nearest)
    return orders


def neighbour_tokens(sample: Sample) -> Iterator[Hypothesis]:
    """Rows of the token before or after."""
    T = sample.evidence.num_tokens
    for step, word in ((-1, "before"), (1, "after")):
        if T > 1:
            yield Hypothesis(
                name="neighbour-token-rows",
                sentence=f"each token has the rows of the token {word} it",
                rows=lambda step=step: sample.evidence.oracle((sample.tokens + step) % T),
            )
