"""``titan generate``. Imports torch only when a model is loaded."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from titan_core.api import ChatTokenizer, CommandContext, UserError
from titan_core.api.checkpoint.stored_model import LoadedModel
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.arguments import integer, json_argument, number
from titan_core.toolkit.files import read_text
from titan_core.toolkit.launching import RankJob
from titan_core.toolkit.status import StatusLine, phase
from titan_core.toolkit.text import print_json
from titan_inference.prompts import encode_prompt

MOST_TOKENS = 2**20


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan generate``."""
    model_argument(parser)
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="text to continue; may be repeated (default: none)"
    )
    parser.add_argument("--prompts", metavar="FILE", help="a file with one prompt a line; - is standard input")
    parser.add_argument("--chat", action="store_true", help="render each prompt as a user's message by the chat template")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: a system message before each prompt")
    parser.add_argument(
        "--max-new-tokens", type=integer(1, MOST_TOKENS), default=128, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--temperature", type=number("a temperature", 0.0, 100.0), default=1.0, metavar="T",
        help="0 always takes the most likely token (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--top-k",
        type=integer(0, MOST_TOKENS),
        default=0,
        metavar="K",
        help="draw from the K most likely tokens; 0: from all",
    )
    parser.add_argument(
        "--top-p", type=number("a probability", 0.0, 1.0), default=1.0, metavar="P",
        help="draw from the fewest tokens whose probabilities sum to P",
    )  # fmt: skip
    parser.add_argument(
        "--min-p", type=number("a probability", 0.0, 1.0), default=0.0, metavar="P",
        help="draw from tokens with at least P times the probability of the most likely one",
    )  # fmt: skip
    parser.add_argument("--seed", type=integer(0, 2**63 - 1), default=0, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT",
        help="end at this text; may be repeated. The tokenizer's end of text always ends",
    )  # fmt: skip
    parser.add_argument("--ignore-end", action="store_true", help="continue past the end of text")
    parser.add_argument("--no-cache", action="store_true", help="compute the whole sequence for every token")
    json_argument(parser)


def model_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a stored model."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run's directory, a checkpoint, a folder of Hugging Face or Meta weights, or the name of a downloaded model",
    )


def run(context: CommandContext) -> int:
    """Generate a continuation of each prompt."""
    settings = context.arguments
    texts = _prompts(settings)
    stored = context.models.find(settings.model)
    assemble = partial(context.models.job, stored)
    if settings.launcher is not None:
        status: int = settings.launcher.run.load()(context, RankJob(assemble, writes_run=False))
        return status
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    job = assemble(world_size)
    prompts = [_encoded(job, text, settings) for text in texts]
    _require_room(job, prompts, settings)
    with context.models.open(job, stored) as loaded:
        return _generate(loaded, prompts, stored.end_ids, settings)


def _prompts(settings: argparse.Namespace) -> list[str]:
    """
    Raises:
        UserError: the file cannot be read, or there is no prompt.
    """
    texts: list[str] = list(settings.prompt)
    if settings.prompts is not None:
        try:
            content = sys.stdin.read() if settings.prompts == "-" else read_text(settings.prompts)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError.one(
                f"--prompts {settings.prompts}", f"cannot be read: {reason}", "give a UTF-8 text file"
            ) from None
        texts += [line for line in content.splitlines() if line.strip()]
    if settings.system is not None and not settings.chat:
        raise UserError.one("--system", "is for chats", "add --chat")
    if "" in settings.stop:
        raise UserError.one(
            "--stop", "is empty, and every text contains the empty one", "name the text to end at, or drop it"
        )
    if settings.chat and not texts:
        raise UserError.one("--chat", "needs a message", "add --prompt TEXT")
    return texts or [""]


def _encoded(job: AssembledJob, text: str, settings: argparse.Namespace) -> list[int]:
    """The ids of a prompt, from the begin of a document; not its end, where the model continues."""
    tokenizer = job.text_tokenizer
    if settings.chat:
        return _encoded_chat(job, text, settings.system)
    ids = encode_prompt(tokenizer, text)
    if not ids:
        raise UserError.one("--prompt", "encodes to zero tokens", "give a longer prompt")
    return ids


def _encoded_chat(job: AssembledJob, text: str, system: str | None) -> list[int]:
    tokenizer = job.text_tokenizer
    if not isinstance(tokenizer, ChatTokenizer):
        why = f"tokenizer {job.tokenizer.name!r} has no chat template"
        raise UserError.one("--chat", why, "use a model whose folder has one, or drop --chat")
    messages = [{"role": "system", "content": system}] if system is not None else []
    chat = tokenizer.render_chat([*messages, {"role": "user", "content": text}], add_generation_prompt=True)
    return tokenizer.encode_with_special_tokens(chat.text)


def _require_room(job: AssembledJob, prompts: Sequence[Sequence[int]], settings: argparse.Namespace) -> None:
    """
    Raises:
        UserError: a prompt and its continuation exceed the model's longest context.
    """
    longest, most = max(map(len, prompts)), job.model.layout.max_seq_len
    if longest + settings.max_new_tokens > most:
        total = f"a prompt of {longest} tokens and {settings.max_new_tokens} new ones"
        room = most - longest
        fix = f"set --max-new-tokens to at most {room}" if room > 0 else "shorten the prompt"
        raise UserError.one("--max-new-tokens", f"{total} exceed the model's longest context of {most}", fix)


def _generate(loaded: LoadedModel, prompts: list[list[int]], end_ids: Sequence[int], settings: argparse.Namespace) -> int:
    from titan_inference.generation import Generator
    from titan_inference.output import Continuation, Stream
    from titan_inference.sampling import Sampler, SamplingOptions

    world, tokenizer = loaded.world, loaded.job.text_tokenizer
    sampler = Sampler(SamplingOptions(settings.temperature, settings.top_k, settings.top_p, settings.min_p, settings.seed))
    turn_ends = tokenizer.turn_end_ids if settings.chat and isinstance(tokenizer, ChatTokenizer) else ()
    ends = set() if settings.ignore_end else {*end_ids, *tokenizer.end_ids, *turn_ends}
    if world.rank > 0:
        logging.getLogger("titan_inference").setLevel(logging.ERROR)  # rank 0 warns for all
    results = [Continuation(tokenizer, ends, settings.stop) for _ in prompts]
    stream = Stream(results) if world.rank == 0 and not settings.json else None
    generator = Generator(loaded.part, world.device, tokenizer.vocab_size, world.broadcast, use_cache=not settings.no_cache)
    steps = generator.generate(prompts, sampler, settings.max_new_tokens, lambda index, token: results[index].add(token))
    # A single text shows the progress itself; otherwise a line counts the tokens.
    counts = world.rank == 0 and (settings.json or len(prompts) > 1)
    with (
        StatusLine() if counts else nullcontext(),
        phase("generating", lambda: f"{sum(len(one.tokens) for one in results)} tokens"),
    ):
        for _ in steps:
            if stream is not None:
                stream.show()
    if world.rank != 0:
        return 0
    if stream is not None:
        stream.close()
        return 0
    for result in results:
        result.finish()
    answers = [{"text": result.text, "tokens": result.tokens} for result in results]
    print_json(answers[0] if len(answers) == 1 else answers)
    return 0
