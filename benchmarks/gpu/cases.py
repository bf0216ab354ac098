"""The configurations to measure, the most important first: a run that is out of time leaves out the last ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["titan", "bare", "torchtitan"]

COMPILED, EAGER = {"compile.enable": "true"}, {"compile.enable": "false"}
AC = "activation_checkpoint.mode"
GRAPHS = {"training.disable_cuda_graphs": "false"}
FLOAT8 = {**COMPILED, "float8.enable": "true"}


@dataclass(frozen=True)
class Case:
    """One row of the table; it runs in a process of its own."""

    name: str
    kind: Kind
    settings: dict[str, str] = field(default_factory=dict)
    """Titan: config keys. Bare loop: ``compilation``. TorchTitan: ``float8`` and ``recompute``."""
    needs_gpu: bool = False


BASELINE = "bare loop, compiled"
"""The row that the others are compared with."""

CASES = (
    Case(BASELINE, "bare", {"compilation": "blocks"}),
    Case("titan, compiled", "titan", COMPILED),
    Case("titan, compiled, float8 tensorwise", "titan", FLOAT8),
    Case("titan, eager", "titan", EAGER),
    Case("titan, compiled, CUDA graphs", "titan", {**COMPILED, **GRAPHS}),
    Case("titan, eager, CUDA graphs", "titan", {**EAGER, **GRAPHS}),
    Case("torchtitan, compiled", "torchtitan", needs_gpu=True),
    Case("titan, compiled, selective recomputation", "titan", {**COMPILED, AC: "selective"}),
    Case("titan, compiled, full recomputation", "titan", {**COMPILED, AC: "full"}),
    Case("bare loop, eager", "bare", {"compilation": "none"}),
    Case("titan, compiled, document masks", "titan", {**COMPILED, "data.document_mask": "true"}),
    Case(
        "titan, compiled, documents by varlen",
        "titan",
        {**COMPILED, "data.document_mask": "true", "data.document_attention": "varlen"},
        needs_gpu=True,
    ),
    Case("titan, compiled, float8 rowwise", "titan", {**FLOAT8, "float8.recipe_name": "rowwise"}),
    Case("titan, compiled, loss in chunks of 1024 tokens", "titan", {**COMPILED, "objective.chunk_tokens": "1024"}),
    Case("titan, compiled, loss of all tokens at once", "titan", {**COMPILED, "objective.chunk_tokens": "1000000000"}),
    Case("bare loop, compiled as one graph", "bare", {"compilation": "model"}),
    Case("titan, eager, selective recomputation", "titan", {**EAGER, AC: "selective"}),
    Case("titan, eager, full recomputation", "titan", {**EAGER, AC: "full"}),
    Case(
        "titan, compiled, float8 rowwise_with_gw_hp",
        "titan",
        {**FLOAT8, "float8.recipe_name": "rowwise_with_gw_hp"},
    ),
    Case("titan, compiled, memory budget 0.5", "titan", {**COMPILED, AC: "memory_budget"}, needs_gpu=True),
    Case("torchtitan, compiled, float8", "torchtitan", {"float8": "true"}, needs_gpu=True),
    Case("torchtitan, compiled, selective recomputation", "torchtitan", {"recompute": "selective"}, needs_gpu=True),
    Case("titan, eager, document masks", "titan", {**EAGER, "data.document_mask": "true"}),
)


@dataclass(frozen=True)
class Plan:
    """What all configurations have in common, sent to their processes as JSON."""

    device: str
    recipe: str
    settings: dict[str, str]
    """Config keys over those of the recipe; a case's own come last."""
    warmup: int
    """Steps before the measured ones; the first compiles."""
    steps: int
    """Measured steps, in one block."""
    probes: int
    """Further steps, each alone, that measure the host's time."""
    backend: str = "inductor"
    """Of ``torch.compile``."""

    @property
    def all_steps(self) -> int:
        """Number of steps of a run. Titan logs the last, which waits for the device, so nothing is measured there."""
        return self.warmup + self.steps + self.probes + 1

    def overrides(self, case: Case) -> dict[str, str]:
        """Return the config keys of a Titan job for ``case``; other kinds use those that describe model and batch."""
        own = case.settings if case.kind == "titan" else {}
        common = {
            "job.device": self.device,
            "training.steps": str(self.all_steps),
            "metrics.log_freq": "1000000",
            "compile.backend": self.backend,
        }
        if own.get("float8.enable") and self.device == "cpu":
            common["float8.emulate"] = "true"
        return {**self.settings, **common, **own}


def plan(device: str, toy: bool, layers: int, seq_len: int, batch: int) -> Plan:
    """Return the plan of a run: layers of Llama 3.1 8B with its full vocabulary, or a toy."""
    fixed = {
        "model.tokenizer": "byte",
        "model.tokenizer_path": "none",
        "training.dataset": "stdlib",
        "training.mixed_precision_param": "bfloat16",
        "training.mixed_precision_reduce": "float32",
        "training.local_batch_size": str(batch),
        "training.global_batch_size": str(batch),
        "training.seq_len": str(seq_len),
        "checkpoint.enable": "false",
        AC: "none",
    }
    if toy:
        small = {"model.args": "{dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 128, vocab_size = 272}"}
        shape = {"training.seq_len": "64", "sample.enable": "false"}
        return Plan(device, "llama3_debug", {**fixed, **small, **shape}, warmup=1, steps=2, probes=1, backend="aot_eager")
    return Plan(device, "llama3_8b", {**fixed, "model.args.n_layers": str(layers)}, warmup=4, steps=20, probes=4)


def chosen(names: list[str] | None, device: str) -> list[Case]:
    """Return the cases that contain one of ``names``, by default all that the device can run.

    Raises:
        ValueError: a name matches no case.
    """
    runnable = [case for case in CASES if device == "cuda" or not case.needs_gpu]
    if names is None:
        return runnable
    for name in names:
        if not any(name in case.name for case in runnable):
            raise ValueError(f"no configuration for {device} contains {name!r}; --list shows all")
    exact = {case.name for case in runnable if case.name in names}
    return [case for case in runnable if case.name in exact or any(name in case.name for name in set(names) - exact)]


def as_json(case: Case, of: Plan) -> dict[str, Any]:
    """Return the arguments of a process that measures ``case``."""
    return {"case": vars(case), "plan": vars(of)}
