"""Checks of what index builders are given: types always, values where they can be seen.

Values are looked at with NumPy in 64 bits, outside jit only. Each check names the argument, the
value and what is accepted.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np

from jax_impl.arrays import is_traced, shape_of, true_or_false

INT32_MAX = 2**31 - 1
_INT32 = ("int32",)


class HostTokens(NamedTuple):
    """`tokens.Tokens` of the batch's real tokens, in 64 bits."""

    request: np.ndarray
    position: np.ndarray


# Types: at every call.


def count(value: Any, name: str, *, least: int = 0) -> int:
    """A static integer of at least `least`, and at most what an int32 holds."""
    try:
        if isinstance(value, (bool, np.bool_)) or is_traced(value):
            raise TypeError
        exact = operator.index(value)
    except TypeError:
        exact = None
    if exact is None or not least <= exact <= INT32_MAX:
        raise ValueError(f"{name} must be an integer from {least} to 2^31 - 1; got {value!r}")
    return exact


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def list_width(multiple: int, **parts: int) -> int:
    """Columns of a list: the sum of the parts, named as arguments are, up to a multiple."""
    width = round_up(sum(parts.values()), multiple)
    if width > INT32_MAX:
        *others, last = parts
        names = f"{', '.join(others)} and {last}" if others else last
        values = " + ".join(str(part) for part in parts.values())
        raise ValueError(
            f"{names} must make lists of at most {INT32_MAX // multiple * multiple} columns, a "
            f"multiple of {multiple} that an int32 holds; got {values}"
        )
    return width


def int32_shape(value: Any, name: str, axes: str) -> tuple[int, ...]:
    return shape_of(value, name, axes, _INT32)


def requests_of(query_start_loc: Any) -> int:
    (entries,) = int32_shape(query_start_loc, "query_start_loc", "[n + 1]")
    if not entries:
        raise ValueError("query_start_loc must be [n + 1], with at least one entry; got shape [0]")
    return entries - 1


def batch_of(query_start_loc: Any, seq_lens: Any) -> int:
    """The number of requests that both describe."""
    requests = requests_of(query_start_loc)
    one_each(seq_lens, "seq_lens", requests)
    return requests


def one_each(
    value: Any, name: str, wanted: int, *, of: str = "n", more: int = 0, dtypes: Any = _INT32
) -> None:
    """An array of one value for each request (of="n") or token (of="T"), and `more`."""
    axes = f"[{of} + {more}]" if more else f"[{of}]"
    (entries,) = shape_of(value, name, axes, dtypes)
    if entries != wanted + more:
        raise ValueError(f"{name} must be {axes} = [{wanted + more}]; got shape [{entries}]")


def tokens_in(query_start_loc: Any, num_tokens: Any, *arrays: tuple[Any, str]) -> int:
    """T: from num_tokens, from the arrays (with their names) of a row for each token, or else
    from the values of query_start_loc."""
    known_from = "num_tokens"
    if num_tokens is not None:
        num_tokens = count(num_tokens, "num_tokens")
    for array, name in arrays:
        if array is None:
            continue
        rows = int(array.shape[0])
        if num_tokens is None:
            num_tokens, known_from = rows, name
        if rows != num_tokens:
            raise ValueError(
                f"{name} must have a row for each of the {num_tokens} tokens of {known_from}; "
                f"got {rows}"
            )
    if num_tokens is not None:
        return num_tokens
    if is_traced(query_start_loc):
        raise ValueError("num_tokens must be given inside jit, where it can't be counted")
    offsets = np.asarray(query_start_loc, np.int64)
    return max(int(offsets[-1] - offsets[0]), 0)


def known(validate: bool, *arrays: Any) -> bool:
    """Whether the values may and can be looked at."""
    true_or_false(validate, "validate")
    return validate and not is_traced(*arrays)


def check_columns(num_columns: int, what: str) -> None:
    """An int32 numbers the columns, and one more for what is in none of a table's."""
    most = INT32_MAX - 2
    if num_columns > most:
        raise ValueError(f"{what} must have at most {most} columns; got {num_columns}")


