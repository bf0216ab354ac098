"""Mistakes in low precision."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

NUMERICS, RANKS, PLUGIN, TRAINING = (
    "tests/float8/test_numerics.py",
    "tests/float8/test_scales_over_ranks.py",
    "tests/float8/test_conversion.py",
    "tests/float8/test_training.py",
)
EXPERTS, PRODUCTS = "tests/float8/test_experts.py", "tests/float8/test_grouped.py"
GROUPED, GROUPED_FLOAT8, GROUPED_MX = "float8/grouped.py", "float8/float8.py", "float8/grouped_mx.py"
NVFP4, FOUR_BITS = "float8/nvfp4.py", "tests/float8/test_nvfp4.py"
FLOAT8, MX, SCALES = "float8/float8.py", "float8/mx.py", "float8/tensor_parallel.py"

MUTANTS = (
    Mutant("scale-of-one-rank", SCALES, "reduce_amax=ranks is not None", "reduce_amax=False", (RANKS,)),
    Mutant("rows-scale-as-columns", SCALES, "None if by_output else ranks)", "ranks if by_output else None)", (RANKS,)),
    Mutant("gradients-scale-alone", SCALES, "ranks if by_output else None\n", "None\n", (RANKS,)),
    Mutant("head-is-not-a-column", SCALES, " or name == part.layout.head[-1]", "", (RANKS,)),
    Mutant("bias-dropped", SCALES, "return output if self.bias is None else output + self.bias.to(output.dtype)", "return output", (RANKS,)),
    Mutant("weight-gradient-of-the-transpose", SCALES, "torch.mm(low.t(), low_input.reshape(-1, hidden.shape[-1]))", "torch.mm(low_input.reshape(-1, hidden.shape[-1]).t(), low).t()", (RANKS,),
           equivalent="the same product"),
    Mutant("head-converted-unasked", "float8/layers.py", "head = () if convert_head else layout.head[-1:]", "head = ()", (PLUGIN,)),
    Mutant("sizes-of-one-dimension", "float8/layers.py", "all(size % multiple == 0 for size", "any(size % multiple == 0 for size", (PLUGIN,)),
    Mutant("filters-that-match-nothing", "float8/layers.py", "            raise UserError.one(f\"{section}.filter_fqns", "            return UserError.one(f\"{section}.filter_fqns", (PLUGIN,)),
    Mutant("filters-by-pattern-alone", "float8/layers.py", "any(text in name for text in filters) or matches", "matches", (PLUGIN,)),
    Mutant("filters-by-part-alone", "float8/layers.py", " or matches(name, filters)", "", (PLUGIN,)),
    Mutant("nothing-converted-is-fine", "float8/layers.py", "if not found and part.blocks():", "if False:", (PLUGIN,)),
    Mutant("auto-filter-ignored", FLOAT8, "if AUTO_FILTER in section.filter_fqns:", "if False:", (PLUGIN,)),
    Mutant("scales-of-the-first-step", FLOAT8, '        """Compute the scales for the next step."""\n        self._compute()\n', '        """Compute the scales for the next step."""\n', (PLUGIN,)),
    Mutant("emulation-by-itself", FLOAT8, "emulate=section.emulate,", "emulate=True,", (PLUGIN, NUMERICS)),
    Mutant("gather-in-high-precision", FLOAT8, "enable_fsdp_float8_all_gather=gather)", "enable_fsdp_float8_all_gather=False)", (PLUGIN, TRAINING)),
    Mutant("scales-recomputed", FLOAT8, "    part.saved_operators += _LARGEST\n", "", (PLUGIN, TRAINING)),
    Mutant("flops-of-two-matmuls", FLOAT8, "1 - _HIGH_PRECISION_SHARE[section.recipe_name]", "_HIGH_PRECISION_SHARE[section.recipe_name]", (PLUGIN, NUMERICS)),
    Mutant("blocks-cut-by-ranks", MX, "BLOCK * context.job.mesh.degree(\"tp\")", "BLOCK", (PLUGIN, TRAINING)),
    Mutant("floor-for-rceil", MX, "ScaleCalculationMode.FLOOR if floor else ScaleCalculationMode.RCEIL", "ScaleCalculationMode.FLOOR", (NUMERICS,)),
    Mutant("weight-gradients-in-low-precision", "float8/layers.py", 'converted.weight_gradient_in_high_precision = section.recipe_name.endswith("wgrad_with_hp")', "converted.weight_gradient_in_high_precision = False", (NUMERICS,)),
    Mutant("any-gpu-has-float8", "float8/hardware.py", "capability < needed:", "capability > needed:", (PLUGIN, "tests/float8")),
    Mutant("some-columns-suffice", "float8/tensor_parallel.py", "all(name in converted for name in columns)", "any(name in converted for name in columns)", (PLUGIN,)),
    Mutant("float8-tried-unasked-beside-mx", "float8/config.py", "{} if context.config.section(MXSection).enable else", "{} if not context.config.section(MXSection).enable else", (PLUGIN,)),
    Mutant("nvfp4-scale-of-any-size", NVFP4, "whole = _next_power_of_two(per_tensor_amax_to_scale(largest.amax()).clamp(min=_LEAST))", "whole = per_tensor_amax_to_scale(largest.amax()).clamp(min=_LEAST)", (FOUR_BITS,)),
    Mutant("nvfp4-scale-rounded-down", NVFP4, "number.view(torch.int32) + 0x7FFFFF", "number.view(torch.int32)", (FOUR_BITS,)),
    Mutant("nvfp4-rounds-down-stochastically", NVFP4, "(bits.float() + 0.5) * 2.0**-15", "0.0 * bits", (FOUR_BITS,)),
    Mutant("nvfp4-steps-of-the-smallest-numbers", NVFP4, "torch.where(size < 4.0, 1.0, 2.0)", "1.0", (FOUR_BITS,)),
    Mutant("nvfp4-square-blocks-of-rows", NVFP4, "amax((1, 3))", "amax((1, 3)).amax(1, keepdim=True).expand(-1, blocks.shape[2])", (FOUR_BITS,)),
    Mutant("nvfp4-transform-of-one-factor", NVFP4, "rows = quantize(spread(hidden", "rows = quantize((lambda one: _filled(one).flatten(0, 1).mT)(hidden", (FOUR_BITS,)),
    Mutant("nvfp4-kernel-gets-plain-scales", NVFP4, "to_blocked(scales).view(self.scales.dtype)", "scales.flatten().view(self.scales.dtype)", (FOUR_BITS,)),
    Mutant("nvfp4-blocks-cut-by-rings", "float8/checks.py", "seq_len) % (32 * ranks)", "seq_len) % 16", (FOUR_BITS,)),
    Mutant("experts-weight-gradient-of-rounded-rows", GROUPED, "grouped_weight_gradient(gradient, rows, counts) if", "grouped_weight_gradient(gradient, rows.to(torch.float8_e4m3fn).to(rows.dtype), counts) if", (PRODUCTS,)),
    Mutant("experts-filled-to-multiples-of-8", GROUPED, "multiple * multiple\n        ends", "8 * 8\n        ends", (PRODUCTS,)),
    Mutant("experts-places-without-fillers", GROUPED, "places_end - filled - ends + counts", "places_end - filled", (PRODUCTS,)),
    Mutant("experts-rows-of-none-among-the-last", GROUPED, "right=True)]", "right=False)]", (PRODUCTS,)),
    Mutant("experts-too-few-places", GROUPED, "rows + (multiple - 1) * counts.shape[0]", "rows", (PRODUCTS,)),
    Mutant("experts-results-of-rows-of-none", GROUPED, "return mask_rows(result, counts) if masked else result", "return result", (PRODUCTS,)),
    Mutant("experts-scales-of-the-whole-tensor", GROUPED_FLOAT8, "scaling_granularity=ScalingGranularity.AXISWISE", "scaling_granularity=ScalingGranularity.TENSORWISE", (PRODUCTS,)),
    Mutant("experts-scales-for-the-kernel-inverted", GROUPED_FLOAT8, "weight_scales.squeeze(-1).reciprocal()", "weight_scales.squeeze(-1)", (PRODUCTS,)),
    Mutant("experts-blocks-scaled-down", GROUPED_MX, "ScaleCalculationMode.RCEIL)", "ScaleCalculationMode.FLOOR)", (PRODUCTS,)),
    Mutant("experts-blocks-of-64", GROUPED_MX, "BLOCK = 32", "BLOCK = 64", (PRODUCTS,)),
    Mutant("experts-scales-not-in-tiles", GROUPED_MX, "to_blocked(scales).view(_E8M0)", "to_blocked(scales).sort().values.view(_E8M0)", (PRODUCTS,)),
    Mutant("experts-tiles-over-two-experts", GROUPED_MX, "FilledRows(counts, rows.shape[0], ROWS)", "FilledRows(counts, rows.shape[0], BLOCK)", (PRODUCTS,)),
    Mutant("experts-scales-of-weights-not-filled", GROUPED_MX, "-scales.shape[1] % ROWS", "ROWS", (PRODUCTS,)),
    Mutant("experts-blocks-cut-by-ranks", "float8/experts.py", "(ranks if dim == shared else 1)", "1", (EXPERTS,)),
    Mutant("experts-of-mx-on-one-rank", MX, "MXGroupedLinear, degree)", "MXGroupedLinear, 1)", (EXPERTS,)),
    Mutant("experts-with-rounded-weight-gradients", "float8/checks.py", 'if section.recipe_name != "mxfp8_rceil_wgrad_with_hp":', "if False:", (EXPERTS,)),
    Mutant("experts-on-any-blackwell", "float8/hardware.py", "capability[0] != grouped", "capability[0] < grouped", (EXPERTS,)),
    Mutant("experts-mx-flops-of-three-products", MX, "share = 2 / 3 if", "share = 1.0 if", (EXPERTS,)),
    Mutant("experts-that-compute-themselves-are-skipped", "float8/experts.py", "    if not products:\n", "    if False:\n", (EXPERTS,)),
    Mutant("experts-flops-of-all-experts", "float8/experts.py", " * router.per_token / router.experts", "", (EXPERTS,)),
    Mutant("experts-divided-by-tensor-parallelism", "float8/checks.py", "if inside and job.mesh", "if False and job.mesh", (EXPERTS,)),
)  # fmt: skip
