"""Mistakes in stages, in streams that continue after a change, in rewinds, and in evaluation on the way."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

CHANGED, STAGES = "tests/core/test_changed_streams.py", "tests/integration/test_stages.py"
REWIND, PROVENANCE = "tests/integration/test_rewind.py", "tests/integration/test_changed_provenance.py"
TASKS = "tests/integration/test_task_evaluation.py"
SHARDS, POSITIONS, STREAMS = "core/data/shards.py", "core/data/positions.py", "core/data/streams.py"
BEST_FIT, JOB = "core/data/best_fit.py", "core/api/plugins/assembled_job.py"

MUTANTS = (
    Mutant("sequences-begin-anew-with-the-batch", SHARDS, "self._first, self._taken = self._first + self._taken * self._shards, 0", "self._first, self._taken = 0, 0", (CHANGED,)),
    Mutant("sequences-counted-by-the-new-batch", SHARDS, "if size != self._global_size:", "if False:", (CHANGED,)),
    Mutant("sources-by-number", POSITIONS, "dict(zip(before, streams, strict=True))", "dict(zip(now, streams, strict=False))", (CHANGED,)),
    Mutant("digests-of-any-type", POSITIONS, 'isinstance(position.get("digest"), str | None)', "True", ("tests/core/test_stream_check.py",)),
    Mutant("sources-that-left-begin-anew", POSITIONS, "known = {**idle, **dict(", "known = {**dict(", (CHANGED,)),
    Mutant("sources-that-leave-are-forgotten", POSITIONS, '"streams": found, "idle": known}', '"streams": found, "idle": {}}', (CHANGED,)),
    Mutant("lengths-change-within-a-block-unseen", BEST_FIT, 'if restored["length"] != length:', "if False:", (CHANGED,)),
    Mutant("the-rest-of-a-block-with-what-was-used", BEST_FIT, "left = self._sequences(pieces, earlier)[used:]", "left = self._sequences(pieces, earlier)", (CHANGED,)),
    Mutant("blocks-are-full-by-the-new-length", BEST_FIT, "(block.earlier[0][0] if block.earlier else length)", "length", (CHANGED,)),
    Mutant("mixtures-change-unasked", STREAMS, "        fixed = key == SHARDS\n", "        fixed = key == SHARDS\n        if key == MIXTURE:\n            continue\n", (CHANGED,)),
    Mutant("stages-change-what-they-do-not-name", JOB, "        return tuple(changed + ", '        return tuple(["*"] + ', (STAGES + "::test_a_change_that_no_stage_plans_is_refused",)),
    Mutant("planned-changes-at-any-step", JOB, "if not self.stage or step != self.first_step:", "if not self.stage:", (STAGES + "::test_a_change_that_no_stage_plans_is_refused",)),
    Mutant("tokens-by-the-last-stage", JOB, "max(0, min(end, step) - stage.first_step) * stage.tokens_per_step", "max(0, min(end, step) - stage.first_step) * self.batch.tokens_per_step", (STAGES,)),
    Mutant("stages-begin-a-step-early", "core/job/stages.py", "first = last.first_step + -(-missing // last.tokens_per_step)", "first = last.first_step + missing // last.tokens_per_step - 1", (STAGES,)),
    Mutant("stages-ignore-requests", "core/loop/trainer.py", "            self.requests.exchange(self.world)\n", "            pass\n", (STAGES + "::test_a_request_in_the_last_step_of_a_stage_stops_the_run",)),
    Mutant("segments-begin-with-the-data", "data/provenance/recorded_run.py", "        if self.before is None:\n            return None\n", "        return None\n", (PROVENANCE,)),
    Mutant("excluded-documents-are-read", "core/data/tokens.py", "            if self._excluded and not again and", "            if False and", (REWIND,)),
    Mutant("documents-in-use-are-passed-over", "core/data/tokens.py", "self._next_document(again=True)", "self._next_document()", (REWIND + "::test_a_document_in_use_stays",)),
    Mutant("begun-documents-are-passed-over", "data/provenance/rewind.py", "return sorted(used - begun), sorted(used & begun)", "return sorted(used), []", (REWIND,)),
    Mutant("exclusions-are-forgotten", STREAMS, '            f"dataset.{number}.excluded": sorted(spec.excluded.get(dataset.name, ())) or None,\n', "", (REWIND + "::test_an_exclusion_that_is_forgotten_is_refused",)),
    Mutant("later-checkpoints-stay", "ckpt/save/retention.py", "if one > step", "if one > step + 10**6", (REWIND,)),
    Mutant("scores-counted-for-each-rank", "inference/answers_in_training.py", "            objective.sums.zero_()", "            pass", (TASKS + "::test_scores_on_a_mesh[TP 2 x PP 2]",)),
    Mutant("scores-of-the-next-target", "inference/answers_in_training.py", "targets[index, begin:end] = row[begin + 1 :]", "targets[index, begin:end] = row[begin:-1]", (TASKS,)),
)  # fmt: skip
