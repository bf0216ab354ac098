"""The contract: the names that an author of a plugin imports, all from this path, in nine chapters and a list of hooks.

* :mod:`~titan_core.api.plugins`: How do I register something, what do I receive, and how do I say what is wrong?
* :mod:`~titan_core.api.config`: Which settings does my plugin have?
* :mod:`~titan_core.api.model`: How do I describe a model?
* :mod:`~titan_core.api.parallel`: What is the mesh, and what may a transform change?
* :mod:`~titan_core.api.training`: What does a step compute, and what updates the weights?
* :mod:`~titan_core.api.observe`: How do I watch a run, add figures, keep state?
* :mod:`~titan_core.api.data`: How do documents and tokens come in?
* :mod:`~titan_core.api.checkpoint`: How do I save and restore a run?
* :mod:`~titan_core.api.commands`: How do I add a subcommand, or a check of the machine?
* :mod:`~titan_core.api.hookspecs`: the hooks, in the order in which they fire.

Each chapter explains its names in one line each. Names are imported when they are first used, so that a ``plugin.py``, which
must not import torch, may use this path too.
"""

from typing import TYPE_CHECKING, Final

from titan_core.api._lazy import getter, names_of

if TYPE_CHECKING:
    from titan_core.api.checkpoint import *  # noqa: F403
    from titan_core.api.commands import *  # noqa: F403
    from titan_core.api.config import *  # noqa: F403
    from titan_core.api.data import *  # noqa: F403
    from titan_core.api.model import *  # noqa: F403
    from titan_core.api.observe import *  # noqa: F403
    from titan_core.api.parallel import *  # noqa: F403
    from titan_core.api.plugins import *  # noqa: F403
    from titan_core.api.training import *  # noqa: F403
else:
    __getattr__ = getter(__name__)
    __all__ = [*names_of(), "API_VERSION"]

API_VERSION: Final = (1, 0)
"""Version of the contract. A plugin states the version that it was written for as ``api``: the major number must be equal to
this one, and the minor number at most this one."""
