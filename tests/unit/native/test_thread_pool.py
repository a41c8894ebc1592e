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
        for _ in range(20):
            n.accumulate(pool, target.data_ptr(), one.data_ptr(), n.Dtype.float32, one.numel())

    threads = [threading.Thread(target=work, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(bool((target == 20).all()) for target in targets)
