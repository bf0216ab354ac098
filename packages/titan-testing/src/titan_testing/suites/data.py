"""The suites of what comes in: datasets and tokenizers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, ClassVar

import numpy
import pytest

from titan_core.api import Dataset, DocumentSource, TextTokenizer, Tokenizer
from titan_testing.jobs import make_job
from titan_testing.meshes import Case
from titan_testing.pytest_plugin import TEXTS, RunJob
from titan_testing.settings import SMALL, selecting
from titan_testing.suites.base import Suite


class DatasetSuite(Suite):
    """Tests of a dataset. Override :meth:`job` if its path depends on files that a fixture writes."""

    dataset: ClassVar[str]
    """Name of the dataset, as in ``training.dataset``."""
    path: ClassVar[str] = ""
    """``training.dataset_path``."""
    meshes = ("FSDP 2", "CP 2", "PP 2, 1F1B")
    most: ClassVar[int] = 50
    """Documents of a shard that are looked at."""

    def job(self) -> dict[str, object]:
        """See :class:`Suite`."""
        return {**selecting(Dataset, self.dataset, dataset_path=self.path), **self.settings}

    def source(self) -> DocumentSource:
        """Return the source that the job opens."""
        (dataset,) = make_job(self.recipe, self.job(), world_size=1).data.datasets
        return dataset.build.call(DocumentSource, dataset.context)

    def documents(self, shard: int = 0, shards: int = 1, epoch: int = 0) -> list[Any]:
        """Return the first documents of a logical shard."""
        return [_plain(one) for one in islice(iter(self.source().shard(shard, shards, epoch)), self.most)]

    def test_it_repeats(self) -> None:
        """Opened again, the source has the same documents in the same order: the token stream is a function of the seed."""
        documents = self.documents()
        assert documents, "the dataset has no documents"
        assert self.documents() == documents

    def test_shards_partition_the_documents(self) -> None:
        """Each document is in one logical shard."""
        if (number := self.source().num_documents) is None or number > self.most:
            # A stream has no number of documents, so that a shard cannot be read to its end.
            pytest.skip("the dataset does not say how many documents it has, or has too many to compare all")
        shards = [document for shard in range(3) for document in self.documents(shard, 3)]
        assert sorted(map(repr, shards)) == sorted(map(repr, self.documents()))

    def test_a_position_is_resumed(self) -> None:
        """A shard that loads a position continues with the next document, in another process too."""
        for read in (0, 1, 3):
            shard = self.source().shard(0, 1, 0)
            for _ in islice(shard, read):
                pass
            state = shard.state_dict()
            rest = [_plain(one) for one in islice(shard, 5)]
            again = self.source().shard(0, 1, 0)
            again.load_state_dict(state)
            assert [_plain(one) for one in islice(again, 5)] == rest, f"after {read} documents"

    def test_mesh(self, row: Case, run_job: RunJob) -> None:
        """Every mesh trains on the same tokens as one device."""
        self.require_equal_on(row, run_job)


class TokenizerSuite(Suite):
    """Tests of a tokenizer. Its vocabulary must fit the model of :attr:`settings`."""

    tokenizer: ClassVar[str]
    """Name of the tokenizer, as in ``model.tokenizer``."""
    path: ClassVar[str] = ""
    """``model.tokenizer_path``."""
    texts: ClassVar[list[str]] = [
        *TEXTS,
        "",
        " leading and trailing ",
        "tab\tand\r\nline breaks\n\n",
        "\U0001f642 你好 Привет",
    ]
    """Texts to encode and, if :attr:`lossless`, to decode again."""
    lossless: ClassVar[bool] = True
    """Whether every text can be decoded again."""

    def job(self) -> dict[str, object]:
        """See :class:`Suite`."""
        return {**selecting(Tokenizer, self.tokenizer, tokenizer_path=self.path), **self.settings}

    def opened(self) -> TextTokenizer:
        """Return the tokenizer of the job."""
        return make_job(self.recipe, self.job(), world_size=1).text_tokenizer

    def test_ids_are_in_the_vocabulary(self) -> None:
        """Every id is at least 0 and below the size of the vocabulary."""
        tokenizer = self.opened()
        for text in self.texts:
            ids = numpy.asarray(tokenizer.encode_document(text))
            assert not len(ids) or (ids.min() >= 0 and ids.max() < tokenizer.vocab_size), text

    def test_texts_are_decoded_again(self) -> None:
        """Between the ids that mark a document stands its text."""
        if not self.lossless:
            # Only its author knows which texts it keeps; the other tests hold for any tokenizer.
            pytest.skip("the tokenizer declares that it loses text")
        tokenizer = self.opened()
        begin, end = len(tokenizer.begin_ids), len(tokenizer.end_ids)
        for text in self.texts:
            ids = list(tokenizer.encode_document(text))
            assert tokenizer.decode(ids[begin : len(ids) - end]) == text

    def test_it_repeats(self) -> None:
        """Opened again, the tokenizer is the same: a resumed run compares fingerprints."""
        assert self.opened().fingerprint() == self.opened().fingerprint()
        assert list(self.opened().encode_document(self.texts[0])) == list(self.opened().encode_document(self.texts[0]))

    def test_a_job_trains_with_it(self, run_job: RunJob) -> None:
        """A run on its tokens takes its steps."""
        assert len(run_job(self.recipe, self.job()).losses) == SMALL["training.steps"]


def _plain(document: Any) -> Any:
    """Return a document as values that can be compared."""
    if isinstance(document, str):
        return str(document)
    if isinstance(document, Mapping):
        return {key: _plain(value) for key, value in document.items()}
    if hasattr(document, "ids"):
        return {name: _plain(value) for name, value in vars(document).items()}
    return numpy.asarray(document).tolist()
