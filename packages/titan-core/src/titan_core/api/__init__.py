"""The contract: everything that a plugin may import. It imports no other room of titan-core.

Start with :mod:`~titan_core.api.hookspecs` (the hooks) and :mod:`~titan_core.api.components` (the objects that registration
hooks return), then read the modules for your kind of plugin:

* model: :mod:`~titan_core.api.layout`, :mod:`~titan_core.api.attention`, :mod:`~titan_core.api.weights`;
* parallelism or precision: :mod:`~titan_core.api.model_part`, :mod:`~titan_core.api.mesh`, :mod:`~titan_core.api.step`,
  :mod:`~titan_core.api.model_trial`;
* data: :mod:`~titan_core.api.dataset`, :mod:`~titan_core.api.tokenizer`, :mod:`~titan_core.api.batch`;
* checkpoints: :mod:`~titan_core.api.checkpoint`;
* observer: :mod:`~titan_core.api.events`, :mod:`~titan_core.api.world`, :mod:`~titan_core.api.shared_request`;
* metric logger: :mod:`~titan_core.api.metric_log`;
* command: :mod:`~titan_core.api.command`.

All kinds have settings (:mod:`~titan_core.api.section`, with the types of :mod:`~titan_core.api.numbers`).
:mod:`titan_core.api.runs` reads and writes run directories; :mod:`titan_core.api.tools` has functions that several plugins
need.
"""

from typing import Final

API_VERSION: Final = (1, 0)
"""Version of the contract. A plugin states the version that it was written for as ``api``: the major number must be equal to
this one, and the minor number at most this one."""
