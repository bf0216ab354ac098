"""The config section of titan-ckpt. Names follow TorchTitan's TOML where it had them."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from titan_core.api.numbers import Count, Steps
from titan_core.api.paths import AnyPath
from titan_core.api.section import ALL_KEYS, Section


class CheckpointSection(Section):
    section: ClassVar[str] = "checkpoint"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    enable: bool = False
    """Save checkpoints, and resume from the newest one at the start."""
    folder: AnyPath = "checkpoint"
    """Where checkpoints are: a folder within job.dump_folder, or any URL that fsspec knows (s3://bucket/run)."""
    interval: Steps = Field(default=500, gt=0)
    """Steps between two checkpoints. The last step is always saved; SIGUSR1 requests one after the next step."""
    enable_first_step_checkpoint: bool = False
    """Save after the first step too: it shows early whether saving works."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Whether training continues while a checkpoint is written; with pinned memory the copy that is written from is made
    faster (CUDA)."""
    keep_latest_k: Count = Field(default=10, ge=0)
    """How many checkpoints to keep; 0 keeps all. An older one is removed only after a newer one is complete."""
    keep_every_n_steps: Steps = Field(default=0, ge=0)
    """Keep every checkpoint whose step is a multiple of this for good; 0 keeps none so."""
    load_step: Steps = Field(default=-1, ge=-1)
    """Go on from this step's checkpoint; -1: from the newest that is whole. A restart by the launcher takes the newest."""
    initial_load_path: AnyPath | None = None
    """A checkpoint to begin with where the run has none of its own yet."""
    initial_load_model_only: bool = True
    """Take only the weights from initial_load_path, and begin at step 0."""
    exclude_from_loading: list[str] = Field(default_factory=list)
    """Patterns of what not to load from initial_load_path or load_step, e.g. ["optimizer.*"] or ["model.output.*"]; it keeps
    its first values."""
    allow_changed: list[str] = Field(default_factory=list)
    """Patterns of keys that a resumed run may have other values of, although they decide what is trained, e.g.
    ["optimizer.lr", "model.args.rope_theta"], and of data that may have changed: ["dataset.NAME.content"]. A resumed run
    with another value of any other such key is refused; the error names the key."""
    last_save_model_only: bool = False
    """Save only the weights after the last step, in export_dtype: for use, not to resume from."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of weights that are saved alone."""

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> CheckpointSection:
        loads = {
            "load_step": self.load_step >= 0,
            "initial_load_path": self.initial_load_path is not None,
            "exclude_from_loading": bool(self.exclude_from_loading),
        }
        given = [key for key, is_given in loads.items() if is_given]
        if given and not self.enable:
            raise ValueError(f"{' and '.join(given)} would load nothing without checkpoint.enable = true")
        if given == ["exclude_from_loading"]:
            raise ValueError("exclude_from_loading applies to load_step and initial_load_path, and neither is set")
        return self
