"""How do documents and tokens come in?

A dataset opens a source, which returns logical shards: iterators of documents whose position can be saved::

    def build(context: DatasetContext[MySection]) -> DocumentSource:
        return ShuffledDocuments(MyRecords(context.path), context.seed)

* ``Dataset``: a source of documents
* ``RecordFormat``: a conversion of records
* ``Tokenizer``: a conversion of text to ids
* ``ModelHub``: a place where models have names
* ``DatasetContext``: its context: path, split, seed
* ``DocumentSource``: what it builds
* ``DocumentShard``: one of its logical shards
* ``Document``: text, ids, or ids with weights
* ``WeightedTokens``: ids with weights
* ``CorruptRecord``: a record without a document
* ``ExcludedRecord``: one that the settings exclude
* ``ShuffledDocuments``: documents by index, shuffled; nothing else is needed
* ``TokenizerContext``: its context
* ``TextTokenizer``: what it builds
* ``EncodesSpecialTokens``: a tokenizer that reads special tokens in text
* ``MarksDocuments``: one that says how documents begin and end
* ``DescribesSpecialTokens``: one that describes its special tokens
* ``ExportsTokenizer``: one that can be exported
* ``RendersChats``: one with a chat template
* ``RenderedChat``: a rendered chat
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
        DocumentShard as DocumentShard,
        DocumentSource as DocumentSource,
        ExcludedRecord as ExcludedRecord,
        WeightedTokens as WeightedTokens,
    )
    from titan_core.api.data.shuffled import ShuffledDocuments as ShuffledDocuments
    from titan_core.api.data.tokenizer import (
        DescribesSpecialTokens as DescribesSpecialTokens,
        EncodesSpecialTokens as EncodesSpecialTokens,
        ExportsTokenizer as ExportsTokenizer,
        MarksDocuments as MarksDocuments,
        RenderedChat as RenderedChat,
        RendersChats as RendersChats,
        TextTokenizer as TextTokenizer,
        TokenizerContext as TokenizerContext,
    )
else:
    __getattr__ = getter(__name__, "data")
    __all__ = names_of("data")
