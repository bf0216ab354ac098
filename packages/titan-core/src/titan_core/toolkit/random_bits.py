"""Random bits as a function of their place, the same on any mesh, for values beside those of modules."""

from __future__ import annotations

from titan_core.api.model._random_bits import (
    element_bits as element_bits,
    feature_words as feature_words,
    mixed as mixed,
    of_module as of_module,
    token_words as token_words,
)
