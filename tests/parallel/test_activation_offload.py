"""Activations in host memory: the same losses and gradients, less memory, and no copy that is not needed."""

from __future__ import annotations

import gc
import os
import weakref
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.fake_cuda import FakeCuda
from harness.objectives import first_step
from harness.quick import rows
from titan_core.api import Batch, ModelPart, UserError
from titan_core.loop.world import join_world
from titan_core.model.build import build_parts
from titan_parallel.activation_offload import BlockPass, Offload, _BlockHooks, offloaded
from titan_parallel.host_memory import HostMemory
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, make_job, run_recipe
from titan_testing.meshes import CP, DR, FAST, HEADS, PP, SCHEDULE, TP

CPU = torch.device("cpu")
SHARE, MODE = "activation_checkpoint.offload_share", "activation_checkpoint.mode"
STEPS: dict[str, object] = {**FAST, "training.steps": 2, "lr_scheduler.warmup_steps": 1}
SELECTIVE: dict[str, object] = {MODE: "selective"}
FULL: dict[str, object] = {MODE: "full"}
BY_BLOCK: dict[str, object] = {"parallelism.fsdp_group_mib": 0}
COMPILED: dict[str, object] = {"compile.enable": "true", "compile.backend": "aot_eager"}
JOBS: dict[str, tuple[int, dict[str, object]]] = {
    "one device": (1, {}),
    "one device, selective": (1, SELECTIVE),
    "one device, full": (1, FULL),
    "one device, every second block": (1, {**SELECTIVE, "activation_checkpoint.selective_ac_option": "2"}),
    "one device, compiled": (1, COMPILED),
    "one device, compiled, selective": (1, {**COMPILED, **SELECTIVE}),
    "one device, bf16, dropout": (1, {"training.mixed_precision_param": "bfloat16", "model.args.dropout": 0.2}),
    "FSDP 2": (2, {}),
    "FSDP 2 by block": (2, BY_BLOCK),
    "FSDP 2 by block, selective": (2, {**BY_BLOCK, **SELECTIVE}),
    "FSDP 2 by block, full": (2, {**BY_BLOCK, **FULL}),
    "FSDP 2, compiled": (2, COMPILED),
    "HSDP 2x2": (4, {DR: 2, **BY_BLOCK, **SELECTIVE}),
    "TP 2": (2, {TP: 2}),
    "TP 2, selective": (2, {TP: 2, **SELECTIVE}),
    "TP 2, full": (2, {TP: 2, **FULL}),
    "CP 2": (2, {CP: 2}),
    "CP 2, full": (2, {CP: 2, **FULL}),
    "CP 2 by heads, selective": (2, {CP: 2, HEADS: 2, **SELECTIVE}),
    "PP 2, 1F1B": (2, {PP: 2, SCHEDULE: "1F1B"}),
    "PP 2, 1F1B, full": (2, {PP: 2, SCHEDULE: "1F1B", **FULL}),
    "PP 2, Interleaved1F1B": (2, {PP: 2, SCHEDULE: "Interleaved1F1B", "model.args.n_layers": 8, **SELECTIVE}),
    "PP 2, ZBVZeroBubble": (2, {PP: 2, SCHEDULE: "ZBVZeroBubble", "model.args.n_layers": 8}),
    "PP 2, ZBVZeroBubble, selective": (2, {PP: 2, SCHEDULE: "ZBVZeroBubble", "model.args.n_layers": 8, **SELECTIVE}),
    "FSDP x PP": (4, {PP: 2, SCHEDULE: "1F1B", **BY_BLOCK}),
    "TP x CP": (4, {TP: 2, CP: 2}),
}
QUICK = ("one device, selective", "FSDP 2 by block", "TP 2", "CP 2, full", "PP 2, 1F1B")


class Counted(HostMemory):
    """Counts the bytes that are copied."""

    copied = 0

    def _copy(self, pairs: Any) -> Any:
        pairs = list(pairs)
        Counted.copied += sum(source.numel() for _, source in pairs)
        return super()._copy(pairs)


