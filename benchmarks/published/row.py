"""A published run, and the job that stands for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MACHINES = Path(__file__).parent / "machines"
"""Clusters that differ from the machines that come with Titan."""

KEYS = {
    "length": "training.seq_len",
    "local": "training.local_batch_size",
    "total": "training.global_batch_size",
    "replicate": "parallelism.data_parallel_replicate_degree",
    "shard": "parallelism.data_parallel_shard_degree",
    "reshard": "parallelism.fsdp_reshard_after_forward",
    "tp": "parallelism.tensor_parallel_degree",
    "async_tp": "parallelism.enable_async_tensor_parallel",
    "loss_parallel_off": "parallelism.disable_loss_parallel",
    "cp": "parallelism.context_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "schedule": "parallelism.pipeline_parallel_schedule",
    "micro": "parallelism.pipeline_parallel_microbatch_size",
    "stage_layers": "parallelism.pipeline_parallel_layers_per_stage",
    "first_less": "parallelism.pipeline_parallel_first_stage_less_layers",
    "last_less": "parallelism.pipeline_parallel_last_stage_less_layers",
    "recompute": "activation_checkpoint.mode",
    "recompute_option": "activation_checkpoint.selective_ac_option",
    "compile": "compile.enable",
    "float8": "float8.enable",
    "float8_gather": "float8.enable_fsdp_float8_all_gather",
}
"""Short names of the settings that rows have."""


@dataclass(frozen=True)
class Trainer:
    """What the program that trained had in place of Titan's own parts."""

    name: str
    full_logits: bool = False
    """A loss that holds the logits of all positions in fp32 and is not compiled (:mod:`benchmarks.published.loss`)."""
    ring: bool = False
    """TorchTitan's ring attention (:mod:`benchmarks.published.ring`)."""
    flash: bool = False
    """FlashAttention 2 where Titan prefers another kernel."""


TORCHTITAN = Trainer("TorchTitan", full_logits=True, ring=True, flash=True)
NVIDIA = Trainer("Megatron, NeMo")


@dataclass(frozen=True)
class Row:
    """A published run."""

    name: str
    recipe: str
    ranks: int
    options: Mapping[str, str]
    """Settings that differ from the recipe's: key -> text."""
    tokens: float
    """Per second and GPU."""
    gib: float | None = None
    """Reserved by torch's allocator, if published."""
    machine: str = "h100"
    """A machine that comes with Titan, or a file of :data:`MACHINES`, without its ending."""
    trainer: Trainer = TORCHTITAN

    @property
    def device(self) -> str:
        """The name or file that :func:`titan_simulate.hardware.read.read_machine` takes."""
        own = MACHINES / f"{self.machine}.toml"
        return str(own) if own.exists() else self.machine


def job(*parts: Mapping[str, str], model: Mapping[str, object] | None = None, **settings: object) -> dict[str, str]:
    """Return settings by key: ``parts``, then those of :data:`KEYS` by their short names, then arguments of the model."""
    own = {KEYS[name]: _text(value) for name, value in settings.items()}
    sizes = {f"model.args.{name}": _text(value) for name, value in (model or {}).items()}
    return {key: text for part in (*parts, own, sizes) for key, text in part.items()}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
