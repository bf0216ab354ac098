"""Mistakes in datasets and tokenizers (:mod:`benchmarks.mutants.data` has those of the core's data engine)."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

TOKENIZED, SPLITS, DATASETS, CHAT, TOOLS, MARKS, COMPRESSED, FOREIGN, CSV, ROWS, COLUMNS, ODDITIES = (
    "tests/data/test_tokenized.py",
    "tests/data/test_splits.py",
    "tests/data/test_datasets.py",
    "tests/data/test_chat_tokens.py",
    "tests/data/test_chat_tools.py",
    "tests/data/test_document_marks.py",
    "tests/data/test_compressed.py",
    "tests/data/test_foreign_tokens.py",
    "tests/data/test_csv_files.py",
    "tests/data/test_row_groups.py",
    "tests/data/test_table_columns.py",
    "tests/data/test_oddities.py",
)

MUTANTS = (
    Mutant("ids-of-large-vocabularies-wrap", "data/tokenized.py", "DTYPES[0] if vocab_size <= 2**16 else DTYPES[1]", "DTYPES[0] if vocab_size <= 2**17 else DTYPES[1]", (TOKENIZED,)),
    Mutant("ids-of-65536-take-four-bytes", "data/tokenized.py", "DTYPES[0] if vocab_size <= 2**16 else DTYPES[1]", "DTYPES[0] if vocab_size < 2**16 else DTYPES[1]", (TOKENIZED,)),
    Mutant("documents-of-the-part-before", "data/file_documents.py", "bisect_right(self._upto, index)", "bisect_right(self._upto, index - 1)", (TOKENIZED,)),
    Mutant("documents-begin-at-zero", "data/tokenized.py", "(int(ends[place - 1]) if place else 0), int(ends[place])", "0, int(ends[place])", (TOKENIZED,)),
    Mutant("another-tokenizers-tokens", "data/tokenized.py", "if context.tokenizer and context.tokenizer != index.fingerprint:", "if False:", (TOKENIZED,)),
    Mutant("truncated-parts-accepted", "data/tokenized.py", "            if size != expected:\n", "            if size is None:\n", (TOKENIZED,)),
    Mutant("parts-anywhere", "data/tokenized.py", " or Path(part.name).name != part.name:", ":", (TOKENIZED,)),
    Mutant("another-tokenisation-resumed", "data/tokenize.py", "            if differ:\n", "            if False:\n", (TOKENIZED,)),
    Mutant("parts-depend-on-the-seed", "data/tokenize.py", "replace(dataset.context, seed=0, shuffle=\"documents\")", "dataset.context", (TOKENIZED,)),
    Mutant("test-is-not-validation", "data/splits.py", 'return "test" if names == ["test"] else "validation"', 'return "validation"', (SPLITS,)),
    Mutant("files-outside-splits-are-training", "data/splits.py", 'return None if others else "train"', 'return "train"', (SPLITS,)),
    Mutant("two-keywords-name-a-split", "data/splits.py", "        if len(splits) == 1:\n", "        if splits:\n", (SPLITS,)),
    Mutant("caches-are-data", "data/splits.py", "if (names := parts[file.parent]) is None or file.name in names]", "]", (SPLITS, DATASETS)),
    Mutant("pieces-cut-lines", "data/text_files.py", "_CUTS = (re.compile(rb\"\\n\"), ", "_CUTS = (", (DATASETS,)),
    Mutant("pieces-lose-the-rest", "data/text_files.py", "end = size - first if last else", "end = self._size if last else", (DATASETS,)),
    Mutant("each-piece-begins-a-text", "data/text_files.py", "begins=piece == 0", "begins=True", (DATASETS,)),
    Mutant("records-end-between-quotes", "data/csv_files.py", "ends)) % 2 == 0]", "ends)) >= 0]", (CSV,)),
    Mutant("quotes-within-values-begin-some", "data/csv_files.py", "% 2 or begin or doubled:", ">= 0:", (CSV,)),
    Mutant("json-columns-are-texts", "data/arrow_values.py", 'return parse_json if about.get("decode", True) else None', "return None", (COLUMNS,)),
    Mutant("unknown-extensions-are-their-storage", "data/arrow_values.py", "    if extension:\n", "    if False:\n", (ODDITIES,)),
    Mutant("marks-depend-on-registered-types", "data/arrow_values.py", "if isinstance(field.type, pyarrow.BaseExtensionType)", "if False", (ROWS,)),
    Mutant("rows-of-the-group-before", "data/row_groups.py", 'row, "right")', 'row, "left")', (ROWS,)),
    Mutant("decoded-rows-without-bound", "data/row_groups.py", "while self.bytes > LIMIT and", "while False and", (ROWS,)),
    Mutant("large-groups-from-their-first-row", "data/row_groups.py", "if here is None or here.next > part:", "if True:", (ROWS,)),
    Mutant("columns-whose-names-begin-alike", "data/parquet_files.py", "key=len", "key=lambda name: -len(name)", (ROWS,)),
    Mutant("megatron-documents-of-one-sequence", "data/foreign/megatron.py", "int(bounds[first]), int(bounds[last])", "int(bounds[first]), int(bounds[first]) + 1", (FOREIGN,)),
    Mutant("flat-documents-begin-with-an-end", "data/foreign/flat_tokens.py", "else found + 1", "else found", (FOREIGN,)),
    Mutant("foreign-ids-unchecked", "data/foreign/documents.py", "        if self._vocab_size is not None:\n", "        if False:\n", (FOREIGN,)),
    Mutant("announced-bytes-kept-for-one-reading", "data/remote_bytes.py", "return self._left <= 0 and not self._untouched.any()", "return True", ("tests/data/test_remote.py::test_blocks_of_documents_are_fetched_once",)),
    Mutant("losses-not-announced", "data/foreign/datatrove.py", "for _, begin, end in found if self.weighted]", "for _, begin, end in found if not self.weighted]", ("tests/data/test_read_ahead.py",)),
    Mutant("tools-left-out", "data/chat/source.py", "    for number in calls:\n", "    for number in ():\n", (TOOLS,)),
    Mutant("prompts-are-trained-on", "data/chat/tokens.py", "[number % 2 for number in range(len(pieces))]", "[1 for number in range(len(pieces))]", (CHAT,)),
    Mutant("answers-of-other-messages", "data/chat/tokens.py", "[by_index[index] for index in chat.trained]", "list(full.assistant)", (CHAT,)),
    Mutant("changed-renderings-accepted", "data/chat/tokens.py", "if not full.text.startswith(after):", "if False:", (CHAT,)),
    Mutant("begin-tokens-against-the-config", "data/tokenizers/document_marks.py", "    if adds_begin is False and not before:\n", "    if False:\n", (MARKS,)),
    Mutant("one-token-at-both-ends", "data/tokenizers/document_marks.py", "and named.ids == end.ids and not before and not adds_begin:", "and False:", (MARKS,)),
    Mutant("ends-by-the-first-name-of-all", "data/tokenizers/document_marks.py", "Marks(tuple(ids[:1]), ", "Marks(tuple(ids), ", (MARKS,)),
)  # fmt: skip
