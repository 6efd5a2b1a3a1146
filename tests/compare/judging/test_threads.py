"""Blocks on several threads give what one thread gives."""

from __future__ import annotations

import time

import pytest

from compare.judging.threads import in_order


def test_results_come_in_the_order_of_the_items():
    def slow_at_first(item: int) -> int:
        time.sleep(0.02 if item == 0 else 0.0)
        return item * item

    assert list(in_order(slow_at_first, range(50))) == [i * i for i in range(50)]


def test_few_items_are_taken_ahead_of_the_results():
    taken: list[int] = []

    def items():
        for item in range(10_000):
            taken.append(item)
            yield item

    results = in_order(lambda item: item, items())
    assert next(results) == 0
    assert len(taken) < 5_000
    results.close()  # pyright: ignore[reportAttributeAccessIssue]


def test_what_the_work_raises_goes_through():
    def fail(item: int) -> int:
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 0"):
        list(in_order(fail, range(3)))
