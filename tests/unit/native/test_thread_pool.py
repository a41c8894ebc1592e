from __future__ import annotations

import threading

import pytest
import torch

n = pytest.importorskip("zerooffload._native")


def test_num_threads() -> None:
    assert n.ThreadPool(3).num_threads == 3
    with pytest.raises(ValueError, match="num_threads: expected at least 1, got 0"):
        n.ThreadPool(0)


def test_several_python_threads_share_a_pool() -> None:
    pool = n.ThreadPool(2)
    one = torch.ones(64 * 4096)
    targets = [torch.zeros(64 * 4096) for _ in range(4)]

    def work(target: torch.Tensor) -> None:
        sums, fp32 = torch.empty(64, dtype=torch.float64), n.Dtype.float32
        for count in range(1, 21):
            n.arrive(pool, n.Arrival.add, target.data_ptr(), fp32, one.data_ptr(), fp32, one.numel(), sums.data_ptr())
            assert bool((sums == 4096 * count**2).all())

    threads = [threading.Thread(target=work, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(bool((target == 20).all()) for target in targets)
