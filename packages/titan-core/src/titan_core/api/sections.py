"""The core's own config sections. Names follow TorchTitan's TOML of 2025 where it had them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from titan_core.api.numbers import (
    Documents,
    Epsilon,
    Factor,
    FewSteps,
    GlobalSequences,
    GradientNorm,
    LearningRate,
    LocalSequences,
    Processes,
    Ranks,
    Retries,
    Seconds,
    Share,
    Steps,
    Tokens,
    WeightDecay,
    WholeSeconds,
)
from titan_core.api.paths import AnyPath
from titan_core.api.section import ALL_KEYS, Section, none_if_empty


class JobSection(Section):
    section: ClassVar[str] = "job"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    description: str = ""
    """What this run is about, in your words; written into the run's directory."""
    dump_folder: AnyPath = Field(default="", validate_default=False)  # set where the recipe is known
    """The run's directory: resolved config, plugin versions, metrics. Default: outputs/<recipe>."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; "auto" is CUDA where there is one."""


class PluginsSection(Section):
    section: ClassVar[str] = "plugins"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    disable: list[str] = Field(default_factory=list)
    """Plugins to switch off, by name (see `titan plugins`); the variable TITAN_DISABLE_PLUGINS adds to them."""


class ModelSection(Section):
    section: ClassVar[str] = "model"
    # What these come to is compared itself: the resolved arguments, and the ids that the tokenizer gives.
    may_change: ClassVar[tuple[str, ...]] = ("flavor", "args", "tokenizer", "tokenizer_path")

    name: str = ""
    """Model family (see `titan plugins`). Default: the installed one, where there is only one."""
    flavor: str = "debug"
    """Size of the model."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Single model arguments that differ from the flavor's, e.g. --model.args.n_layers 4."""
    tokenizer: str = "byte"
    """Tokenizer: "byte" (needs no file), or a plugin's (see `titan plugins`)."""
    tokenizer_path: AnyPath | None = None
    """The tokenizer's file."""


class TrainingSection(Section):
    section: ClassVar[str] = "training"
    # What the dataset, the seed and the batch come to is compared itself. More or fewer steps are the commonest reason to
    # resume; the schedule of the learning rate then is that of the new number.
    may_change: ClassVar[tuple[str, ...]] = (
        "dataset", "dataset_path", "seed", "global_batch_size", "local_batch_size", "steps", "stop_at_step", "deterministic",
        "enable_cpu_offload", "on_nan",
    )  # fmt: skip

    dataset: str = "stdlib"
    """Dataset: "stdlib" (Python's own source text, needs no network), or a plugin's (see `titan plugins`)."""
    dataset_path: AnyPath | None = None
    """File, folder or glob of the dataset's files, or a hub name (optionally "name:config")."""
    dataset_split: str | None = None
    """The split to train on, of a dataset that has several; "all" reads every file, whatever its split. Default: "train"; a
    folder of several splits where that one is not clear is refused."""
    steps: Steps = Field(default=1000, gt=0)
    """Optimizer steps."""
    stop_at_step: Steps | None = Field(default=None, ge=0)
    """End the job after this step, with a checkpoint if there are any, as if it were to resume later: the schedule of the
    learning rate stays that of all steps. 0 trains nothing: the checkpoint holds the initial weights."""
    seq_len: Tokens = Field(default=2048, gt=0)
    """Tokens in a sequence."""
    local_batch_size: LocalSequences = Field(default=8, gt=0)
    """Sequences that one data-parallel rank takes in one forward pass."""
    global_batch_size: GlobalSequences = Field(default=-1, ge=-1)
    """Sequences in one optimizer step over all ranks; gradients are accumulated as needed. -1: local_batch_size times the
    data-parallel degree (so no accumulation)."""
    max_norm: GradientNorm = Field(default=1.0, ge=0.0)
    """Clip gradients to this global norm; 0 does not clip."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides initial weights and the order of data."""
    deterministic: bool = False
    """Only deterministic algorithms, bit for bit the same on each run; slower on GPUs."""
    float32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """How exact fp32 matrix products are: TF32 on GPUs and bf16 units on CPUs are used below "highest"."""
    mixed_precision_param: Literal["float32", "bfloat16"] = "float32"
    """Compute forward and backward with parameters cast to this type; the optimizer keeps fp32 ones."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Sum gradients over ranks in this type."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in the host's memory, and on the device only what it computes with at
    the moment. Slow; for models that do not fit otherwise."""
    on_nan: Literal["stop", "skip", "warn", "ignore"] = "stop"
    """What to do when the loss or the gradient norm is not finite: stop, leave out the step's update (each step then waits
    for its gradient norm on a GPU), log it and continue, or continue."""


