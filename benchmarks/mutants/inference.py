"""Mistakes in generating and evaluating."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

SAMPLING, GENERATION, SCORING = (
    "tests/inference/test_sampling.py",
    "tests/inference/test_generation.py",
    "tests/inference/test_scoring.py",
)
TEXT, OUTPUT = "tests/inference/test_text.py", "tests/inference/test_output.py"

MUTANTS = (
    Mutant("temperature-after-truncation", "inference/sampling.py", "filtered(logits / options.temperature, options).softmax(-1)", "(filtered(logits, options) / options.temperature).softmax(-1)", (SAMPLING,)),
    Mutant("temperature-multiplies", "inference/sampling.py", "logits / options.temperature", "logits * options.temperature", (SAMPLING,)),
    Mutant("noise-of-one-sequence", "inference/sampling.py", "{self._options.seed}:{index}:{length}", "{self._options.seed}:{length}", (SAMPLING,)),
    Mutant("noise-of-one-length", "inference/sampling.py", "{self._options.seed}:{index}:{length}", "{self._options.seed}:{index}", (SAMPLING,)),
    Mutant("noise-is-uniform", "inference/sampling.py", "torch.empty(size).exponential_(generator=generator)", "torch.rand(size, generator=generator)", (SAMPLING,)),
    Mutant("noise-multiplies", "inference/sampling.py", "(probabilities / noise)", "(probabilities * noise)", (SAMPLING,)),
    Mutant("top-p-leaves-out-the-token-at-the-border", "inference/sampling.py", "ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)", "ordered.softmax(-1).cumsum(-1)", (SAMPLING,)),
    Mutant("min-p-is-absolute", "inference/sampling.py", "options.min_p * probabilities.amax(-1, keepdim=True)", "torch.tensor(options.min_p)", (SAMPLING,)),
    Mutant("padding-is-scored", "inference/answers.py", "logits[index, len(row) - 1 - count : len(row) - 1]", "logits[index, width - count : width]", (SCORING,)),
    Mutant("scores-in-the-order-of-lengths", "inference/answers.py", "scores[index] = score", "scores[first] = score", (SCORING,)),
    Mutant("any-greedy-token-will-do", "inference/answers.py", "bool(agrees.all())", "bool(agrees.any())", (SCORING,)),
    Mutant("long-rows-lose-their-end", "inference/answers.py", "[-(longest + 1) :]", "[: longest + 1]", (SCORING,)),
    Mutant("bits-are-nats", "inference/perplexity.py", "self.loss / math.log(2) / self.bytes_per_token", "self.loss / self.bytes_per_token", (SCORING,)),
    Mutant("bytes-are-characters", "inference/perplexity.py", 'len(text.encode(errors="replace"))', "len(text)", (SCORING,)),
    Mutant("replicas-count-bytes-twice", "inference/perplexity.py", 'if not world.is_first_along("weights"):', "if False:", ("tests/inference",),
           equivalent="bytes and tokens are counted equally often, and only their quotient is shown"),
    Mutant("stop-text-is-shown", "inference/output.py", "self.text[: min(places)], True", "self.text[: max(places)], True", (OUTPUT,)),
    Mutant("half-a-stop-text-is-shown", "inference/output.py", "len(text) - 1 for text in stop", "0 for text in stop", (OUTPUT,)),
    Mutant("end-token-is-kept", "inference/output.py", "            self.finish()\n            return False\n", "            self.finish()\n            self.tokens.append(token)\n            return False\n", (OUTPUT,)),
    Mutant("characters-of-three-bytes", "inference/output.py", "len(self._ids) - self._decoded < 4", "len(self._ids) - self._decoded < 3", (TEXT,)),
    Mutant("text-without-its-context", "inference/output.py", "self._context, self._decoded = self._decoded, len(self._ids)", "self._context = self._decoded = len(self._ids)", (TEXT,)),
    Mutant("prompts-end-the-document", "inference/prompts.py", "ids[: len(ids) - len(end)] if end and ids[-len(end) :] == end else ids", "ids", ("tests/inference/test_sample.py",)),
    Mutant("ids-beyond-the-tokenizer", "inference/generation.py", "logits[:, : self._vocab_size]", "logits", (GENERATION,)),
    Mutant("prefill-of-the-last-chunk", "inference/generation.py", "if first < last <= end:", "if last <= end:", (GENERATION,)),
    Mutant("positions-one-late", "inference/generation.py", "[[end - 1] for end in ends]", "[[end] for end in ends]", (GENERATION,)),
    Mutant("ended-sequences-continue", "inference/generation.py", "if index in running and not accept(index, token):", "if not accept(index, token):", (GENERATION, OUTPUT)),
    Mutant("samples-at-every-step", "inference/sample.py", "last % self._section.freq == 0", "last % self._section.freq >= 0", ("tests/inference/test_sample.py",)),
)  # fmt: skip
