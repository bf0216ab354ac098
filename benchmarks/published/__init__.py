"""Predicted against published: ``titan estimate`` for runs that others published."""
