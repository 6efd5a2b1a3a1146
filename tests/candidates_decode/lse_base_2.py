"""Wrong: lse is in base 2."""

from __future__ import annotations

import math

from right_decode import decode


def dcp_decode(**given):
    out, lse = decode(**given)
    return out, lse / math.log(2)
