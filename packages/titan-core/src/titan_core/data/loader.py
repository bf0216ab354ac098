"""A rank's share of each global batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from titan_core.config.config import Config
from titan_core.config.sections import DataSection, TrainingSection
from titan_core.data.batch import Batch
from titan_core.data.source import DocumentSource, State
from titan_core.data.tokens import TokenStream
from titan_core.errors import UserError
from titan_core.job.batch_plan import BatchPlan
from titan_core.tokenizers.tokenizer import TextTokenizer


@dataclass(frozen=True)
class StepData:
    """What one rank computes on in one optimizer step."""

    microbatches: list[Batch]
    epoch: int
    """How many times the dataset was read to its end."""

    def num_targets(self) -> int:
        """Target tokens of this rank's share."""
        return sum(batch.num_targets() for batch in self.microbatches)


class DataLoader:
    """Cuts the logical shards that a rank owns into microbatches.

    The global batch has a fixed number of places; each logical shard fills the same places in every step, and a rank owns
    whole shards: which tokens a step consumes does not depend on the number of ranks.
    """

    def __init__(self, source: DocumentSource, tokenizer: TextTokenizer, plan: BatchPlan, config: Config, rank: int) -> None:
        """``rank`` counts the groups of ranks that see different sequences, from 0 to ``plan.ranks - 1``."""
        training, data = config.section(TrainingSection), config.section(DataSection)
        owned = plan.logical_shards // plan.ranks
        self._plan = plan
        self._per_shard = plan.global_size // plan.logical_shards
        self._streams = {
            index: TokenStream(source, tokenizer, index, plan.logical_shards, data.on_end, training.dataset)
            for index in range(rank * owned, (rank + 1) * owned)
        }
        self._stream_of = {
            "training.dataset": training.dataset,
            "training.dataset_path": training.dataset_path,
            "training.seed": training.seed,
            "data.logical_shards": plan.logical_shards,
        }
        self._ahead: list[StepData | None] = []
        self._positions = self._read_positions()

    def peek(self) -> StepData | None:
        """The next step's microbatches, or ``None`` where a logical shard has ended and is not to be repeated. Reads them,
        and keeps the positions before them until :meth:`next_step` consumes them."""
        if not self._ahead:
            self._ahead.append(self._read_step())
        return self._ahead[0]

    def next_step(self) -> StepData | None:
        """Consume the next step's microbatches."""
        step = self.peek()
        if step is not None:
            self._ahead.clear()
            self._positions = self._read_positions()
        return step

    def state_dict(self) -> State:
        """The position of each logical shard that this rank owns, after the last step that was consumed; and what the
        positions are positions in."""
        return {"stream_of": self._stream_of, "shards": self._positions}

    def load_state_dict(self, state: State) -> None:
        """Go on from positions that :meth:`state_dict` gave, on this rank or on others; other ranks' shards may be there.

        Raises:
            UserError: they are positions in another stream.
        """
        for key, value in self._stream_of.items():
            if state["stream_of"][key] != value:
                raise UserError.one(
                    f"{key} = {value!r}",
                    f"the saved position in the data was made with {state['stream_of'][key]!r}, and means nothing here",
                    "set it as it was, or start anew",
                )
        for index, stream in self._streams.items():
            stream.load_state_dict(state["shards"][str(index)])
        self._ahead.clear()
        self._positions = self._read_positions()

    def _read_step(self) -> StepData | None:
        rows: list[list[int]] = []
        for stream in self._streams.values():
            for _ in range(self._per_shard):
                # One token more than the sequence is long: each position's target is its successor.
                window = stream.take(self._plan.seq_len + 1)
                if window is None:
                    return None
                rows.append(window)
        size = self._plan.local_size
        batches = [_batch(rows[start : start + size]) for start in range(0, len(rows), size)]
        return StepData(batches, epoch=min(stream.epoch for stream in self._streams.values()))

    def _read_positions(self) -> dict[str, State]:
        return {str(index): stream.state_dict() for index, stream in self._streams.items()}


def require_documents(source: DocumentSource, plan: BatchPlan, name: str) -> None:
    """Whether there is a document for each logical shard.

    Raises:
        UserError: there are fewer.
    """
    available = source.num_documents
    if available is not None and available < plan.logical_shards:
        raise UserError.one(
            f"dataset {name!r}",
            f"it has {available} documents, fewer than the {plan.logical_shards} streams that they are divided into",
            "lower data.logical_shards (or training.global_batch_size), or give more documents",
        )


def _batch(rows: list[list[int]]) -> Batch:
    windows = torch.tensor(rows, dtype=torch.int64)
    return Batch(tokens=windows[:, :-1].contiguous(), targets=windows[:, 1:].contiguous())
