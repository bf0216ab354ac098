"""Families of transformers in small, and a plain loop of the library that trains them: the reference of Titan's runs."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_core.api import Batch, current_microbatch, hookimpl
from titan_testing.jobs import RunRecord, run_recipe

_SIZES: dict[str, Any] = {
    "vocab_size": 288, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": None, "bos_token_id": 256, "eos_token_id": 257,
    # Large, so that scores and gates differ between positions.
    "initializer_range": 0.15,
}  # fmt: skip
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GRANITE = {
    "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3,
}  # fmt: skip
_DEEPSEEK = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_GLM4_MOE = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True,
}  # fmt: skip
_QWEN3_NEXT = {
    "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "initializer_range": 0.05,  # larger weights make training chaotic: rounding would grow from step to step
}  # fmt: skip
_FALCON_H1 = {
    "head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16,
    "mamba_chunk_size": 16, "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5,
}  # fmt: skip

# The sequences of the tests have 48 positions: windows are shorter.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": _LLAMA3_ROPE}),
    "mistral": ("mistral", {"sliding_window": 16, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 20}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20},
    ),
    "phi3": ("phi3", {}),
    "glm4": ("glm4", {"head_dim": 16}),
    "granite": ("granite", _GRANITE),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "starcoder2": ("starcoder2", {"sliding_window": 16}),
    "gpt_neox": ("gpt_neox", {}),
    "cohere2": ("cohere2", {"sliding_window": 16}),
    "gpt_oss": ("gpt_oss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 16, "norm_topk_prob": True, **_EXPERTS}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "glm4_moe": ("glm4_moe", {"head_dim": 16, **_GLM4_MOE}),
    "qwen3_next": ("qwen3_next", {"head_dim": 16, **_EXPERTS, **_QWEN3_NEXT}),
    "falcon_h1": ("falcon_h1", _FALCON_H1),
}
"""Family -> its architecture, and keys of its config besides the small sizes."""
_LACKING = {"gpt_neox": ("num_key_value_heads",)}

_P = "parallelism."
_TP, _CP, _PP, _EP = (f"{_P}{one}_parallel_degree" for one in ("tensor", "context", "pipeline", "expert"))
_BY_HEADS = f"{_P}context_parallel_heads_degree"
_FSDP, _LOCAL = f"{_P}data_parallel_shard_degree", "training.local_batch_size"
MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "one": (1, {}),
    "fsdp2": (2, {_FSDP: 2}),
    "tp2": (2, {_TP: 2}),
    "tp2 whole": (2, {_TP: 2, f"{_P}disable_sequence_parallel": "true"}),
    "cp2": (2, {_CP: 2}),
    "cp2 by heads": (2, {_CP: 2, _BY_HEADS: 2}),
    "cp4": (4, {_CP: 4, f"{_P}context_parallel_rotate_method": "alltoall"}),
    "cp4 by heads": (4, {_CP: 4, _BY_HEADS: 4}),
    "cp2x2 by both": (4, {_CP: 4, _BY_HEADS: 2}),
    "pp2": (2, {_PP: 2}),
    "tp2 cp2": (4, {_TP: 2, _CP: 2}),
    "tp2 pp2": (4, {_TP: 2, _PP: 2}),
    "fsdp2 cp2": (4, {_FSDP: 2, _CP: 2}),
    "ep2": (2, {_EP: 2}),
    "ep4": (4, {_EP: 4, _LOCAL: 1}),
    "ep2 fsdp2": (4, {_EP: 2, _LOCAL: 1}),
    "ep2 tp2": (4, {_EP: 2, _TP: 2}),
    "ep2 cp2": (2, {_EP: 2, _CP: 2}),
    "ep2 pp2": (4, {_EP: 2, _PP: 2}),
}
"""Mesh -> its number of ranks, and the keys of the config."""
STEPS, SEQ_LEN = 5, 48


def config_of(family: str, **more: object) -> tuple[str, dict[str, Any]]:
    """Return architecture and config of a family."""
    architecture, own = FAMILIES[family]
    sizes = {key: value for key, value in _SIZES.items() if key not in _LACKING.get(family, ())}
    return architecture, {**sizes, "tie_word_embeddings": False, **own, **more}


def settings(family: str, mesh: str, documents: Path | None, folder: Path, **more: object) -> dict[str, object]:
    """Return the overrides of recipe ``hf_debug`` for a cell of the table.

    Args:
        documents: file with short documents, which are packed, and to which attention is confined; ``None``: long ones.
        folder: of the run.
        more: further keys of the model's config.
    """
    architecture, config = config_of(family, **more)
    found: dict[str, object] = {
        "model.flavor": "",
        "model.args": f"{{architecture = {_toml(architecture)}, config = {_toml(config)}}}",
        "training.steps": STEPS,
        "training.seq_len": SEQ_LEN,
        "training.local_batch_size": 2,
        "training.global_batch_size": 4,
        "optimizer.lr": 1e-3,
        "optimizer.weight_decay": 0.0,
        "lr_scheduler.warmup_steps": 2,
        "metrics.log_freq": 5,
        "job.device": "cpu",
        "job.dump_folder": folder,
        **MESHES[mesh][1],
    }
    if documents is not None:
        found |= {"data.document_mask": "true", "training.dataset": "json", "training.dataset_path": documents}
    return found


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


class Batches:
    """Keeps the microbatches that a run of one rank trains on."""

    def __init__(self) -> None:
        self.kept: list[Batch] = []

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        run.parts[0].module.register_forward_pre_hook(self._keep)

    def _keep(self, module: Any, arguments: Any) -> None:
        microbatch = current_microbatch()
        if module.training and torch.is_grad_enabled() and microbatch is not None:
            self.kept.append(microbatch.batch)


@dataclass
class Curve:
    """Losses and gradient norms by step, and the gradients of the first step by parameter."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    z_losses: list[float] = field(default_factory=list)
    """Of the routers, by step; empty if none is trained with."""


