"""Counters of kernels: zeros, shared by nothing that could run at the same time."""

import pytest
import torch

from rpe3d.attention.decode import arrivals as counters


def test_on_a_cpu_they_are_made_for_the_occasion():
    assert counters.zeros(3, torch.device("cpu")).tolist() == [0, 0, 0]


def test_a_pool_gives_no_counter_twice_and_ends():
    pool = counters._Pool(torch.device("cpu"))
    first, second = pool.take(5), pool.take(40)
    assert len(first) == 5
    assert len(second) == 40
    assert second.storage_offset() - first.storage_offset() >= 32
    assert pool.take(counters._SIZE) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams and graphs need a GPU")
def test_streams_and_captured_launches_have_their_own():
    device = torch.device("cuda", torch.cuda.current_device())
    first = counters.zeros(8, device)
    assert counters.zeros(8, device).data_ptr() == first.data_ptr()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert counters.zeros(8, device).data_ptr() != first.data_ptr()
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(1, device=device)
    with torch.cuda.graph(graph):
        taken = {counters.zeros(8, device).data_ptr() for _ in range(2)}
        x += 1
    assert len(taken | {first.data_ptr()}) == 3
