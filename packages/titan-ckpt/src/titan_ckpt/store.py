"""Saving and restoring a run (TorchTitan paper, section 2.3, on :mod:`torch.distributed.checkpoint`)."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from titan_ckpt import state as plain
from titan_ckpt.catalogue import Entry, entry, step_folder, steps_in
from titan_ckpt.config import CheckpointSection
from titan_ckpt.folder import Folder
from titan_ckpt.foreign_files import CONFIG_OF, kind_of, open_files, read_config, require_tensors
from titan_ckpt.foreign_reader import ForeignReader
from titan_ckpt.manifest import NAME, BrokenCheckpoint, Manifest
from titan_ckpt.reader import Reader
from titan_ckpt.retention import remove, to_remove
from titan_ckpt.staging import Staging
from titan_ckpt.tensors import MODEL, begin_optimizer, forget_state, model_tensors, optimizer_tensors, zero_optimizer
from titan_ckpt.writer import Writer
from titan_core.errors import Problem, UserError
from titan_core.job.assemble import model_args
from titan_core.patterns import matches
from titan_core.train.checkpoint import CheckpointRequest

log = logging.getLogger(__name__)


def build(request: CheckpointRequest) -> Store:
    """The checkpoints of a run."""
    return Store(request)


class Store:
    """A :class:`~titan_core.train.checkpoint.CheckpointStore`."""

    def __init__(self, request: CheckpointRequest) -> None:
        self._job, self._world, self._state = request.job, request.world, request.state
        self._settle, self._saved = request.settle, request.saved
        self._section = request.job.config.section(CheckpointSection)
        self._folder = checkpoint_folder(request.job.dump_folder, self._section.folder)
        self._asynchronous = self._section.async_mode != "disabled"
        # A save beside training must not mix its messages with training's.
        self._group: Any = dist.new_group(backend="gloo") if self._asynchronous else None
        self._staging = self._make_staging()
        self._pending: tuple[int, Future[None]] | None = None
        self._beside = ThreadPoolExecutor(1, "checkpoint")
        self._copied = threading.Event()
        self._newest: int | None = None
        self._complete: set[int] = set()
        self._excluded: list[str] = []
        self._require_writable()

    # -- restoring

    def restore(self) -> None:
        """Go on from the newest whole checkpoint, or the one that the config names.

        Raises:
            UserError: there are checkpoints, and none can be used.
        """
        wanted = self._section.load_step
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
            wanted = -1  # the launcher starts the job again after a failure: what it did since is not to be lost
        self._excluded = self._section.exclude_from_loading if wanted >= 0 else []
        candidates = [wanted] if wanted >= 0 else self._on_first_rank(lambda: steps_in(self._folder))
        problems: list[Problem] = []
        for step in candidates:
            found = self._on_first_rank(lambda step=step: entry(step_folder(self._folder, step), step))
            problem = found.problem or self._load(found)
            if not problem:
                self._newest = step
                if problems:
                    log.warning("going on from step %d, not from the newest checkpoint", step)
                self._warn_of_later(step, wanted)
                return
            problems.append(Problem(str(found.folder), problem))
            log.warning("%s cannot be used: %s", found.folder, problem)
        # What was never complete is what an interrupted first save leaves: nothing was lost with it.
        if wanted >= 0 or any("not complete" not in problem.why for problem in problems):
            way_out = "set checkpoint.folder to another place to start anew, or mend what is said above"
            raise UserError(*problems, Problem(str(self._folder), "no checkpoint here can be used", way_out))
        if self._section.initial_load_path:
            self._excluded = self._section.exclude_from_loading
            self._begin_from(self._section.initial_load_path)

    def _warn_of_later(self, step: int, wanted: int) -> None:
        """Later checkpoints belong to what is being left, and would be taken first at the next start."""
        later = [one for one in self._on_first_rank(lambda: steps_in(self._folder)) if one > step]
        if wanted >= 0 and later:
            shown = " ".join(map(str, reversed(later)))
            log.warning(
                "%s has later checkpoints too, and a start without checkpoint.load_step takes the newest: "
                "`titan checkpoint rm %s --step %s` removes them",
                self._folder, self._folder, shown,
            )  # fmt: skip

    def _begin_from(self, path: str) -> None:
        kind = self._on_first_rank(lambda: kind_of(Path(path)) if Path(path).is_dir() else None)
        if kind is not None:
            self._begin_from_foreign(Path(path), kind)
            return
        folder = Folder(path)
        found = self._on_first_rank(lambda: _entry_or_problem(folder))
        problem = found.problem or self._load(found, weights_only=self._section.initial_load_model_only)
        if problem:
            where = self._job.config.where("checkpoint.initial_load_path", path)
            raise UserError.one(where, problem, "name the folder of a checkpoint, such as .../checkpoint/step-1000")

    def _begin_from_foreign(self, path: Path, kind: str) -> None:
        """Begin with weights in another format, each rank reading what it holds.

        Raises:
            UserError: they are not those of this job's model; on all ranks, whichever found it out.
        """
        opened, mistake = None, None
        try:
            opened = self._open_foreign(path, kind)
        except UserError as error:
            mistake = error
        problems = [problem for error in self._world.gather(mistake) if error is not None for problem in error.problems]
        if opened is None or problems:
            raise UserError(*dict.fromkeys(problems)) from mistake
        tensors, reader = opened
        load(tensors, storage_reader=reader)
        log.info("beginning with the weights of %s", path)

    def _open_foreign(self, path: Path, kind: str) -> tuple[dict[str, Any], ForeignReader]:
        """What to load, and from where.

        Raises:
            UserError: they are not those of this job's model.
        """
        where = self._job.config.where("checkpoint.initial_load_path", str(path))
        form = next((one for one in self._job.model.formats if one.name == kind), None)
        if form is None:
            raise UserError.one(where, f"model {self._job.model.name!r} does not know this format", "convert it elsewhere")
        args = model_args(self._job.config, self._job.model)
        try:
            theirs = form.to_args.load()(read_config(path, kind))
        except (ValueError, KeyError) as error:
            raise UserError.one(where, f"{CONFIG_OF[kind]} describes another model: {error}", "train that one") from None
        # A longer or shorter context is the same weights.
        differences = [
            f"{key} is {value!r} there and {mine!r} here"
            for (key, value), (_, mine) in zip(theirs, args, strict=True)
            if value != mine and key != "max_seq_len"
        ]
        if differences:
            raise UserError.one(where, "; ".join(differences), "set model.flavor and model.args to those weights' model")
        tensors = model_tensors(self._state.parts)
        tensors = {name: one for name, one in tensors.items() if not matches(name, self._excluded)}
        foreign = {f"{MODEL}.{one.parameter}": one for one in form.tensors.load()(args)}
        files = open_files(path, kind)
        unknown = [name for name in tensors if name not in foreign]
        if unknown:
            why = f"the model's plugin does not say what {unknown[0]} is called there"
            raise UserError.one(where, why, "name it in checkpoint.exclude_from_loading")
        shapes = {name.removeprefix(f"{MODEL}."): tuple(one.shape) for name, one in tensors.items()}
        mine = {name: foreign[name] for name in tensors}
        require_tensors(files, mine.values(), shapes, where)
        return tensors, ForeignReader(files, foreign)

    def _load(self, found: Entry, weights_only: bool = False) -> str:
        """Load a checkpoint; why it could not be, if so. All ranks come to the same answer.

        Raises:
            UserError: it is whole, and of something else.
        """
        manifest = found.manifest
        assert manifest is not None
        weights_only = weights_only or (manifest.model_only and manifest.step == 0)  # the initial weights
        if manifest.model_only and not weights_only:
            return "it holds only weights, which a run cannot go on from (checkpoint.initial_load_path can begin with them)"
        tensors = model_tensors(self._state.parts)
        if not weights_only:
            begin_optimizer(self._state.optimizer)
            tensors |= optimizer_tensors(self._state.parts, self._state.optimizer)
        unwanted = {name for name in tensors if matches(name, self._excluded)}
        tensors = {name: one for name, one in tensors.items() if name not in unwanted}
        self._require_same_tensors(found.folder, manifest, tensors)
        try:
            load(tensors, storage_reader=Reader(found.folder, manifest))
        except CheckpointException as error:
            reasons = [one[0] if isinstance(one, tuple) else one for one in error.failures.values()]
            if not all(isinstance(reason, BrokenCheckpoint | OSError) for reason in reasons):
                raise
            zero_optimizer(self._state.optimizer)
            return str(reasons[0])
        forget_state(self._state.parts, self._state.optimizer, unwanted)
        if not weights_only:
            plain.apply(dict(manifest.state), self._state, self._world)
            log.info("going on after step %d from %s", manifest.step, found.folder)
        else:
            log.info("beginning with the weights of %s", found.folder)
        return ""

    def _require_same_tensors(self, folder: Folder, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Names and shapes must be those of the checkpoint.

        Raises:
            UserError: on every rank, naming the first few that are not.
        """
        mine = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        ours: dict[str, tuple[int, ...]] = {}
        for of_rank in self._world.gather(mine):
            ours |= of_rank
        differences = [
            f"{name} is {list(manifest.tensors[name].shape)} there and {list(shape)} here"
            if name in manifest.tensors
            else f"{name} is not there"
            for name, shape in ours.items()
            if name not in manifest.tensors or manifest.tensors[name].shape != shape
        ]
        theirs = (name for name in manifest.tensors if name.startswith(f"{MODEL}."))
        excluded = self._excluded
        differences += [f"{name} is not here" for name in theirs if name not in ours and not matches(name, excluded)]
        if differences:
            shown = "; ".join(differences[:3]) + (f"; and {len(differences) - 3} more" if len(differences) > 3 else "")
            there = manifest.about.get("model", "another model")
            raise UserError.one(
                str(folder),
                f"it is a checkpoint of {there}, and this job trains {self._job.name}: {shown}",
                "train that model, set checkpoint.folder to another place, or name what differs in "
                "checkpoint.exclude_from_loading",
            )

    # -- saving

    def after_step(self, last: bool, asked: bool) -> None:
        """See :class:`~titan_core.train.checkpoint.CheckpointStore`."""
        self._report_finished()
        step = self._state.step
        first = self._section.enable_first_step_checkpoint and step == 1
        if not (last or asked or first or step % self._section.interval == 0):
            return
        self._settle(step)
        self.finish_pending()
        self._save(last)

    def close(self) -> None:
        """Wait for what is still being written, and for no other rank: after an error they may be elsewhere."""
        if self._pending is not None:
            step, future = self._pending
            self._pending = None
            error = future.exception()
            if error is not None:
                log.error("checkpoint of step %d could not be completed: %s", step, error)
        self._beside.shutdown()

    def _save(self, last: bool) -> None:
        step = self._state.step
        exported = last and self._section.last_save_model_only and step >= self._job.config.value("training.steps")
        weights_only = exported or step == 0  # the optimizer has no state yet
        tensors = model_tensors(self._state.parts)
        if exported:
            dtype = getattr(torch, self._section.export_dtype)
            tensors = {name: one.to(dtype) if one.is_floating_point() else one for name, one in tensors.items()}
        if not weights_only:
            tensors |= optimizer_tensors(self._state.parts, self._state.optimizer)
        values = {} if weights_only else plain.collect(self._state, self._world)
        folder = step_folder(self._folder, step)
        # What an interrupted save of the same step has left, or a run that was restarted from before it.
        self._clear(step)
        writer = Writer(folder, self._world.rank, step, self._about(), values)
        if not self._asynchronous or last:
            try:
                save(tensors, storage_writer=writer)
            except CheckpointException as error:
                self._failed(step, error, last)
            else:
                self._committed(step)
            return
        self._copied.clear()
        self._pending = (step, self._beside.submit(self._save_beside, tensors, writer))

    def _save_beside(self, tensors: dict[str, Tensor], writer: Writer) -> None:
        """In a thread of its own: copy, which must be done before the next update, and write the copy."""
        copies: dict[str, Tensor] = {}
        try:
            copies = self._staging.copy(tensors)
        except (RuntimeError, MemoryError) as error:
            writer.give_up(error)  # told to the other ranks by the save, which all have to take part in
        finally:
            self._copied.set()
        save(copies, storage_writer=writer, process_group=self._group)

    def before_update(self) -> None:
        """Wait for the copy that a save beside training writes from. It was made during forward and backward."""
        if self._pending is not None:
            self._copied.wait()

    def _report_finished(self) -> None:
        """Say that a save beside training is done, on all ranks after the same step."""
        if self._pending is None:
            return
        done = torch.tensor(int(self._pending[1].done()))
        if int(self._world.sum(done)) == self._world.size:
            self.finish_pending()

    def finish_pending(self) -> None:
        """Wait for a save that is still going on beside training."""
        if self._pending is None:
            return
        step, future = self._pending
        self._pending = None
        try:
            future.result()
        except CheckpointException as error:
            self._failed(step, error, last=False)
        else:
            self._committed(step)

    def _committed(self, step: int) -> None:
        """A checkpoint is complete: tell, and remove those that are not to be kept any longer."""
        self._newest = step
        folder = step_folder(self._folder, step)
        log.info("saved %s", folder)
        self._saved(step, str(folder))
        self._on_first_rank(self._prune_if_possible)

    def _clear(self, step: int) -> None:
        """Remove what there is of a step's checkpoint. Where that fails, so will the save, which says so."""

        def clear() -> None:
            try:
                remove(self._folder, step)
            except OSError as error:
                log.warning("%s cannot be removed: %s", step_folder(self._folder, step), error.strerror or error)

        self._on_first_rank(clear)

    def _prune_if_possible(self) -> None:
        try:
            self._prune()
        except OSError as error:
            log.warning("old checkpoints in %s cannot be removed: %s", self._folder, error.strerror or error)

    def _prune(self) -> None:
        # Later ones belong to what was left with checkpoint.load_step: they neither count nor are they this run's to remove.
        steps = [step for step in steps_in(self._folder) if self._newest is not None and step <= self._newest]
        folders = {step: step_folder(self._folder, step) for step in steps}
        # A manifest is read once: those of large models are large.
        self._complete |= {step for step in steps if step not in self._complete and entry(folders[step], step).manifest}
        unwanted = to_remove(
            [step for step in steps if step in self._complete],
            self._section.keep_latest_k,
            self._section.keep_every_n_steps,
        )
        # What interrupted saves have left. Nothing is being written now, and what is damaged has its manifest.
        newest = max(self._complete.intersection(steps), default=-1)
        unwanted += [step for step in steps if step < newest and NAME not in folders[step].list()]
        for step in unwanted:
            remove(self._folder, step)

    def _failed(self, step: int, error: CheckpointException, last: bool) -> None:
        """A checkpoint could not be written. Training goes on, unless this was its last chance.

        Raises:
            UserError: it was.
        """
        rank, failure = next(iter(error.failures.items()))
        reason = failure[0] if isinstance(failure, tuple) else failure
        if not isinstance(reason, OSError | MemoryError | torch.OutOfMemoryError):
            raise error
        self._clear(step)  # it takes room, and is of no use
        newest = "there is none yet" if self._newest is None else f"the newest is that of step {self._newest}"
        why = f"cannot be written (rank {rank}: {getattr(reason, 'strerror', None) or reason})"
        if last:
            raise UserError.one(str(step_folder(self._folder, step)), why, f"{newest}; make room and start the job again")
        log.error("checkpoint of step %d %s; training goes on, %s", step, why, newest)

    # -- helpers

    def _about(self) -> dict[str, Any]:
        return {
            "model": self._job.name,
            "model_name": self._job.model.name,
            "model_args": model_args(self._job.config, self._job.model).model_dump(),
            "mesh": {name: degree for name, degree in self._world.plan.degrees.items() if degree > 1},
            "world_size": self._world.size,
            "torch": torch.__version__,
            **self._job.identity(),
        }

    def _make_staging(self) -> Staging:
        pinned = self._section.async_mode == "async_with_pinned_mem"
        if pinned and self._world.device.type != "cuda":
            key = "checkpoint.async_mode"
            raise UserError(self._job.config.problem(key, "pinned memory is for copies from a GPU", 'set it to "async"'))
        return Staging(self._world.device, pinned)

    def _require_writable(self) -> None:
        """Find out before training, not after its first interval.

        Raises:
            UserError: on every rank.
        """

        def probe() -> str:
            try:
                self._folder.make()
                self._folder.write(".writable", b"")
                self._folder.remove(".writable")
            except Exception as error:  # noqa: BLE001 - a storage of fsspec's may raise anything, a missing package first
                return getattr(error, "strerror", None) or str(error)
            return ""

        problem = self._on_first_rank(probe)
        if problem:
            raise UserError.one(str(self._folder), f"cannot be written: {problem}", "set checkpoint.folder to another place")

    def _on_first_rank(self, find: Any) -> Any:
        """What ``find`` gives on rank 0, on every rank; what it raises too."""
        box: list[Any] = [None, None]
        if self._world.rank == 0:
            try:
                box = [find(), None]
            except Exception as error:  # noqa: BLE001 - it is raised below, on all ranks
                box = [None, error if isinstance(error, UserError | OSError) else RuntimeError(repr(error))]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        if box[1] is not None:
            raise box[1]
        return box[0]


def _entry_or_problem(folder: Folder) -> Entry:
    """The checkpoint in ``folder``, whatever its storage may raise."""
    try:
        return entry(folder, 0)
    except Exception as error:  # noqa: BLE001 - a storage of fsspec's may raise anything, a missing package first
        return Entry(0, folder, None, getattr(error, "strerror", None) or str(error))


def checkpoint_folder(dump_folder: str, folder: str) -> Folder:
    """Where a run's checkpoints are."""
    return Folder(folder) if "://" in folder or folder.startswith("/") else Folder(dump_folder) / folder
