"""Mistakes in the provenance of a run: which documents a step used, and which steps a document."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

TRACED = "tests/core/test_tracing.py"
PLACES = "tests/data/test_places.py"
PROVENANCE = "tests/integration/test_provenance.py"
STEP = f"{PROVENANCE}::test_what_a_step_lists_is_what_it_trained_on"
WHERE = f"{PROVENANCE}::test_where_is_the_inverse_of_step"
TOKENS, BEST_FIT, BUFFERED = "core/data/tokens.py", "core/data/best_fit.py", "core/data/buffered_shuffle.py"
ORDERS, SHUFFLED, REPLAY = "core/api/data/orders.py", "core/api/data/shuffled.py", "core/data/replay.py"
DOCUMENTS, STEPS = "data/provenance/documents.py", "data/provenance/steps.py"
RUN, FILES = "data/provenance/recorded_run.py", "data/file_documents.py"

LOSSES, LOSS_TESTS = "data/provenance/losses.py", "tests/integration/test_document_losses.py"
BY_HAND, OF_TRAINING = (
    f"{LOSS_TESTS}::test_each_loss_is_that_of_plain_torch",
    f"{LOSS_TESTS}::test_the_mean_is_the_loss_of_training",
)
NO_WEIGHTS = f"{LOSS_TESTS}::test_without_weights_there_is_one_error"

MUTANTS = (
    Mutant("parts-begin-at-the-first-token", TOKENS, "UsedTokens(self._read, used.start, len(piece))", "UsedTokens(self._read, 0, len(piece))", (TRACED,)),
    Mutant("parts-have-the-epoch-of-the-beginning", TOKENS, "ReadDocument(self._epoch, place_of", "ReadDocument(0, place_of", (TRACED,)),
    Mutant("cut-parts-begin-at-the-first-token", BEST_FIT, "UsedTokens(document.read, start, size)", "UsedTokens(document.read, 0, size)", (TRACED,)),
    Mutant("buffered-places-are-not-shuffled", BUFFERED, "self._places = [places[index] for index in order]", "self._places = places", (TRACED,)),
    Mutant("buffered-places-are-of-the-next", BUFFERED, "self._places[self._returned - 1]", "self._places[self._returned % len(self._places)]", (TRACED,)),
    Mutant("untraced-streams-are-traced", "core/data/shards.py", "if self._traced else []", "if True else []", (TRACED,), equivalent="windows of an untraced stream have none"),
    Mutant("places-are-of-the-next-document", SHUFFLED, "self._document_at(self._next - 1)", "self._document_at(min(self._next, len(self._order) - 1))", (TRACED, PLACES)),
    Mutant("inverted-documents-are-not-permuted", ORDERS, "return document if self._order is None else int", "return document if True else int", (TRACED,)),
    Mutant("inverted-blocks-in-files-order", ORDERS, "self._place_of(block) // self._mine.step", "block // self._mine.step", (TRACED,)),
    Mutant("inverted-windows-begin-at-the-first", ORDERS, "return window * self._window + int(", "return int(", (TRACED,)),
    Mutant("changed-data-is-read", REPLAY, "            self.require_same(after)\n", "", (PROVENANCE + "::test_changed_data_is_refused",), equivalent="Segment.position() compares it before"),
    Mutant("changed-data-is-listed", RUN, "self.replay.require_same(found)\n", "pass\n", (PROVENANCE + "::test_changed_data_is_refused",)),
    Mutant("changed-data-before-a-checkpoint-is-listed", DOCUMENTS, "        segment.position(MOST_STEPS)  # raises", "        pass  # raises", (PROVENANCE + "::test_changed_data_is_refused",), equivalent="the command asks for the last step of the run, which reads the newest position"),
    Mutant("the-step-before", DOCUMENTS, "            if step >= first:\n", "            if step >= first - 1:\n", (STEP,)),
    Mutant("branches-of-another-mixture-are-refused", RUN, "if found.step == begin else found", "if False else found", ("tests/integration/test_branched_stages.py",)),
    Mutant("ranks-of-the-recipe", RUN, 'path / CONFIG), event["world_size"]))', 'path / CONFIG), None))', (PROVENANCE + "::test_the_batch_is_that_of_the_runs_ranks",)),
    Mutant("rows-of-other-shards", DOCUMENTS, "row=shard * per_shard + at", "row=within * per_shard + at", ("tests/data/test_used_documents.py",)),
    Mutant("parts-of-a-document-are-not-joined", DOCUMENTS, "piece.first == last.first + last.tokens", "False", ("tests/data/test_used_documents.py",)),
    Mutant("a-checkpoint-after-the-document", STEPS, ">= (epoch, position)", "> (epoch + 1, position)", (WHERE,)),
    Mutant("packed-in-advance-is-unread", STEPS, "            if self.dataset in rows.datasets:\n                now", "            if True:\n                now", (WHERE,)),
    Mutant("epochs-of-one-shard", REPLAY, "return max(epoch for epoch", "return min(epoch for epoch", (WHERE,)),
    Mutant("documents-packed-together-are-forgotten", REPLAY, "        ahead.read()\n", "", (WHERE,)),
    Mutant("a-part-of-the-document-suffices", STEPS, "if used == use.of:", "if used:", (WHERE,)),
    Mutant("lines-before-the-place", FILES, "self.may_contain or self.number_of(file, found) == number", "True", (PLACES, PROVENANCE + "::test_mistakes_are_one_error")),
    Mutant("files-by-a-part-of-their-name", "data/places.py", "PurePath(file).parts[-len(parts) :] == parts", "file.endswith(name)", (PLACES,)),
    Mutant("one-of-two-files", "data/places.py", "if len(ending) == 1 else None", "if ending else None", (PLACES,)),
    Mutant("blank-lines-uncounted", "data/json_lines.py", "return document + 1 + self._blank_before(file, document)", "return document + 1", (STEP,)),
    Mutant("positions-of-later-steps", "ckpt/resume/position.py", "if one <= step", "if one <= step + 1", (STEP,)),
    Mutant("losses-of-inputs", LOSSES, "slice(max(first - 1 - begin, 0), min(max(end - 1 - begin, 0), positions))", "slice(max(first - begin, 0), min(max(end - begin, 0), positions))", (BY_HAND,)),
    Mutant("losses-of-the-first-chunk", LOSSES, "begin, positions = 0 if batch.columns is None else int(batch.columns[0, 0])", "begin, positions = 0", (BY_HAND,)),
    Mutant("losses-of-one-sequence", LOSSES, "self._of_rows.get(row, ())", "self._of_rows.get(index, ())", (OF_TRAINING,)),
    Mutant("losses-of-the-whole-row", LOSSES, "logits[index : index + 1, chosen], one, vocabulary", "logits[:1, chosen], one, vocabulary", (BY_HAND,)),
    Mutant("losses-without-dropout", LOSSES, "    part.module.train()  # for", "    pass  # for", (f"{LOSS_TESTS}::test_dropout_is_that_of_the_step",)),
    Mutant("losses-with-the-next-weights", RUN, "context(job), step - 1)", "context(job), step)", (OF_TRAINING, NO_WEIGHTS)),
    Mutant("losses-of-whole-sequences", LOSSES, "if not part.objective.per_position:", "if False:", (f"{LOSS_TESTS}::test_an_objective_of_whole_sequences_is_refused",)),
    Mutant("replayed-batches-without-masks", REPLAY, "batch_of(self._spec, [rows], self._document_mask)", "batch_of(self._spec, [rows], False)", (BY_HAND, OF_TRAINING)),
)  # fmt: skip
