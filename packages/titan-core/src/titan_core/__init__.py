"""titan-core: the plugin contract (:mod:`titan_core.api`), discovery, typed config, job assembly and the trainer; and five
functions for scripts and notebooks (:mod:`titan_core.python_api`): ``train``, ``load_config``, ``assemble``, ``read_run``,
``using_plugin_files``.

Nothing in this package imports torch until a job runs.
"""

# Not from typing: `python -m titan_core` imports this file before it drops the current folder, which may have a typing.py.
TYPE_CHECKING = False

__all__ = ["assemble", "load_config", "read_run", "train", "using_plugin_files"]

if TYPE_CHECKING:
    from titan_core.python_api import (
        assemble as assemble,
        load_config as load_config,
        read_run as read_run,
        train as train,
        using_plugin_files as using_plugin_files,
    )
else:

    def __getattr__(name: str):
        """Import a function of the Python API when it is first used (PEP 562)."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from titan_core import python_api

        return getattr(python_api, name)