def cache_of(page_size: Any, num_slots: Any) -> tuple[int, int]:
    """Page size and slots of a cache; where these aren't known, as many as an int32 can number."""
    page_size = count(page_size, "page_size", least=1)
    if num_slots is None:
        return page_size, INT32_MAX // page_size * page_size
    if count(num_slots, "num_slots") % page_size:
        raise ValueError(f"num_slots must be whole pages of {page_size}; got {num_slots}")
    return page_size, num_slots


# Values: outside jit.


def check_offsets(offsets: Any, name: str = "query_start_loc") -> None:
    values = np.asarray(offsets, np.int64)
    if values[0] < 0:
        raise ValueError(f"{name} must begin at 0 or above; got {values[0]}")
    for i in np.flatnonzero(np.diff(values) < 0)[:1]:
        raise ValueError(f"{name} must never fall; got {values[i + 1]} after {values[i]} at {i}")


def check_batch(query_start_loc: Any, seq_lens: Any, num_tokens: int | None = None) -> None:
    """Offsets that don't fall, no query longer than its context, a row for each token."""
    check_offsets(query_start_loc)
    offsets, contexts = np.asarray(query_start_loc, np.int64), np.asarray(seq_lens, np.int64)
    queries = np.diff(offsets)
    for i in np.flatnonzero(queries > contexts)[:1]:
        raise ValueError(
            f"seq_lens must count this step's tokens too; got {contexts[i]} for request {i}, "
            f"whose query_start_loc gives it {queries[i]}"
        )
    total = int(offsets[-1] - offsets[0])
    if num_tokens is not None and total > num_tokens:
        raise ValueError(
            f"query_start_loc must hold at most the {num_tokens} tokens that there are rows for; "
            f"got {total}"
        )


def check_replay(replay_start: Any) -> None:
    starts = np.asarray(replay_start)
    for i in np.flatnonzero(starts < 0)[:1]:
        raise ValueError(f"replay_start must be at least 0; got {starts[i]} for request {i}")


def host_tokens(query_start_loc: Any, seq_lens: Any) -> HostTokens:
    offsets = np.asarray(query_start_loc, np.int64)
    contexts = np.asarray(seq_lens, np.int64)
    queries = np.diff(offsets)
    request = np.repeat(np.arange(len(queries)), queries)
    token = np.arange(len(request))
    position = contexts[request] - (offsets[request + 1] - offsets[0] - token)
    return HostTokens(request, position)


def check_spans(
    query_start_loc: Any,
    seq_lens: Any,
    spans: Any,
    span_offsets: Any,
    max_image_tokens: int,
    *,
    name: str = "spans",
) -> None:
    """Every span not empty, at most max_image_tokens long, within this step's tokens.

    name: the argument that the spans came in.
    """
    check_offsets(span_offsets, "span_offsets")
    bounds, pairs = np.asarray(span_offsets, np.int64), np.asarray(spans, np.int64)
    if bounds[0] != 0 or bounds[-1] != len(pairs):
        raise ValueError(
            f"span_offsets must run from 0 to the {len(pairs)} spans; "
            f"got {bounds[0]} to {bounds[-1]}"
        )
    contexts = np.asarray(seq_lens, np.int64)
    prefixes = contexts - np.diff(np.asarray(query_start_loc, np.int64))
    owners = np.repeat(np.arange(len(contexts)), np.diff(bounds))
    for request, (first, last) in zip(owners, pairs, strict=True):
        span = f"{name}: the image at positions {first} to {last} of request {request}"
        if first > last:
            raise ValueError(f"{span} is empty; accepted: first <= last, both inclusive")
        if last - first + 1 > max_image_tokens:
            raise ValueError(
                f"{span} is longer than max_image_tokens, {max_image_tokens}: the lists have no "
                "room for it"
            )
        if prefixes[request] == contexts[request]:
            raise ValueError(
                f"{span} is not among this step's tokens, of which the request has none: accepted "
                "are images that are prefilled in one step"
            )
        if first < prefixes[request] or last >= contexts[request]:
            raise ValueError(
                f"{span} is not wholly among this step's tokens, positions {prefixes[request]} to "
                f"{contexts[request] - 1}: accepted are images that are prefilled in one step"
            )


