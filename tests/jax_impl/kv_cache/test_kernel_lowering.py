"""The gather kernel as a program: that it lowers, works in place, and counts bytes in 64 bits."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.interpreters.mlir import make_ir_context
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import arith, func

from jax_impl.kv_cache import FORMATS, empty_cache
from jax_impl.kv_cache.kernel_sm90 import Config, gather, gather_into, pieces
from jax_impl.kv_cache.kernel_sm90.seams_cuda import field_address, row_address
from jax_impl.mosaic import ptx
from tests.jax_impl.kv_cache.test_kernel_body import problem


def shapes(name: str, num_pages: int, page_size: int, requests: int, columns: int) -> tuple:
    paged = jax.eval_shape(lambda: empty_cache(name, num_pages=num_pages, page_size=page_size))

    def integers(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    return (
        paged, integers(requests, columns), integers(requests), integers(requests), integers(),
    )  # fmt: skip


def lowered(function: Any, *arguments: Any) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("num_pages", "page_size"), [(5, 2), (70_000, 64)])
def test_the_kernel_lowers_for_cuda_on_any_machine(name, num_pages, page_size):
    """Caches of more than 2^31 bytes among them."""
    paged, *integers, offset = shapes(name, num_pages, page_size, 3, 40)
    workspace = jax.ShapeDtypeStruct((3, 900, FORMATS[name].d), jnp.bfloat16)
    text = lowered(gather, paged, *integers, workspace, offset)
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("rows", [2, 3, 8, 16])
def test_every_tuning_lowers(rows):
    paged, *integers, offset = shapes("v4-fp8", 5, 2, 3, 40)
    workspace = jax.ShapeDtypeStruct((3, 900, 512), jnp.bfloat16)

    def tuned(*arguments):
        return gather(*arguments, config=Config(rows_per_warp=rows))

    assert "@mosaic_gpu" in lowered(tuned, paged, *integers, workspace, offset)


def test_two_gathers_into_one_workspace_hand_it_over_without_a_copy():
    compressed, *first, offset = shapes("v4-fp8", 5, 2, 3, 40)
    window, *second, _ = shapes("v4-fp8", 7, 64, 3, 9)

    def fill(compressed, window, first, second, offset):
        ref = jax.empty_ref(jax.ShapeDtypeStruct((3, 900, 512), jnp.bfloat16))
        gather_into(compressed, *first, ref, offset)
        gather_into(window, *second, ref, offset)
        return jax.freeze(ref)

    text = lowered(fill, compressed, window, first, second, offset)
    steps = re.findall(r"(%\d+) = (?:call|stablehlo.custom_call) @(\w+)\(([^)]*)\)", text)
    (buffer, name, _), (filled, _, operands), (_, _, operands_after) = steps[:3]
    assert name == "AllocateBuffer"
    assert buffer in operands.split(", ") and filled in operands_after.split(", ")
    aliases = re.findall(r"output_tuple_indices = \[\], operand_index = 5", text)
    assert len(aliases) == text.count("custom_call @mosaic_gpu") == 2  # each writes in place


def folded(build: Any) -> int:
    """The number that MLIR makes of the kernel's own address arithmetic on constants."""
    with make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):

            @func.FuncOp.from_py_func()
            def address():
                return build()

        passmanager.PassManager.parse("builtin.module(canonicalize)").run(module.operation)
        (constant,) = re.findall(r"arith.constant (-?\d+) : i64", str(module))
        assert "arith.add" not in str(module) and "arith.mul" not in str(module)
    return int(constant)


def test_the_folding_shows_a_product_that_wraps():
    def narrow():
        product = ptx.times(ptx.constant(57359), 37440)
        return arith.extsi(ptx.i64(), product)

    assert folded(narrow) == 2147520960 - 2**32


@pytest.mark.parametrize(
    ("name", "page", "offset"),
    [
        ("v3.2-fp8", 51150, 2147481600),
        ("v3.2-fp8", 51151, 2147523584),
        ("v4-fp8", 57358, 2147483520),
        ("v4-fp8", 57359, 2147520960),
        ("v4-fp8", 2**25 - 1, (2**25 - 1) * 37440),
    ],
)
@pytest.mark.parametrize("token", [0, 63])
def test_the_kernel_counts_bytes_of_a_cache_in_64_bits(name, page, offset, token):
    layout = FORMATS[name]
    assert layout.quantised is not None
    for field in (layout.quantised.codes, layout.quantised.scales, layout.plain):

        def build(field=field):
            base = ptx.constant(0, ptx.i64())
            numbers = ptx.constant(page), ptx.constant(token)
            return field_address(base, problem(kv_format=name), field, *numbers)

        in_page = layout.byte_offset(field, 64, token)
        assert folded(build) == offset + in_page
        assert offset + in_page == layout.byte_offset(field, 64, page * 64 + token)


@pytest.mark.parametrize(("request_", "row"), [(0, 2**21), (3, 0), (3, 2**22 - 1)])
def test_the_kernel_counts_bytes_of_a_workspace_in_64_bits(request_, row):
    def build():
        base = ptx.constant(0, ptx.i64())
        return row_address(base, problem(num_rows=2**22), ptx.constant(request_), ptx.constant(row))

    assert folded(build) == (request_ * 2**22 + row) * 1024


def test_a_layout_whose_pieces_are_not_aligned_is_refused():
    with pytest.raises(NotImplementedError, match="kv_format must keep pieces of 16 bytes"):
        layout = FORMATS["v4-fp8"]
        odd = type(layout)(
            name="odd", regions=(584,), quantised=layout.quantised, plain=layout.plain
        )
        pieces.check_alignment(odd, 64)
