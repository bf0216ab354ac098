"""The config sections of the core. Names follow TorchTitan's TOML of 2025 where it had an equivalent."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from titan_core.api.config.numbers import (
    LONGEST_SECONDS,
    MOST_STEPS,
    Epsilon,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Ranks,
    Share,
)
from titan_core.api.config.paths import AnyPath
from titan_core.api.config.section import ALL_KEYS, Section, none_if_empty


class JobSection(Section):
    section: ClassVar[str] = "job"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    description: str = ""
    """Description of this run, in your words; saved in the run's directory."""
    dump_folder: AnyPath = Field(default="", validate_default=False)  # set once the recipe is known
    """The run's directory, for the resolved config, plugin versions and metrics. Default: outputs/<recipe>."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; "auto" selects CUDA if available."""


class PluginsSection(Section):
    section: ClassVar[str] = "plugins"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    disable: list[str] = Field(default_factory=list)
    """Names of plugins to disable (see `titan plugins`), in addition to those in the variable TITAN_DISABLE_PLUGINS."""
    optional: list[str] = Field(default_factory=list)
    """Names of sections that this recipe does without if no plugin in use owns them; a job that trains logs each of them.
    Any other unknown section is an error."""


class ModelSection(Section):
    section: ClassVar[str] = "model"
    # A resume compares their results instead: the resolved arguments, and the ids that the tokenizer returns.
    may_change: ClassVar[tuple[str, ...]] = ("flavor", "args", "tokenizer", "tokenizer_path", "from_pretrained")

    name: str = ""
    """Model family (see `titan plugins`). Default: the installed one, if it is the only one that is not for tests."""
    flavor: str = "debug"
    """Size of the model, by name. Empty: model.args describes the whole model."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Model arguments that override the flavor's, e.g. --model.args.n_layers 4. "none" means no value."""
    from_pretrained: AnyPath | None = None
    """Trained weights to start from: a folder of weights in a format that a plugin reads, a checkpoint, a run's directory,
    or the name of a downloaded model ("organisation/model"). Also sets the model and its tokenizer, if the recipe does not.
    A run that has a checkpoint resumes from that instead."""
    tokenizer: str = "byte"
    """Tokenizer: "byte" (needs no file) or a plugin's (see `titan plugins`)."""
    tokenizer_path: AnyPath | None = None
    """The tokenizer's file."""


