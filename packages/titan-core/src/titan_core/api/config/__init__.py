"""Which settings does my plugin have?

A section is a class; a component names it as its ``config``, and receives an instance as ``context.section``::

    class ZonesSection(Section):
        section = "zones"
        count: Ranks = Field(default=1, ge=1)

* ``Section``: base class of a ``[section]``; its fields are the keys, their docstrings the documentation
* ``ALL_KEYS``: value of ``Section.may_change`` if a resumed run may change every key
* ``Config``: the resolved config: sections by class, values by key, and where each value was set
* ``AnyPath``: a path on this machine
* ``RunFolder``: a folder below the run's directory, which a fresh start moves away
* ``Steps``: number of optimizer steps, or a period in steps
* ``Ranks``: number of ranks
* ``Layers``: number of blocks
* ``Heads``: number of attention heads
* ``Count``: number of items
* ``Width``: number of features
* ``Tokens``: number of tokens
* ``VocabularySize``: number of tokens in a vocabulary
* ``LearningRate``: a learning rate
* ``Factor``: a number that another one is multiplied by
* ``Share``: a fraction of a whole
* ``Epsilon``: a term that keeps a denominator from being 0
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_core.api._lazy import getter, names_of

if TYPE_CHECKING:
    from titan_core.api.config.numbers import (
        Count as Count,
        Epsilon as Epsilon,
        Factor as Factor,
        Heads as Heads,
        Layers as Layers,
        LearningRate as LearningRate,
        Ranks as Ranks,
        Share as Share,
        Steps as Steps,
        Tokens as Tokens,
        VocabularySize as VocabularySize,
        Width as Width,
    )
    from titan_core.api.config.paths import AnyPath as AnyPath
    from titan_core.api.config.resolved import Config as Config
    from titan_core.api.config.run_folder import RunFolder as RunFolder
    from titan_core.api.config.section import ALL_KEYS as ALL_KEYS, Section as Section
else:
    __getattr__ = getter(__name__, "config")
    __all__ = names_of("config")