def curve_of(record: RunRecord) -> Curve:
    """Return what a run of Titan's has recorded."""
    z_losses = [losses["router_z_loss"] for losses in record.auxiliary if "router_z_loss" in losses]
    return Curve(record.losses, record.grad_norms, record.gradients, z_losses)


def train(overrides: dict[str, object]) -> Curve:
    """Train a cell of the table, as a rank of its mesh."""
    torch.set_num_threads(1)
    return curve_of(run_recipe("hf_debug", overrides, weights=True))


def train_and_reference(
    family: str, overrides: dict[str, object], z_loss: float = 0.0, **more: object
) -> tuple[Curve, Curve]:
    """Train a family on one rank, and from the same weights on the same batches by a plain loop of the library. Return the
    results of both.

    Args:
        z_loss: factor of the z-loss of routers in the plain loop.
    """
    torch.set_num_threads(1)
    batches = Batches()
    record = run_recipe("hf_debug", overrides, weights=True, observers=[batches])
    found = curve_of(record)
    found.gradients = of_library(family, found.gradients, **more)
    return found, plain_loop(family, record, batches.kept, z_loss, **more)


def library_model(family: str, **more: object) -> Any:
    """Return the library's own model with its eager implementations."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    architecture, config = config_of(family, **more)
    made = CONFIG_MAPPING[architecture](**copy.deepcopy(config))
    return AutoModelForCausalLM.from_config(made, attn_implementation="eager", experts_implementation="eager").float()


def of_library(family: str, tensors: Mapping[str, Tensor], **more: object) -> dict[str, Tensor]:
    """Return ``tensors`` of Titan's parameters as those of the library's, which joins some."""
    from titan_models_hf.config import HFArgs
    from titan_models_hf.rearranged import rearranged_model

    architecture, config = config_of(family, **more)
    _, rows = rearranged_model(HFArgs(architecture=architecture, config=config))
    joined: dict[str, list[str]] = {}
    for name in sorted(rows, key=lambda name: rows[name].first):
        joined.setdefault(rows[name].parameter, []).append(name)
    kept = {name: tensor for name, tensor in tensors.items() if name not in rows}
    return kept | {name: torch.cat([tensors[part] for part in parts]) for name, parts in joined.items()}


def plain_loop(family: str, record: RunRecord, batches: list[Batch], z_loss: float = 0.0, **more: object) -> Curve:
    """Train the library's model by AdamW: each document by itself, in a call of its own.

    Args:
        z_loss: factor of the z-loss of routers, which return their logits first.
    """
    model = library_model(family, **more)
    parameters = dict(model.named_parameters())
    initial = of_library(family, record.initial, **more)
    assert parameters.keys() == initial.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(initial[name])
    model.train()
    logits: list[Tensor] = []
    for module in model.modules():
        if z_loss and type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda router, inputs, output: logits.append(output[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    result, each = Curve(), len(batches) // len(record.losses)
    for step, rate in enumerate(record.learning_rates):
        of_step = batches[step * each : (step + 1) * each]
        targets = sum(int((batch.targets != -100).sum()) for batch in of_step)
        positions = sum(batch.tokens.numel() for batch in of_step)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        total = penalties = 0.0
        for batch in of_step:
            logits.clear()
            loss = _loss(model, batch) / targets
            penalty = (
                sum((torch.log(one.exp().sum(-1)).square().sum() for one in logits), torch.zeros(())) * z_loss / positions
            )
            (loss + penalty).backward()
            total, penalties = total + loss.item(), penalties + penalty.item()
        if not result.gradients:
            result.gradients = {name: one.grad.clone() for name, one in parameters.items() if one.grad is not None}
        result.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        result.losses.append(total)
        result.z_losses += [penalties] if z_loss else []
        optimizer.step()
    return result


def _loss(model: Any, batch: Batch) -> Tensor:
    if batch.documents is None:
        logits = model(input_ids=batch.tokens, use_cache=False).logits
        return _sum(logits, batch.targets)
    losses = []
    for tokens, targets, documents in zip(batch.tokens, batch.targets, batch.documents, strict=True):
        starts = [0, *(torch.nonzero(documents[1:] != documents[:-1]).flatten() + 1).tolist(), len(tokens)]
        for first, end in itertools.pairwise(starts):
            logits = model(input_ids=tokens[None, first:end], use_cache=False).logits
            losses.append(_sum(logits, targets[None, first:end]))
    return torch.stack(losses).sum()


def _sum(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum"
    )


def largest_difference(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two lists of numbers."""
    return max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))


def gradient_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the largest difference of a gradient, relative to the largest element of its parameter's, and the parameter.

    One that nearly cancels is as exact as its addends: the largest element counts as at least a hundredth of the largest of
    all parameters; that of a vector, such as the decays of a recurrence, which sums over all positions, as a tenth.
    """
    assert found.keys() == expected.keys(), set(found) ^ set(expected)
    differences = {}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        scale = max(float(gradient.abs().max()), (0.1 if gradient.dim() == 1 else 0.01) * largest)
        differences[name] = float((found[name].cpu() - gradient).abs().max()) / scale
    worst = max(differences, key=lambda name: differences[name])
    return differences[worst], worst
