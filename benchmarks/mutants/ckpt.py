"""Mistakes in checkpoints."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

SAVING = "tests/ckpt/test_saving.py"
RESUME = "tests/ckpt/test_resume.py"
DAMAGE = "tests/ckpt/test_damage.py"
PARTS = "tests/ckpt/test_checkpoint_parts.py"
STEPS = "tests/ckpt/test_parts.py"
DURABLE = "tests/ckpt/test_durability.py"
DCP = "tests/ckpt/test_dcp.py"
ARRANGED = "tests/ckpt/test_arrangement.py"
REFUSALS = "tests/ckpt/test_dcp_refusals.py"
LIES = f"{REFUSALS}::test_contradictions_are_refused"

MERGE = "tests/ckpt/test_merge.py"

BRANCH, BRANCH_TESTS = "ckpt/commands/branch.py", ("tests/ckpt/test_branch.py",)
ON_PHASES = ("tests/integration/test_branched_phases.py",)
STAGED = ("tests/integration/test_branched_stages.py",)

RESTORE = "ckpt/resume/optimizer_restore.py"
FROZEN = ("tests/integration/test_freeze.py::test_a_resume_with_other_frozen_parameters_must_be_allowed",)

PUSH, PUSH_TESTS = "ckpt/foreign/hub_push.py", ("tests/integration/test_pushed_exports.py",)
EXPORTS, EXPORT_TESTS = "ckpt/save/exports.py", ("tests/ckpt/test_exports.py",)

MUTANTS = (
    Mutant("push-of-the-old-weights-too", PUSH, "                    *(CommitOperationDelete(path) for path in stale),\n", "", PUSH_TESTS),
    Mutant("push-removes-files-of-the-user", PUSH, " and any(fnmatch(path, pattern) for pattern in _WEIGHTS)", "", PUSH_TESTS),
    Mutant("push-shows-the-token", PUSH, ".replace(self._token, REDACTED)", "", PUSH_TESTS),
    Mutant("push-waits-for-ever", PUSH, "session.timeout, _STALLED_SECONDS", "session.timeout, None", PUSH_TESTS),
    Mutant("push-makes-a-public-repository", PUSH, "private=True", "private=False", PUSH_TESTS),
    Mutant("push-without-permission", PUSH, "                api.auth_check(self.name, write=True)\n", "", PUSH_TESTS),
    Mutant("push-needs-the-hub-at-the-start", PUSH, "return is_transient(error) and (", "return False and (", PUSH_TESTS),
    Mutant("exports-all-kept", EXPORTS, "if step <= newest], self._keep_latest, 0)", "if step <= newest], 0, 0)", EXPORT_TESTS),
    Mutant("exports-of-an-abandoned-part-counted", EXPORTS, "[step for step in steps if step <= newest]", "steps", EXPORT_TESTS),
    Mutant("exports-leave-leftovers", EXPORTS, "if _LEFTOVER.fullmatch(path.name) or ", "if ", EXPORT_TESTS),
    Mutant("exports-of-a-finished-run-again", EXPORTS, "        if not self._target(step).exists():\n", "        if True:\n", EXPORT_TESTS),
    Mutant("exports-queued-unprotected", EXPORTS, "running | {self._next[0]}", "running", EXPORT_TESTS),
    Mutant("exporting-checkpoints-removed", "ckpt/save/retention.py", "            if step not in in_use:\n", "            if True:\n", EXPORT_TESTS),
    Mutant("exports-outlive-the-run", "ckpt/foreign/convert.py", "    end_with_parent()  # a run", "    pass  # a run", EXPORT_TESTS),
    Mutant("export-takes-itself-for-a-rank", "ckpt/save/export_process.py", "if name not in _OF_RANKS}", "}", EXPORT_TESTS),
    Mutant("new-folders-not-durable", "ckpt/format/new_folder.py", "                _sync(path)\n", "                pass\n", EXPORT_TESTS),
    Mutant("branch-refuses-its-own-changes", BRANCH, "*config.section(CheckpointSection).allow_changed, *allowed, *of_model", "*config.section(CheckpointSection).allow_changed", BRANCH_TESTS),
    Mutant("branch-without-stages", BRANCH, "redact(job.run_config.tables())", "redact(job.run_config.as_dict())", STAGED),
    Mutant("branch-refuses-its-mixture", BRANCH, 'if of_data else []', 'if False else []', STAGED),
    Mutant("arguments-logged-twice", "ckpt/resume/comparing.py", "if not (by_argument and", "if not (False and", STAGED),
    Mutant("branch-stops-where-the-run-did", BRANCH, "if stop is not None and stop <= step and", "if False and", BRANCH_TESTS),
    Mutant("branch-of-nothing-to-train", BRANCH, "if value is not None and value <= step:", "if False:", BRANCH_TESTS),
    Mutant("branch-of-weights", BRANCH, "    if found.manifest.model_only:", "    if False:", BRANCH_TESTS),
    Mutant("branch-among-other-checkpoints", BRANCH, "    if checkpoints.list():", "    if False:", BRANCH_TESTS),
    Mutant("branch-overrides-ignored", BRANCH, "if key in config.overridden]\n", "if False]\n", BRANCH_TESTS),
    Mutant("branch-copies-what-can-be-linked", BRANCH, "        os.link(old / name, new / name)\n", "        return False\n", BRANCH_TESTS),
    Mutant("branch-copies-a-block", BRANCH, "while block := old.read(_BLOCK):", "if block := old.read(100):", BRANCH_TESTS),
    Mutant("branch-copy-unfinished", BRANCH, "    target.remove(UNFINISHED)\n", "", BRANCH_TESTS),
    Mutant("rates-of-the-old-batch", "ckpt/resume/comparing.py", '"training.global_batch_size", "training.seq_len",\n', "\n", ON_PHASES),
    Mutant("merge-of-the-oldest", "ckpt/commands/merge.py", "complete[: arguments.last]", "complete[-arguments.last :]", (MERGE,)),
    Mutant("merge-counts-one-too-many", "ckpt/commands/merge.py", "total.div_(len(chosen))", "total.div_(len(chosen) + 1)", (MERGE,)),
    Mutant("merge-of-any-models", "ckpt/commands/merge.py", "if ours.about.get(key) != theirs.about.get(key):", "if False:", (MERGE,)),
    Mutant("async-copies-torn", "ckpt/save/staging.py", "        self._requested.wait()\n", "        pass\n", (SAVING,)),
    Mutant("async-copies-not-awaited", "ckpt/save/staging.py", "            self._requested.set()\n", "            pass\n", (SAVING,),
           equivalent="training hangs, and no test waits for that"),
    Mutant("live-tensors-written", "ckpt/save/staging.py", "        copy.copy_(local, non_blocking=self._pinned)\n", "        copy = local\n", (SAVING,)),
    Mutant("staging-not-copied", "ckpt/save/staging.py", "        copy.copy_(local, non_blocking=self._pinned)\n", "", (SAVING,)),
    Mutant("update-before-the-copies", "ckpt/save/staging.py", "            self._staging.make_stream_wait(self._copied)\n", "            pass\n", ("tests/ckpt/test_staging.py",)),
    Mutant("copies-before-the-values", "ckpt/save/staging.py", "        self._stream.wait_event(after)\n", "", ("tests/ckpt/test_staging.py",)),
    Mutant("copies-written-before-they-are-complete", "ckpt/save/staging.py", "            self._copied.synchronize()\n", "            pass\n", ("tests/ckpt/test_staging.py",)),
    Mutant("failed-copy-blocks-training", "ckpt/save/staging.py", "        finally:\n            self._requested.set()\n", "        finally:\n            pass\n        self._requested.set()\n", ("tests/ckpt/test_staging.py",)),
    Mutant("staging-of-another-dtype", "ckpt/save/staging.py", " or copy.dtype != local.dtype:", ":", (SAVING,)),
    Mutant("python-generator-not-restored", "ckpt/contents/state.py", "random.setstate((version, tuple(words), gauss))", "pass", (STEPS,)),
    Mutant("torch-generator-not-restored", "ckpt/contents/state.py", "torch.set_rng_state(_tensor_of(cpu))", "pass", (STEPS,)),
    Mutant("generators-of-the-first-rank", "ckpt/contents/state.py", '[states for states in saved["generators"] if _has(states["ranks"], world.rank)]', 'saved["generators"][:1]', (PARTS,)),
    Mutant("schedule-not-restored", "ckpt/contents/state.py", "scheduler.load_state_dict(_merged(present, kept))", "scheduler.load_state_dict(present)", (PARTS,)),
    Mutant("rates-of-groups-not-restored", "ckpt/torch_private.py", '[group["lr"] for group in scheduler.optimizer.param_groups]', '[0.0 for group in scheduler.optimizer.param_groups]', ("tests/ckpt/test_checkpoint_parts.py",)),
    Mutant("data-not-restored", "ckpt/contents/state.py", 'state.loader.load_state_dict(saved["loader"], allowed)', "pass", (SAVING,)),
    Mutant("step-not-restored", "ckpt/contents/state.py", 'state.step = saved["step"]', "state.step = state.step", (SAVING,)),
    Mutant("tokens-seen-forgotten", "ckpt/contents/state.py", 'state.tokens_seen = saved["tokens_seen"]', "pass", (PARTS, SAVING)),
    Mutant("tokens-by-dataset-forgotten", "ckpt/contents/state.py", 'state.tokens_by_dataset = dict(saved["tokens_by_dataset"])', "pass", (SAVING,)),
    Mutant("adapters-must-be-stored", "ckpt/contents/tensors.py", "if name in known or not matches(name, added)}", "}", ("tests/integration/test_lora_example.py::test_a_stored_run_computes_with_its_adapters",)),
    Mutant("stored-adapters-not-loaded", "ckpt/contents/tensors.py", "if name in known or not matches(name, added)}", "if not matches(name, added)}", ("tests/integration/test_lora_example.py::test_a_stored_run_computes_with_its_adapters",)),
    Mutant("buffers-not-saved", "ckpt/contents/tensors.py", "(*part.named_parameters(), *part.module.named_buffers())", "part.named_parameters()", (SAVING,)),
    Mutant("one-checkpoint-too-few-kept", "ckpt/save/retention.py", "reverse=True)[keep_latest:]", "reverse=True)[keep_latest - 1 :]", (PARTS,)),
    Mutant("nothing-kept-for-good", "ckpt/save/retention.py", "step % keep_every == 0", "step % keep_every == 1", (PARTS,)),
    Mutant("checksums-not-held", "ckpt/format/manifest.py", "chunk_digest(tensor, dtype, chunk.offset, chunk.shape, data) != chunk.sha256", "False", (PARTS,)),
    Mutant("strided-shards-cut-first", "ckpt/format/pieces.py", "order.insert(after, at)", "order.insert(0, at)", ("tests/ckpt/test_pieces.py",)),
    Mutant("the-first-replica-writes-all", "ckpt/format/pieces.py", "else chance % size)", "else 0)", ("tests/ckpt/test_pieces.py",)),
    Mutant("empty-pieces-written", "ckpt/format/pieces.py", "filled = (shapes > 0).all(axis=1)", "filled = (shapes >= 0).all(axis=1)", ("tests/ckpt/test_pieces.py",)),
    Mutant("pieces-in-another-order", "ckpt/format/layout.py", "number = number * (len(cuts) - 1) + at", "number = number + at", ("tests/ckpt/test_pieces.py",)),
    Mutant("pieces-at-the-end-missed", "ckpt/format/layout.py", "bisect_left(cuts, first + size)", "bisect_right(cuts, first + size) - 1", ("tests/ckpt/test_pieces.py",)),
    Mutant("an-index-unchecked", "ckpt/format/index.py", "if hashlib.sha256(text).hexdigest() != expected.sha256:", "if False:", ("tests/ckpt/test_damage.py",)),
    Mutant("chunks-read-from-the-beginning", "ckpt/format/chunks.py", "        file.seek(chunk.start)\n", "", (SAVING,)),
    Mutant("data-not-durable", "ckpt/format/folder.py", "            early.finish()\n            os.fsync(file.fileno())\n", "            early.finish()\n", (DURABLE,)),
    Mutant("an-early-syncs-error-lost", "ckpt/format/folder.py", "            early.finish()\n            os.fsync(file.fileno())\n", "            os.fsync(file.fileno())\n", (DURABLE,)),
    Mutant("names-not-durable", "ckpt/format/folder.py", '        os.replace(f"{path}.new", path)\n        self.sync()\n', '        os.replace(f"{path}.new", path)\n', (DURABLE,)),
    Mutant("parent-not-synced", "ckpt/format/folder.py", "for path in (self.located[1], os.path.dirname(self.located[1])):", "for path in (self.located[1],):", (DURABLE,)),
    Mutant("data-names-after-the-manifest", "ckpt/format/writer.py", "        if self._folder.is_local:\n            self._folder.sync()\n", "", (DURABLE,)),
    Mutant("marks-go-before-the-manifest", "ckpt/format/writer.py", "        created = datetime", "        self._folder.remove(UNFINISHED)\n        created = datetime", (DURABLE,)),
    Mutant("unmarked-while-unfinished", "ckpt/format/writer.py", '            self._folder.write(UNFINISHED, b"")\n', "            pass\n", (DURABLE,)),
    Mutant("data-removed-before-the-manifest-is", "ckpt/save/retention.py", "        if checkpoint.is_local:\n            checkpoint.sync()\n", "", (DURABLE,)),
    Mutant("removed-unmarked", "ckpt/save/retention.py", "        if UNFINISHED not in names:\n", "        if False:\n", (DURABLE,)),
    Mutant("the-mark-is-removed-first", "ckpt/save/retention.py", "checkpoint.remove(*(name for name in names if name != UNFINISHED))", "checkpoint.remove(UNFINISHED, *(name for name in names if name != UNFINISHED))", (DURABLE,)),
    Mutant("a-changed-rate-ignored", "ckpt/resume/optimizer_restore.py", "            rate = rate * (float(group[\"initial_lr\"]) / float(first))\n", "            pass\n", (PARTS,)),
    Mutant("a-changed-rate-inverted", "ckpt/resume/optimizer_restore.py", '(float(group["initial_lr"]) / float(first))', '(float(first) / float(group["initial_lr"]))', (PARTS,)),
    Mutant("old-folders-first", "ckpt/format/catalogue.py", "if match), reverse=True)", "if match))", (PARTS,)),
    Mutant("dcp-any-name-unpickled", "ckpt/foreign/dcp_metadata.py", '        raise _Refused(f"{module}.{name}")\n', "        return super().find_class(module, name)\n", (f"{REFUSALS}::test_a_malicious_pickle_is_refused_and_nothing_is_executed",)),
    Mutant("dcp-unpickled-unasked", "ckpt/foreign/convert.py", "if not arguments.allow_pickle:", "if False:", (f"{REFUSALS}::test_a_pickle_is_read_only_with_consent",)),
    Mutant("dcp-shards-misplaced", "ckpt/foreign/dcp_files.py", "= whole[inside]", "= whole[tuple(slice(0, side.stop - side.start) for side in inside)]", (f"{DCP}::test_a_part_comes_from_the_chunks_that_hold_it",)),
    Mutant("dcp-gaps-accepted", "ckpt/foreign/dcp_metadata.py", "    if problem:\n", "    if False:\n", (LIES,)),
    Mutant("dcp-files-anywhere", "ckpt/foreign/dcp_metadata.py", "file != Path(file).name or ", "", (LIES,)),
    Mutant("dcp-archives-not-compared", "ckpt/foreign/dcp_files.py", "if found != wanted:", "if False:", (LIES,)),
    Mutant("dcp-unknown-entries-left-out", "ckpt/foreign/dcp_files.py", "self._tensors[full] = entry", "self.left_out[full] += 1", (f"{REFUSALS}::test_what_is_not_understood_is_refused_until_it_is_excluded",)),
    Mutant("priority-ignored", "ckpt/foreign/config.py", "sorted(candidates, key=lambda one: -one[1].priority)", "sorted(candidates, key=lambda one: one[1].priority)", (ARRANGED,)),
    Mutant("format-tie-unseen", "ckpt/foreign/config.py", "    if len(equal) > 1:\n", "    if False:\n", (ARRANGED,)),
    Mutant("buffer-converted", "ckpt/foreign/exporting.py", "None if sources[0].buffer else dtype, sources", "dtype, sources", (ARRANGED,)),
    Mutant("rows-left-unclaimed", "ckpt/foreign/checks.py", "if shared and len(claimed) < (block := sources[0].block):", "if False:", (ARRANGED,)),
    Mutant("whole-stack-read", "ckpt/foreign/arrangement.py", "(rows.diff() > _GAP)", "(rows.diff() > 10**9)", (ARRANGED,)),
    Mutant("rows-in-file-order", "ckpt/foreign/arrangement.py", "found[order.argsort()]", "found", (ARRANGED,)),
    Mutant("unfrozen-parameters-refused", RESTORE, "elif unfreezes:", "elif False:", FROZEN),
    Mutant("missing-state-taken-for-unfrozen", "ckpt/resume/comparing.py", 'change.key == "training.freeze"', "True", ("tests/integration/test_changed_jobs.py", "tests/ckpt/test_optimizer_state.py")),
    Mutant("unfrozen-groups-at-the-first-rate", RESTORE, "for name in wanted) if wanted else others[:1]", "for name in wanted)", ("tests/integration/test_freeze.py::test_a_group_that_is_no_longer_frozen_has_the_rate_of_the_schedule",)),
    Mutant("frozen-parameters-not-counted", "ckpt/resume/loading.py", "if not tensor.requires_grad and name in saved]", "if name in saved]", FROZEN),
    Mutant("exports-stay-when-a-run-goes-back", "ckpt/save/retention.py", "context.section.export is not None and", "False and", ("tests/ckpt/test_exports.py",)),
    Mutant("what-is-set-aside-has-another-number", "ckpt/save/retention.py", "(path.name for path in exported.iterdir())", "()", ("tests/ckpt/test_exports.py",)),
    Mutant("exports-of-no-run-set-aside", "ckpt/save/retention.py", "context.section.export is not None and", "", ("tests/ckpt/test_exports.py",)),
    Mutant("exports-of-checkpoints-set-aside-count", "ckpt/save/exports.py", "if not running.checkpoint.list():", "if False:", ("tests/ckpt/test_exports.py",)),
)  # fmt: skip
