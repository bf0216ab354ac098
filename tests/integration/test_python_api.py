"""The Python API (``docs/python.md``): its snippets, its errors, and what a call leaves behind."""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import titan_core
from titan_core.api import Recipe, StepReport, UserError, hookimpl
from titan_core.api.config.sections import TrainingSection
from titan_core.config.overrides import value_of
from titan_core.plugins.registry import Components
from titan_core.toolkit import status
from titan_testing.jobs import TINY, make_job

PAGE = (Path(__file__).parents[2] / "docs/python.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SCRIPT = next(snippet for snippet in SNIPPETS if snippet.startswith("# sweep.py"))

SMALL: dict[str, Any] = {key: value_of(str(value), None, "") for key, value in TINY.items()} | {"training.steps": 2}
"""Settings of ``tiny``, typed."""


class PandasStandIn:
    """Stands in for pandas, which Titan does not depend on: takes what ``DataFrame`` takes, columns of one length."""

    class DataFrame:
        def __init__(self, columns: dict[str, list[Any]]) -> None:
            (self.rows,) = {len(column) for column in columns.values()}
            self.columns = columns

        def set_index(self, name: str) -> PandasStandIn.DataFrame:
            assert self.columns[name] == sorted(set(self.columns[name]))
            return self

        def __getitem__(self, names: list[str]) -> list[list[Any]]:
            return [self.columns[name] for name in names]


@pytest.mark.full
def test_the_snippets_of_the_page_run(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("pandas") is None:
        monkeypatch.setitem(sys.modules, "pandas", PandasStandIn)
    names: dict[str, Any] = {}
    for snippet in SNIPPETS:
        if snippet.startswith("# "):
            Path(snippet.partition("\n")[0].removeprefix("# ")).write_text(snippet)
        else:
            exec(compile(snippet, "docs/python.md", "exec"), names)
    printed = capsys.readouterr().out
    assert re.search(r"loss \d\.\d{3} after step 3, saved in outputs/llama3_debug/checkpoint/step-3$", printed, re.MULTILINE)
    shown = re.findall(r"```\n(overrides: .*?)```", PAGE, re.DOTALL)
    assert len(shown) == 1
    assert printed.endswith(shown[0])


@pytest.mark.full
def test_the_script_of_the_page_runs_under_torchrun(in_tmp: Path) -> None:
    Path("sweep.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    logs = ["--log-dir", "logs", "--redirects", "1"]  # the lines of ranks that share a pipe may be torn
    done = subprocess.run([*command, *logs, "sweep.py"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    printed = [log.read_text(encoding="utf-8") for log in Path("logs").rglob("stdout.log")]
    found = [re.findall(r"^([12]) (\d+\.\d+)$", text, re.MULTILINE) for text in printed]
    assert len(found) == 2
    assert found[0] == found[1]
    assert [seed for seed, _ in found[0]] == ["1", "2"]
    assert found[0][0][1] != found[0][1][1]


def test_the_import_loads_neither_torch_nor_plugins() -> None:
    script = "import sys, titan_core; print({'torch', 'pluggy', 'titan_core.plugin', 'pydantic'}.intersection(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        titan_core.trian  # type: ignore[attr-defined]  # noqa: B018


class Vandal:
    """What plugins and torch may do to a process."""

    @hookimpl
    def titan_train_start(self) -> None:
        os.environ["LEFT_BY_A_JOB"] = "1"
        gc.freeze()
        status.hide_all()


def _state() -> tuple[Any, ...]:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)]
    loggers = [logging.root.level, list(logging.root.handlers), logging.getLogger("titan_core").level]
    generators = [random.getstate(), torch.get_rng_state().tolist()]
    process = [gc.isenabled(), gc.get_freeze_count(), sys.excepthook, list(sys.path), os.getcwd()]
    return dict(os.environ), handlers, loggers, generators, process, status._hidden, torch.distributed.is_initialized()


@pytest.mark.parametrize("fails", [False, True])
def test_the_process_is_as_before(fails: bool, in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_core.loop import training

    def train(job: Any, observers: Any) -> Any:
        return original(job, [*observers, Vandal()])

    def on_step(report: StepReport) -> None:
        if fails:
            raise KeyError("mine")

    original = training.train
    monkeypatch.setattr(training, "train", train)
    before = _state()
    overrides = {**SMALL, "training.deterministic": True}
    if fails:
        with pytest.raises(KeyError, match="mine"):
            titan_core.train("tiny", overrides, on_step=on_step)
    else:
        titan_core.train("tiny", overrides, on_step=on_step)
    assert _state() == before


@pytest.mark.full
def test_the_same_call_twice_gives_the_same_run(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = {**SMALL, "metrics.enable_console": False}
    ends = [titan_core.train("tiny", {**quiet, "job.dump_folder": in_tmp / name}) for name in ("one", "two")]
    assert capsys.readouterr().out == ""
    assert ends[0].loss == ends[1].loss is not None
    assert (ends[0].step, ends[0].completed, ends[0].dump_folder) == (2, True, str(in_tmp / "one"))
    runs = [titan_core.read_run(end.dump_folder) for end in ends]
    assert runs[0].metrics["loss"] == runs[1].metrics["loss"]
    assert [run.metrics["step"] for run in runs] == [[1, 2]] * 2
    assert runs[0].metrics["loss"][-1] == ends[0].loss
    assert [event["event"] for event in runs[0].events if event["event"] != "spent"] == ["start", "end"]


def test_a_validation_shares_the_row_of_its_step(in_tmp: Path) -> None:
    validated = {"validation.enable": True, "validation.dataset": "stdlib", "validation.steps": 1, "validation.freq": 1}
    end = titan_core.train("tiny", {**SMALL, **validated, "training.steps": 3, "metrics.log_freq": 3})
    metrics = titan_core.read_run(end.dump_folder).metrics
    assert metrics["step"] == [1, 2, 3]
    assert [loss is None for loss in metrics["loss"]] == [False, True, False]
    assert metrics["validation_loss"][-1] == end.validation_loss is not None
    assert {len(column) for column in metrics.values()} == {3}


def test_an_observer_may_not_change_a_step(in_tmp: Path) -> None:
    with pytest.raises(ValueError, match=r"on_step=.*: titan_step_end changed .*observers must leave the tensors"):
        titan_core.train("tiny", SMALL, on_step=lambda report: report.loss.zero_())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"training.steps": "3"}, 'overrides: training.steps = "3": must be a whole number'),
        ({"training.steps": 0}, "overrides: training.steps = 0: must be greater than 0"),
        ({"training.stepz": 3}, "overrides: training.stepz = 3: unknown key; did you mean 'steps'?"),
        ({"trainin.steps": 3}, "overrides: trainin.*: no installed plugin owns this section; did you mean 'training'?"),
        ({"steps": 3}, 'overrides: steps: is not the name of a key (value 3); write "section.key": value'),
        ({"parallelism.tensor_parallel_degree": 2}, "overrides: parallelism.tensor_parallel_degree = 2"),
    ],
)
def test_mistakes_are_exceptions_that_name_the_override(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        titan_core.train("tiny", overrides)
    assert "--" not in message


def test_a_process_group_of_the_caller_is_refused(in_tmp: Path) -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # public, but not exported to type checkers
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="this process: has a process group already"):
            titan_core.train("tiny", SMALL)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.quick_rows(5)
@pytest.mark.parametrize("recipe", [one.name for one in Components.from_installed().all(Recipe)])
def test_a_config_is_a_recipe(recipe: str) -> None:
    config = titan_core.load_config(recipe)
    again = titan_core.load_config(config, {"training.seed": 77})
    assert again.changed({"training.seed": config.section(TrainingSection).seed}).sections == config.sections
    assert (again.source, again.overridden) == (recipe, {"training.seed"})
    assert titan_core.load_config(again).where("training.seed") == "overrides: training.seed"


def test_a_changed_config_is_checked() -> None:
    config = titan_core.load_config("tiny", SMALL).changed({"training.steps": -3})
    with pytest.raises(UserError, match=r"overrides: training\.steps = -3: must be greater than 0"):
        titan_core.assemble(config)


def test_the_assembled_job_is_that_of_the_command_line(in_tmp: Path) -> None:
    job = titan_core.assemble(titan_core.load_config("tiny", SMALL), 2)
    text = {key: value for key, value in TINY.items() if key != "training.steps"}
    other = make_job("tiny", {**text, "training.steps": 2}, world_size=2)
    assert (job.mesh, job.batch, job.digest()) == (other.mesh, other.batch, other.digest())
