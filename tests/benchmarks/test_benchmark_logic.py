"""What the benchmarks decide and reckon, without a GPU."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest

import interference
import step
import variants
from copy_rate import copy_jobs
from models import CASES
from tables import excesses
from tide.errors import InputError
from tide.transport.cuda import Settings


class Unit:
    """A unit whose collectives do nothing."""

    def free(self) -> None:
        """Nothing."""

    gather = prepare_reduce = reduce = free


class Side:
    """Kernels on a rank's own clock; every call is a meeting of all ranks."""

    def __init__(self, single: float, late: bool = False) -> None:
        self.single, self.late, self.pause = single, late, 0
        self.calls: list[tuple[int, bool]] = []

    def together(self, kernel, count, prepare=None, collective=None):
        self.calls.append((count, collective is not None))
        slower = 1.4 if collective else 1.0
        return interference.Sample(count * self.single * slower, 9.0, 1.0, in_time=not self.late)


def measured(monkeypatch, sides: list[Side]) -> list[dict]:
    """``measure`` on as many threads as there are ranks, with a reduction between them."""
    meeting = threading.Barrier(len(sides), timeout=20)
    values, rows, rank_of = [0.0] * len(sides), [{} for _ in sides], threading.local()

    def agreed(value: float) -> float:
        values[rank_of.rank] = value
        meeting.wait()
        found = max(values)
        meeting.wait()
        return found

    def rank(number: int) -> None:
        rank_of.rank = number
        try:
            rows[number] = interference.measure(sides[number], lambda: None, Unit(), "reduce-scatter", 8.5, 0.7, 3)
        finally:
            if not rows[number]:
                meeting.abort()

    monkeypatch.setattr(interference, "agreed", agreed)
    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(sides))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(rows), "a rank waited for the others in vain"
    return rows


def test_ranks_with_other_clocks_run_the_same_kernels(monkeypatch):
    sides = [Side(0.0530), Side(0.0557), Side(0.0541)]
    rows = measured(monkeypatch, sides)
    assert sides[0].calls == sides[1].calls == sides[2].calls
    assert all(row["count"] == int(0.7 * 8.5 / 0.0557) for row in rows)
    for row in rows:
        assert row["slowdown"] == pytest.approx(1.4)
        assert row["null"] == pytest.approx(1.0)
        assert row["lost_ms"] == pytest.approx(0.4 * int(2.5 * 8.5 / 0.0557) * 0.0557)


def test_a_late_host_is_not_measured_on_any_rank(monkeypatch):
    sides = [Side(0.05), Side(0.05, late=True)]
    rows = measured(monkeypatch, sides)
    assert sides[0].calls == sides[1].calls
    assert all(row["late"] == 3 and "slowdown" not in row for row in rows)
    assert sides[0].pause == sides[1].pause


def row(variant: str, slowdown: float, null: float = 1.0, lost: float = 1.0) -> dict:
    common = {"kernel": "k", "collective": "c", "variant": variant}
    return common | {"slowdown": slowdown, "null": null, "lost_ms": lost}


def test_the_goal_is_a_ratio_of_excesses():
    (found,) = excesses([row("stock", 1.4, lost=3.0), row("tide", 1.02, lost=0.1)])
    assert found["figure"] == pytest.approx(20)
    assert found["lost_ratio"] == pytest.approx(30)
    assert found["bound"] == ""


def test_a_slowdown_within_the_noise_is_a_bound():
    (found,) = excesses([row("stock", 1.4), row("tide", 1.001, null=0.99)])
    assert found["figure"] == pytest.approx(0.4 / 0.01)
    assert found["bound"] == "at least"


def test_without_stock_there_is_no_goal():
    assert excesses([row("tide", 1.1)]) == []


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_copies_of_all_ranks_do_not_meet(world):
    nbytes = 1 << 30
    addresses = {rank: rank << 40 for rank in range(world)}
    written: dict[str, list[tuple[int, int]]] = {}
    for rank in range(world):
        jobs = copy_jobs(rank, world, nbytes, addresses, 99 << 40, list(range(world - 1)))
        assert set(jobs) == ({"pull", "push"} if world == 2 else {"pull", "push", "push to all", "push to all at once"})
        for name in jobs.keys() - {"pull"}:
            for _, destination, source, size in jobs[name]:
                assert addresses[rank] != destination >> 40 << 40, "a push to oneself"
                assert destination % (1 << 40) + size <= nbytes
                assert source + size <= (99 << 40) + nbytes
                written.setdefault(name, []).append((destination, size))
    for ranges in written.values():
        ranges.sort()
        assert all(a + size <= b for (a, size), (b, _) in pairwise(ranges))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("stock", variants.Variant("stock")),
        ("symm:own", variants.Variant("symm", "own")),
        ("symm:24", variants.Variant("symm", "24")),
        ("tide:64/32", variants.Variant("tide", "64/32")),
        ("tide+slots=3+route=pull", variants.Variant("tide", "", {"slots": 3, "route": "pull"})),
        ("tide-regather", variants.Variant("tide", "", {}, {"reuse_forward": False})),
        ("tide-early", variants.Variant("tide", "", {}, {"early_reduce": True})),
        ("tide-early+slots=3", variants.Variant("tide", "", {"slots": 3}, {"early_reduce": True})),
        ("tide+padded_storage", variants.Variant("tide", "", {"padded_storage": True})),
        ("tide+prefetch=2", variants.Variant("tide", "", {}, {"prefetch": 2})),
    ],
)
def test_a_variant_is_read(text, found):
    assert variants.parse(text) == found


def test_settings_are_the_variants():
    assert variants.parse("tide:48/16").settings() == Settings(place_ctas=48, accumulate_ctas=16)
    assert variants.parse("tide").settings() == Settings()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fsdp", "no variant"),
        ("tide+slotz=2", "no option 'slotz'"),
        ("stock+slots=2", "only tide takes options"),
        ("symm:fast", "behind the colon"),
        ("stock:1", "behind the colon"),
        ("tide+slots=0", "slots must be"),
    ],
)
def test_a_wrong_variant_is_refused_before_anything_runs(text, says):
    with pytest.raises((ValueError, InputError), match=says):
        variants.parse(text)


def run(ms: float, losses: list[float], **more) -> dict:
    return {"times": [ms, ms + 1, ms + 2], "host_ms": 5.0, "peak_gib": 9.0, "losses": losses, **more}


def test_stock_is_compared_with_itself():
    runs = {
        "solo": [run(40, [1.0, 2.0])],
        "stock": [run(80, [1.0, 2.0]), run(80, [1.0, 2.0 + 1e-6])],
        "tide": [run(50, [1.0, 2.0], stated={"tide": 3.0, "stock": 4.0})],
    }
    rows = {row["variant"]: row for row in step.summarise(CASES["llama"], 1024, runs)}
    assert rows["stock"]["losses_equal"] is False
    assert rows["stock"]["loss_difference"] == pytest.approx(5e-7, rel=1e-3)
    assert rows["tide"]["losses_equal"] is True
    assert rows["tide"]["gap_closed"] == pytest.approx(30 / 40)
    assert (rows["tide"]["stated_gib"], rows["stock"]["stated_gib"]) == (3.0, 4.0)
    assert "losses_equal" not in rows["solo"]


def test_one_run_of_stock_says_nothing_about_itself():
    (found,) = step.summarise(CASES["llama"], 1024, {"stock": [run(80, [1.0])]})
    assert "losses_equal" not in found
