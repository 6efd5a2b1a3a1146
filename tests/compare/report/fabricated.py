"""Reports made by hand, one row for each thing that can happen."""

from __future__ import annotations

from typing import Any

from compare.protocol.report import Report, Row
from compare.protocol.verdict import Diagnosis, Status, TensorMetrics, Verdict, Worst

CASE = "sparse-prefill:s_q=3,s_kv=300,seed=7"
ENVIRONMENT = {
    "python": "3.12.3",
    "jax": "0.11.2",
    "torch": "2.11.0",
    "revision": "0123456789ab" * 3,
}


def metrics(rel_l2: float = 2.07e-3, **changes: Any) -> TensorMetrics:
    values: dict = {
        "elements": 98304,
        "max_abs": 0.0078125,
        "max_rel": float("inf"),
        "rel_l2": rel_l2,
        "cosine_difference": 1e-6,
        "quantiles_abs": (1e-4, 1e-3, 0.0078125),
        "ulp": (0.0, 1.0, 2.0),
        "matched": 1.0,
        "special": {},
    }
    return TensorMetrics(**(values | changes))


def verdict(status: Status = Status.PASS, **changes: Any) -> Verdict:
    values: dict = {"status": status}
    if status is Status.PASS:
        values |= {
            "share": 0.42,
            "against_oracle": {"out": metrics(), "lse": metrics(max_abs=1.4e-6)},
            "against_reference": {"out": metrics(9e-4)},
            "reference_against_oracle": {"out": metrics(2.08e-3)},
            "torch_against_oracle": {"out": metrics(2.09e-3)},
            "rows_judged": 192,
            "rows_total": 192,
        }
    return Verdict(**(values | changes))


def row(
    status: Status = Status.PASS,
    *,
    case: str = CASE,
    candidate: str = "xla",
    reference: str | None = "golden:h200/flash_mla",
    **changes: Any,
) -> Row:
    return Row(
        case=case,
        candidate=candidate,
        reference=reference,
        verdict=verdict(status, **changes),
        seconds=1.25,
    )


def report(*rows: Row, **changes: Any) -> Report:
    values: dict = {"rows": rows, "environment": ENVIRONMENT, "seconds": 3.5}
    return Report(**(values | changes))


BASE_2 = row(
    Status.NUMERIC,
    candidate="my|kernels.py:attend",
    reason="lse: 192 of 192 rows are outside 4 fp32 ulp of the oracle",
    share=3.1e5,
    diagnosis=(Diagnosis(name="lse-base-2", sentence="lse is 1.4427 times the oracle's: base 2"),),
    worst=(Worst(tensor="lse", index=(2, 17), got=6.7, expected=4.6440, share=3.1e5),),
    against_oracle={"out": metrics(), "lse": metrics(0.4427, special={"nan": 1})},
)
UNSUPPORTED = row(
    Status.UNSUPPORTED, candidate="pallas", reason="needs a Hopper GPU; there is none here"
)
RAISED = row(
    Status.ERROR, candidate="mine", reason="ValueError: \x1b[31mred\x1b[0m <&> ]]> \x00\ud800 ~~~~"
)
EVERY_STATUS = tuple(
    row(status, case=f"{CASE[:-1]}{number}", reason=f"because of {number}")
    for number, status in enumerate(Status)
)
EVERYTHING = report(
    *EVERY_STATUS,
    BASE_2,
    UNSUPPORTED,
    RAISED,
    row(
        reference_failed="golden:h200/flash_mla is outside its bound",
        not_compared=("max_logits",),
        notes=("heads padded from 16 to 64",),
        waived_by="waivers.toml line 3",
        rows_total=4096,
    ),
    unavailable=("flash_mla isn't available: no GPU",),
    interrupted=True,
    require=40,
    profile="both",
)
