"""A loaded model behind the interface of EleutherAI's ``lm-eval``. Needs the extra ``lm-eval``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from titan_core.api import TextTokenizer
from titan_inference.answers import Answers
from titan_inference.prompts import encode_prompt
from titan_inference.sampling import SamplingOptions

_MOST_NEW_TOKENS = 256
"""Of tasks that set no limit, as in lm-eval's own models."""


class TitanLM(TemplateLM):  # type: ignore[misc] # lm-eval has no types
    """Asks a model the requests of a task."""

    def __init__(self, answers: Answers, tokenizer: TextTokenizer, batch_size: int) -> None:
        super().__init__()
        self._answers, self._tokenizer, self._batch_size = answers, tokenizer, batch_size
        self._begin_ids = tokenizer.begin_ids

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text. A model that has none is given its first begin token, or 0."""
        return min(self._answers.end_ids, default=self._begin_ids[0] if self._begin_ids else 0)

    @property
    def prefix_token_id(self) -> int:
        """The context of a continuation that has none."""
        return self._begin_ids[0] if self._begin_ids else self.eot_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of ``string``, after the begin token unless ``add_special_tokens`` is false."""
        ids = encode_prompt(self._tokenizer, string)
        return ids[len(self._begin_ids) :] if add_special_tokens is False else ids

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        return self._answers.score([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, each token predicted once."""
        longest = self._answers.longest
        pairs: list[tuple[list[int], list[int]]] = []
        counts = []
        for request in requests:
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(
                token_list=ids, prefix_token=self.prefix_token_id, max_seq_len=longest, context_len=1
            )
            found = [make_disjoint_window(window) for window in windows]
            pairs += found
            counts.append(len(found))
        scores = iter(self._answers.score(pairs))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, up to one of its stop texts."""
        return [
            text
            for first in range(0, len(requests), self._batch_size)
            for text in self._generated(requests[first : first + self._batch_size])
        ]

    def _generated(self, requests: Sequence[Instance]) -> list[str]:
        settings = dict(requests[0].args[1])
        if any(request.args[1] != settings for request in requests):  # tasks use one setting for all documents
            return [text for request in requests for text in self._generated([request])]
        stop = settings.get("until") or []
        stop = [stop] if isinstance(stop, str) else list(stop)
        new_tokens = int(settings.get("max_gen_toks", _MOST_NEW_TOKENS))
        sampled = bool(settings.get("do_sample", False))
        options = SamplingOptions(
            temperature=float(settings.get("temperature", 1.0)) if sampled else 0.0, top_p=float(settings.get("top_p", 1.0))
        )
        room = max(1, self._answers.longest - new_tokens)
        prompts = [self.tok_encode(request.args[0])[-room:] for request in requests]
        return self._answers.generate(prompts, options, new_tokens, stop)
