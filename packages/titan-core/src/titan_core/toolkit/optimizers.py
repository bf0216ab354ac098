"""Optimizers that compute with torch's own code, or on shards."""

from __future__ import annotations

from titan_core.torch_private import (
    OnLocalShards as OnLocalShards,
    global_offset as global_offset,
    step_unless as step_unless,
)
