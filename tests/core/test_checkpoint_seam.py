"""The checkpoint interface: a store of 30 lines can resume a run, and a job without a store reports it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from harness.distributions import write_distribution
from titan_core.api import hookimpl
from titan_core.toolkit.errors import PluginFailure
from titan_testing.jobs import TINY, run_recipe

TOY_CHECKPOINT = '''
import torch
from typing import ClassVar
from titan_core.api import Checkpoint, Ref, Section, UserError, hookimpl

api = (1, 0)

class ToySection(Section):
    section: ClassVar[str] = "toy_checkpoint"
    path: str = ""
    """Folder of the checkpoints."""
    stop: int = 0
    """Step after which the run fails."""

class Store:
    def __init__(self, context):
        self.context, self.section, self.newest = context, context.section, None
    def restore(self):
        import os
        if not os.path.exists(self.section.path):
            return False
        state, kept = self.context.state, torch.load(self.section.path, weights_only=False)
        state.parts[0].module.load_state_dict(kept["model"])
        state.optimizer.load_state_dict(kept["optimizer"])
        state.lr_scheduler.load_state_dict(kept["lr_scheduler"])
        state.loader.load_state_dict(kept["data"])
        state.step, state.tokens_seen = kept["step"], kept["tokens_seen"]
        self.context.lifecycle.restore_state(kept["observers"])
        self.newest = state.step, self.section.path
        return True
    def before_update(self):
        pass
    def after_step(self, last, requested):
        state = self.context.state
        torch.save(dict(model=state.parts[0].module.state_dict(), optimizer=state.optimizer.state_dict(),
            lr_scheduler=state.lr_scheduler.state_dict(), data=state.loader.state_dict(), step=state.step,
            tokens_seen=state.tokens_seen, observers=self.context.lifecycle.save_state()), self.section.path)
        self.newest = state.step, self.section.path
        self.context.lifecycle.checkpoint_saved(state.step, self.section.path)
        if state.step == self.section.stop:
            raise RuntimeError("power cut")
    def close(self):
        pass

@hookimpl
def titan_checkpoints():
    return [Checkpoint(name="toy", summary="", config=ToySection, build=Ref("toy_checkpoint:Store"),
        active=lambda context: bool(context.section.path))]
'''


def test_a_checkpoint_plugin_resumes_bit_for_bit(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(in_tmp / "site", "toy-checkpoint", TOY_CHECKPOINT)
    monkeypatch.syspath_prepend(str(in_tmp / "site"))
    monkeypatch.delitem(sys.modules, "toy_checkpoint", raising=False)
    whole = run_recipe("tiny", {**TINY, "training.steps": 6}, weights=True)
    resumable = {**TINY, "training.steps": 6, "toy_checkpoint.path": "kept.pt", "job.dump_folder": "resumed"}
    with pytest.raises(PluginFailure, match="power cut"):
        run_recipe("tiny", {**resumable, "toy_checkpoint.stop": 3})
    record = run_recipe("tiny", resumable, weights=True)
    assert record.losses == whole.losses[3:]
    assert all(torch.equal(record.final[name], tensor) for name, tensor in whole.final.items())
    steps = [json.loads(line)["step"] for line in (in_tmp / "resumed/metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 4, 6]  # one file per run, although the run was started twice


def test_a_checkpoint_request_without_a_checkpoint_plugin_is_reported(
    in_tmp: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Signals:
        @hookimpl
        def titan_step_start(self, step: int) -> None:
            if step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)

    assert len(run_recipe("tiny", TINY, observers=[Signals()]).losses) == 4
    assert "SIGUSR1 requested a checkpoint, but this job does not save checkpoints" in caplog.text
