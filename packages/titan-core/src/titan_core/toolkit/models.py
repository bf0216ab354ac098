"""Models and batches while they compute, for code that divides, simulates or generates."""

from __future__ import annotations

from titan_core.api.model.attention import attend as attend
from titan_core.api.model.attention_mask import (
    attention_masks as attention_masks,
    document_mask as document_mask,
    mask_name as mask_name,
    uses_block_masks as uses_block_masks,
)
from titan_core.api.model.random_streams import divide_streams as divide_streams
from titan_core.api.observe.deferred_reports import finite as finite, in_flight as in_flight
from titan_core.api.parallel.microbatch import (
    AuxiliaryLosses as AuxiliaryLosses,
    MetricSums as MetricSums,
    StepCounts as StepCounts,
    microbatch_scope as microbatch_scope,
)
from titan_core.api.parallel.model_part import PrunedModule as PrunedModule, arguments_of as arguments_of
from titan_core.api.parallel.step import is_shape_inference as is_shape_inference, shape_inference as shape_inference
from titan_core.api.training.batch import IGNORE as IGNORE, join_batches as join_batches, with_positions as with_positions
from titan_core.api.training.optimizer import param_groups as param_groups, trained_parameters as trained_parameters
