"""What a plugin's function or method wrongly returns is refused, with the plugin's name."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from harness.guarded import NAMED, Loss, end, guarded
from harness.odd_plugin import ORIGIN
from titan_core.api import Costs, ModelPart, OptimizerCosts, PipelineCosts, Ref, StoredModel, TextTokenizer
from titan_core.toolkit.errors import PluginFailure


class Source:
    num_documents: Any = 3

    def shard(self, *_: int) -> Any:
        return iter("abc")


class Bare:
    """Has ``vocab_size`` and no more."""

    vocab_size = 3


class Tokens(TextTokenizer):
    vocab_size = 3

    def encode_document(self, text: str) -> list[int]:
        return [1]

    def decode(self, ids: object) -> Any:
        return b"bytes"


def with_value(cls: type, **values: Any) -> object:
    return type(cls.__name__, (cls,), values)()


NONSENSE: list[tuple[str, Any, str]] = [
    ("ModelDefinition.flops_per_token", float("nan"), "returned nan; it must return a finite number, at least 0"),
    ("ModelDefinition.flops_per_token", float("inf"), "returned inf"),
    ("ModelDefinition.flops_per_token", -1.0, "returned -1.0"),
    ("ModelDefinition.flops_per_token", "many", "returned 'many'"),
    ("ModelDefinition.flops_per_token", True, "returned True"),
    ("ModelDefinition.build", object(), "must return an nn.Module"),
    ("ModelLayout.buffers", [1.0], "must return a tensor"),
    ("Model.define", {"layout": 1}, "must return a ModelDefinition"),
    ("Transform.active", None, "returned None; it must return True or False"),
    ("Transform.apply", [], "must return the ModelPart, or a list of ModelParts"),
    ("Transform.checks.model", ["words"], "found 'words'"),
    ("Transform.planning.choices", {"key": "text"}, "must return a mapping from config keys to lists of values"),
    ("Transform.planning.costs", Costs(kept=float("nan")), "returned kept = nan"),
    ("Transform.planning.costs", Costs(after_update_every=0), "must return after_update_every of at least 1"),
    ("Transform.planning.costs", Costs(pipeline=PipelineCosts(stages=(), rank_of=(), microbatch_size=1, microbatches=1,
                                                              alive=(-1.0,), idle=0.0)), r"returned alive = \(-1.0,\)"),
    ("Transform.steps.runner", Bare(), "has no '__call__'; it must return a StepRunner"),
    ("Transform.steps.observer", Bare, "returned the class Bare; it must return an instance"),
    ("Observer.build", None, "returned None"),
    ("Dataset.build", Bare(), "has no 'num_documents'; it must return a DocumentSource"),
    ("Dataset.build", with_value(Source, num_documents=-1), "num_documents is -1; it must be a whole number, at least 0"),
    ("Dataset.build", with_value(Source, num_documents=1.5), "num_documents is 1.5"),
    ("Dataset.build", with_value(Source, num_documents=property(end)), "num_documents raised StopIteration"),
    ("Dataset.extras", {"tags": "int64"}, "must return a mapping from names to ExtraFields"),
    ("Tokenizer.build", Bare(), "must return a TextTokenizer"),
    ("Tokenizer.build", with_value(Tokens, vocab_size=0), "vocab_size is 0; it must be a whole number, at least 1"),
    ("ModelHub.locate", 3, "must return a str"),
    ("Optimizer.costs", Costs(), "must return OptimizerCosts"),
    ("Optimizer.costs", OptimizerCosts(state_bytes=-1.0, traffic=0.0), "returned state_bytes = -1.0"),
    ("Optimizer.build", Bare(), "must return a Optimizer"),
    ("Objective.build", end, "must return a ObjectiveFunction"),
    ("Objective.reference", {"training.seed": 1}, r"must return a mapping from keys of \[model\]"),
    ("Objective.build", with_value(Loss, metrics="accuracy"), "metrics is 'accuracy'; it must be a tuple of names"),
    ("LRSchedule.build", 0.1, "must return a LRScheduler"),
    ("Observer.build", Bare, "returned the class Bare; it must return an instance"),
    ("Checkpoint.build", None, "returned None"),
    ("Checkpoint.find_model", "path", "must return a StoredModel"),
    ("Checkpoint.resumes_after", -1, "must be a whole number, at least 0"),
    ("Command.run", None, "returned None; it must return the exit status"),
    ("Launcher.run", True, "returned True; it must return the exit status"),
    ("WeightFormat.tensors", ["w"], "must return a list of ForeignTensor"),
    ("WeightFormat.to_args", {}, "must return the model's arguments"),
    ("WeightFormat.notes", "a note", "must return a list of str"),
    ("WeightFormat.from_args", [], "must return a dict"),
    ("Mixer.divided", None, "must return a function"),
    ("Computed.values", None, "returned None; it must return a tensor of floating-point numbers"),
    ("Computed.values", torch.ones(3, dtype=torch.int64), r"returned a tensor \[3\] of torch.int64; it must return"),
    ("Computed.values", torch.tensor([1.0, float("nan")]), "returned values that are not finite"),
    ("ModelPart.batch_transforms", None, "must return a Batch"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "result", "message"), NONSENSE)
def test_nonsense_is_refused_where_it_enters(row: str, result: Any, message: str) -> None:
    with pytest.raises(PluginFailure, match=f"{NAMED}.*{message}"):
        ORIGIN.guard_ref(row, lambda: result)()


class Shard:
    document: Any = None

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self.document

    def state_dict(self) -> Any:
        return [1]

    def load_state_dict(self, state: object) -> None: ...


def shard_of(document: Any) -> Any:
    source = with_value(Source, shard=lambda self, *_: with_value(Shard, document=document))
    return guarded("Dataset.build", source).shard(0, 1, 0)


@pytest.mark.parametrize("document", [None, b"bytes", 3, {"text": "a"}], ids=str)
def test_what_is_no_document_is_refused_instead_of_ending_the_data(document: Any) -> None:
    with pytest.raises(PluginFailure, match=f"{NAMED}__next__ returned .*; a document is a str, an array of token ids or"):
        next(shard_of(document), None)


def test_methods_that_return_nonsense() -> None:
    assert next(shard_of("a text")) == "a text" and next(shard_of(numpy.ones(2))) is not None
    with pytest.raises(PluginFailure, match=r"state_dict returned \[1\]; it must return a dict"):
        shard_of("a text").state_dict()
    with pytest.raises(PluginFailure, match="decode returned b'bytes'; it must return a str"):
        guarded("Tokenizer.build", Tokens()).decode([1])
    objective = guarded("Objective.build", with_value(Loss, __call__=lambda self, *_: torch.ones(2)))
    with pytest.raises(PluginFailure, match=r"__call__ returned a tensor \[2\] of torch.float32; it must return a scalar"):
        objective(None, None, None)


def test_what_transforms_leave_on_a_part_is_guarded() -> None:
    part = ModelPart(torch.nn.Linear(1, 1), layout=None, objective=Loss())  # type: ignore[arg-type]
    part.batch_transforms, part.after_evaluation = (end,), (end,)
    assert guarded("Transform.apply", part) is part
    for name in ("batch_transforms", "after_evaluation"):
        (call,) = getattr(part, name)
        with pytest.raises(PluginFailure, match=f"{NAMED}{name} raised StopIteration"):
            call()
        guarded("Transform.apply", part)
        assert getattr(part, name) == (call,)  # guarded once, so that it remains the same to later transforms


def test_a_stored_model_is_loaded_by_guarded_code() -> None:
    stored = guarded("Checkpoint.find_model", StoredModel("path", {}, load=Ref("harness.guarded:end")))
    with pytest.raises(PluginFailure, match=f"{NAMED}load raised StopIteration"):
        stored.load.load()()
