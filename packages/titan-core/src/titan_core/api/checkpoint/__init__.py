"""How do I save and restore a run?

A checkpoint component builds the store of one run, from everything that a resumed run needs::

    def build(context: CheckpointContext[MySection]) -> CheckpointStore:
        return MyStore(context.state, context.lifecycle)

* ``Checkpoint``: the kind of component that saves and restores
* ``CheckpointContext``: its context
* ``CheckpointStore``: what it builds
* ``TrainState``: everything to restore
* ``DataPosition``: the position in the data
* ``CheckpointEvents``: the channel to observers
* ``RefusedChange``: a difference that a resume must not have
* ``StoredModel``: trained weights that were found
* ``WeightsContext``: the argument of ``StoredModel.load``
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
    from titan_core.api.model.weights import StoredModel as StoredModel
else:
    __getattr__ = getter(__name__, "checkpoint")
    __all__ = names_of("checkpoint")