def both(folder: str, overrides: dict[str, object], share: float) -> tuple[RunRecord, RunRecord, int]:
    """Return the records of a run with offloading and of one without, and the bytes copied."""
    os.chdir(folder)
    plain = run_recipe("tiny", {**STEPS, **overrides}, weights=True)
    Counted.copied = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("titan_parallel.activation_offload.HostMemory", Counted)
        return run_recipe("tiny", {**STEPS, **overrides, SHARE: share}, weights=True), plain, Counted.copied


@pytest.mark.parametrize("job", rows(JOBS, QUICK, tuple(JOBS)))
def test_training_is_bitwise_that_without(gloo: GlooPool, tmp_path: Path, job: str) -> None:
    ranks, overrides = JOBS[job]
    for offloading, plain, copied in gloo.run(ranks, both, str(tmp_path), overrides, 1.0):
        assert copied
        assert offloading.losses == plain.losses and offloading.rank_losses == plain.rank_losses
        assert offloading.grad_norms == plain.grad_norms and offloading.statistics == plain.statistics
        for found, expected in ((offloading.gradients, plain.gradients), (offloading.final, plain.final)):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("blocks", "share", "expected"),
    [
        (6, 1.0, {0, 1, 2, 3, 4}),
        (6, 0.6, {0, 1, 3}),
        (9, 0.5, {0, 2, 4, 6}),
        (9, 0.01, {0}),
        (1, 1.0, set()),
    ],
)
def test_the_share_is_spread_over_all_blocks_but_the_last(blocks: int, share: float, expected: set[int]) -> None:
    assert offloaded(blocks, share) == expected


@pytest.mark.parametrize(
    ("ranks", "overrides", "where"),
    [
        (1, {"model.args.n_layers": 1}, "the last block of the model stays"),
        (2, {PP: 2, "model.args.n_layers": 2}, "the last block of each of 2 pipeline stages stays"),
    ],
)
def test_a_job_without_a_block_to_offload_is_refused(ranks: int, overrides: dict[str, object], where: str) -> None:
    with pytest.raises(UserError, match=rf"offload_share = 0.5: {where}.*set activation_checkpoint\.offload_share = 0"):
        make_job("tiny", {**STEPS, **overrides, SHARE: 0.5}, ranks)


