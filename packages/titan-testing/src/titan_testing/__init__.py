"""The kit for authors of plugins: suites that a plugin's tests inherit, jobs on several gloo ranks, and ``titan plugin``.

* :mod:`titan_testing.suites`: a suite for each stage, such as ``ModelSuite``
* :mod:`titan_testing.pytest_plugin`: the fixtures, such as ``run_job``
* :mod:`titan_testing.checks`: the fast checks, without pytest, that ``titan plugin check`` runs
"""

PATIENCE = 660.0
"""Seconds after which waiting for a process ends with an error. More than the ranks of a job wait for each other (600 s):
their errors say more."""
