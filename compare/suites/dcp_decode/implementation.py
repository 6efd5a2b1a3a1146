"""What implementations of decode have in common that run inside this process."""

from __future__ import annotations

from compare.houses.ranks import Merge, merge_by_torch, run_shards
from compare.protocol.implementation import Unsupported
from compare.protocol.inputs import Inputs
from compare.protocol.one_suite import OneSuite
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.dcp_decode.case import DcpDecodeCase


class DcpDecode(OneSuite[DcpDecodeCase]):
    """Base of DCP decode: a subclass says what stops it here and computes one rank's call."""

    suites = frozenset({"dcp-decode"})
    case_type = DcpDecodeCase
    merge: Merge = staticmethod(merge_by_torch)

    def call(self, inputs: DcpDecodeInputs) -> DcpDecodeResult:
        """One rank's call; inputs.shards is None."""
        raise NotImplementedError

    def call_shard(self, inputs: DcpDecodeInputs) -> DcpDecodeResult:
        """One rank's call whose result is to be merged: out may be float32."""
        return self.call(inputs)

    def run(self, inputs: Inputs) -> DcpDecodeResult:
        if not isinstance(inputs, DcpDecodeInputs):
            raise Unsupported(f"{self.name} is for dcp-decode")
        if inputs.shards is not None:
            return run_shards(self.call_shard, inputs, merge=self.merge)
        return self.call(inputs)
