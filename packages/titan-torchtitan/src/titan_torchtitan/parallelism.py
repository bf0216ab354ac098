"""``[parallelism]``, ``[activation_checkpoint]``, ``[compile]`` and mixed precision."""

from __future__ import annotations

from typing import Any, Final

from titan_torchtitan.keys import EARLY
from titan_torchtitan.outcome import ImportOutcome

_SCHEDULES: Final = (
    "GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV",
)  # fmt: skip
_TWO_STAGES_PER_RANK: Final = frozenset(_SCHEDULES) - {"GPipe", "1F1B"}
_FOR_CSV: Final = ("pipelineschedulesingle", "pipelineschedulemulti", "pipelinescheduleruntime")
"""Classes of torch that TorchTitan accepted beside a CSV file, which decides the schedule."""

_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_CSV = "parallelism.pipeline_parallel_schedule_csv"
_MICROBATCHES = "parallelism.pipeline_parallel_microbatches"
_MICROBATCH_SIZE = "parallelism.pipeline_parallel_microbatch_size"
_PARTS = "parallelism.module_fqns_per_model_part"
_SPLIT_POINTS = "parallelism.pipeline_parallel_split_points"
_LAYERS = "parallelism.pipeline_parallel_layers_per_stage"
_SHARD = "parallelism.data_parallel_shard_degree"
_AC = "activation_checkpoint"


def import_parallelism(outcome: ImportOutcome) -> None:
    """Import the mesh, the pipeline, and what is recomputed, compiled and computed in bfloat16."""
    old = outcome.old
    if old.get("training.data_parallel_type", "fsdp").lower() == "ddp":
        _replicate(outcome)
    outcome.ignore("FSDP shards over parallelism.data_parallel_shard_degree", "training.data_parallel_type")
    names = (
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward",
        "tensor_parallel_degree", "disable_loss_parallel", "enable_async_tensor_parallel", "pipeline_parallel_degree",
        "context_parallel_degree", "context_parallel_rotate_method",
    )  # fmt: skip
    outcome.keep(*(f"parallelism.{name}" for name in names))
    outcome.ignore(
        "affects speed only: torch.compile compiles forward and backward of each block",
        "parallelism.enable_compiled_autograd",
    )
    outcome.ignore("Titan balances causal attention over ranks itself", "parallelism.context_parallel_load_balancer")
    outcome.ignore(
        "no effect: the model has no experts",
        *(f"parallelism.{name}" for name in (
            "expert_parallel_degree", "expert_tensor_parallel_degree", "expert_parallel_comm_backend",
            "expert_parallel_a2a_impl",
            "pipeline_parallel_expert_parallel_overlap",
        )),
    )  # fmt: skip
    _pipeline(outcome)
    _precision(outcome)
    _activation_checkpoint(outcome)
    outcome.keep("compile.enable", "compile.components", "compile.backend")
    outcome.ignore("affects speed only: compiler passes of an experiment", "compile.model_backend_override")


def _replicate(outcome: ImportOutcome) -> None:
    """TorchTrain's data_parallel_type = "ddp" replicates the model over the data-parallel ranks."""
    degree = outcome.old.get(_SHARD, -1)
    if degree > 0:
        new = {"parallelism.data_parallel_replicate_degree": degree, _SHARD: 1}
        outcome.set(_SHARD, new)
        outcome.set("training.data_parallel_type", new)
        return
    why = (
        "imported as FSDP, which computes the same: for DDP, set parallelism.data_parallel_replicate_degree to the number "
        "of ranks and data_parallel_shard_degree = 1"
    )
    outcome.set("training.data_parallel_type", {_SHARD: -1}, why)


def _pipeline(outcome: ImportOutcome) -> None:
    old = outcome.old
    name = str(old.get(_SCHEDULE, "1F1B"))
    plain = name.replace("_", "").lower()
    schedule = next((known for known in _SCHEDULES if known.lower() == plain), None)
    if old.get(_CSV):
        outcome.keep(_CSV)
        outcome.ignore("the CSV file is the schedule", _SCHEDULE)
    elif schedule is not None:
        outcome.set(_SCHEDULE, {_SCHEDULE: schedule})
    elif plain == "flexibleinterleaved1f1b":
        outcome.set(_SCHEDULE, {_SCHEDULE: "Interleaved1F1B"}, "torch merged it into Interleaved1F1B")
    elif plain in _FOR_CSV:
        outcome.ignore("needs a CSV file, and none is set: the default is 1F1B", _SCHEDULE)
    else:
        outcome.refuse(_SCHEDULE, f"not a schedule of Titan, which has {', '.join(_SCHEDULES)}", {_SCHEDULE: name})
    outcome.ignore("not set", _CSV)
    outcome.ignore("Titan cuts the model by its layout", "experimental.pipeline_parallel_split_mode")
    ranks = old.get("parallelism.pipeline_parallel_degree", 1)
    stages = _stages(outcome, ranks, schedule)
    _microbatches(outcome, stages if ranks > 1 else 1)


