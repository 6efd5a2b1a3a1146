"""The hardware's side of the seams: what the kernel does on a Hopper GPU.

Each function has a namesake in seams_interpret.py that does the same for Pallas' interpreter.
Docstrings stand here. Refs are Pallas refs, arrays are spread over a warpgroup in the layout
that the function's body names, `problem` is static.
"""

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
    arrive_after_copies,
    barrier_scratch,
    initialise_barriers,
    wait,
)
from jax_impl.prefill.sparse.kernel_sm90.seams_cuda.gather import (
    copy_columns,
    load_indices,
    prefetch_queries,
    prefetch_rows,
    publish,
)
from jax_impl.prefill.sparse.kernel_sm90.seams_cuda.page_places import locate, prefetch_page_rows
from jax_impl.prefill.sparse.kernel_sm90.seams_cuda.pages import (
    any_unusual,
    arrived,
    copy_plain,
    load_columns,
    load_scales,
    note_unusual,
    store_columns,
    store_exactly,
    unusual_scales,
)
from jax_impl.prefill.sparse.kernel_sm90.seams_cuda.products import (
    start_scores,
    start_values_of_registers,
    start_values_of_smem,
)
from jax_impl.prefill.sparse.kernel_sm90.seams_cuda.rows import store_output, store_rows

__all__ = [
    "any_row",
    "any_unusual",
    "arrive",
    "arrive_after_copies",
    "arrived",
    "barrier_scratch",
    "copy_columns",
    "copy_plain",
    "finish_products",
    "get_rows",
    "initialise_barriers",
    "load_columns",
    "load_indices",
    "load_scales",
    "locate",
    "matmul_scratch",
    "note_unusual",
    "prefetch_page_rows",
    "prefetch_queries",
    "prefetch_rows",
    "publish",
    "put_rows",
    "quad_sum",
    "row_partial_sums",
    "start_scores",
    "start_values_of_registers",
    "start_values_of_smem",
    "store_columns",
    "store_exactly",
    "store_output",
    "store_rows",
    "store_weights",
    "unusual_scales",
    "wait",
]
