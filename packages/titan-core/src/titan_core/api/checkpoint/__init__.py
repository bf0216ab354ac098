"""How do I save and restore a run?

A ``Checkpoint`` (hook ``titan_checkpoints``) builds the store that saves and restores a run::

    def build(context: CheckpointContext[MySection]) -> CheckpointStore:
        return MyStore(context.state, context.lifecycle)

* ``Checkpoint``: the component; also finds trained models for ``titan generate``
* ``CheckpointContext``: what ``Checkpoint.build`` receives: section, job, state, world, folder locks
* ``CheckpointStore``: what ``Checkpoint.build`` returns: ``restore``, ``after_step``, ``close`` ...
* ``TrainState``: what to save and restore: model, optimizer, schedule, position in the data, counters
* ``DataPosition``: a run's position in its data, with ``state_dict`` and ``load_state_dict``
* ``SavedPosition``: the position in the data in a checkpoint, for commands that read the data again
* ``CheckpointEvents``: collects and restores the state of observers, and reports saved checkpoints to them
* ``RefusedChange``: a difference from the saved run that a resumed run must not have
* ``StoredModel``: trained weights on disk, and the model that they belong to
* ``WeightsContext``: what ``StoredModel.load`` receives: the job and the parts to load into
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_core.api._lazy import getter, names_of

if TYPE_CHECKING:
    from titan_core.api.checkpoint.store import (
        Checkpoint as Checkpoint,
        CheckpointContext as CheckpointContext,
        CheckpointEvents as CheckpointEvents,
        CheckpointStore as CheckpointStore,
        DataPosition as DataPosition,
        RefusedChange as RefusedChange,
        TrainState as TrainState,
    )
    from titan_core.api.checkpoint.stored_model import WeightsContext as WeightsContext
    from titan_core.api.data.replay import SavedPosition as SavedPosition
    from titan_core.api.model.weights import StoredModel as StoredModel
else:
    __getattr__ = getter(__name__, "checkpoint")
    __all__ = names_of("checkpoint")
