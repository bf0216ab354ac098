"""titan-core: the plugin contract (:mod:`titan_core.api`), discovery, typed config, job assembly and the trainer; and four
functions for scripts and notebooks (:mod:`titan_core.python_api`): ``train``, ``load_config``, ``assemble``, ``read_run``.

Nothing in this package imports torch until a job runs.
"""

# Not from typing: `python -m titan_core` imports this file before it drops the current folder, which may have a typing.py.
TYPE_CHECKING = False

__all__ = ["assemble", "load_config", "read_run", "train"]

if TYPE_CHECKING:
    from titan_core.python_api import (
        assemble as assemble,
        load_config as load_config,
        read_run as read_run,
        train as train,
    )
else:

    def __getattr__(name: str):
        """Import a function of the Python API when it is first used (PEP 562)."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from titan_core import python_api

        return getattr(python_api, name)