class TrainingSection(Section):
    section: ClassVar[str] = "training"
    # A resume compares the resulting data stream and batch sizes instead. Users most often resume to train for more or fewer
    # steps; the learning-rate schedule then follows the new number of steps.
    may_change: ClassVar[tuple[str, ...]] = (
        "dataset", "dataset_path", "seed", "global_batch_size", "local_batch_size", "elastic", "steps", "stop_at_step",
        "deterministic", "enable_cpu_offload", "on_nan",
    )  # fmt: skip

    dataset: str = "stdlib"
    """Dataset: "stdlib" (source text of Python's standard library; needs no network) or a plugin's (see `titan plugins`)."""
    dataset_path: AnyPath | None = None
    """File, folder or glob of the dataset's files, or a hub name (optionally "name:config")."""
    dataset_split: str | None = None
    """Split to train on, if the dataset has several; "all" reads every file, whatever its split. Default: "train"; a folder
    with several splits is refused if none of them is clearly that one."""
    steps: PositiveInt = 1000
    """Number of optimizer steps."""
    stop_at_step: NonNegativeInt | None = None
    """End the job after this step like an interrupted run: save a checkpoint if checkpoints are enabled, and follow the
    learning-rate schedule of all steps until then. 0 trains nothing: the checkpoint holds the initial weights."""
    seq_len: PositiveInt = 2048
    """Sequence length, in tokens."""
    local_batch_size: int = Field(default=8, gt=0, le=2**16)
    """Sequences per data-parallel rank in one forward pass."""
    global_batch_size: int = Field(default=-1, ge=-1, le=MOST_STEPS)
    """Sequences per optimizer step over all ranks; gradients are accumulated as needed. -1: local_batch_size times the
    data-parallel degree (no accumulation)."""
    elastic: bool = False
    """Adapt to the number of ranks when the job is restarted on more or fewer of them, and train the same: the global batch
    stays that of the run's first start, local_batch_size becomes an upper bound, and one data-parallel degree follows the
    number of ranks: parallelism.data_parallel_shard_degree if it is -1, else the replicate degree. `titan train --nnodes
    MIN:MAX` sets it."""
    max_norm: NonNegativeFloat = 1.0
    """Clip gradients to this global norm; 0 disables clipping."""
    freeze: list[str] = Field(default_factory=list)
    """Parameters that keep their values: patterns of their names, as in optimizer.param_groups. They have no gradient, no
    optimizer state and no weight decay."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seeds the initial weights and the order of the data."""
    deterministic: bool = False
    """Use deterministic algorithms only: every run is the same bit for bit. Slower on GPUs."""
    float32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Precision of fp32 matmuls. Values below "highest" use TF32 on GPUs and bf16 units on CPUs."""
    mixed_precision_param: Literal["float32", "bfloat16"] = "float32"
    """Cast parameters to this type for forward and backward; the optimizer keeps fp32 parameters."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Reduce gradients over ranks in this type."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and on the device only those in current use. Slow; for
    models that do not fit otherwise."""
    on_nan: Literal["stop", "skip", "warn", "ignore"] = "stop"
    """Action if the loss or the gradient norm is not finite: stop the run without the update, skip the update and continue,
    warn in the log and continue with it, or ignore it."""


class StageEntry(BaseModel):
    """The keys of an entry of ``[[stages]]``, beside its sections."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    name: str | None = Field(default=None, min_length=1)
    """Name of the stage, for logs and reports. Default: its number."""
    at_step: PositiveInt | None = None
    """The stage begins after this step."""
    at_tokens: float | int | None = Field(default=None, gt=0)
    """The stage begins after the step in which the run has read this number of tokens, padding included."""


class MixtureEntry(BaseModel):
    """One dataset of a mixture."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    dataset: str
    """See training.dataset."""
    dataset_path: AnyPath | None = None
    """See training.dataset_path."""
    dataset_split: str | None = None
    """See training.dataset_split."""
    weight: NonNegativeFloat = 1.0
    """Share of the sequences that come from this dataset, relative to the other weights."""
    name: str = ""
    """Name of the dataset in metrics. Default: the dataset's own name."""
    text_field: str | None = None
    """Overrides data.text_field."""
    format: str | None = None
    """Overrides data.format."""

    @field_validator("*", mode="before")
    @classmethod
    def _unset(cls, value: Any, info: ValidationInfo) -> Any:
        return none_if_empty(cls, info.field_name, value)


