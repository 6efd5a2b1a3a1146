"""Wrong: lse is in base 2."""

from __future__ import annotations

import math

from right_v4 import v4


def v4_prefill(**given):
    answer = v4(given)
    answer.lse = answer.lse / math.log(2)
    return answer
