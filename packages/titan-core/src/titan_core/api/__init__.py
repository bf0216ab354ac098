"""The contract: all that a plugin may import. It imports nothing else of titan-core.

Read in this order: :mod:`~titan_core.api.hookspecs` (which hooks there are), :mod:`~titan_core.api.components` (what registration
hooks return), then the module of the kind of plugin that you write: :mod:`~titan_core.api.layout` and
:mod:`~titan_core.api.weights` for a model, :mod:`~titan_core.api.model_part`, :mod:`~titan_core.api.mesh` and
:mod:`~titan_core.api.step` for a parallelism, :mod:`~titan_core.api.dataset` and :mod:`~titan_core.api.tokenizer` for data,
:mod:`~titan_core.api.checkpoint`, :mod:`~titan_core.api.events` for observers, :mod:`~titan_core.api.metric_log` and
:mod:`~titan_core.api.command`. :mod:`titan_core.api.runs` reads and writes run directories; :mod:`titan_core.api.tools` holds
functions that several plugins need.
"""

from typing import Final

API_VERSION: Final = (1, 0)
"""Version of the contract. A plugin states the one that it was written for as ``api``: the major number must be the same, the
minor number not newer than this."""