def _stages(outcome: ImportOutcome, ranks: int, schedule: str | None) -> int:
    """Import where stages begin, and return their number."""
    old = outcome.old
    per_rank = 2 if schedule in _TWO_STAGES_PER_RANK else 1
    if old.get(_PARTS):
        parts = old.get(_PARTS)
        split_points = _first_modules(parts)
        if split_points is None:
            outcome.refuse(_PARTS, f"not lists of modules in the model's order: set {_SPLIT_POINTS}")
        else:
            outcome.set(_PARTS, {_SPLIT_POINTS: split_points}, "the first module of each stage but the first")
            outcome.ignore(f"{_PARTS} names the stages", _SPLIT_POINTS)
            ranks, per_rank = len(parts), 1
    outcome.ignore("not set", _PARTS)
    if old.get(_SPLIT_POINTS):
        ranks, per_rank = len(old.get(_SPLIT_POINTS)) + 1, 1
    outcome.keep(_SPLIT_POINTS, _LAYERS)
    first, last = (f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
    outcome.keep(first, last)
    if old.has(_LAYERS):  # with the layers that each counts for, it decides the number of stages
        for key in (first, last):
            if not old.has(key):
                outcome.default(key, 1)
    return ranks * per_rank


def _first_modules(parts: Any) -> list[str] | None:
    """Return the first module of every part but the first; ``None`` if a part is not a list of modules in order."""
    if not isinstance(parts, list) or not all(isinstance(part, list) and part for part in parts):
        return None
    modules = [module for part in parts for module in part]
    blocks = [module.partition(".")[2] for module in modules if isinstance(module, str) and module.startswith("layers.")]
    in_order = [str(index) for index in range(len(blocks))]
    if blocks != in_order or modules[:1] != ["tok_embeddings"] or modules[-2:] != ["norm", "output"]:
        return None
    return [part[0] for part in parts[1:]]


def _microbatches(outcome: ImportOutcome, stages: int) -> None:
    """TorchTitan counted the microbatches of a rank's batch until 2025, and then gave their size."""
    old = outcome.old
    batch = old.get("training.local_batch_size", 8)
    outcome.keep(_MICROBATCH_SIZE)
    if stages <= 1:
        outcome.ignore("no effect without a pipeline", _MICROBATCHES)
        return
    if old.get(_MICROBATCHES):
        count = old.get(_MICROBATCHES)
        if count > 0 and batch % count == 0:
            outcome.set(_MICROBATCHES, {_MICROBATCH_SIZE: batch // count}, f"{count} microbatches of a batch of {batch}")
        else:
            outcome.refuse(_MICROBATCHES, f"must divide the batch of {batch}: set {_MICROBATCH_SIZE}")
        return
    outcome.ignore("not set", _MICROBATCHES)
    if old.generation <= EARLY and not old.has(_MICROBATCH_SIZE) and batch % stages == 0 and batch > stages:
        outcome.default(_MICROBATCH_SIZE, batch // stages, "TorchTitan's default: one microbatch per stage")


def _precision(outcome: ImportOutcome) -> None:
    old = outcome.old
    for name, value in (("mixed_precision_param", "bfloat16"), ("mixed_precision_reduce", "float32")):
        key = f"training.{name}"
        outcome.keep(key)
        if not old.has(key):
            outcome.default(key, value)
    outcome.keep("training.enable_cpu_offload")
    if old.get("training.dtype", "float32") != "float32":
        outcome.refuse("training.dtype", "Titan keeps weights and optimizer state in fp32, and computes in mixed precision")
    outcome.ignore("Titan keeps weights in fp32", "training.dtype")


def _activation_checkpoint(outcome: ImportOutcome) -> None:
    old = outcome.old
    mode = old.get(f"{_AC}.mode", "selective")
    outcome.keep(f"{_AC}.mode")
    if not old.has(f"{_AC}.mode"):
        outcome.default(f"{_AC}.mode", mode)
    if old.has(f"{_AC}.selective_ac_option"):
        outcome.set(f"{_AC}.selective_ac_option", {f"{_AC}.selective_ac_option": old.get(f"{_AC}.selective_ac_option")})
    elif mode == "selective":
        outcome.default(f"{_AC}.selective_ac_option", "2")
    outcome.keep(f"{_AC}.memory_budget")
    outcome.ignore(
        "changes memory and speed, not results: Titan selects the matmuls to recompute",
        f"{_AC}.per_op_sac_force_recompute_mm_shapes_by_fqns", f"{_AC}.early_stop",
    )  # fmt: skip
    outcome.ignore("a diagnosis of torch that Titan does not offer", f"{_AC}.visualize_memory_budget_pareto", f"{_AC}.debug")
    outcome.ignore(
        "recomputation always draws the same random numbers in Titan",
        f"{_AC}.preserve_rng_state",
        f"{_AC}.determinism_check",
    )