class Log:
    """Writes down which block's pass backward reaches, for what the device waits then, and what is fetched."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        reach, fetch = BlockPass.reach, BlockPass.fetch

        def reached(one: BlockPass) -> None:
            if not one._reached:
                self.lines.append(f"reach {one.number}")
            reach(one)

        def fetched(one: BlockPass) -> None:
            if one._stored:
                self.lines.append(f"fetch {one.number}")
            fetch(one)

        arrive = HostMemory.arrive

        def arrived(host: HostMemory) -> None:
            if host._arriving is not None:
                self.lines.append("wait")
            arrive(host)

        patch.setattr(HostMemory, "arrive", arrived)
        patch.setattr(BlockPass, "reach", reached)
        patch.setattr(BlockPass, "fetch", fetched)


def build(overrides: dict[str, object]) -> tuple[ModelPart, HostMemory]:
    """Return the model on one CPU, and the memory that its blocks share."""
    made: list[HostMemory] = []

    class Made(HostMemory):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            made.append(self)

    job = make_job("tiny", {**STEPS, SHARE: 1.0, **overrides})
    with pytest.MonkeyPatch.context() as patch, join_world(job) as world:
        patch.setattr("titan_parallel.activation_offload.HostMemory", Made)
        (part,) = build_parts(job, world.mesh, world.device)
    return part, made[-1]


def loss_of(part: ModelPart, positions: int = 48) -> Tensor:
    tokens = torch.arange(2 * positions).view(2, positions)
    return part.forward_loss(first_step(Batch(tokens, tokens.roll(1))))


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.4, "reach 5, fetch 2, reach 4, reach 3, reach 2, wait, fetch 0, reach 1, reach 0, wait"),
        (
            0.8,
            "reach 5, fetch 3, reach 4, reach 3, wait, fetch 2, reach 2, wait, fetch 1, reach 1, wait, fetch 0, reach 0, "
            "wait",
        ),
    ],
)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_backward_fetches_one_offloaded_block_ahead(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, share: float, expected: str, mode: str
) -> None:
    part, _ = build({SHARE: share, MODE: mode, "model.args.n_layers": 6})
    losses = [loss_of(part), loss_of(part)]  # two microbatches alive, as in a pipeline
    for loss in losses:
        log = Log(monkeypatch)
        loss.backward()
        assert ", ".join(log.lines) == expected
        monkeypatch.undo()


class Late(HostMemory):
    """Copies at the last moment: when the device is made to wait."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._pending: list[Any] = []

    def _copy(self, pairs: Any) -> Any:
        self._pending.append(list(pairs))
        return self._pending[-1]

    def wait_for(self, event: Any) -> None:
        while event in self._pending:
            super()._copy(self._pending.pop(0))


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_what_a_copy_needs_lives_until_the_device_waits_for_it(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    settings = {**STEPS, MODE: mode}
    plain = run_recipe("tiny", settings, weights=True)
    monkeypatch.setattr("titan_parallel.activation_offload.HostMemory", Late)
    late = run_recipe("tiny", {**settings, SHARE: 1.0}, weights=True)
    assert late.losses == plain.losses
    assert all(torch.equal(late.gradients[name], tensor) for name, tensor in plain.gradients.items())


def buffers(host: HostMemory) -> dict[int, int]:
    """Return the number of free buffers by size."""
    return {size: len(free) for size, free in host._free.items()}


def test_buffers_are_used_again(in_tmp: Path) -> None:
    part, host = build({})
    losses = [loss_of(part, positions) for positions in (33, 48)]
    assert not any(buffers(host).values())
    for loss in losses:
        loss.backward()
    first = buffers(host)
    assert any(first.values()) and host._arriving is None
    for positions in (40, 36, 44):  # other sizes, up to the same powers of two
        loss_of(part, positions).backward()
    assert buffers(host) == first
    reference = weakref.ref(host)
    del part, host
    gc.collect()
    assert reference() is None


def test_nothing_is_offloaded_without_a_backward_pass(in_tmp: Path) -> None:
    part, host = build({})
    with torch.no_grad():
        loss_of(part)
    assert not host._free


class Block(nn.Module):
    """Saves its input, its weight, a view of its result, and a table that others have as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        scaled = hidden @ self.weight * table
        return (scaled[:, :32] * scaled[:, 32:]).repeat(1, 2)


def pass_through(offload: Offload, number: int, block: nn.Module, *arguments: Tensor, offloads: bool = True) -> Tensor:
    hooks = _BlockHooks(offload, number, offloads)
    hooks.begin()
    output: Tensor = block(*arguments)
    hooks.end(block, arguments, {}, output)
    return output


def test_each_memory_of_the_block_itself_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    offload, block, sent = Offload(CPU), Block(), list[Tensor]()
    send = offload.host.send
    monkeypatch.setattr(offload.host, "send", lambda pairs: sent.extend(source for _, source in pairs) or send(pairs))
    hidden, table = torch.randn(32, 64, requires_grad=True), torch.randn(32, 64)
    output = pass_through(offload, 0, block, hidden, table)
    scaled = (hidden @ block.weight * table).detach()
    assert [one.view(torch.float32).view(32, 64).tolist() for one in sent] == [hidden.tolist(), scaled.tolist()]
    pass_through(offload, 1, block, output, table, offloads=False).square().sum().backward()
    found, hidden.grad = hidden.grad, None
    block(block(hidden, table), table).square().sum().backward()
    assert found is not None and hidden.grad is not None and torch.equal(found, hidden.grad)


@pytest.mark.parametrize("offloads", [True, False], ids=["offloaded", "kept"])
def test_a_change_in_place_is_noticed_as_without_offloading(offloads: bool) -> None:
    offload, hidden = Offload(CPU), torch.randn(32, 64, requires_grad=True)
    output = pass_through(offload, 0, nn.Sigmoid(), hidden, offloads=offloads)
    output.data.add_(1)  # which autograd does not see, but the copy is complete or not
    output.add_(1)  # a copy may still be reading it
    offload.release()
    with pytest.raises(RuntimeError, match=r"a tensor of shape \(32, 64\) that a block has saved .* was changed in place"):
        output.sum().backward()


def test_what_is_on_the_host_may_change_on_the_device() -> None:
    offload, hidden = Offload(CPU), torch.randn(32, 64, requires_grad=True)
    output = pass_through(offload, 0, nn.Sigmoid(), hidden)
    offload.release()
    output.add_(1)
    output.sum().backward()
    sigmoid = hidden.detach().sigmoid()
    torch.testing.assert_close(hidden.grad, sigmoid * (1 - sigmoid))


class Streams:
    """Stands in for ``torch.cuda``, its streams and its events: writes down who waits for whom."""

    def __init__(self, name: str, lines: list[str]) -> None:
        self._name, self._lines = name, lines

    def Stream(self, device: torch.device) -> Streams:
        return Streams("copies", self._lines)

    def current_stream(self, device: torch.device) -> Streams:
        return Streams("computation", self._lines)

    def stream(self, stream: Streams) -> AbstractContextManager[None]:
        return nullcontext()

    def wait_stream(self, other: Streams) -> None:
        self._lines.append(f"{self._name} wait for {other._name}")

    def wait_event(self, event: Streams) -> None:
        self._lines.append(f"{self._name} waits for {event._name}")

    def record_event(self) -> Streams:
        self._lines.append("event")
        return Streams("event", self._lines)


def test_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(torch, "cuda", Streams("cuda", lines))
    host = HostMemory(torch.device("cuda", 0))
    pair = torch.zeros(2), torch.ones(2)
    event = host.send([pair])
    assert lines == ["copies wait for computation", "event"] and pair[0].tolist() == [1, 1]
    host.wait_for(event)
    assert lines.pop() == "computation waits for event"
    host.arrive()
    host.fetch([pair])
    target = weakref.ref(pair[0])
    del pair
    assert lines[2:] == ["copies wait for computation", "event"] and target() is not None
    host.fetch([(torch.zeros(2), torch.ones(2))])  # the backward pass of the first has ended early
    assert lines[4:] == ["computation waits for event", "copies wait for computation", "event"] and target() is None
    host.arrive()
    host.arrive()
    assert lines[7:] == ["computation waits for event"]


LARGER: dict[str, object] = {
    "model.args": "{dim = 64, n_layers = 8, n_heads = 8, n_kv_heads = 4, ffn_dim = 128}",
    "training.seq_len": 512,
    "training.local_batch_size": 2,
    "training.steps": 3,
}


@pytest.mark.parametrize(("mode", "kept"), [("none", 15), ("selective", 5), ("full", 1)])
def test_the_memory_of_a_device_falls_and_that_of_the_host_rises(fake_cuda: FakeCuda, mode: str, kept: int) -> None:
    """By several inputs of a block, for all blocks but the last and one that is being copied; the host waits for none."""
    plain, offloading = (fake_cuda.train("tiny", {**LARGER, MODE: mode, SHARE: share}, world_size=8) for share in (0.0, 1.0))
    falls = plain.steps[1].phase("forward").peak.bytes - offloading.steps[1].phase("forward").peak.bytes
    assert falls >= 6 * kept * 2 * 512 * 64 * 4
    assert offloading.on_host - plain.on_host >= falls
    assert not any(step.garbage for step in offloading.steps), "tensors in reference cycles"
