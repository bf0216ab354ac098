"""The simulated device: what is fake, what is real, and where the host waits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from harness.fake_cuda import FakeCuda
from titan_core.api import UserError

host_waits = pytest.importorskip("titan_simulate.engine.host_waits")
forks = pytest.importorskip("titan_simulate.engine.forks")


def read_a_number() -> None:
    torch.ones(3, device="cuda").sum().item()


def decide_by_a_tensor() -> None:
    if torch.ones((), device="cuda") > 0:
        pass


def find_indices() -> None:
    torch.ones(3, device="cuda").nonzero()


def index_by_a_mask() -> None:
    values = torch.ones(3, device="cuda")
    values[values > 0]


def copy_to_the_host() -> None:
    torch.ones(3, device="cuda").cpu()


def copy_a_number_to_the_device() -> None:
    torch.tensor(1.0, device="cuda")


def copy_from_pageable_memory() -> None:
    torch.ones(3).to("cuda", non_blocking=True)


def copy_into_pageable_memory() -> None:
    pageable = torch.empty_like(torch.ones(3, device="cuda"), device="cpu")
    pageable.copy_(torch.ones(3, device="cuda"), non_blocking=True)


def synchronize() -> None:
    torch.cuda.synchronize()


def synchronize_a_stream() -> None:
    torch.cuda.Stream().synchronize()


def synchronize_an_event() -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (read_a_number, "reading a value"),
        (decide_by_a_tensor, "reading a value"),
        (find_indices, "nonzero"),
        (index_by_a_mask, "indexing by a mask"),
        (copy_to_the_host, "a blocking copy of float32[3] to the host"),
        (copy_a_number_to_the_device, "a blocking copy of float32[] to the device"),
        (copy_from_pageable_memory, "from pageable memory"),
        (copy_into_pageable_memory, "to pageable memory"),
        (synchronize, "torch.cuda.synchronize"),
        (synchronize_a_stream, "Stream.synchronize"),
        (synchronize_an_event, "Event.synchronize"),
    ],
)
def test_a_wait_is_an_error_that_names_its_line(fake_cuda: FakeCuda, function: Callable[[], None], what: str) -> None:
    with pytest.raises(host_waits.HostSync, match=f"{re.escape(what)}.*test_fake_device.py:\\d+ in {function.__name__}"):
        fake_cuda.run(function, strict=True)


def work_without_waiting() -> float:
    pinned = torch.arange(6, dtype=torch.float32).pin_memory()
    values = pinned.to("cuda", non_blocking=True).requires_grad_()
    ((values * 2).relu() @ torch.full((6,), 3.0, device="cuda")).backward()
    assert values.grad is not None and values.grad.device == torch.device("cuda", 0)
    back = values.grad.to("cpu", non_blocking=True)
    assert back.is_pinned() and not torch.ones(3).is_pinned()
    return float(pinned.sum())  # a real tensor, with real values


def test_tensors_on_the_host_are_real_and_asynchronous_work_is_no_wait(fake_cuda: FakeCuda) -> None:
    assert fake_cuda.run(work_without_waiting, strict=True) == 15.0


def test_nothing_real_runs_on_the_device(fake_cuda: FakeCuda) -> None:
    code = "from titan_simulate.engine import stub_libraries as s; s.load(); import torch; torch.ones(3, device='cuda')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode and "CUDA error" in done.stderr


def route() -> tuple[list[int], int, int]:
    """Sort rows by the expert that random numbers choose, as a mixture of experts does."""
    chosen = torch.rand(6, 4, device="cuda").topk(2, dim=-1).indices.flatten()
    counts = (chosen[:, None] == torch.arange(4, device="cuda")).sum(0)
    pieces = torch.rand(12, 8, device="cuda")[chosen.argsort(stable=True)].split(counts.tolist())
    repeated = torch.arange(4, device="cuda").repeat_interleave(counts)
    return counts.tolist(), sum(len(piece) for piece in pieces), len(repeated)


def test_rows_are_spread_evenly_over_experts(fake_cuda: FakeCuda) -> None:
    assert fake_cuda.run(route) == ([3, 3, 3, 3], 12, 12)


def sort_and_repeat() -> tuple[list[int], list[int], list[list[int]]]:
    """Count sorted choices, and repeat a range by the counts, whose sum is known."""
    chosen = torch.rand(6, 4, device="cuda").topk(2, dim=-1).indices
    ordered, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(ordered, torch.arange(4, device="cuda"), right=True)
    repeated = torch.arange(4, device="cuda").repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), output_size=12)
    assert order.shape == repeated.shape == (12,)
    return ends.tolist(), chosen.sort(1, descending=True).values[0].tolist(), chosen.view(3, 4).tolist()


def test_sorted_choices_are_known_and_a_list_is_read_at_once(fake_cuda: FakeCuda) -> None:
    assert fake_cuda.run(sort_and_repeat) == ([3, 6, 9, 12], [1, 0], [[0, 1, 2, 3]] * 3)
    assert fake_cuda.call(number_of_waits) == [3, 0]


def number_of_waits() -> list[int]:
    """Return how often the host waits in :func:`sort_and_repeat`, and when it repeats a known number of elements."""
    from titan_simulate.engine.host_waits import HostWaits
    from titan_simulate.engine.observation import Observation
    from titan_simulate.engine.simulate import observed

    found = []
    for function in (sort_and_repeat, repeat):
        waits = HostWaits()
        with observed(Observation(), waits):
            function()
        found.append(len(waits.found))
    return found


def repeat() -> None:
    torch.arange(4, device="cuda").repeat_interleave(torch.ones(4, dtype=torch.int64, device="cuda"), output_size=4)


def select() -> None:
    torch.rand(3, device="cuda").nonzero()


def test_a_size_that_depends_on_unknown_values_is_an_error_that_names_its_line(fake_cuda: FakeCuda) -> None:
    with pytest.raises(UserError, match=r"test_fake_device.py:\d+ in select: the size of the result of nonzero depends"):
        fake_cuda.run(select)


def repeat_operators() -> bool:
    """Call operators twice with arguments of the same shapes, and other ones with other shapes."""
    for _ in range(2):
        for size in (2, 3):
            x = torch.empty(size, 4, device="cuda")
            y = x.t()
            assert y.shape == (4, size) and y.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert x.add_(1) is x and (x * 2).dtype is torch.float32 and (x > 0).dtype is torch.bool
            assert (x.to(torch.bfloat16) @ torch.empty(4, 5, device="cuda", dtype=torch.bfloat16)).shape == (size, 5)
            assert x.sum(1, keepdim=True).shape == (size, 1) and (x * 2.0).device == torch.device("cuda", 0)
            values, indices = x.max(dim=1)
            assert values.shape == indices.shape == (size,) and indices.dtype is torch.int64
    return True


def test_remembered_results_are_those_of_their_arguments(fake_cuda: FakeCuda) -> None:
    assert fake_cuda.run(repeat_operators)


def die() -> None:
    os._exit(3)


def test_a_process_that_dies_is_an_error_and_the_next_call_works(fake_cuda: FakeCuda) -> None:
    with pytest.raises(forks.RemoteError, match="exit code 3"):
        fake_cuda.run(die)
    assert fake_cuda.run(work_without_waiting) == 15.0


def describe() -> tuple[bool, int, str, int, int]:
    import torch.distributed as dist

    return (
        torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.get_device_name(),
        torch.cuda.current_device(), dist.get_world_size(),
    )  # fmt: skip


def test_a_rank_has_the_device_of_its_place_on_the_machine(fake_cuda: FakeCuda) -> None:
    assert fake_cuda.run(describe, world_size=64, rank=13) == (True, 8, "NVIDIA H100 80GB HBM3", 5, 64)


def copy_by_operators_that_may_return_views() -> tuple[int, int]:
    """Copy 2 MiB twice with operators that return a view of other arguments; return the bytes and the kernels counted."""
    from harness.fake_cuda import fake_devices

    with fake_devices() as observation, torch.inference_mode():  # below autograd, they reach the device undivided
        x = torch.empty(1024, 512, device="cuda")
        before = observation.memory.live
        kept = [x.t().contiguous(), x.t().reshape(-1), x.contiguous(), x.reshape(-1)]
        found = observation.memory.live - before, sum(observation.take()[2].values())
        del kept
        return found


def test_a_copy_counts_though_its_operator_may_return_a_view(fake_cuda: FakeCuda) -> None:
    assert fake_cuda.call(copy_by_operators_that_may_return_views) == (2 * 2 * 2**20, 2)


def operations_of_attention(key_heads: int) -> int:
    """Return the operations counted of attention of 8 query heads."""
    from harness.fake_cuda import fake_devices

    with fake_devices() as observation:
        query, keys = (torch.empty(2, heads, 128, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, key_heads))
        torch.nn.functional.scaled_dot_product_attention(query, keys, keys, is_causal=True, enable_gqa=True)
        return sum(observation.take()[3].values())


def test_attention_with_fewer_key_heads_needs_as_many_operations(fake_cuda: FakeCuda) -> None:
    """The formulas of torch 2.11 refuse them."""
    assert (
        fake_cuda.call(operations_of_attention, 2) == fake_cuda.call(operations_of_attention, 8) == 4 * 2 * 8 * 128**2 * 64
    )


def operations_of_capped_attention(softcap: float | None) -> tuple[int, int]:
    """Return the operations counted forward, and forward and backward, of two equal layers."""
    from harness.fake_cuda import fake_devices
    from titan_core.api import CausalAttention

    with fake_devices() as observation:
        attention = CausalAttention(softcap=softcap, window=128, sinks=True)
        q, k = (torch.empty(2, heads, 512, 64, device="cuda", requires_grad=True) for heads in (4, 2))
        sinks = torch.empty(4, device="cuda", requires_grad=True)
        result = attention(attention(q, k, k, sinks=sinks), k, k, sinks=sinks)
        forward = sum(observation.take()[3].values())
        result.sum().backward()
        assert q.grad is not None and k.grad is not None and sinks.grad is not None
        assert (q.grad.shape, k.grad.shape, sinks.grad.shape) == (q.shape, k.shape, sinks.shape)
        return forward, forward + sum(observation.take()[3].values())


def test_capped_scores_have_a_gradient(fake_cuda: FakeCuda) -> None:
    """FlexAttention traces the function of the scores to find it: operators that this device has seen, and that are no
    work."""
    capped = fake_cuda.call(operations_of_capped_attention, 50.0)
    assert capped == fake_cuda.call(operations_of_capped_attention, None) and 0 < 3 * capped[0] < capped[1]
