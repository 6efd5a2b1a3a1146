"""What implementations of decode have in common that run inside this process."""

from __future__ import annotations

from compare.houses.ranks import Merge, merge_by_torch, run_shards
from compare.protocol.one_suite import OneSuite
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.dcp_decode.case import DcpDecodeCase


class DcpDecode(OneSuite[DcpDecodeCase, DcpDecodeInputs]):
    """Base of DCP decode; a `call` is one rank's, its inputs.shards is None."""

    case_type = DcpDecodeCase
    inputs_type = DcpDecodeInputs
    merge: Merge = staticmethod(merge_by_torch)

    def call_shard(self, inputs: DcpDecodeInputs) -> DcpDecodeResult:
        """One rank's call whose result is to be merged: out may be float32."""
        return self.call(inputs)

    def compute(self, inputs: DcpDecodeInputs) -> DcpDecodeResult:
        if inputs.shards is not None:
            return run_shards(self.call_shard, inputs, merge=self.merge)
        return self.call(inputs)
