"""Suites to inherit: one for each kind of component. A subclass names the component and its smallest settings::

    from titan_testing.suites import ModelSuite

    class TestTinyLM(ModelSuite):
        model = "tinylm"
        args = {"dim": 32, "n_layers": 2, "n_heads": 2}

Tests that need a package that is not installed are skipped, and name it. A row that a component cannot do stands in
``unsupported`` with a pattern of the error: the suite then checks that Titan refuses it before step 1.
"""

from titan_testing.suites.base import Suite as Suite
from titan_testing.suites.data import DatasetSuite as DatasetSuite, TokenizerSuite as TokenizerSuite
from titan_testing.suites.model import ModelSuite as ModelSuite
from titan_testing.suites.run import (
    CheckpointSuite as CheckpointSuite,
    CommandSuite as CommandSuite,
    ObserverSuite as ObserverSuite,
)
from titan_testing.suites.training import (
    ObjectiveSuite as ObjectiveSuite,
    OptimizerSuite as OptimizerSuite,
    ScheduleSuite as ScheduleSuite,
)
from titan_testing.suites.transform import PrecisionSuite as PrecisionSuite, TransformSuite as TransformSuite
