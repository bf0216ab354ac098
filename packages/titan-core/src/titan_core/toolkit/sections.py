"""The core's sections of the config, and bounds of numbers in them."""

from __future__ import annotations

from titan_core.api.config.numbers import (
    LARGEST as LARGEST,
    LONGEST_SECONDS as LONGEST_SECONDS,
    MOST_LAYERS as MOST_LAYERS,
    MOST_PROCESSES as MOST_PROCESSES,
    MOST_RANKS as MOST_RANKS,
    MOST_STEPS as MOST_STEPS,
    FewSteps as FewSteps,
    LocalSequences as LocalSequences,
    Ranks as Ranks,
    Seconds as Seconds,
    Wavelength as Wavelength,
)
from titan_core.api.config.sections import (
    CORE_SECTIONS as CORE_SECTIONS,
    CommSection as CommSection,
    DataSection as DataSection,
    JobSection as JobSection,
    MetricsSection as MetricsSection,
    ModelSection as ModelSection,
    StageEntry as StageEntry,
    TrainingSection as TrainingSection,
    ValidationSection as ValidationSection,
)
