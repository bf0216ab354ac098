"""The config section of titan-ckpt. Key names follow TorchTitan's TOML where it has an equivalent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from titan_core.api import ALL_KEYS, AnyPath, JobContext, NonNegativeInt, PositiveInt, Problem, Section
from titan_core.api.config.numbers import MOST_STEPS
from titan_core.api.config.sections import ModelSection

HUB_NAME = r"^[\w.-]+/[\w.-]+$"
"""What the name of a repository on the Hugging Face hub looks like."""


class CheckpointSection(Section):
    section: ClassVar[str] = "checkpoint"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    enable: bool = False
    """Save checkpoints, and resume from the newest one on start."""
    folder: AnyPath = "checkpoint"
    """Location of the checkpoints: a folder within job.dump_folder, an absolute path, or a URL that fsspec supports
    (s3://bucket/run)."""
    interval: PositiveInt = 500
    """Number of steps between checkpoints. The last step is always saved; SIGUSR1 requests one after the next step."""
    enable_first_step_checkpoint: bool = False
    """Also save after the first step, to show early whether saving works."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Whether to write checkpoints in the background while training continues. With pinned memory, copies to the host are
    faster and no update waits for them on the host (CUDA only)."""
    keep_latest_k: NonNegativeInt = 10
    """Number of checkpoints to keep; 0 keeps all. A checkpoint is removed only after a newer one is complete."""
    keep_every_n_steps: NonNegativeInt = 0
    """Never remove checkpoints whose step is a multiple of this number; 0 disables the rule."""
    load_step: int = Field(default=-1, ge=-1, le=MOST_STEPS)
    """Step of the checkpoint to resume from; -1 selects the newest complete one. After a restart by the launcher, a job
    always resumes from the newest."""
    initial_load_path: AnyPath | None = None
    """Checkpoint, directory of another run (its newest checkpoint), or folder of Hugging Face or Meta weights, to start from
    if the run has no checkpoint yet."""
    initial_load_model_only: bool = True
    """Load only the weights from initial_load_path, and start at step 0."""
    exclude_from_loading: list[str] = Field(default_factory=list)
    """Patterns of tensors not to load from initial_load_path or load_step, e.g. ["optimizer.*"] or ["model.output.*"]; they
    keep their initial values."""
    allow_changed: list[str] = Field(default_factory=list)
    """Patterns of keys that a resumed run may change although they affect what is trained, e.g. ["optimizer.lr",
    "model.args.rope_theta"], and of data that may have changed: ["dataset.NAME.content"]. A resumed run that changes any
    other key of that kind is refused; the error names the key."""
    last_save_model_only: bool = False
    """After the last step, save only the weights, in export_dtype. A run cannot resume from that checkpoint."""
    export: Literal["hf"] | None = None
    """Format to export the weights to in the background after each saved checkpoint: "hf", the folder that Hugging Face's
    transformers loads, as from `titan checkpoint convert`."""
    export_folder: AnyPath = "hf"
    """Local folder of the exports (step-N): within job.dump_folder, or an absolute path."""
    export_keep_latest_k: NonNegativeInt = 2
    """Number of exports to keep; 0 keeps all. An export is removed only after a newer one is complete."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the weights that export and last_save_model_only write."""

    export_push: str | None = Field(default=None, pattern=HUB_NAME)
    """Repository on the Hugging Face hub, "owner/name", to push each complete export to, as one commit; made, and private,
    unless it exists. Needs huggingface-hub, and HF_TOKEN."""

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> CheckpointSection:
        loads = {
            "load_step": self.load_step >= 0,
            "initial_load_path": self.initial_load_path is not None,
            "exclude_from_loading": bool(self.exclude_from_loading),
        }
        given = [key for key, is_given in loads.items() if is_given]
        if given and not self.enable:
            raise ValueError(f"{' and '.join(given)} would have no effect without checkpoint.enable = true")
        if given == ["exclude_from_loading"]:
            raise ValueError("exclude_from_loading applies to load_step and initial_load_path, and neither is set")
        if self.export_push is not None and not (self.enable and self.export):
            raise ValueError(
                'export_push would have no effect without checkpoint.enable = true and checkpoint.export = "hf"'
            )
        return self


def check(context: JobContext[CheckpointSection]) -> Iterator[Problem]:
    """Check that the config names only one origin of the initial weights, and folders for exports that hold nothing else."""
    config = context.job.config
    if context.section.export is not None and (why := _unfit_for_exports(context)):
        yield config.problem("checkpoint.export_folder", why, 'name a folder for exports alone, such as "hf"')
    if context.section.initial_load_path is not None and config.section(ModelSection).from_pretrained is not None:
        why = "model.from_pretrained names the weights to start from, too"
        yield config.problem("checkpoint.initial_load_path", why, "remove one of them")


def _unfit_for_exports(context: JobContext[CheckpointSection]) -> str:
    """Return why ``checkpoint.export_folder`` cannot have the exports; empty if it can."""
    from titan_ckpt.format.catalogue import checkpoint_folder

    dump, section = Path(context.job.dump_folder), context.section
    if "://" in section.export_folder:
        return "is an address, but exports are written to a local folder"
    exports = (dump / section.export_folder).resolve()
    taken = {
        "the run's directory": dump,
        "the folder of its checkpoints": checkpoint_folder(str(dump), section.folder).local_path,
    }
    for what, path in taken.items():
        if path is not None and path.resolve() == exports:
            return f"is {what}, in which folders step-N are checkpoints"
    return ""
