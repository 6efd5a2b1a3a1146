"""Wrong: a list's length is ignored and -1 counts from the end, as NumPy has it."""

from __future__ import annotations

from right_v4 import softmax, v4


def attend(q, workspace, indices, length, scale, sink):
    return softmax(q, workspace[indices.long()], scale, sink)


def v4_prefill(**given):
    return v4(given, attend=attend)
