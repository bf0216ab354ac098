"""Mistakes in what is derived from models of transformers, and in the mixers that it uses."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

MESHES = "tests/integration/test_hf_families.py::test_equals_the_library"
SCALED, WINDOW, SINKS, CAPPED = (
    f"{MESHES}[{row}]" for row in ("granite-tp2-False", "gemma3-cp2-True", "gpt_oss-tp2-False", "gemma2-pp2-False")
)
REFUSALS = "tests/models_hf/test_refusals.py"
FORMATS = "tests/models_hf/test_formats.py"
UNBIASED = "tests/integration/test_hf_routers.py::test_a_family_without_a_bias_in_its_files_is_refused"
EXPERTS, ROUTERS = "tests/models_hf/test_experts.py", "tests/models_hf/test_routers.py"
RECURRENCES = "tests/models_hf/test_recurrences.py"
OPTIONS = "tests/core/test_attention_options.py"
PARTS = "tests/parallel/test_attention.py"

TRACE, LAYOUT, MODEL, MIXERS = (f"models-hf/{name}.py" for name in ("trace", "layout", "model", "mixers"))
FAMILY, RULES, DERIVE, INITIAL, BUFFERS = (
    f"models-hf/{name}.py" for name in ("families", "rules", "derive", "initial", "buffers")
)
REARRANGED, ARRANGEMENT, FUSED = (f"models-hf/{name}.py" for name in ("rearranged", "arrangement", "fused"))
RECURRENCE, CONVOLUTION = (f"models-hf/recurrent/{name}.py" for name in ("linear_recurrence", "convolution"))
DENSE, DECODING, WINDOWS = "core/api/model/dense_attention.py", "core/api/model/decoding.py", "parallel/window_attention.py"

MUTANTS = (
    Mutant("hf-window-lost-in-the-mask", TRACE, "(window is None or query - key < window)) for query", "True) for query", (REFUSALS,)),
    Mutant("hf-mask-not-compared", TRACE, "if not (mask or Mask(None)).is_causal(window):", "if False:", (REFUSALS,)),
    Mutant("hf-keywords-not-compared", TRACE, "if strange := mixers.unknown(keywords):", "if strange := ():", (REFUSALS,)),
    Mutant("hf-dropout-accepted", TRACE, 'if keywords.get("dropout"):', "if False:", (REFUSALS,)),
    Mutant("hf-longrope-by-rank", TRACE, 'in ("dynamic", "longrope")', 'in ("dynamic",)', (REFUSALS,)),
    Mutant("hf-routers-loss-ignored", TRACE, 'getattr(model.config, "output_router_logits", False)', "False", (REFUSALS,)),
    Mutant("hf-scale-ignored", TRACE, "scale=None if scale is None or scale == width**-0.5 else float(scale)", "scale=None", (SCALED,)),
    Mutant("hf-window-one-longer", TRACE, "window=window,", "window=window and window + 1,", (WINDOW,)),
    Mutant("hf-sinks-not-sharded", RULES, 'name: "shard 0" for name in rules if name == f"{region}.sinks"', 'name: "replicate" for name in rules if name == f"{region}.sinks"', (SINKS,)),
    Mutant("hf-call-not-compared", MIXERS, "if found != module.titan_call or", "if", (REFUSALS,)),
    Mutant("hf-documents-dropped", MODEL, '{} if documents is None else {"documents": documents}', "{}", (WINDOW,)),
    Mutant("hf-embedding-not-scaled", FAMILY, "        _append(model.get_input_embeddings(), Multiply(base.embedding_multiplier))\n        base.embedding_multiplier = 1.0\n        _append(head, Divide", "        base.embedding_multiplier = 1.0\n        _append(head, Divide", (SCALED,)),
    Mutant("hf-logits-scaled-twice", FAMILY, "        config.logits_scaling = 1.0\n    if architecture == \"hyperclovax\"", "    if architecture == \"hyperclovax\"", (SCALED,)),
    Mutant("hf-cap-is-a-clamp", FAMILY, "torch.tanh(x / self.factor) * self.factor", "x.clamp(-self.factor, self.factor)", (CAPPED,)),
    Mutant("hf-fused-rows-overlap", FUSED, "        first += count\n", "", (FORMATS,)),
    Mutant("hf-unrecorded-draw", INITIAL, " and value == second.get(name)}", "}", ("tests/models_hf/test_initial.py",)),
    Mutant("hf-operands-swapped", "models-hf/programs.py", "*(reversed(operands) if flipped else operands)", "*operands", ("tests/models_hf/test_initial.py",)),
    Mutant("hf-stale-step", "models-hf/programs.py", "if version == version_of(tensor):", "if version is not None:", ("tests/models_hf/test_initial.py",)),
    Mutant("hf-rates-not-read", "models-hf/random_keys.py", "(rate and other.numbers != found.numbers)", "False", (REFUSALS,)),
    Mutant("hf-experts-not-compared", "models-hf/reference.py", "            compute_by_library(module)\n", "            pass\n", (REFUSALS,)),
    Mutant("hf-bias-of-no-expert", "models-hf/experts.py", "(0, 0, 0, 1))[experts]", "(0, 0, 0, 1))[experts.clamp(max=len(counts) - 1)]", (EXPERTS,)),
    Mutant("hf-any-router-is-a-softmax", "models-hf/routers.py", " and torch.allclose(factors, factors[:, :1], rtol=1e-4)", "", (ROUTERS,)),
    Mutant("hf-loss-of-the-logits-lost", "models-hf/routers.py", "if returned is not logits:", "if False:", (ROUTERS,)),
    Mutant("hf-scores-of-other-logits", "models-hf/routers.py", "_SCORES[scores](returned)", "_SCORES[scores](returned * 2)", (ROUTERS,)),
    Mutant("hf-any-buffer-is-a-bias", "models-hf/routers.py", "found += [name] if same else []", "found += [name]", (ROUTERS,)),
    Mutant("hf-bias-of-the-logits", "models-hf/routers.py", " and torch.equal(after, logits)", "", (ROUTERS,)),
    Mutant("hf-bias-of-the-weights", "models-hf/routers.py", "same &= scores_of(router, hidden) == scores", "pass", (ROUTERS,)),
    Mutant("hf-bias-not-saved", "models-hf/routers.py", "if name in kept and bias.shape", "if bias.shape", (ROUTERS,)),
    Mutant("hf-bias-not-in-the-layout", LAYOUT, "per_token=one.per_token, bias=one.bias)", "per_token=one.per_token)", (UNBIASED,)),
    Mutant("hf-experts-not-transposed", "models-hf/experts.py", "weight.mT if module.is_transposed else weight", "weight", (EXPERTS,)),
    Mutant("cap-after-the-mask", DENSE, "        scores = softcap * torch.tanh(scores / softcap)\n    scores = scores.masked_fill(~seen.unsqueeze(2), -torch.inf)\n", "        scores = softcap * torch.tanh(scores.masked_fill(~seen.unsqueeze(2), -torch.inf) / softcap)\n", (OPTIONS,)),
    Mutant("window-lost-in-the-cache", DECODING, "seen = ((distance >= 0) & (distance < window) & ", "seen = ((distance >= 0) & ", (OPTIONS,)),
    Mutant("states-not-passed", RECURRENCE, "            state = added + factor @ state\n", "            state = added\n", (RECURRENCES,)),
    Mutant("state-of-another-document", RECURRENCE, "since_start * ids.continue_state", "since_start", (RECURRENCES,)),
    Mutant("padding-decays-the-state", RECURRENCE, "        log_decay = log_decay.masked_fill(~real, 0.0)\n", "", (RECURRENCES,)),
    Mutant("convolution-of-the-own-chunk", CONVOLUTION, "before = ends[:, index * held : index * held + reach]", "before = torch.zeros_like(ends[:, index * held : index * held + reach])", (RECURRENCES,)),
    Mutant("convolution-keeps-padding", CONVOLUTION, "last = real.sum(dim=1, keepdim=True) + ", "last = real.shape[1] + 0 * real.sum(dim=1, keepdim=True) + ", (RECURRENCES,)),
)  # fmt: skip
