"""titan-core: the plugin contract (:mod:`titan_core.api`), discovery, typed config, job assembly and the trainer.

Nothing in this package imports torch until a job runs.
"""