class MixtureEntry(BaseModel):
    """One dataset of a mixture."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    dataset: str
    """As training.dataset."""
    dataset_path: AnyPath | None = None
    """As training.dataset_path."""
    dataset_split: str | None = None
    """As training.dataset_split."""
    weight: Factor = Field(default=1.0, ge=0.0)
    """Share of the sequences that come from it, relative to the other weights."""
    name: str = ""
    """What it is called in metrics. Default: the dataset's name."""
    text_field: str | None = None
    """Instead of data.text_field."""
    format: str | None = None
    """Instead of data.format."""

    @field_validator("*", mode="before")
    @classmethod
    def _unset(cls, value: Any, info: ValidationInfo) -> Any:
        return none_if_empty(cls, info.field_name, value)


class DataSection(Section):
    section: ClassVar[str] = "data"
    # What decides the stream of tokens is compared where positions in it are restored.
    may_change: ClassVar[tuple[str, ...]] = (
        "text_field", "format", "mixture", "on_end", "logical_shards", "shuffle_buffer", "num_workers", "prefetch",
        "on_corrupt", "retries", "retry_seconds",
    )  # fmt: skip

    text_field: str = Field(default="text", min_length=1)
    """The field of a record that holds its text."""
    format: str | None = None
    """A function of yours that makes a record's text, in the place of text_field: "package.module:function", from a mapping
    to text."""
    mixture: list[MixtureEntry] | None = None
    """Datasets to mix, in the place of training.dataset: each with its weight, path, field or format."""
    document_mask: bool = False
    """Attention stays inside of a document, and positions begin at 0 with each; without it a sequence is one stream of
    tokens, whatever documents it holds."""
    on_end: Literal["repeat", "stop"] = "repeat"
    """When a dataset ends: read it again, or stop the job cleanly."""
    logical_shards: GlobalSequences = Field(default=0, ge=0)
    """Streams that the dataset is divided into; ranks own whole streams, so it must be a multiple of the data-parallel
    degree and divide the global batch. 0: one for each sequence of the global batch. Changing it changes the data's
    order; changing the number of ranks does not."""
    shuffle_buffer: Documents = Field(default=0, ge=0)
    """Shuffle a streamed dataset among so many documents of each logical shard; 0 keeps its own order. Local files are
    shuffled whole, in a new order in each epoch."""
    num_workers: Processes = Field(default=0, ge=0)
    """Processes of each rank that read and tokenise; 0 does so in a thread beside training."""
    prefetch: FewSteps = Field(default=2, ge=1)
    """Steps that are read before they are wanted."""
    on_corrupt: Literal["stop", "skip"] = "stop"
    """What to do about a record that holds no text (undecodable, no JSON, without the field): stop, or leave it out, count
    it and say where it is."""
    retries: Retries = Field(default=5, ge=0)
    """How often to try again after a transient error of the network or the disk, waiting twice as long each time."""
    retry_seconds: Seconds = Field(default=1.0, ge=0.0)
    """How long to wait before the first of them."""


class ValidationSection(Section):
    section: ClassVar[str] = "validation"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    enable: bool = False
    """Measure the loss on other data now and then."""
    dataset: str = ""
    """As training.dataset; needed where enable is true."""
    dataset_path: AnyPath | None = None
    """As training.dataset_path."""
    dataset_split: str | None = None
    """As training.dataset_split. Default: "validation", or "test" where that is the only split."""
    text_field: str | None = None
    """Instead of data.text_field."""
    format: str | None = None
    """Instead of data.format."""
    freq: Steps = Field(default=100, gt=0)
    """Validate every so many steps (and after the last)."""
    steps: Steps = Field(default=-1, ge=-1)
    """Global batches of one validation, the same ones each time; -1 takes the whole dataset, each token once."""

    @field_validator("steps")
    @classmethod
    def _some(cls, value: int) -> int:
        if value == 0:
            raise ValueError("must be at least 1, or -1")
        return value


