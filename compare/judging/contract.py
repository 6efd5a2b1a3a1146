"""What the judge has to know about a suite besides its numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from compare.judging.metrics import Tolerance
from compare.judging.tolerance import EXACT_LSE_ULPS, FLASHMLA


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contract:
    """tolerances, whose: the flashmla profile's rules by tensor, and whose tests have them.
    empty_lse: the lse of a row without keys. no_key, nan_key: why 0 or NaN is due, in words.
    exact_lse_ulps: float32 ULP that lse may be off on data=exact.
    """

    tolerances: Mapping[str, Tolerance]
    whose: str = "FlashMLA's tests"
    empty_lse: float = math.inf
    no_key: str = "the row has no valid slot"
    nan_key: str = "a NaN in q, a referenced key or the sink"
    exact_lse_ulps: float = EXACT_LSE_ULPS


PREFILL = Contract(tolerances=FLASHMLA)
