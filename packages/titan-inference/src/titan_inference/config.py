"""The config section of titan-inference."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from titan_core.api import ALL_KEYS, AnyPath, NonNegativeInt, PositiveInt, Section


class SampleSection(Section):
    section: ClassVar[str] = "sample"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    enable: bool = False
    """Let the model write at the end of the run. The texts are printed, and kept in events.jsonl."""
    freq: NonNegativeInt = 0
    """Also sample every this many steps; 0: only at the end."""
    prompts: list[str] = Field(default=[""], min_length=1, max_length=64)
    """Texts to continue. An empty one starts a document."""
    max_new_tokens: int = Field(default=64, ge=1, le=4096)
    """Longest continuation. Fewer if the longest prompt and its continuation would exceed training.seq_len."""
    temperature: float = Field(default=0.8, ge=0.0, le=100.0)
    """Divides the logits; 0 always takes the most likely token."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the draws. The mesh does not change them."""


class EvaluationSection(Section):
    section: ClassVar[str] = "evaluation"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    enable: bool = False
    """Run tasks of lm-eval on the model while it trains, on the mesh that trains it. Needs the package lm-eval."""
    tasks: list[str] = Field(default_factory=list)
    """Names of the tasks to run before the first step and at intervals."""
    freq: NonNegativeInt = 1000
    """Run tasks every this many steps; 0: only before the first step and at the end."""
    limit: PositiveInt | None = None
    """Questions of each of these tasks. Default: all."""
    final_tasks: list[str] = Field(default_factory=list)
    """Names of the tasks to run at the end of the run, with all of their questions. None: tasks, within the limit."""
    num_fewshot: int | None = Field(default=None, ge=0, le=1000)
    """Examples before each question. Default: as each task says."""
    include_path: AnyPath | None = None
    """Folder with further tasks."""
