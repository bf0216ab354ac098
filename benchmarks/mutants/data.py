"""Mistakes in reading data."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

ORACLE = "tests/integration/test_oracle.py::test_a_run_is_that_of_plain_torch"
VALIDATED = "tests/integration/test_oracle.py::test_validation_is_that_of_plain_torch"
DATA = "tests/core/test_data.py"
BATCHES = "tests/core/test_batches.py"
IDENTITY = "tests/core/test_stream_identity.py"
READING = "tests/core/test_reading.py"
SHUFFLING = "tests/core/test_shuffling.py"
PERMUTATION = "tests/core/test_permutation.py"
PACKING = "tests/core/test_best_fit.py"
ORDERED = "tests/core/test_orders.py"

LOADER, MADE, TOKENS, SHARDS = "core/data/loader.py", "core/data/batches.py", "core/data/tokens.py", "core/data/shards.py"
BEST_FIT = "core/data/best_fit.py"
CHECK, CHECKED = "core/toolkit/stream_check.py", "tests/core/test_stream_check.py"
PERMUTED, ORDERS = "core/api/data/permutation.py", "core/api/data/orders.py"
SHUFFLED, BUFFERED, MIXTURE = "core/api/data/shuffled.py", "core/data/buffered_shuffle.py", "core/data/shards.py"

FIRST, AGREED = "core/data/first_documents.py", "tests/core/test_first_documents.py"

MUTANTS = (
    Mutant("ranks-read-other-documents", FIRST, "            if len(found) > 1:\n", "            if len(found) > 9:\n", (AGREED,)),
    Mutant("each-data-rank-reads-its-own-shards-alone", FIRST, "(world.data_rank, world.data_rank + 1)", "(world.data_rank, world.data_rank)", (AGREED,)),
    Mutant("other-numbers-of-documents-unseen", FIRST, "= source.num_documents, first.record(", "= None, first.record(", (AGREED,)),
    Mutant("sources-are-not-resumed", FIRST, "        if self._next(other) != second:\n", "        if False:\n", (AGREED,)),
    Mutant("a-position-need-not-survive-json", FIRST, "json.loads(json.dumps(position))", "position", (AGREED,)),
    Mutant("one-shard-for-all-accepted", FIRST, "        if other is shard:\n", "        if False:\n", (AGREED,)),
    Mutant("other-shuffle-buffers-accepted", "core/data/streams.py", '        "data.shuffle_buffer": spec.shuffle_buffer,\n', "", (IDENTITY,)),
    Mutant("first-fit", BEST_FIT, "at = bisect_left(free, (sizes[number], -1))", "at = next((at for at, (left, _) in enumerate(sorted(free, key=lambda one: one[1])) if left >= sizes[number]), len(free))", (PACKING,)),
    Mutant("blocks-begin-at-their-last-document", BEST_FIT, "            if not block.documents:\n", "            if True:\n", (PACKING,)),
    Mutant("the-end-of-other-data-is-an-empty-shard", TOKENS, 'self._tokens_read = state["records"]', "self._tokens_read = 0", (CHECKED,)),
    Mutant("blocks-of-other-documents-accepted", BEST_FIT, 'if restored["digest"] not in', "if False and restored not in", (PACKING,)),
    Mutant("positions-of-other-documents-accepted", TOKENS, 'if state["digest"] not in', "if False and state not in", (CHECKED,)),
    Mutant("other-tokens-accepted", TOKENS, "{self._records} {self._digest()} ", "{self._records} ", (CHECKED,)),
    Mutant("one-document-is-read-again", CHECK, "DIFFERENT: Final = 3", "DIFFERENT: Final = 1", (CHECKED,)),
    Mutant("retries-unchecked", CHECK, "if digest not in (None, self.digest):", "if False:", (CHECKED,)),
    Mutant("shuffled-blocks-unchecked", CHECK, "{getattr(shard, 'block_digest', 0)}", "0", (CHECKED,)),
    Mutant("other-packings-accepted", "core/data/streams.py", "if spec.packing_window else None", "if False else None", (PACKING,)),
    Mutant("cut-documents-uncounted", TOKENS, "self.cut += len(piece) < len(self._document)", "self.cut += len(piece) > len(self._document)", (PACKING,)),
    Mutant("other-weights-accepted", "core/data/streams.py", '            f"dataset.{number}.weight": dataset.weight,\n', "", (IDENTITY,)),
    Mutant("other-seeds-accepted", "core/data/streams.py", '        "training.seed": spec.seed,\n', "", (IDENTITY,)),
    Mutant("other-numbers-of-shards-accepted", "core/data/streams.py", '        SHARDS: spec.plan.logical_shards,\n', "", (IDENTITY,)),
    Mutant("targets-of-the-next-document", MADE, "    targets[documents[:, 1:] != documents[:, :-1]] = IGNORE", "    targets[documents[:, 1:] < documents[:, :-1]] = IGNORE", (ORACLE,)),
    Mutant("targets-shifted-by-nothing", MADE, "rows[:, 1:].astype(numpy.int64)", "rows[:, :-1].astype(numpy.int64)", (ORACLE,)),
    Mutant("positions-do-not-begin-anew", MADE, "positions = numpy.arange(width) - starts", "positions = numpy.arange(width) - 0 * starts", (BATCHES + "::test_with_document_mask_the_last_token_of_a_document_has_no_target",)),
    Mutant("short-rows-have-targets", MADE, "row[max(sum(pieces) - 1, 0) :] = IGNORE", "row[max(sum(pieces), 0) :] = IGNORE", (VALIDATED, BATCHES)),
    Mutant("ranks-own-the-first-shards", LOADER, "range(rank * owned, (rank + 1) * owned)", "range(owned)", (DATA,)),
    Mutant("peeking-consumes", LOADER, "        self._peeked.clear()\n        data, self._positions = step", "        data, self._positions = step", (DATA,)),
    Mutant("positions-of-what-was-read-ahead", LOADER, "        step = self._peeked[0]\n        return step[0] if", "        step = self._peeked[0]\n        self._positions = step[1] if step else None\n        return step[0] if", (DATA,)),
    Mutant("the-last-token-read-twice", TOKENS, "self._used += len(piece)", "self._used += len(piece) - (not missing)", (ORACLE,),
           equivalent="`missing` is never 0 there"),
    Mutant("windows-overlap-by-one", SHARDS, "plan.global_size // plan.logical_shards, plan.seq_len + 1\n        self._readers", "plan.global_size // plan.logical_shards, plan.seq_len\n        self._readers", (ORACLE,)),
    Mutant("epochs-in-one-order", SHUFFLED, "key = (self._seed, epoch)", "key = (self._seed, 0)", (ORACLE,)),
    Mutant("orders-of-one-seed", SHUFFLED, "key = (self._seed, epoch)", "key = (0, epoch)", (SHUFFLING,)),
    Mutant("shards-in-blocks", ORDERS, "range(index, size, count)", "range(index * size // count, (index + 1) * size // count)", (ORACLE,)),
    Mutant("the-order-of-an-older-block", SHUFFLED, "if self._block is None or self._block[0] != number:", "if self._block is None:", (ORDERED,)),
    Mutant("positions-walked-once", PERMUTED, "while len(outside := numpy.flatnonzero(found >= self._size)):", "if len(outside := numpy.flatnonzero(found >= self._size)):", (PERMUTATION,)),
    Mutant("one-round", PERMUTED, "_ROUNDS: Final = 12", "_ROUNDS: Final = 2", (PERMUTATION,)),
    Mutant("a-round-lost", PERMUTED, "_ROUNDS: Final = 12", "_ROUNDS: Final = 11", (PERMUTATION,)),
    Mutant("a-round-lost-on-the-way-back", PERMUTED, "reversed(list(enumerate(self._keys)))", "reversed(list(enumerate(self._keys))[1:])", (PERMUTATION,)),
    Mutant("cycles-not-walked", PERMUTED, "while len(outside := numpy.flatnonzero(found >= self._size)):", "while len(outside := numpy.flatnonzero(found > found)):", (PERMUTATION,)),
    Mutant("the-inverse-is-off-by-one", PERMUTED, "return self._walked(elements, self._backward)", "return self._walked(elements, self._backward) - 1", (PERMUTATION,)),
    Mutant("the-order-has-no-version", SHUFFLED, 'f"{self._shuffle}, version {VERSIONS[self._shuffle]}"', "self._shuffle", (IDENTITY,)),
    Mutant("epochs-of-blocks-in-one-order", ORDERS, "Permutation(number, key) if number", "Permutation(number, key[:1]) if number", (ORDERED,)),
    Mutant("the-last-block-left-out", ORDERS, "number = -(-size // block)", "number = size // block", (ORDERED,)),
    Mutant("the-last-block-too-long", ORDERS, "documents[documents >= self._size] = NO_DOCUMENT", "documents[documents > self._size] = NO_DOCUMENT", (ORDERED,)),
    Mutant("windows-in-files-order", ORDERS, "(*self._key, self._index, window)", "(*self._key, self._index)", (ORDERED,)),
    Mutant("orders-of-other-versions-accepted", "core/data/streams.py", '            f"dataset.{number}.order": getattr(source, "order", None),\n', "", (IDENTITY,)),
    Mutant("blocks-in-one-order", BUFFERED, "[*self._key, self._block]", "[*self._key]", (SHUFFLING,)),
    Mutant("given-of-a-block-forgotten", BUFFERED, 'self._documents, self._returned = None, int(state["given"])', "self._documents, self._returned = None, 0", (SHUFFLING,)),
    Mutant("mixture-of-one-seed", MIXTURE, 'f"mixture:{seed}"', 'f"mixture:{0}"', (SHUFFLING,)),
    Mutant("mixture-by-count", MIXTURE, "accumulate(weights)", "accumulate([total / len(weights)] * len(weights))", (SHUFFLING, DATA)),
    Mutant("sequences-numbered-by-shard-alone", SHARDS, "step * self._global_size + self._index * self._per_step + row", "step * self._global_size + row", (DATA,)),
    Mutant("corrupt-records-stop-nothing", "core/toolkit/reading.py", 'if self._policy.on_corrupt == "stop":', 'if self._policy.on_corrupt == "never":', (READING,)),
    Mutant("one-retry-too-many", "core/toolkit/reading.py", "if attempt > self._policy.retries:", "if attempt > self._policy.retries + 1:", (READING,)),
    Mutant("waits-do-not-grow", "core/toolkit/reading.py", "2 ** (attempt - 1)", "1", (READING,)),
    Mutant("splits-lose-the-rest", "core/api/training/batch.py", "starts = range(0, len(self.tokens), size)", "starts = range(0, len(self.tokens) - size + 1, size)", (BATCHES,)),
)  # fmt: skip
