"""How do documents and tokens come in?

A ``Dataset`` (hook ``titan_datasets``) opens a source of documents, in logical shards whose positions can be saved::

    def build(context: DatasetContext[MySection]) -> DocumentSource:
        return ShuffledDocuments(MyRecords(context.path), context.seed, shuffle=context.shuffle)

* ``Dataset``: the component that ``training.dataset`` selects
* ``RecordFormat``: a conversion of a dataset's records to texts, selected by ``data.format``
* ``Tokenizer``: the component that ``model.tokenizer`` selects
* ``ModelHub``: maps names such as ``organisation/model`` to local folders
* ``DatasetContext``: what ``Dataset.build`` receives: path, split, seed ...
* ``DocumentSource``: what ``Dataset.build`` returns: documents in logical shards
* ``DocumentShard``: a logical shard: an iterator of documents whose position can be saved
* ``DocumentPlace``: where a document is: file, and line or row
* ``Document``: a text, token ids, or ids with weights
* ``TextPart``: a part of a longer text, which begins or ends where the text does only
* ``WeightedTokens``: token ids, some of which may have no loss
* ``ExtraField``: the form of a named tensor that a dataset fills in each batch
* ``CorruptRecord``: raise it for a record that holds no document
* ``ExcludedRecord``: raise it for a record that the dataset's settings exclude
* ``ShuffledDocuments``: a complete source from documents that can be fetched by index
* ``TokenizerContext``: what ``Tokenizer.build`` receives
* ``TextTokenizer``: base class of what ``Tokenizer.build`` returns: ``encode_document``, ``decode``, ``vocab_size``
* ``ChatTokenizer``: base class of a tokenizer with a chat template
* ``RenderedChat``: the text of a chat, and which of it the assistant wrote
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_core.api._lazy import getter, names_of

if TYPE_CHECKING:
    from titan_core.api.data.components import (
        Dataset as Dataset,
        ModelHub as ModelHub,
        RecordFormat as RecordFormat,
        Tokenizer as Tokenizer,
    )
    from titan_core.api.data.dataset import (
        CorruptRecord as CorruptRecord,
        DatasetContext as DatasetContext,
        Document as Document,
        DocumentPlace as DocumentPlace,
        DocumentShard as DocumentShard,
        DocumentSource as DocumentSource,
        ExcludedRecord as ExcludedRecord,
        ExtraField as ExtraField,
        TextPart as TextPart,
        WeightedTokens as WeightedTokens,
    )
    from titan_core.api.data.shuffled import ShuffledDocuments as ShuffledDocuments
    from titan_core.api.data.tokenizer import (
        ChatTokenizer as ChatTokenizer,
        RenderedChat as RenderedChat,
        TextTokenizer as TextTokenizer,
        TokenizerContext as TokenizerContext,
    )
else:
    __getattr__ = getter(__name__, "data")
    __all__ = names_of("data")
