from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerooffload import BudgetError, InternalError
from zerooffload.memory import Budget


def test_leases_add_up_to_the_limit_and_not_one_byte_more() -> None:
    budget = Budget("host", 100)
    with budget.lease(60, "ring"), budget.lease(40, "homes"):
        assert budget.free_bytes == 0
        with pytest.raises(BudgetError):
            budget.lease(1, "window")
    assert (budget.leased_bytes, budget.peak_bytes) == (0, 100)


def test_a_refusal_names_needs_holders_and_the_smallest_change() -> None:
    budget = Budget("host", 100)
    with budget.lease(70, "ring"), pytest.raises(BudgetError) as caught:
        budget.lease(50, "window")
    for word in ("host budget", "window needs 50 bytes", "30 of 100", "ring 70 B", "by 20 bytes"):
        assert word in str(caught.value)


def test_a_refused_lease_takes_nothing() -> None:
    budget = Budget("host", 10)
    with pytest.raises(BudgetError):
        budget.lease(11, "window")
    assert budget.leased_bytes == 0
    assert budget.holders() == {}


def test_a_lease_counts_in_the_parent_too() -> None:
    host = Budget("host", 100)
    device = Budget("device", 80, host)
    lease = device.lease(50, "window")
    assert (host.leased_bytes, device.leased_bytes) == (50, 50)
    assert device.free_bytes == 30
    with host.lease(40, "ring"):
        assert device.free_bytes == 10
    lease.release()
    assert (host.leased_bytes, device.leased_bytes) == (0, 0)


def test_a_child_that_refuses_gives_back_what_its_parent_took() -> None:
    host = Budget("host", 100)
    device = Budget("device", 10, host)
    with pytest.raises(BudgetError, match="device budget"):
        device.lease(50, "window")
    assert host.leased_bytes == 0


def test_a_parent_that_refuses_is_the_one_that_is_named() -> None:
    device = Budget("device", 100, Budget("host", 10))
    with pytest.raises(BudgetError, match="host budget"):
        device.lease(50, "window")
    assert device.leased_bytes == 0


def test_holders_are_told_largest_first_and_forgotten_when_they_hold_nothing() -> None:
    budget = Budget("host", 100)
    leases = [budget.lease(n, name) for n, name in ((10, "a"), (30, "b"), (5, "a"))]
    assert list(budget.holders().items()) == [("b", 30), ("a", 15)]
    leases[1].release()
    assert budget.holders() == {"a": 15}


def test_releasing_again_is_harmless() -> None:
    budget = Budget("host", 100)
    lease = budget.lease(10, "a")
    lease.release()
    lease.release()
    assert budget.leased_bytes == 0


def test_a_dropped_lease_comes_back() -> None:
    budget = Budget("host", 100)
    lease = budget.lease(10, "a")
    del lease
    gc.collect()
    assert budget.leased_bytes == 0


def test_more_given_back_than_leased_is_a_bug_that_is_told() -> None:
    budget = Budget("host", 100)
    with pytest.raises(InternalError, match="host budget"):
        budget._give_back(1, "a")


@given(st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=30))
def test_what_is_leased_never_exceeds_the_limit(moves: list[tuple[int, bool]]) -> None:
    budget = Budget("host", 100)
    held, peak = [], 0
    for nbytes, drop in moves:
        try:
            held.append(budget.lease(nbytes, "x"))
        except BudgetError:
            assert nbytes + sum(lease.nbytes for lease in held) > 100
        if drop and held:
            held.pop(0).release()
        expected = sum(lease.nbytes for lease in held)
        assert budget.leased_bytes == expected <= 100
        peak = max(peak, expected)
    assert budget.peak_bytes >= peak


def test_threads_share_a_budget() -> None:
    budget = Budget("host", 1000)

    def take_and_give() -> None:
        for _ in range(300):
            budget.lease(7, "x").release()

    threads = [threading.Thread(target=take_and_give) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.leased_bytes == 0


def test_a_lease_collected_while_the_budget_is_asked_does_not_block() -> None:
    code = """
import gc
from zerooffload.memory import Budget
budget = Budget("host", 10**9)
class Node: pass
gc.set_threshold(1)
def leave_garbage():
    node = Node()
    node.itself, node.lease = node, budget.lease(10, "x")
for _ in range(500):
    leave_garbage()
    budget.holders()
"""
    try:
        subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=5)
    except subprocess.TimeoutExpired:
        pytest.fail("deadlock")
