"""What the judge says about one candidate on one case."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping


class Status(enum.Enum):
    """The outcome of one comparison; only PASS is good, UNSUPPORTED is neither."""

    PASS = "PASS"
    NUMERIC = "NUMERIC"  # outside the tolerance
    SPECIAL = "SPECIAL"  # NaN, +inf, -inf or an exact value at the wrong place
    PLAN = "PLAN"  # a prefill plan breaks one of its rules
    SHAPE = "SHAPE"
    DTYPE = "DTYPE"
    ERROR = "ERROR"  # it raised
    CRASH = "CRASH"  # its process died
    TIMEOUT = "TIMEOUT"
    UNSUPPORTED = "UNSUPPORTED"
    NONDETERMINISTIC = "NONDETERMINISTIC"

    @property
    def failed(self) -> bool:
        return self not in (Status.PASS, Status.UNSUPPORTED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worst:
    """The worst element of a tensor: its index, the candidate's value, the expected one (None where
    any finite value would have passed), and their distance as a share of what is allowed there."""

    tensor: str
    index: tuple[int, ...]
    got: float
    expected: float | None
    share: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorMetrics:
    """Distances of one tensor to another over the finite, compared elements.

    max_rel has the floor 1e-6 in its denominator. ulp: quantiles 0.5, 0.99, 1 of the distance in
    units of the last place (bfloat16 for out, float32 for lse and max_logits). matched: the share
    of elements within the flashmla profile's tolerance. special: how many NaN / +inf / -inf stand
    where the other has none, by name, empty when all agree. elements: how many were compared.
    """

    elements: int
    max_abs: float
    max_rel: float
    rel_l2: float
    cosine_difference: float
    quantiles_abs: tuple[float, float, float]
    ulp: tuple[float, float, float]
    matched: float
    special: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A fault that the tensors themselves show: its name (a stable slug, e.g. "lse-base-2") and a
    sentence.
    """

    name: str
    sentence: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The judge's answer for one candidate on one case.

    reason: a sentence; for failures it names the tensor, the tolerance and the worst place.
    share: the largest share of the calibrated bound that the candidate used (1 is the limit).
    shares: the same by tensor name, with "out tensor" for the bound of out as a whole.
    against_oracle, against_reference, reference_against_oracle, torch_against_oracle: metrics by
        tensor name; the last is the yardstick's, eager PyTorch in the kernel's precision.
    rows_judged: (token, head) rows compared with the oracle; rows_total: all of them.
    reference_failed: a sentence when the reference itself was outside its bound; the case is then
        judged against the oracle alone and the run ends with exit status 3.
    waived_by: the waiver that a reader accepted, beside the status, never in its place.
    """

    status: Status
    reason: str = ""
    share: float | None = None
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
    diagnosis: tuple[Diagnosis, ...] = ()
    worst: tuple[Worst, ...] = ()
    against_oracle: Mapping[str, TensorMetrics] = dataclasses.field(default_factory=dict)
    against_reference: Mapping[str, TensorMetrics] = dataclasses.field(default_factory=dict)
    reference_against_oracle: Mapping[str, TensorMetrics] = dataclasses.field(default_factory=dict)
    torch_against_oracle: Mapping[str, TensorMetrics] = dataclasses.field(default_factory=dict)
    rows_judged: int = 0
    rows_total: int = 0
    reference_failed: str | None = None
    not_compared: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    waived_by: str | None = None
