"""An independent implementation of pre-training in plain torch and float64. A Titan run must report the same results. It
imports nothing from Titan."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BEGIN, END = 256, 257
"""The begin and end tokens of the byte tokenizer."""

DOCUMENTS = [
    "ÁÂÃ: é, ö, ÿ — the first of ten documents, longer than a sequence.",
    "x",
    "Short.",
    "ÂÂÂÂ ÁÁÁÁ ÂÁÂÁ",
    "Each of them is read between a begin and an end, one after another, whatever their length may be.",
    "0123456789",
    "ß",
    "Ein Satz mit Umlauten: äöü ÄÖÜ.",
    "abc abc abc abc abc abc",
    "— – — –",
]


def write_documents(path: Path) -> Path:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return path


@dataclass
class Sequences:
    """The sequences of one step, in the order of their places in the global batch. All ``[sequences, seq_len]``."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor


def shuffled(size: int, *key: int) -> list[int]:
    """Return the numbers below ``size`` in the order of an epoch, by ``key``: its seed and number. One by one, in Python's
    numbers: a Feistel network over the bits of the smallest power of two, whose results outside of the range are permuted
    again."""
    bits = max((size - 1).bit_length(), 1)
    widths = bits - bits // 2, bits // 2
    rounds = 12 if size > 4096 else 24
    random = hashlib.shake_256(f"permutation:{','.join(map(str, key))}".encode()).digest(8 * rounds)

    def mixed(half: int, number: int) -> int:
        value = (half + int.from_bytes(random[8 * number : 8 * number + 8], "little")) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    def permuted(value: int) -> int:
        high, low = divmod(value, 2 ** widths[1])
        for number in range(rounds):
            if number % 2 == 0:
                high ^= mixed(low, number) % 2 ** widths[0]
            else:
                low ^= mixed(high, number) % 2 ** widths[1]
        return high * 2 ** widths[1] + low

    order = []
    for position in range(size):
        found = permuted(position)
        while found >= size:
            found = permuted(found)
        order.append(found)
    return order


Stream = list[tuple[int, int, int]]
"""The id, the document, and the position in the document of each token."""


def _stream(shard: int, shards: int, at_least: int, seed: int) -> Stream:
    """Return complete epochs of a stream, with at least ``at_least`` tokens."""
    stream: Stream = []
    epoch = number = 0
    while len(stream) < at_least:
        for index in shuffled(len(DOCUMENTS), seed, epoch)[shard::shards]:
            ids = [BEGIN, *DOCUMENTS[index].encode(), END]
            stream += [(token, number, place) for place, token in enumerate(ids)]
            number += 1
        epoch += 1
    return stream


def read(steps: int, *, seq_len: int, sequences: int, shards: int, document_mask: bool, seed: int = 0) -> list[Sequences]:
    """Return the sequences that a run reads. In each epoch, the documents are shuffled anew and dealt out to ``shards``
    streams. Each stream is cut into windows of ``seq_len + 1`` tokens, and fills the same places of every global batch."""
    wanted = steps * sequences // shards * (seq_len + 1)
    streams = [_stream(shard, shards, wanted, seed) for shard in range(shards)]
    steps_read: list[Sequences] = []
    each = sequences // shards
    for step in range(steps):
        rows = []
        for stream in streams:
            for place in range(each):
                start = (step * each + place) * (seq_len + 1)
                rows.append(stream[start : start + seq_len + 1])
        tokens, documents, positions = (torch.tensor([[token[kind] for token in row] for row in rows]) for kind in range(3))
        targets = tokens[:, 1:].clone()
        if document_mask:
            targets[documents[:, 1:] != documents[:, :-1]] = -100
            for row in range(len(rows)):  # positions in a document that is cut by the window begin at 0 in the window
                first = documents[row] == documents[row, 0]
                positions[row, first] -= positions[row, 0].clone()
        else:
            documents = torch.zeros_like(documents)
            positions = torch.arange(seq_len + 1).expand_as(positions)
        steps_read.append(Sequences(tokens[:, :-1], targets, positions[:, :-1], documents[:, :-1]))
    return steps_read


def read_once(*, seq_len: int, sequences: int, shards: int, seed: int = 0) -> list[Sequences]:
    """Return the sequences that validation reads: one epoch of each stream, with a short last window and document masks."""
    windows: list[list[Stream]] = []
    for shard in range(shards):
        stream = _stream(shard, shards, 1, seed)
        windows.append([stream[start : start + seq_len + 1] for start in range(0, len(stream), seq_len + 1)])
    each = sequences // shards
    batches = []
    for first in range(0, max(map(len, windows)), each):
        rows = [window for of_shard in windows for window in of_shard[first : first + each]]
        padded = [[*row, *[(0, -1, 0)] * (seq_len + 1 - len(row))] for row in rows]  # a separate document, never a target
        tokens, documents, places = (torch.tensor([[token[kind] for token in row] for row in padded]) for kind in range(3))
        targets = tokens[:, 1:].clone()
        targets[(documents[:, 1:] != documents[:, :-1]) | (documents[:, 1:] < 0)] = -100
        for row in range(len(rows)):
            within = documents[row] == documents[row, 0]
            places[row, within] -= places[row, 0].clone()
        batches.append(Sequences(tokens[:, :-1], targets, places[:, :-1], documents[:, :-1]))
    return batches


