"""Mistakes in the optimizers of titan-optim."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

MUON_TESTS, BF16_TESTS = "tests/optim/test_muon.py", "tests/optim/test_adamw_bf16.py"
MUON, MATRICES, EXCHANGE, NEWTON_SCHULZ = (f"optim/{name}.py" for name in ("muon", "matrices", "exchange", "newton_schulz"))

AVERAGES_TESTS = "tests/optim/test_averages.py"
AVERAGES = "optim/averages.py"

MUTANTS = (
    Mutant("averages-begin-at-zero", AVERAGES, "torch.where(states > 1, 1 - self._section.decay, 1.0)", "1 - self._section.decay * states.new_ones(())", (AVERAGES_TESTS,)),
    Mutant("averages-of-every-step", AVERAGES, " or after % self._section.freq", "", (AVERAGES_TESTS,)),
    Mutant("averages-of-skipped-steps", AVERAGES, "torch.as_tensor(~report.skipped if isinstance(report.skipped, Tensor) else True, device=self._states.device)", "torch.as_tensor(True, device=self._states.device)", (AVERAGES_TESTS,)),
    Mutant("averages-in-narrow-types", AVERAGES, "torch.promote_types(tensor.dtype, torch.float32)", "tensor.dtype", (AVERAGES_TESTS,)),
    Mutant("averages-without-buffers", AVERAGES, "if name in kept and one.is_floating_point()", "if False", (AVERAGES_TESTS,)),
    Mutant("averages-stay-in-the-model", AVERAGES, "            self._replace(kept)\n", "            pass\n", (AVERAGES_TESTS,)),
    Mutant("averages-with-outdated-scales", AVERAGES, "                recompute()\n", "                pass\n", (AVERAGES_TESTS,)),
    Mutant("averages-of-nothing-validated", AVERAGES, " or not self._states.item()", "", (AVERAGES_TESTS,)),
    Mutant("muon-patterns-unchecked", MATRICES, "if not any(matches(name, [pattern]) for name in names):", "if False:", (MUON_TESTS,)),
    Mutant("muon-no-nesterov", MUON, "if self._section.nesterov:", "if False:", (MUON_TESTS,)),
    Mutant("muon-skipped-gradient-kept", MUON, "if self._skip is None else torch.where(self._skip, momentum, gradient)", "", (MUON_TESTS,)),
    Mutant("muon-decay-forgotten", MUON, "parameter.mul_(1 - lr * weight_decay).add_(", "parameter.add_(", (MUON_TESTS,)),
    Mutant("muon-plan-kept-without-a-gradient", MUON, "[*map(id, self._planned[0])] != [*map(id, trained)]", "False", (MUON_TESTS,)),
    Mutant("muon-stack-as-one-matrix", NEWTON_SCHULZ, "x.norm(dim=(1, 2), keepdim=True)", "x.norm()", (MUON_TESTS,)),
    Mutant("muon-tall-not-transposed-back", NEWTON_SCHULZ, "return x if wide else x.mT", "return x.reshape(matrices.shape)", (MUON_TESTS,)),
    Mutant("muon-parts-scaled-alike", NEWTON_SCHULZ, " * (scale / max(scales))", "", (MUON_TESTS,)),
    Mutant("muon-fused-as-one", NEWTON_SCHULZ, "if len(parts) == 1:", "if True:", (MUON_TESTS,)),
    Mutant("muon-strided-shards-joined-last", EXCHANGE, "return [*replicas, *strided, *reversed(plain)]", "return [*replicas, *reversed(plain), *strided]", (MUON_TESTS,)),
    Mutant("muon-shards-joined-outermost-first", EXCHANGE, "*reversed(plain)]", "*plain]", (MUON_TESTS,)),
    Mutant("muon-one-owner-of-all", EXCHANGE, "heapq.heappush(loads, (load + _cost(matrices), owner))", "heapq.heappush(loads, (load, owner))", (MUON_TESTS,)),
    Mutant("muon-experts-exchanged", EXCHANGE, "        if dim == matrices.stack:\n            continue\n", "", (MUON_TESTS,)),
    Mutant("bf16-state-rounded-to-nearest", "optim/adamw_bf16.py", "((values.view(torch.int32) + bits) & -0x10000)", "(values.view(torch.int32) + 0 * bits)", (BF16_TESTS,)),
    Mutant("bf16-state-cut-off", "optim/adamw_bf16.py", "(values.view(torch.int32) + bits)", "values.view(torch.int32)", (BF16_TESTS,)),
    Mutant("bf16-bits-of-local-rows", "optim/adamw_bf16.py", "torch.arange(first, first + size, device=shard.device)", "torch.arange(size, device=shard.device)", (BF16_TESTS,)),
    Mutant("bf16-bits-of-local-columns", "optim/adamw_bf16.py", "return global_offset(parameter)[-1] if", "return 0 if", (BF16_TESTS,)),
    Mutant("bf16-same-bits-in-each-step", "optim/adamw_bf16.py", " ^ step.to(torch.int64)", "", (BF16_TESTS,)),
    Mutant("bf16-skipped-step-counted", "optim/adamw_bf16.py", "if self._skip is None else (~self._skip).to(state[\"step\"])", "", (BF16_TESTS,)),
)  # fmt: skip
