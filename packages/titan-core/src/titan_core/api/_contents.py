"""The table of contents of the contract: chapter -> file -> the names that it promises, separated by spaces. CI records and
versions these names (``ci/contract.py``); whatever else the files define may change at any time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CONTENTS: Final[Mapping[str, Mapping[str, str]]] = {
    "plugins": {
        "hookspecs": "hookimpl",
        "plugins.ref": "Ref",
        "plugins.component": "Component Recipe recipes_in",
        "plugins.job": "Job JobContext TrainingContext",
        "plugins.errors": "Problem UserError RunStopped",
    },
    "config": {
        "config.section": "Section ALL_KEYS",
        "config.resolved": "Config",
        "config.paths": "AnyPath",
        "config.run_folder": "RunFolder",
        "config.numbers": "PositiveInt NonNegativeInt PositiveFloat NonNegativeFloat Share Epsilon Ranks Layers Size",
    },
    "model": {
        "model.components": "Model",
        "model.layout": "ModelDefinition ModelLayout matches",
        "model.layout_rules": "Column Row Shard Replicate Experts Rule Router Mixer causal_attention CAUSAL_ATTENTION",
        "model.initial_values": "InitialValue Constant Normal TruncatedNormal Uniform Computed Loaded Elements",
        "model.sequence_share": "SequenceShare",
        "model.attention": "CausalAttention",
        "model.decoding": "Decoding current_decoding",
        "model.dropout": "Dropout",
        "model.random_streams": "RandomStream",
        "model.auxiliary_loss": "add_auxiliary_loss",
        "model.statistic": "add_statistic",
        "model.weights": "WeightFormat ForeignTensor",
    },
    "parallel": {
        "parallel.components": "Transform Phase MeshUse Checks StepUse Planning DATA_DIMS",
        "parallel.planning": "Costs OptimizerCosts PipelineCosts",
        "parallel.mesh": "MeshDim MeshView MeshPlan",
        "parallel.job_mesh": "JobMesh",
        "parallel.world": "World",
        "parallel.model_part": "ModelPart",
        "plugins.component": "Slot",
        "parallel.model_trial": "ModelTrial ModuleCall Around Shares",
        "parallel.step": "StepRunner StepInput StepAbandoned",
        "parallel.microbatch": "Microbatch current_microbatch",
    },
    "training": {
        "training.components": "Objective Optimizer LRSchedule",
        "training.metric": "add_metric",
        "training.vocabulary": "Vocabulary",
        "training.batch": "Batch Extra ObjectiveFunction",
        "plugins.job": "BatchPlan",
        "training.optimizer": "OptimizerContext ParamGroup TrainedParameter ParameterRole SkipsOnDevice LRScheduleContext",
        "config.sections": "OptimizerSection",
    },
    "observe": {
        "observe.components": "Observer",
        "observe.events": "Record Run StepReport PendingUpdate ValidationReport RunEnd Finding",
        "observe.shared_request": "SharedRequest",
        "observe.deferred_reports": "DeferredReports",
    },
    "data": {
        "data.components": "Dataset RecordFormat Tokenizer ModelHub",
        "data.dataset": (
            "DatasetContext DocumentSource DocumentShard DocumentPlace Document TextPart WeightedTokens ExtraField"
            " CorruptRecord ExcludedRecord"
        ),
        "data.shuffled": "ShuffledDocuments",
        "data.tokenizer": "TokenizerContext TextTokenizer ChatTokenizer RenderedChat",
    },
    "checkpoint": {
        "checkpoint.store": (
            "Checkpoint CheckpointContext CheckpointStore TrainState DataPosition CheckpointEvents RefusedChange"
        ),
        "data.replay": "SavedPosition",
        "model.weights": "StoredModel",
        "checkpoint.stored_model": "WeightsContext",
    },
    "commands": {
        "commands.command": "Command CommandContext",
        "commands.registry": "Registry",
        "commands.health": "HealthCheck HealthContext CheckResult Health",
    },
}

DEPRECATED: Final[Mapping[str, str]] = {}
"""Promised name -> what to use instead. Importing such a name warns; it goes with the next minor version at the earliest."""
