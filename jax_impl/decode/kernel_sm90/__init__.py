"""DCP causal MLA decode as a Pallas Mosaic GPU kernel for Hopper."""

from jax_impl.decode.kernel_sm90.config import Config
from jax_impl.decode.kernel_sm90.launch import attend

__all__ = ["Config", "attend"]
