"""A run on one device: its story, its files, and how it ends."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pluggy
import pytest
import torch
from rich.console import Console

from harness.distributions import write_distribution
from harness.jobs import TINY, Recorder, make_job, run_recipe
from titan_core.cli.main import main
from titan_core.data import loader
from titan_core.data.batch import IGNORE, Batch
from titan_core.errors import UserError
from titan_core.hookspecs import hookimpl
from titan_core.lifecycle import Lifecycle
from titan_core.metrics.console import ConsoleLog
from titan_core.metrics.jsonl import JsonLines
from titan_core.train.finite_guard import NonFiniteError
from titan_core.train.lookahead import Lookahead
from titan_core.train.run_directory import RunDirectory
from titan_core.train.trainer import train


def test_the_story_of_a_run(in_tmp: Path) -> None:
    record = run_recipe("llama3_debug", TINY)
    steps = [f"{event} {step}" for step in range(1, 5) for event in ("step_start", "step_end")]
    assert record.events == ["job_assembled", "train_start", *steps, "train_end"]
    assert record.reason == "all steps are done"
    folder = in_tmp / "outputs" / "llama3_debug"
    assert sorted(file.name for file in folder.iterdir()) == ["config.toml", "events.jsonl", "metrics.jsonl", "plugins.json"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 4]
    assert [line["loss"] for line in lines] == pytest.approx([record.losses[0], record.losses[1], record.losses[3]])
    assert {"grad_norm", "lr", "tokens_per_second", "mfu", "memory_peak_gib", "data_seconds"} <= set(lines[0])
    assert lines[-1]["tokens_seen"] == 4 * 4 * 32
    assert {one["distribution"] for one in json.loads((folder / "plugins.json").read_text())} >= {"titan-core"}


def test_the_written_config_repeats_the_run(in_tmp: Path) -> None:
    first = run_recipe("llama3_debug", TINY)
    again = run_recipe("outputs/llama3_debug/config.toml")
    assert again.losses == first.losses


def test_a_fresh_start_never_mixes_with_an_older_run(in_tmp: Path) -> None:
    run_recipe("llama3_debug", TINY)
    old = (in_tmp / "outputs/llama3_debug/metrics.jsonl").read_text()
    run_recipe("llama3_debug", {**TINY, "training.steps": 2})
    folder = in_tmp / "outputs/llama3_debug"
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert (folder / "previous/1/metrics.jsonl").read_text() == old
    assert sorted(file.name for file in (folder / "previous/1").iterdir()) == [
        "config.toml",
        "events.jsonl",
        "metrics.jsonl",
        "plugins.json",
    ]


def test_deterministic_runs_repeat_bit_for_bit(in_tmp: Path) -> None:
    try:
        runs = [run_recipe("llama3_debug", {**TINY, "training.deterministic": "true"}, weights=True) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert runs[0].losses == runs[1].losses
    assert all(torch.equal(runs[0].final[name], tensor) for name, tensor in runs[1].final.items())


def test_accumulation_does_not_change_the_loss(in_tmp: Path) -> None:
    runs = [run_recipe("llama3_debug", {**TINY, "training.local_batch_size": size}) for size in (1, 4)]
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-6)
    assert runs[0].grad_norms == pytest.approx(runs[1].grad_norms, rel=1e-5)


def test_a_loss_that_is_no_number_stops_the_run(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = {**TINY, "optimizer.lr": 100, "optimizer.weight_decay": 100, "training.max_norm": 0, "training.steps": 50}
    recorder = Recorder(weights=False)
    with pytest.raises(NonFiniteError, match=r"step \d+: .* nan; training stops.*Lower optimizer\.lr"):
        train(make_job("llama3_debug", overrides), [recorder])
    assert recorder.record.events[-2:] == ["exception NonFiniteError", "train_end"]
    arguments = [text for key, value in overrides.items() for text in (f"--{key}", str(value))]
    assert main(["train", "llama3_debug", *arguments]) == 1
    assert re.search(r"^titan: stopped: step \d+: .* nan; training stops", capsys.readouterr().err, re.MULTILINE)
    record = run_recipe("llama3_debug", {**overrides, "training.on_nan": "ignore"})
    assert math.isnan(record.losses[-1])
    last = (in_tmp / "outputs/llama3_debug/metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["loss"] is None


def test_data_that_ends_stops_the_run_cleanly(in_tmp: Path) -> None:
    (in_tmp / "a.jsonl").write_text("".join(json.dumps({"text": "some words " * 10}) + "\n" for _ in range(8)))
    data = {"training.dataset": "json", "training.dataset_path": "a.jsonl"}
    record = run_recipe("llama3_debug", {**TINY, **data, "data.on_end": "stop", "training.steps": 50})
    assert record.reason == "the dataset has ended"
    assert 2 <= len(record.losses) < 50
    assert len(run_recipe("llama3_debug", {**TINY, **data, "training.steps": 20}).losses) == 20


TOY_CHECKPOINT = '''
import torch
from typing import ClassVar
from titan_core.components import Checkpoint
from titan_core.config.section import Section
from titan_core.errors import UserError
from titan_core.hookspecs import hookimpl
from titan_core.ref import Ref

api = (1, 0)

class ToySection(Section):
    section: ClassVar[str] = "toy_checkpoint"
    path: str = ""
    """Where."""
    stop: int = 0
    """Fail after this step."""

class Store:
    def __init__(self, request):
        self.request = request
        self.section = request.job.config.section(ToySection)
    def restore(self):
        import os
        if not os.path.exists(self.section.path):
            return
        state, kept = self.request.state, torch.load(self.section.path, weights_only=False)
        state.parts[0].module.load_state_dict(kept["model"])
        state.optimizer.load_state_dict(kept["optimizer"])
        state.lr_scheduler.load_state_dict(kept["lr_scheduler"])
        state.loader.load_state_dict(kept["data"])
        state.step, state.tokens_seen = kept["step"], kept["tokens_seen"]
        self.request.lifecycle.restore_state(kept["observers"])
    def before_update(self):
        pass
    def after_step(self, last, asked):
        state = self.request.state
        torch.save(dict(model=state.parts[0].module.state_dict(), optimizer=state.optimizer.state_dict(),
            lr_scheduler=state.lr_scheduler.state_dict(), data=state.loader.state_dict(), step=state.step,
            tokens_seen=state.tokens_seen, observers=self.request.lifecycle.save_state()), self.section.path)
        self.request.lifecycle.checkpoint_saved(state.step, self.section.path)
        if state.step == self.section.stop:
            raise RuntimeError("power cut")
    def close(self):
        pass

@hookimpl
def titan_checkpoints():
    return [Checkpoint(name="toy", summary="", config=ToySection, build=Ref("toy_checkpoint:Store"),
        active=lambda facts: bool(facts.section(ToySection).path))]
'''


def test_a_checkpoint_plugin_resumes_bit_for_bit(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(in_tmp / "site", "toy-checkpoint", TOY_CHECKPOINT)
    monkeypatch.syspath_prepend(str(in_tmp / "site"))
    monkeypatch.delitem(sys.modules, "toy_checkpoint", raising=False)
    whole = run_recipe("llama3_debug", {**TINY, "training.steps": 6}, weights=True)
    resumable = {**TINY, "training.steps": 6, "toy_checkpoint.path": "kept.pt", "job.dump_folder": "resumed"}
    with pytest.raises(RuntimeError, match="power cut"):
        run_recipe("llama3_debug", {**resumable, "toy_checkpoint.stop": 3})
    record = run_recipe("llama3_debug", resumable, weights=True)
    assert record.losses == whole.losses[3:]
    assert all(torch.equal(record.final[name], tensor) for name, tensor in whole.final.items())
    steps = [json.loads(line)["step"] for line in (in_tmp / "resumed/metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 4, 6]  # one file for the run, though it was started twice


class Keeps:
    """An observer, or a metric logger, with a state."""

    def __init__(self, state: Any) -> None:
        self.state, self.restored = state, None

    @hookimpl
    def titan_save_state(self) -> Any:
        return self.state

    @hookimpl
    def titan_restore_state(self, state: Any) -> None:
        self.restored = state.get("mine")


@pytest.mark.parametrize("state", [{"mine": torch.ones(1)}, ["mine"], {"mine": {1: 2}}, {"mine": (1, 2)}], ids=str)
def test_a_state_that_cannot_be_kept_is_told_with_its_observer(state: Any) -> None:
    with pytest.raises(ValueError, match=r"titan_save_state of <.*Keeps .* must return a table of plain values"):
        Lifecycle([Keeps(state)]).save_state()


class LeavesOutTheFirst:
    """Has the first update left out."""

    @hookimpl
    def titan_before_update(self, update: Any) -> bool:
        warnings.warn("an observer's own", UserWarning, stacklevel=1)
        return bool(update.step == 1)


def test_leaving_out_the_first_update_warns_of_nothing(in_tmp: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record = run_recipe("llama3_debug", {**TINY, "training.steps": 2}, observers=[LeavesOutTheFirst()])
    assert record.skipped == [1]
    ours = [one for one in caught if "lr_scheduler" in str(one.message)]
    assert not ours, ours[0].message
    assert sum("an observer's own" in str(one.message) for one in caught) == 2


class KeepsTensors:
    """An observer with tensors."""

    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors

    @hookimpl
    def titan_state_tensors(self) -> Any:
        return self.tensors


def test_tensors_of_observers_are_put_together() -> None:
    one, other = torch.ones(1), torch.zeros(2)
    lifecycle = Lifecycle([KeepsTensors({"a": one}), KeepsTensors(None), KeepsTensors({"b": other})])
    assert lifecycle.state_tensors() == {"a": one, "b": other}
    with pytest.raises(ValueError, match=r"KeepsTensors .* keeps tensors, and is built after a checkpoint is restored"):
        lifecycle.register(KeepsTensors({}))
    with pytest.raises(ValueError, match="two observers keep a tensor under the name 'a'"):
        Lifecycle([KeepsTensors({"a": one}), KeepsTensors({"a": one})]).state_tensors()


@pytest.mark.parametrize("tensors", [{"mine": 1.0}, ["mine"], {1: torch.ones(1)}], ids=str)
def test_tensors_that_are_none_are_refused_with_their_observer(tensors: Any) -> None:
    with pytest.raises(ValueError, match=r"titan_state_tensors of <.*KeepsTensors .* must return a table of tensors"):
        Lifecycle([KeepsTensors(tensors)]).state_tensors()


def test_observers_that_come_after_a_restore_get_their_state_too() -> None:
    lifecycle, early, late = Lifecycle(), Keeps({"mine": [1]}), Keeps(None)
    lifecycle.register(early)
    assert lifecycle.save_state() == {"mine": [1]}
    lifecycle.restore_state({"mine": [2]})
    lifecycle.register(late)
    assert (early.restored, late.restored) == ([2], [2])


def test_an_observer_with_a_misspelt_hook_is_refused() -> None:
    class Observer:
        @hookimpl
        def titan_step_over(self) -> None:
            pass

    with pytest.raises(pluggy.PluginValidationError, match="titan_step_over"):
        Lifecycle([Observer()])


def test_a_resumed_run_drops_what_was_logged_after_its_checkpoint_and_keeps_a_copy(tmp_path: Path) -> None:
    torn = '{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo'
    (tmp_path / "metrics.jsonl").write_text(torn)
    RunDirectory(tmp_path).begin(make_job("llama3_debug"), step=2)
    log = JsonLines(tmp_path / "metrics.jsonl")
    log.log({"step": 3})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    assert (tmp_path / "previous/1/metrics.jsonl").read_text() == torn


@pytest.mark.parametrize("line", ['{"a": 1}', '{"step": "x"}', "no JSON", None], ids=str)
def test_a_run_does_not_go_on_in_damaged_files(tmp_path: Path, line: str | None) -> None:
    metrics = tmp_path / "metrics.jsonl"
    if line is None:
        metrics.mkdir()
    else:
        metrics.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(
        UserError, match="metrics.jsonl: is a folder" if line is None else "metrics.jsonl:2: this line is no"
    ):
        RunDirectory(tmp_path).begin(make_job("llama3_debug"), step=2)


def test_folders_that_the_config_names_belong_to_the_run(tmp_path: Path) -> None:
    job = make_job("llama3_debug", {"metrics.save_tb_folder": "tb/mine", "profiling.save_traces_folder": "traces"})
    for name in ("tb/mine/events", "tb/yours", "traces/step-1", "checkpoint/step-1", "debug/flight/rank-0.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    RunDirectory(tmp_path).begin(job, step=0)
    moved = {str(one.relative_to(tmp_path / "previous/1")) for one in (tmp_path / "previous/1").rglob("*") if one.is_file()}
    assert moved == {"tb/mine/events", "traces/step-1", "debug/flight/rank-0.json"}


@pytest.mark.parametrize("folder", ["/tmp/mine", "../mine", "a/../../b", "", ".", "previous", "previous/1"])
def test_a_folder_outside_of_the_run_is_refused(folder: str) -> None:
    with pytest.raises(UserError, match=r"must (be a folder below the run's directory|not be in 'previous')"):
        make_job("llama3_debug", {"metrics.save_tb_folder": repr(folder)})


class Interrupts:
    """Presses Ctrl-C in a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        if step == self._step:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_finishes_the_step_saves_and_resumes_bit_for_bit(in_tmp: Path) -> None:
    whole = run_recipe("llama3_debug", {**TINY, "job.dump_folder": "whole"})
    resumable = {**TINY, "checkpoint.enable": "true", "checkpoint.interval": 100, "job.dump_folder": "run"}
    end = train(make_job("llama3_debug", resumable), [Interrupts(2)])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (end.interrupted, end.failed, end.completed, end.preempted) == (True, False, False, False)
    assert (in_tmp / f"run/checkpoint/step-{end.step}/checkpoint.json").exists()
    events = [json.loads(line) for line in (in_tmp / "run/events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "checkpoint", "end"]
    assert events[-1]["interrupted"] and not events[-1]["failed"]
    assert whole.losses[: end.step] + run_recipe("llama3_debug", resumable).losses == whole.losses


def test_an_interrupt_while_a_run_is_built_ends_it_at_once(in_tmp: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Building:
        @hookimpl
        def titan_train_start(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(make_job("llama3_debug", TINY), [Building()])
    assert "titan: interrupted" not in capfd.readouterr().err  # the command says that


def test_an_application_that_handles_interrupts_keeps_its_handler(in_tmp: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        assert train(make_job("llama3_debug", TINY), [Interrupts(2)]).completed
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


def test_a_checkpoint_that_is_asked_for_in_vain_is_told(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Signals:
        @hookimpl
        def titan_step_start(self, step: int) -> None:
            if step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)

    assert len(run_recipe("llama3_debug", TINY, observers=[Signals()]).losses) == 4
    assert "SIGUSR1 requests a checkpoint, and this job has no way to save one" in caplog.text


def test_an_observer_that_fails_hides_neither_the_error_nor_others(in_tmp: Path) -> None:
    class Breaks:
        @hookimpl(tryfirst=True)
        def titan_step_end(self) -> None:
            raise ValueError("the original")

        @hookimpl(tryfirst=True)
        def titan_exception(self) -> None:
            raise RuntimeError("another")

    recorder = Recorder(weights=False)
    with pytest.raises(ValueError, match="the original"):
        train(make_job("llama3_debug", TINY), [Breaks(), recorder])
    assert recorder.record.events[-2:] == ["exception ValueError", "train_end"]


def test_a_pattern_that_matches_no_parameter_is_refused(in_tmp: Path) -> None:
    overrides = {**TINY, "optimizer.param_groups": '[{pattern = "*nrom*", weight_decay = 0.0}]'}
    with pytest.raises(UserError, match=r'param_groups = "\*nrom\*": the pattern matches no parameter'):
        train(make_job("llama3_debug", overrides))


@pytest.mark.parametrize("terminal", [True, False])
def test_the_console(in_tmp: Path, terminal: bool) -> None:
    console = Console(force_terminal=terminal, width=160, record=True, file=(in_tmp / "out").open("w"), highlight=False)
    recorder = ConsoleRun(console)
    train(make_job("llama3_debug", TINY), [recorder])
    text = console.export_text()
    assert "model      llama3 debug" in text
    assert "batch      4 sequences of 32 tokens = 1 x 2 x 2" in text
    assert re.search(r"step 4/4 \| loss +\d\.\d{4} \| grad norm +\d\.\d{3} \| lr .* tokens/s \| mfu .*% \| memory", text)
    assert "done: 4 steps; config, plugins and metrics are in outputs/llama3_debug" in text
    assert ("━" in (in_tmp / "out").read_text()) == terminal


class ConsoleRun:
    """A second console beside the job's own, drawn where the test can see it."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        from titan_core.metrics.logger import LoggerRequest

        self.log = ConsoleLog(LoggerRequest(run, "CPU"), self.console)

    @hookimpl
    def titan_step_end(self, report: Any) -> None:
        self.log.titan_step_end(report)
        if report.step == 4:
            self.log.log({
                "step": 4, "loss": report.loss.item(), "grad_norm": 1.0, "lr": 0.1,
                "tokens_per_second": 1e4, "mfu": 0.5, "memory_peak_gib": 1.0,
            })  # fmt: skip

    @hookimpl
    def titan_train_end(self, end: Any) -> None:
        self.log.titan_train_end(end)


def test_a_copy_of_the_weights_without_a_target_in_a_step_learns_nothing(
    monkeypatch: pytest.MonkeyPatch, in_tmp: Path
) -> None:
    """Where copies train apart (local SGD), another may have all targets of a global batch: its share is 0, not 0 / 0."""
    look, batch = Lookahead.look, loader._batch

    def without_targets(rows: Any, lengths: Any, document_mask: bool) -> Batch:
        made = batch(rows, lengths, document_mask)
        return replace(made, targets=torch.full_like(made.targets, IGNORE))

    monkeypatch.setattr(loader, "_batch", without_targets)
    monkeypatch.setattr(
        Lookahead, "look", lambda self, skipped: replace(look(self, skipped), num_targets=100, copy_targets=0)
    )
    record = run_recipe("llama3_debug", {**TINY, "training.steps": 1, "optimizer.weight_decay": 0.0}, weights=True)
    assert record.losses == [0.0]
    assert record.grad_norms == [0.0]
    assert all(torch.equal(record.initial[name], final) for name, final in record.final.items())


def test_a_dataset_of_empty_texts_is_an_error_and_not_a_loss_of_zero(in_tmp: Path) -> None:
    texts = {"empty": ["", ""] * 10, "some": ["", "a document that says something"] * 10}
    for name, lines in texts.items():
        (in_tmp / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    settings = {**TINY, "training.dataset": "json"}
    with pytest.raises(UserError, match=r"dataset 'json': all \d+ documents of logical shard \d of 4 are empty"):
        run_recipe("llama3_debug", {**settings, "training.dataset_path": "empty.jsonl"})
    run_recipe("llama3_debug", {**settings, "training.dataset_path": "some.jsonl", "job.dump_folder": "some"})
    last = json.loads((in_tmp / "some/metrics.jsonl").read_text().splitlines()[-1])
    assert last["empty_documents"] > 0
    assert last["corrupt_records"] == 0