class ParamGroupSpec(BaseModel):
    """Settings for the parameters whose names match a pattern."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    pattern: str
    """Shell wildcards over the parameter's full name, e.g. "*norm*"."""
    weight_decay: WeightDecay | None = Field(default=None, ge=0.0)
    """Instead of optimizer.weight_decay."""
    lr_scale: Factor = Field(default=1.0, ge=0.0)
    """Times optimizer.lr."""


class OptimizerSection(Section):
    section: ClassVar[str] = "optimizer"
    may_change: ClassVar[tuple[str, ...]] = ("implementation",)

    name: str = "AdamW"
    """Optimizer: "AdamW", "Adam", or a plugin's."""
    lr: LearningRate = Field(default=8e-4, gt=0.0)
    """Peak learning rate."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of the running mean of gradients."""
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay of the running mean of squared gradients."""
    eps: Epsilon = 1e-8
    """Added to the denominator."""
    weight_decay: WeightDecay = Field(default=0.1, ge=0.0)
    """Decoupled weight decay (AdamW), or an L2 penalty (Adam)."""
    implementation: Literal["auto", "for-loop", "foreach", "fused"] = "auto"
    """How the update runs; "auto" is fused, which CPU and CUDA both have."""
    param_groups: list[ParamGroupSpec] | None = None
    """Settings by parameter name; the first pattern that matches a parameter decides, and the rest have the settings of this
    section. Default: no weight decay on biases and on parameters of fewer than two dimensions (the gains of norms).
    TorchTitan decays every parameter: `param_groups = []` does so too."""


class ObjectiveSection(Section):
    section: ClassVar[str] = "objective"
    may_change: ClassVar[tuple[str, ...]] = ("chunk_tokens",)

    name: str = "next_token"
    """What is minimised: "next_token" (cross entropy), or a plugin's objective."""
    chunk_tokens: int = Field(default=0, ge=0, le=2**40)
    """The loss is computed for so many tokens of a microbatch at a time, so that the logits of all never exist; 0 takes as
    many as have 1 GiB of logits in float32. With more than one chunk the head's products are computed twice."""


class LRSchedulerSection(Section):
    section: ClassVar[str] = "lr_scheduler"

    name: str = "wsd"
    """Schedule: "wsd" (warmup, stable, decay), or a plugin's."""
    warmup_steps: Steps = Field(default=200, ge=0)
    """Steps over which the learning rate rises linearly to its peak."""
    decay_ratio: Share | None = None
    """Share of all steps, the last ones, over which it decays; without it, decay begins right after the warmup."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: Share = 0.0
    """The learning rate never decays below this times its peak."""


class MetricsSection(Section):
    section: ClassVar[str] = "metrics"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    log_freq: Steps = Field(default=10, gt=0)
    """Log metrics every so many steps (and the first and the last)."""


class ParallelismSection(Section):
    section: ClassVar[str] = "parallelism"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    data_parallel_replicate_degree: Ranks = Field(default=1, gt=0)
    """Copies of the model that train on different data (DDP; HSDP together with sharding)."""
    data_parallel_shard_degree: Ranks = Field(default=-1, ge=-1)
    """Ranks that one copy of parameters, gradients and optimizer state is divided over (FSDP). -1: all that are left."""
    tensor_parallel_degree: Ranks = Field(default=1, gt=0)
    """Ranks that each layer is divided over."""
    pipeline_parallel_degree: Ranks = Field(default=1, gt=0)
    """Groups of ranks that hold successive layers."""
    context_parallel_degree: Ranks = Field(default=1, gt=0)
    """Ranks that each sequence is divided over."""


class CommSection(Section):
    section: ClassVar[str] = "comm"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    init_timeout_seconds: WholeSeconds = Field(default=600, gt=0)
    """How long a collective may take until the first step is done: while the model is built, compiled and restored."""
    train_timeout_seconds: WholeSeconds = Field(default=300, gt=0)
    """How long one may take from then on, before the run ends with an error. Ranks also wait for each other in it where one
    writes its part of a checkpoint more slowly than another; a checkpoint that is written beside training does not count."""


CORE_SECTIONS: tuple[type[Section], ...] = (
    JobSection,
    PluginsSection,
    ModelSection,
    TrainingSection,
    DataSection,
    ValidationSection,
    ObjectiveSection,
    OptimizerSection,
    LRSchedulerSection,
    MetricsSection,
    ParallelismSection,
    CommSection,
)