class DataSection(Section):
    section: ClassVar[str] = "data"
    # Keys that determine the token stream are compared when the positions in it are restored.
    may_change: ClassVar[tuple[str, ...]] = (
        "text_field", "format", "mixture", "on_end", "logical_shards", "shuffle", "shuffle_buffer", "packing",
        "packing_window", "exclude", "num_workers", "prefetch", "on_corrupt", "max_record_bytes", "retries", "retry_seconds",
        "document_attention",
    )  # fmt: skip

    text_field: str = Field(default="text", min_length=1)
    """Record field that holds the text."""
    format: str | None = None
    """Makes the text of a record, in place of text_field: a template of its fields, such as "{{ question }} {{ answer }}",
    or the name of a plugin's format."""
    mixture: list[MixtureEntry] | None = None
    """Datasets to mix instead of training.dataset, each with its own weight, path, and field or format."""
    document_mask: bool = False
    """Restrict attention to each document and start positions at 0 in each. Otherwise a sequence is one stream of tokens,
    regardless of the documents in it."""
    document_attention: Literal["flex", "varlen"] = "flex"
    """The kernel of GPUs for attention within documents: FlexAttention, which computes every model, or torch's
    variable-length attention (FlashAttention, or cuDNN's), which is compiled for no shape, computes in half precision and
    takes heads of up to 256 features. Capped scores, attention sinks and sequences that a ring of ranks shards stay with
    FlexAttention. CPUs have a mask either way."""
    on_end: Literal["repeat", "stop"] = "repeat"
    """At the end of a dataset, either read it again or stop the job cleanly."""
    logical_shards: NonNegativeInt = 0
    """Number of streams that the dataset is divided into. Each rank reads whole streams, so the number must be a multiple of
    the data-parallel degree and divide the global batch. 0: one per sequence of the global batch. Changing it changes the
    order of the data; changing the number of ranks does not."""
    shuffle: Literal["documents", "blocks", "none"] = "documents"
    """Order of local datasets, a new one each epoch: all documents shuffled; or blocks of some MiB, with the documents of 16
    blocks shuffled together, for file systems on which each request is slow; or as they are in the files."""
    shuffle_buffer: int = Field(default=0, ge=0, le=10**7)
    """Shuffle a streamed dataset within a buffer of this many documents per logical shard; 0 keeps its order. Local files
    have shuffle instead."""
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """How documents become sequences: in a row, cut wherever a sequence ends, without padding; or packed by best fit, so
    that only documents that are longer than a sequence are cut, with a little padding (`titan data inspect` shows how
    much)."""
    packing_window: int = Field(default=1024, gt=0, le=10**7)
    """Number of documents of a logical shard that "best_fit" packs together. Each shard keeps up to twice as many in memory;
    fewer need more padding."""
    exclude: AnyPath | None = None
    """File of documents that are passed over, one {"dataset": NAME, "index": N} a line, with indices as `titan data step
    --json` prints them. Default: excluded.jsonl in the run's directory, if it exists: `titan run rewind` writes it."""
    num_workers: int = Field(default=0, ge=0, le=256)
    """Processes per rank that read and tokenise; 0 uses a background thread."""
    prefetch: int = Field(default=2, ge=1, le=1000)
    """Number of steps to read ahead."""
    on_corrupt: Literal["stop", "skip"] = "stop"
    """Action for a record without text (undecodable, not JSON, or without the field): stop, or skip it, count it and log its
    location."""
    max_record_bytes: int = Field(default=2**24, ge=2**10, le=2**40)
    """What a record may take, in bytes. A larger one is corrupt (see on_corrupt). What is decoded together with others, such
    as a page of a Parquet file, may take 24 times as much."""
    retries: int = Field(default=5, ge=0, le=20)
    """Number of retries after a transient network or disk error; each waits twice as long as the one before."""
    retry_seconds: float = Field(default=1.0, ge=0.0, le=LONGEST_SECONDS)
    """Seconds to wait before the first retry."""


class ValidationSet(BaseModel):
    """One of several validation datasets."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Its loss is logged as validation_loss/NAME."""
    dataset: str
    """See training.dataset."""
    dataset_path: AnyPath | None = None
    """See training.dataset_path."""
    dataset_split: str | None = None
    """See validation.dataset_split."""
    text_field: str | None = None
    """Overrides data.text_field."""
    format: str | None = None
    """Overrides data.format."""

    @field_validator("*", mode="before")
    @classmethod
    def _unset(cls, value: Any, info: ValidationInfo) -> Any:
        return none_if_empty(cls, info.field_name, value)


class ValidationSection(Section):
    section: ClassVar[str] = "validation"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    enable: bool = False
    """Measure the loss on other data at intervals."""
    dataset: str = ""
    """See training.dataset; required if enable is true, unless there are sets."""
    dataset_path: AnyPath | None = None
    """See training.dataset_path."""
    dataset_split: str | None = None
    """See training.dataset_split. Default: "validation", or "test" if that is the only split."""
    text_field: str | None = None
    """Overrides data.text_field."""
    format: str | None = None
    """Overrides data.format."""
    sets: list[ValidationSet] | None = Field(default=None, min_length=1, max_length=1000)
    """Datasets to validate on instead of validation.dataset, each with a loss of its own."""
    freq: PositiveInt = 100
    """Validate every this many steps, and after the last."""
    steps: int = Field(default=-1, ge=-1, le=MOST_STEPS)
    """Global batches per validation and dataset, the same ones each time; -1 reads the whole dataset, each token once."""

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
    """Shell wildcards for the parameter's fully qualified name, e.g. "*norm*"."""
    weight_decay: NonNegativeFloat | None = None
    """Overrides optimizer.weight_decay."""
    lr_scale: NonNegativeFloat = 1.0
    """Factor on optimizer.lr."""


