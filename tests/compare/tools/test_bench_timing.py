"""The timing of back-to-back launches, on a clock of its own."""

from __future__ import annotations

import pytest

from compare.bench.timing import Contender, Method, Timing, interleaved


class Machine:
    """A clock that only launches move: `fixed` seconds a batch, `each` a launch."""

    def __init__(self) -> None:
        self.now = 0.0
        self.batches: list[tuple[str, int]] = []

    def contender(self, name: str, each: float, fixed: float = 0.0) -> Contender:
        def launch(n: int) -> None:
            self.batches.append((name, n))
            self.now += fixed + n * each

        return Contender(name, launch)


def test_what_happens_once_a_batch_is_not_in_the_time_of_a_launch():
    machine = Machine()
    contenders = [
        machine.contender("a", each=3e-3, fixed=0.5),
        machine.contender("b", each=2e-3, fixed=0.1),
    ]
    times = interleaved(contenders, Method(), clock=lambda: machine.now)
    assert times["a"].median_us == pytest.approx(3000)
    assert times["b"].median_us == pytest.approx(2000)
    assert len(times["a"].rounds_us) == 5


def test_contenders_take_turns_and_each_begins_some_rounds():
    machine = Machine()
    contenders = [machine.contender(name, each=1e-3) for name in "abc"]
    interleaved(contenders, Method(launches=10, few=2, rounds=3), clock=lambda: machine.now)
    warm, timed = machine.batches[:3], machine.batches[3:]
    assert warm == [("a", 2), ("b", 2), ("c", 2)]
    assert [name for name, n in timed if n == 12] == list("abcbcacab")
    assert [n for _, n in timed] == [2, 12] * 9


def test_one_disturbed_round_does_not_move_the_median():
    timing = Timing((900.0, 1000.0, 1010.0, -7000.0, 1020.0))
    assert timing.median_us == 1000
    assert timing.measurable


def test_launches_that_take_no_time_are_not_measurable():
    machine = Machine()
    times = interleaved(
        [machine.contender("a", each=0.0, fixed=0.1)], Method(), clock=lambda: machine.now
    )
    assert not times["a"].measurable


@pytest.mark.parametrize("word", ["launches", "few", "rounds"])
def test_a_method_without_launches_is_refused(word):
    with pytest.raises(ValueError, match=f"{word} is 0"):
        Method(**{word: 0})
