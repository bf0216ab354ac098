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
* ``PositiveInt``: a number of steps, tokens, ...
* ``Size``: a number of features, heads, experts or vocabulary entries
* ``NonNegativeInt``: a whole number that may be 0
* ``PositiveFloat``: a learning rate, a factor, ...
* ``NonNegativeFloat``: a weight or a factor that may be 0
* ``Share``: a fraction of a whole
* ``Epsilon``: a term that keeps a denominator from being 0
* ``Ranks``: number of ranks
* ``Layers``: number of blocks
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_core.api._lazy import getter, names_of

if TYPE_CHECKING:
    from titan_core.api.config.numbers import (
        Epsilon as Epsilon,
        Layers as Layers,
        NonNegativeFloat as NonNegativeFloat,
        NonNegativeInt as NonNegativeInt,
        PositiveFloat as PositiveFloat,
        PositiveInt as PositiveInt,
        Ranks as Ranks,
        Share as Share,
        Size as Size,
    )
    from titan_core.api.config.paths import AnyPath as AnyPath
    from titan_core.api.config.resolved import Config as Config
    from titan_core.api.config.run_folder import RunFolder as RunFolder
    from titan_core.api.config.section import ALL_KEYS as ALL_KEYS, Section as Section
else:
    __getattr__ = getter(__name__, "config")
    __all__ = names_of("config")
