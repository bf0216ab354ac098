"""The contract: all that a plugin may import. It imports nothing else of titan-core.

Read :mod:`~titan_core.api.hookspecs` first (the hooks), then :mod:`~titan_core.api.components` (what registration hooks
return), then the modules of the kind of plugin that you write:

* a model: :mod:`~titan_core.api.layout`, :mod:`~titan_core.api.attention`, :mod:`~titan_core.api.weights`;
* a parallelism or a precision: :mod:`~titan_core.api.model_part`, :mod:`~titan_core.api.mesh`, :mod:`~titan_core.api.step`,
  :mod:`~titan_core.api.model_trial`;
* data: :mod:`~titan_core.api.dataset`, :mod:`~titan_core.api.tokenizer`, :mod:`~titan_core.api.batch`;
* checkpoints: :mod:`~titan_core.api.checkpoint`;
* an observer: :mod:`~titan_core.api.events`, :mod:`~titan_core.api.world`, :mod:`~titan_core.api.shared_request`;
* a metric logger: :mod:`~titan_core.api.metric_log`; a command: :mod:`~titan_core.api.command`.

Each has settings (:mod:`~titan_core.api.section`, with the types of :mod:`~titan_core.api.numbers`).
:mod:`titan_core.api.runs` reads and writes run directories, and :mod:`titan_core.api.tools` has functions that several
plugins need.
"""

from typing import Final

API_VERSION: Final = (1, 0)
"""Version of the contract. A plugin states the one that it was written for as ``api``: the major number must be the same,
the minor number not newer than this."""
