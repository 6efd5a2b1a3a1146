"""placeholder"""
def sparse_prefill_inputs(case):
    raise NotImplementedError