def check_entries(
    topk_indices: Any, tokens: HostTokens, compress_ratio: int, limits: Any, limit_name: str
) -> None:
    """The first min((pos + 1) // ratio, topk) entries of each row: visible, and under the limit.

    limits: [n], entries that request i has at hand; limit_name: what they come from.
    """
    rows = np.asarray(topk_indices)
    topk = rows.shape[1]
    if not topk or not len(tokens.request):
        return
    rows = rows[: len(tokens.request)].astype(np.int64)
    visible = (tokens.position + 1) // compress_ratio
    listed = np.arange(topk) < visible[:, None]
    at_hand = np.asarray(limits, np.int64)[tokens.request]
    bad = listed & ((rows < 0) | (rows >= np.minimum(visible, at_hand)[:, None]))
    for token, column in np.argwhere(bad)[:1]:
        entry, request = rows[token, column], tokens.request[token]
        place = f"topk_indices must name, in its first {min(visible[token], topk)} columns, "
        got = f"got {entry} in column {column} of token {token} (request {request})"
        if entry < 0:
            raise ValueError(
                f"{place}entries >= 0: a hole there would be taken for a row of the request "
                f"before it; {got}"
            )
        if entry >= visible[token]:
            raise ValueError(
                f"{place}entries that position {tokens.position[token]} sees, under "
                f"{visible[token]}; {got}"
            )
        raise ValueError(f"{place}entries under {limit_name}, {at_hand[token]}; {got}")


def check_gathered(tokens: HostTokens, first: np.ndarray, begin: Any) -> None:
    """Each token's first position is gathered: at begin[request] or behind."""
    begin = np.asarray(begin, np.int64)[tokens.request]
    for t in np.flatnonzero(first < begin)[:1]:
        raise ValueError(
            f"gather_lens must reach back to position {first[t]}, where the window of token {t} "
            f"begins (request {tokens.request[t]}); got {begin[t]} as the first gathered position, "
            "as with a replay_start above 0"
        )


def check_images(
    tokens: HostTokens, seq_lens: Any, left: np.ndarray, right: np.ndarray, queries: np.ndarray
) -> None:
    """No token sees an image's position that is not among its request's tokens of this step."""
    contexts = np.asarray(seq_lens, np.int64)[tokens.request]
    prefixes = contexts - queries[tokens.request]
    for name, values in (("image_left", left), ("image_right", right)):
        for t in np.flatnonzero(values < 0)[:1]:
            raise ValueError(f"{name} must be 0 or above; got {values[t]} for token {t}")
    for t in np.flatnonzero((left > 0) & (tokens.position - left < prefixes))[:1]:
        raise ValueError(
            f"image_left must end at this step's first position, {prefixes[t]}; got {left[t]} for "
            f"token {t} at position {tokens.position[t]}"
        )
    for t in np.flatnonzero(tokens.position + right >= contexts)[:1]:
        raise ValueError(
            f"image_right must end at the last position, {contexts[t] - 1}; got {right[t]} for "
            f"token {t} at position {tokens.position[t]}"
        )


def check_lengths(lengths: np.ndarray, width: int, cause: str) -> None:
    """No list longer than its row; `cause` names the arguments that make the width."""
    for t in np.flatnonzero((lengths > width) | (lengths < 0))[:1]:
        raise ValueError(
            f"{cause} must leave room for the whole list, of 0 to {width} keys; "
            f"got {lengths[t]} for token {t}"
        )


def check_table(
    block_table: Any, name: str, page_size: int, num_slots: int, request: int, wanted: np.ndarray
) -> None:
    """The pages that hold the wanted positions (or entries) of a request are in the cache."""
    table = np.asarray(block_table)
    columns = np.unique(wanted // page_size)
    if not columns.size:
        return
    if columns[-1] >= table.shape[1]:
        raise ValueError(
            f"{name} must have a column for page {columns[-1]} of request {request}, which holds "
            f"{wanted.max()} at {page_size} a page; got {table.shape[1]} columns"
        )
    pages = table[request, columns].astype(np.int64)
    for at in np.flatnonzero((pages < 0) | (pages >= num_slots // page_size))[:1]:
        raise ValueError(
            f"{name} must hold pages from 0 to {num_slots // page_size - 1}; got {pages[at]} in "
            f"column {columns[at]} of request {request}"
        )
