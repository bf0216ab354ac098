"""Devices that compute wrong numbers: a step is repeated on other ranks, and compared bit by bit."""