class OptimizerSection(Section):
    """``[optimizer]``: the optimizer, the peak learning rate, and settings that several optimizers have."""

    section: ClassVar[str] = "optimizer"
    may_change: ClassVar[tuple[str, ...]] = ("implementation",)

    name: str = "AdamW"
    """Optimizer: "AdamW", "Adam" or a plugin's."""
    lr: PositiveFloat = 8e-4
    """Peak learning rate."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay rate of the running mean of gradients."""
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay rate of the running mean of squared gradients."""
    eps: Epsilon = 1e-8
    """Term added to the denominator of the update."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay (AdamW), or an L2 penalty (Adam)."""
    implementation: Literal["auto", "for-loop", "foreach", "fused"] = "auto"
    """Implementation of the update; "auto" selects fused, which exists for CPU and CUDA."""
    param_groups: list[ParamGroupSpec] | None = None
    """Settings by parameter name. The first matching pattern applies; parameters without a match use the section's settings.
    Default: no weight decay on biases and on parameters with fewer than two dimensions (norm gains). TorchTitan decays
    every parameter: set `param_groups = []` for that."""


class ObjectiveSection(Section):
    section: ClassVar[str] = "objective"
    may_change: ClassVar[tuple[str, ...]] = ("chunk_tokens",)

    name: str = "next_token"
    """Objective to minimise: "next_token" (cross entropy) or a plugin's."""
    chunk_tokens: int = Field(default=0, ge=0, le=2**40)
    """Compute the loss for this many tokens of a microbatch at a time, so that the logits of all tokens never exist at once.
    0 chooses as many as would take 1 GiB of fp32 logits on a rank. With more than one chunk, the forward pass also computes
    the gradients of the head."""


class LRSchedulerSection(Section):
    section: ClassVar[str] = "lr_scheduler"

    name: str = "wsd"
    """Schedule: "wsd" (warmup, stable, decay) or a plugin's."""
    warmup_steps: NonNegativeInt = 200
    """Steps over which the learning rate rises linearly to its peak."""
    decay_ratio: Share | None = None
    """Fraction of all steps, at the end, over which the learning rate decays. Default: decay starts right after warmup."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: Share = 0.0
    """Minimum learning rate of the decay, as a fraction of the peak."""


class MetricsSection(Section):
    section: ClassVar[str] = "metrics"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    log_freq: PositiveInt = 10
    """Log metrics every this many steps, and for the first and the last."""
    enable_console: bool = True
    """Print the run, its logged steps and how it ended."""


class ParallelismSection(Section):
    section: ClassVar[str] = "parallelism"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    data_parallel_replicate_degree: Ranks = Field(default=1, gt=0)
    """Replicas of the model that train on different data (DDP, or HSDP if combined with sharding)."""
    data_parallel_shard_degree: Ranks = Field(default=-1, ge=-1)
    """Ranks that parameters, gradients and optimizer state are sharded over (FSDP). -1: all remaining ranks."""
    tensor_parallel_degree: Ranks = Field(default=1, gt=0)
    """Ranks that each layer is sharded over."""
    pipeline_parallel_degree: Ranks = Field(default=1, gt=0)
    """Pipeline stages: groups of ranks that hold successive layers."""
    context_parallel_degree: Ranks = Field(default=1, gt=0)
    """Ranks that each sequence is sharded over."""


class CommSection(Section):
    section: ClassVar[str] = "comm"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    init_timeout_seconds: int = Field(default=600, gt=0, le=int(LONGEST_SECONDS))
    """Timeout of collectives until the first step is complete, while the model is built, compiled and restored."""
    train_timeout_seconds: int = Field(default=300, gt=0, le=int(LONGEST_SECONDS))
    """Timeout of collectives from then on, after which the run ends with an error. It includes the wait for a rank that is
    slower to write its part of a checkpoint, but not checkpoints that are written in the background."""


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
