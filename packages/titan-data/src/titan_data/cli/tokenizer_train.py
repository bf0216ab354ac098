"""``titan tokenizer train``: trains a byte-level BPE tokenizer on the user's text."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from titan_core.api import CommandContext, UserError
from titan_core.api.config.resolved import Override
from titan_core.api.data.tokenizer import without_surrogates
from titan_core.toolkit.arguments import integer, json_argument, recipe_arguments
from titan_core.toolkit.reading import DatasetSpec, DocumentReader, ReadPolicy
from titan_core.toolkit.status import StatusLine, phase
from titan_core.toolkit.text import print_json, say, shorten, show_bytes
from titan_data.cli.tokenizer_download import keys_for, print_keys

R = TypeVar("R")

_NO_TOKENIZER = (Override("model.tokenizer", "byte"), Override("model.tokenizer_path", "none"))
"""The recipe's own tokenizer is not needed: it may be the one that is trained now."""
_MOST_BYTES = 10 * 10**9


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan tokenizer train``."""
    recipe_arguments(parser)
    parser.description = f"{parser.description}\n--training.dataset and --training.dataset_path name its text"
    parser.add_argument("--output", required=True, metavar="FOLDER", help="output folder")
    parser.add_argument(
        "--vocab-size", type=integer(1, 10_000_000), required=True, metavar="N",
        help="number of tokens in all: 256 bytes, the special tokens, and the tokens to learn",
    )  # fmt: skip
    parser.add_argument(
        "--special-token", action="append", default=[], metavar="TOKEN",
        help="a special token besides those for documents, padding and chats, such as '<|tool|>'; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--max-bytes", type=integer(1, 10**15), default=_MOST_BYTES, metavar="N",
        help=f"bytes of text to read at most (default: {_MOST_BYTES:,})",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace a tokenizer in the output folder")
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Train the tokenizer, write it, and print the keys that select it."""
    arguments = context.arguments
    from titan_core.toolkit.folder_lock import FolderLock
    from titan_data.cli.tokenizer_train import Corpus
    from titan_data.hub import TOKENIZER_FILES
    from titan_data.tokenizers import bpe

    folder = Path(arguments.output).expanduser()
    with FolderLock.beside(folder.resolve(), f"--output {arguments.output}"):
        _require_free(folder, TOKENIZER_FILES, arguments.force)
        special = (*bpe.SPECIAL_TOKENS, *arguments.special_token)
        _check_special_tokens(special, len(bpe.SPECIAL_TOKENS))
        least = bpe.NUM_BYTES + len(special)
        if arguments.vocab_size < least:
            why = f"is less than {least}, the {bpe.NUM_BYTES} bytes and {len(special)} special tokens of every vocabulary"
            raise UserError.one(f"--vocab-size {arguments.vocab_size}", why, "raise it")
        stream = context.job(more=_NO_TOKENIZER).data
        corpus = Corpus(stream.datasets, stream.policy, arguments.max_bytes)
        with StatusLine(), phase("training the tokenizer", lambda: _progress(corpus)):
            tokenizer = _interruptible(lambda: bpe.train(iter(corpus), arguments.vocab_size - len(special), special))
        _require_enough(corpus, tokenizer.get_vocab_size(), arguments.vocab_size)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            bpe.write(tokenizer, folder)
        except OSError as error:
            why = f"cannot be written: {error.strerror or error}"
            raise UserError.one(str(folder), why, "name another folder with --output") from None
    keys = keys_for(folder, context.registry)
    encoded = tokenizer.encode_batch(corpus.sample, add_special_tokens=False)
    per_token = sum(len(text.encode()) for text in corpus.sample) / sum(len(encoding.ids) for encoding in encoded)
    if arguments.json:
        summary = {
            "folder": str(folder), "vocab_size": arguments.vocab_size, "documents": corpus.documents,
            "bytes": corpus.bytes, "cut": corpus.cut, "corrupt": corpus.corrupt, "bytes_per_token": round(per_token, 3),
            "special_tokens": {token: tokenizer.token_to_id(token) for token in special},
            "config": {f"model.{key}": value for key, value in keys.items()},
        }  # fmt: skip
        print_json(summary)
        return 0
    read = f"{corpus.documents:,} documents, {corpus.bytes:,} bytes"
    skipped = f"; skipped {corpus.corrupt} corrupt records" if corpus.corrupt else ""
    say(f"{folder}: {arguments.vocab_size:,} tokens, trained on {read}{skipped}")
    for name in corpus.cut:
        say(f"{name}: not read to its end, because --max-bytes is {arguments.max_bytes:,}")
    say(f"on average, a token is {per_token:.2f} bytes of this text")
    print_keys(keys)
    print("the model's vocabulary must have at least as many tokens (model.args.vocab_size)")
    return 0


