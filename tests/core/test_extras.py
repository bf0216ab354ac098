"""Extra tensors of a batch that datasets fill: through packing, mixing and reading ahead, and resumable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from harness.letters import letters, stream
from harness.loaders import close, loaders_of, merged, plan
from harness.tagged import FIELDS, Tagged
from titan_core.api import Batch, DatasetContext, ExtraField, Objective, Problem, Ref, UserError, WeightedTokens
from titan_core.api.data.dataset import DatasetSpec, StreamSpec
from titan_core.job.data_plan import check_extras
from titan_core.plugins.guard import Origin
from titan_core.toolkit.stream_check import digest_of
from titan_testing.jobs import TINY, make_job

ORIGIN = Origin("odd", "titan-odd", "1.2", "dataset 'odd'")


def dataset(name: str, path: str = "64", weight: float = 1.0, **changed: Any) -> DatasetSpec:
    context = DatasetContext(name, path, "text", 0, "test", section=None)
    build: Any = Ref("harness.tagged:open_tagged", origin=ORIGIN, purpose="Dataset.build")
    return replace(DatasetSpec(name, weight, build, context, FIELDS[name]), **changed)


def spec_of(*datasets: DatasetSpec, seq_len: int = 11, on_end: str = "repeat", ranks: int = 1) -> StreamSpec:
    return stream(*datasets, plan=plan(ranks, 2, seq_len=seq_len), on_end=on_end)


def batches(spec: StreamSpec, steps: int = 6, **options: Any) -> list[Batch]:
    loaders = loaders_of(spec, **options)
    try:
        found = [loader.next_step() for _ in range(steps) for loader in loaders]
    finally:
        close(loaders)
    return [batch for step in found if step is not None for batch in step.microbatches]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_values_stand_beside_their_tokens(workers: int) -> None:
    found = batches(spec_of(dataset("tagged")), workers=workers)
    assert {batch.extras["tags"].tensor.shape for batch in found} == {(4, 11, 2)}
    for batch in found:
        tags, score = batch.extras["tags"], batch.extras["score"]
        assert tags.sequence and tags.tensor.dtype is torch.int64 and score.tensor.dtype is torch.float32
        assert torch.equal(tags.tensor[..., 0], batch.tokens + 1)
        scored = tags.tensor[..., 1] % 2 == 1
        assert torch.equal(score.tensor, torch.where(scored, batch.tokens / 8.0, -1.0))
    assert len({int(number) for batch in found for number in batch.extras["tags"].tensor[..., 1].unique()}) > 20


def test_a_value_of_a_document_gives_it_a_sequence_of_its_own() -> None:
    found = batches(spec_of(dataset("kinds", "24"), seq_len=12, on_end="stop"), steps=3)
    kinds = [int(kind) for batch in found for kind in batch.extras["kind"].tensor]
    assert sorted(kinds) == list(range(24))  # also the last document, beside which there is only padding
    documents = Tagged("kinds", 24)
    for batch in found:
        assert batch.extras["kind"].tensor.dtype is torch.int32 and not batch.extras["kind"].sequence
        for row, kind in zip(batch.tokens.tolist(), batch.extras["kind"].tensor.tolist(), strict=True):
            ids = documents.text(kind).ids[:12].tolist()
            assert row == ids + [0] * (12 - len(ids))


def test_a_mixture_has_the_fill_value_where_a_dataset_gives_none() -> None:
    filled = {"tags": ExtraField("int64", (2,), fill=-7)}
    given = batches(spec_of(dataset("tagged", extras={**FIELDS["tagged"], **filled}), letters("30,40,50,60,70,80,90,99")))
    rows = torch.cat([batch.extras["tags"].tensor for batch in given])
    of_letters = (rows == -7).all(-1).all(-1)
    assert 0.4 < of_letters.float().mean() < 0.6
    tokens = torch.cat([batch.tokens for batch in given])
    assert torch.equal(rows[~of_letters][..., 0], tokens[~of_letters] + 1)


def test_a_stream_can_be_the_key_of_a_cache() -> None:
    """`titan data tokenize` opens a stream once for each worker process."""
    assert {spec_of(dataset("tagged")): 1}[spec_of(dataset("tagged"))] == 1


@pytest.mark.parametrize("name", ["tagged", "kinds"])
def test_a_resumed_stream_continues_with_the_same_values(name: str) -> None:
    spec = spec_of(dataset(name), seq_len=13, ranks=2)
    loaders, resumed = loaders_of(spec), loaders_of(spec)
    for _ in range(3):
        for loader in loaders:
            loader.next_step()
    state = merged(loaders)
    for loader in resumed:
        loader.load_state_dict(state)
    for _ in range(4):
        for one, other in zip(loaders, resumed, strict=True):
            expected, found = one.next_step(), other.next_step()
            assert expected is not None and found is not None
            for a, b in zip(expected.microbatches, found.microbatches, strict=True):
                assert torch.equal(a.tokens, b.tokens)
                for extra in a.extras:
                    assert torch.equal(a.extras[extra].tensor, b.extras[extra].tensor)
    close(loaders, resumed)


def test_documents_that_differ_only_in_their_values_have_other_digests() -> None:
    """So that a stream whose values have changed is refused when it is resumed."""
    ids, ones = numpy.arange(4), numpy.ones(4)
    documents = [
        WeightedTokens(ids, ones),
        WeightedTokens(ids, ones, extras={"a": ids}),
        WeightedTokens(ids, ones, extras={"b": ids}),
        WeightedTokens(ids, ones, extras={"a": ids + 1}),
        WeightedTokens(ids, ones, extras={"a": ids.astype("float32")}),
        WeightedTokens(ids, ones, whole=True),
        WeightedTokens(ids, ones, whole=True, parts=(1, 3)),
        WeightedTokens(ids, ones, whole=True, parts=(2, 2)),
    ]
    assert len({digest_of(document) for document in documents}) == len(documents)


@pytest.mark.parametrize(
    ("flaw", "why"),
    [
        ("missing", "it gives no values for the extra tensor 'tags', which has no fill value"),
        ("unknown", "its extra values colour are not among those that the dataset declares"),
        ("shape", r"its extra values 'tags' have shape \(\d+,\), and not \(\d+, 2\)"),
        ("type", "its extra values 'tags' are float64, and not int64"),
        ("nan", "its extra values 'score' must be finite"),
    ],
)
def test_values_that_are_not_as_declared_are_refused(flaw: str, why: str) -> None:
    with pytest.raises(UserError, match=rf"plugin 'odd' .*logical shard \d of 8, document at .*: {why}"):
        batches(spec_of(dataset("tagged", f"64:{flaw}")))


def test_numbers_that_do_not_fit_are_refused() -> None:
    small = {"kind": ExtraField("int8", sequence=False)}
    with pytest.raises(UserError, match="its extra values 'kind' do not fit int8"):
        batches(spec_of(dataset("kinds", "300", extras=small), seq_len=13), steps=40)


class Parts:
    """Documents of two parts."""

    def __init__(self, parts: tuple[int, ...] | None = None) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return 40

    def text(self, index: int) -> WeightedTokens:
        parts = self.parts or (1 + index % 3, 2 + index % 4)
        ids = numpy.repeat([2 * index, 2 * index + 1], (1 + index % 3, 2 + index % 4))
        return WeightedTokens(ids, numpy.ones(len(ids)), whole=True, parts=parts)


def open_parts(context: DatasetContext[None]) -> Any:
    from titan_core.api import ShuffledDocuments

    return ShuffledDocuments(Parts((1, 1) if context.path == "wrong" else None), context.seed)


def parts_spec(path: str = "") -> StreamSpec:
    context = DatasetContext("parts", path, "text", 0, "test", section=None)
    build: Any = Ref(f"{__name__}:open_parts", origin=ORIGIN, purpose="Dataset.build")
    return spec_of(DatasetSpec("parts", 1.0, build, context), seq_len=12)


def test_parts_of_a_document_are_documents_in_one_sequence() -> None:
    for batch in batches(parts_spec(), document_mask=True):
        assert batch.documents is not None and batch.positions is not None
        for row, documents, positions in zip(batch.tokens, batch.documents, batch.positions, strict=True):
            for number in range(0, int(documents.max()), 2):
                first, second = row[documents == number], row[documents == number + 1]
                assert set(first.tolist()) == {int(first[0])} and int(first[0]) % 2 == 0
                assert set(second.tolist()) <= {int(first[0]) + 1}
                assert positions[documents == number].tolist() == list(range(len(first)))


def test_parts_without_all_tokens_are_refused() -> None:
    with pytest.raises(UserError, match=r"its parts, \(1, 1\), must be whole and have its \d+ tokens between them"):
        batches(parts_spec("wrong"))


@pytest.mark.parametrize(
    "make", [lambda: ExtraField("bfloat16"), lambda: ExtraField("int64", (0,)), lambda: ExtraField("int64", ("two",))]
)
def test_impossible_fields_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="of an extra tensor"):
        make()


def problems(*datasets: DatasetSpec, inputs: tuple[str, ...] = (), extras: tuple[str, ...] = ()) -> list[Problem]:
    job = make_job("tiny", {**TINY, "job.device": "cpu"}, 1)
    model = replace(job.model, layout=replace(job.model.layout, inputs=inputs))
    objective = Objective(name="dpo", summary="", build=Ref("odd:odd"), extras=extras)
    return list(check_extras(job.config, {"training.dataset": datasets}, model, objective, ()))


def test_an_extra_that_no_dataset_fills_is_refused() -> None:
    (problem,) = problems(dataset("tagged"), extras=("tags", "kind"))
    assert "objective 'dpo' needs the extra tensor 'kind', which no dataset fills" in str(problem)
    (problem,) = problems(letters("3"), inputs=("image",))
    assert "the model needs the extra tensor 'image', which no dataset fills" in str(problem)
    assert not problems(dataset("tagged"), extras=("tags",), inputs=("score",))


def test_a_mixture_must_agree() -> None:
    (problem,) = problems(dataset("tagged"), letters("3"))
    assert "dataset 'letters' does not fill the extra tensor 'tags' of dataset 'tagged', which has no fill value" in str(
        problem
    )
    other = replace(dataset("tagged"), name="other", extras={**FIELDS["tagged"], "tags": ExtraField("int64", (3,))})
    (problem,) = problems(dataset("tagged"), other)
    assert "datasets 'tagged' and 'other' fill the extra tensor 'tags' in different forms" in str(problem)


def test_a_job_is_refused_before_anything_is_built() -> None:
    job = {**TINY, "job.device": "cpu", "training.dataset": "kinds"}
    assert make_job("tiny", job, 1).data.extras == FIELDS["kinds"]
