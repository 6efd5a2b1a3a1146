"""The work list that planner and kernel agree on: extents of a tile and fields of an item.

NumPy-free and JAX-free, so that the planner needs neither to know them.
"""

from __future__ import annotations

from jax_impl.mosaic.blocks import PAIR_KEYS, TILE_ROWS

__all__ = ["PAIR_KEYS", "TILE_ROWS"]

# A row of a tile is one head of one token.
ROW_ALIGNMENT = 8  # rows of queries are copied in groups of this many: a tile must begin with one

# An item is one tile of rows over a run of key pairs. Items of the thread blocks of a cluster
# stand side by side and walk over the same keys.
FIRST_ROW = 0  # of the rows [tokens * heads], token-major
NUM_ROWS = 1  # rows that count, from the first on; 0: this thread block only takes part
REQUEST = 2  # row of the block table
FIRST_PAIR = 3
NUM_PAIRS = 4  # 0: rows that see no key
END = 5  # keys that are looked at: the most that a row of the unit sees
FULL = 6  # keys that every row of the tile sees: blocks below need no mask
PARTIAL = 7  # where to leave an unfinished result, or -1 for a finished one
ITEM_FIELDS = 8

# A tile whose keys were split, and its partial results [FIRST_PARTIAL, END_PARTIAL).
MERGE_FIRST_ROW = 0
MERGE_NUM_ROWS = 1
FIRST_PARTIAL = 2
END_PARTIAL = 3
MERGE_FIELDS = 4


def rows_of_token(heads: int) -> int:
    """Rows that a token takes up: its heads, and the padding behind them.

    Every token then begins at a multiple of ROW_ALIGNMENT, and with it every tile. 6 heads -> 8.
    """
    return -(-heads // ROW_ALIGNMENT) * ROW_ALIGNMENT