def summed_loss(weights: dict[str, Tensor], batches: Sequence[Sequences], heads: int) -> tuple[float, int]:
    """Return the sum of the losses over all targets of ``batches``, and the number of targets."""
    exact = {name: tensor.double() for name, tensor in weights.items()}
    total, targets = 0.0, 0
    for batch in batches:
        loss = torch.nn.functional.cross_entropy(
            logits(exact, heads, batch).flatten(0, 1), batch.targets.flatten(), ignore_index=-100, reduction="sum"
        )
        total, targets = total + loss.item(), targets + int((batch.targets != -100).sum())
    return total, targets


def logits(weights: dict[str, Tensor], heads: int, of: Sequences, theta: float = 10_000.0, eps: float = 1e-5) -> Tensor:
    """Return the logits of Llama as defined in its paper, with rotations as complex numbers."""
    h = weights["tok_embeddings.weight"][of.tokens]
    batch, seq, dim = h.shape
    width = dim // heads
    frequencies = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = of.positions[..., None] * frequencies
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    place = torch.arange(seq)
    hidden = (of.documents[:, :, None] != of.documents[:, None, :]) | (place[None, :] > place[:, None])

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weights[name]

    def turned(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2)

    layer = 0
    while f"layers.{layer}.attention.wq.weight" in weights:
        block = {name.removeprefix(f"layers.{layer}."): tensor for name, tensor in weights.items()}
        x = norm(h, f"layers.{layer}.attention_norm.weight")
        q, k, v = ((x @ block[f"attention.w{name}.weight"].T).view(batch, seq, -1, width).transpose(1, 2) for name in "qkv")
        q, k = turned(q), turned(k)
        k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
        scores = (q @ k.transpose(2, 3) / math.sqrt(width)).masked_fill(hidden[:, None], -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, seq, dim)
        h = h + mixed @ block["attention.wo.weight"].T
        x = norm(h, f"layers.{layer}.ffn_norm.weight")
        gate = x @ block["feed_forward.w1.weight"].T
        up = x @ block["feed_forward.w3.weight"].T
        h = h + (gate * gate.sigmoid() * up) @ block["feed_forward.w2.weight"].T
        layer += 1
    return norm(h, "norm.weight") @ weights["output.weight"].T


@dataclass
class Group:
    """The parameters whose names contain one of ``names``, with their common settings."""

    names: tuple[str, ...]
    lr: float
    weight_decay: float


@dataclass
class Outcome:
    """The results of training."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    """Before clipping."""
    targets: list[int] = field(default_factory=list)
    rows: list[list[tuple[float, int]]] = field(default_factory=list)
    """Sum of the loss over the targets and number of targets, by step and sequence."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """The gradients of the first step."""
    final: dict[str, Tensor] = field(default_factory=dict)


def train(
    initial: dict[str, Tensor],
    steps: Sequence[Sequences],
    groups: Sequence[Group],
    *,
    heads: int,
    factors: Sequence[float],
    optimizer: type[torch.optim.Optimizer],
    betas: tuple[float, float],
    eps: float,
    max_norm: float,
    skipped: Sequence[int] = (),
) -> Outcome:
    """Train from ``initial``.

    Args:
        groups: the first group that matches a name applies; the last one takes all other parameters.
        factors: factor of the learning rates in each step.
        skipped: steps, counted from 1, whose update is skipped.
    """
    weights = {name: tensor.double().requires_grad_() for name, tensor in initial.items()}
    members: list[list[Tensor]] = [[] for _ in groups]
    for name, tensor in weights.items():
        chosen = next(
            number
            for number, group in enumerate(groups)
            if number == len(groups) - 1 or any(part in name for part in group.names)
        )
        members[chosen].append(tensor)
    made: Any = optimizer
    opt = made(
        [
            {"params": tensors, "lr": group.lr, "weight_decay": group.weight_decay}
            for group, tensors in zip(groups, members, strict=True)
        ],
        betas=betas,
        eps=eps,
        foreach=False,
    )
    outcome = Outcome()
    for number, (step, factor) in enumerate(zip(steps, factors, strict=True), start=1):
        for settings, group in zip(opt.param_groups, groups, strict=True):
            settings["lr"] = group.lr * factor
        scores = logits(weights, heads, step).log_softmax(-1)
        counted = step.targets != -100
        picked = scores.gather(2, step.targets.clamp(min=0)[..., None]).squeeze(2)
        loss = -(picked * counted).sum() / counted.sum()
        opt.zero_grad()
        loss.backward()
        if number == 1:
            outcome.gradients = {name: tensor.grad.clone() for name, tensor in weights.items() if tensor.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), max_norm if max_norm > 0 else math.inf)
        if number not in skipped:
            opt.step()
        outcome.losses.append(loss.item())
        outcome.grad_norms.append(norm.item())
        outcome.targets.append(int(counted.sum()))
        sums, counts = -(picked.detach() * counted).sum(1), counted.sum(1)
        outcome.rows.append(list(zip(sums.tolist(), counts.tolist(), strict=True)))
    outcome.final = {name: tensor.detach() for name, tensor in weights.items()}
    return outcome
