"""Saving and restoring a run (TorchTitan paper, section 2.3, on :mod:`torch.distributed.checkpoint`)."""

from __future__ import annotations

import logging
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
from titan_ckpt.tensors import MODEL, begin_optimizer, model_tensors, optimizer_tensors, zero_optimizer
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
        self._stager = self._make_stager()
        self._pending: tuple[int, Future[None]] | None = None
        self._beside = ThreadPoolExecutor(1, "checkpoint")
        self._copied = threading.Event()
        self._newest: int | None = None
        self._complete: set[int] = set()
        self._require_writable()

    # -- restoring

    def restore(self) -> None:
        """Go on from the newest whole checkpoint, or the one that the config names.

        Raises:
            UserError: there are checkpoints, and none can be used.
        """
        wanted = self._section.load_step
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
        kind = kind_of(Path(path)) if Path(path).is_dir() else None
        if kind is not None:
            self._begin_from_foreign(Path(path), kind)
            return
        folder = Folder(path)
        found = self._on_first_rank(lambda: entry(folder, 0))
        problem = found.problem or self._load(found, weights_only=self._section.initial_load_model_only)
        if problem:
            where = self._job.config.where("checkpoint.initial_load_path", path)
            raise UserError.one(where, problem, "name the folder of a checkpoint, such as .../checkpoint/step-1000")

    def _begin_from_foreign(self, path: Path, kind: str) -> None:
        """Begin with weights in another format, each rank reading what it holds.

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
        tensors = {name: one for name, one in tensors.items() if not matches(name, self._section.exclude_from_loading)}
        foreign = {f"{MODEL}.{one.parameter}": one for one in form.tensors.load()(args)}
        files = open_files(path, kind)
        shapes = {name.removeprefix(f"{MODEL}."): tuple(one.shape) for name, one in tensors.items()}
        mine = {name: foreign[name] for name in tensors}
        require_tensors(files, mine.values(), shapes, where)
        load(tensors, storage_reader=ForeignReader(files, foreign))
        log.info("beginning with the weights of %s", path)

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
        tensors = {name: one for name, one in tensors.items() if not matches(name, self._section.exclude_from_loading)}
        self._require_same_tensors(found.folder, manifest, tensors)
        try:
            load(tensors, storage_reader=Reader(found.folder, manifest))
        except CheckpointException as error:
            reasons = [one[0] if isinstance(one, tuple) else one for one in error.failures.values()]
            if not all(isinstance(reason, BrokenCheckpoint | OSError) for reason in reasons):
                raise
            zero_optimizer(self._state.optimizer)
            return str(reasons[0])
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
        excluded = self._section.exclude_from_loading
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
        """Wait for what is still being written."""
        self.finish_pending()
        self._beside.shutdown()
        if self._stager is not None:
            self._stager.close()

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
        self._on_first_rank(lambda: remove(self._folder, step))
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
        try:
            copies = self._stager.stage(tensors)
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
        self._on_first_rank(self._prune)

    def _prune(self) -> None:
        steps = steps_in(self._folder)
        folders = {step: step_folder(self._folder, step) for step in steps}
        # A manifest is read once: those of large models are large.
        self._complete |= {step for step in steps if step not in self._complete and entry(folders[step], step).manifest}
        unwanted = to_remove(
            [step for step in steps if step in self._complete],
            self._section.keep_latest_k,
            self._section.keep_every_n_steps,
        )
        # What interrupted saves have left. Nothing is being written now, and what is damaged has its manifest.
        newest = max(self._complete.intersection(steps))
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
        if not isinstance(reason, OSError):
            raise error
        self._on_first_rank(lambda: remove(self._folder, step))  # it takes room, and is of no use
        newest = "there is none yet" if self._newest is None else f"the newest is that of step {self._newest}"
        why = f"cannot be written (rank {rank}: {reason.strerror or reason})"
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

    def _make_stager(self) -> Any:
        if not self._asynchronous:
            return None
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        pinned = self._section.async_mode == "async_with_pinned_mem"
        cuda = self._world.device.type == "cuda"
        if pinned and not cuda:
            key = "checkpoint.async_mode"
            raise UserError(self._job.config.problem(key, "pinned memory is for copies from a GPU", 'set it to "async"'))
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
            )
        )

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
            except OSError as error:
                return error.strerror or str(error)
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
                box = [None, error]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        if box[1] is not None:
            raise box[1]
        return box[0]


def checkpoint_folder(dump_folder: str, folder: str) -> Folder:
    """Where a run's checkpoints are."""
    return Folder(folder) if "://" in folder or folder.startswith("/") else Folder(dump_folder) / folder
