"""Functions that several of Titan's packages share: documented, but without the promise of :mod:`titan_core.api`. A package
that uses them pins the minor version of titan-core."""
