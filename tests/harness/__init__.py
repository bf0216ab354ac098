"""Helpers that the tests of this repository share: models, datasets, stand-ins for services, fake distributions."""
