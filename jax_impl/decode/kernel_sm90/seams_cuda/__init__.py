"""The hardware's side of the seams: what the kernel does on a Hopper GPU.

Each function has a namesake in seams_interpret.py that does the same for Pallas' interpreter.
Docstrings stand here. Refs are Pallas refs, arrays are spread over a warpgroup in the layout
that the function's body names, `problem` is static.
"""

from jax_impl.decode.kernel_sm90.seams_cuda.narrow import (
    load_narrow,
    store_widened,
    widened_arrivals,
)
from jax_impl.decode.kernel_sm90.seams_cuda.products import (
    start_scores,
    start_values_of_registers,
    start_values_of_smem,
)
from jax_impl.decode.kernel_sm90.seams_cuda.results import (
    clear_rows_from,
    load_row_keys,
    store_output,
    store_rows,
)
from jax_impl.mosaic.products import finish_products, matmul_scratch
from jax_impl.mosaic.rows import (
    any_row,
    get_rows,
    put_rows,
    quad_sum,
    row_partial_sums,
    store_weights,
)
from jax_impl.mosaic.synchronisation import (
    arrive,
    barrier_scratch,
    initialise_barriers,
    wait,
)

__all__ = [
    "any_row",
    "arrive",
    "barrier_scratch",
    "clear_rows_from",
    "finish_products",
    "get_rows",
    "initialise_barriers",
    "load_narrow",
    "load_row_keys",
    "matmul_scratch",
    "put_rows",
    "quad_sum",
    "row_partial_sums",
    "start_scores",
    "start_values_of_registers",
    "start_values_of_smem",
    "store_output",
    "store_rows",
    "store_weights",
    "store_widened",
    "wait",
    "widened_arrivals",
]
