"""Optimizers that compute with torch's own code."""

from __future__ import annotations

from titan_core.torch_private import OnLocalShards as OnLocalShards, step_unless as step_unless
