"""Mistakes in the optimizers of titan-optim."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

MUON_TESTS = "tests/optim/test_muon.py"
MUON, MATRICES, EXCHANGE, NEWTON_SCHULZ = (f"optim/{name}.py" for name in ("muon", "matrices", "exchange", "newton_schulz"))

MUTANTS = (
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
)  # fmt: skip
