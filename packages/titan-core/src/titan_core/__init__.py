"""titan-core: hook specs, plugin discovery, typed config, job assembly and the trainer.

Nothing in this package imports torch until a job runs.
"""

from typing import Final

API_VERSION: Final = (1, 0)
"""Version of the plugin contract (:mod:`titan_core.api.hookspecs`). A plugin states the one that it was written for as
``api``: the major number must be the same, the minor number not newer than this."""