def _require_free(folder: Path, names: Sequence[str], force: bool) -> None:
    """Refuse a folder with other contents; ``names`` are those of a tokenizer's files."""
    if folder.exists() and not folder.is_dir():
        raise UserError.one(str(folder), "is not a folder", "name another one with --output")
    entries = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if entries and not force:
        tokenizer = any(name in names for name in entries)
        why = "already contains a tokenizer" if tokenizer else f"is not empty (it contains {shorten(entries[0])})"
        fix = "to replace it" if tokenizer else "to write into it"
        raise UserError.one(str(folder), why, f"name another folder with --output, or add --force {fix}")


def _check_special_tokens(tokens: Sequence[str], num_default: int) -> None:
    for number, token in enumerate(tokens[num_default:], num_default):
        where = f"--special-token {token!r}"
        if len(token) < 2 or not token.isprintable() or token != token.strip():
            raise UserError.one(where, "is not the name of a special token", "write it like <|name|>")
        if token in tokens[:number]:
            why = "is a special token of every trained tokenizer" if token in tokens[:num_default] else "is given twice"
            raise UserError.one(where, why, "drop it")


def _require_enough(corpus: Corpus, got: int, requested: int) -> None:
    """Refuse a vocabulary that is smaller than requested, because the text does not contain enough pairs of tokens."""
    if not corpus.bytes:
        raise UserError.one("the corpus", "contains no text", "set --training.dataset and --training.dataset_path")
    if got < requested:
        why = f"is too small for {requested:,} tokens: its {corpus.bytes:,} bytes yield only {got:,}"
        raise UserError.one("the corpus", why, f"add text, or set --vocab-size {got}")


def _interruptible(work: Callable[[], R]) -> R:
    """Return ``work()``, from a thread that an interrupt leaves behind: the library does not notice signals for minutes."""
    outcome: Future[R] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            outcome.set_exception(error)

    threading.Thread(target=run, name="training the tokenizer", daemon=True).start()
    return outcome.result()


def _progress(corpus: Corpus) -> str:
    """Return how far the training is, for the status line."""
    size = show_bytes(corpus.bytes)
    if corpus.ended:
        return f"learning merges from {size} of text"
    return f"reading: {corpus.documents:,} documents, {size}"


_SAMPLE = 1 << 20


class Corpus:
    """Iterates once over the texts of ``datasets``. If ``limit`` bytes do not suffice for all of them, each dataset gets a
    share by its weight."""

    def __init__(self, datasets: Sequence[DatasetSpec], policy: ReadPolicy, limit: int) -> None:
        self._datasets = [dataset for dataset in datasets if dataset.weight]
        self._policy, self._limit = policy, limit
        self.documents = self.bytes = self.corrupt = 0
        """Documents and bytes of UTF-8 read so far, and corrupt records skipped."""
        self.cut: list[str] = []
        """Names of the datasets that were not read to their end."""
        self.ended = False
        """Whether all texts have been read."""
        self.sample: list[str] = []
        """The first texts, about 1 MB."""

    def __iter__(self) -> Iterator[str]:
        weight = sum(dataset.weight for dataset in self._datasets)
        for dataset in self._datasets:
            size = 0
            for text in self._texts(dataset):
                if size >= self._limit * dataset.weight / weight:
                    self.cut.append(dataset.name)
                    break
                length = len(text.encode())
                size += length
                self.bytes += length
                self.documents += 1
                if self.bytes <= _SAMPLE or not self.sample:
                    self.sample.append(text)
                yield text
        self.ended = True

    def _texts(self, dataset: DatasetSpec) -> Iterator[str]:
        source = dataset.build.load()(dataset.context)
        shard = source.shard(0, 1, 0)
        reader = DocumentReader(self._policy, dataset.name)
        while (document := reader.next(shard)) is not None:
            if not isinstance(document, str):
                why = "contains token ids; a tokenizer is trained on text"
                raise UserError.one(f"dataset {dataset.name!r}", why, "train on the dataset that it was tokenised from")
            yield without_surrogates(document)
        self.corrupt += reader.corrupt
