"""Derives every causal language model of the transformers library in small, and compares its logits with the library's eager
implementation, and its rotary frequencies for ways in which a ``config.json`` may state them. Writes the list of equal and
refused ones::

    uv run python -m benchmarks.hf_scan [NAME ...] [--jobs 2] [--write docs/transformers.md]

A name is a ``model_type``. Keys that let a model draw random numbers have the library's defaults; if it is refused for them,
it is compared with these at 0. Exits with 1 if one is different, or raises something else than a refusal. Takes some 15
minutes of CPU time.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import re
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch

from harness.rope_spellings import KINDS, library_config, spellings
from titan_core.api import UserError, matches
from titan_core.model.layout_check import check_layout
from titan_models_hf import layout, transformers_private as library
from titan_models_hf.config import HFArgs
from titan_models_hf.derive import derive
from titan_models_hf.formats import arguments, from_args
from titan_models_hf.library import configuration
from titan_models_hf.rearranged import rearranged_model

TOLERANCE = 1e-4
"""Of the largest logit."""
LARGEST = 60_000_000
"""Parameters of a model that is tried: more means that its config has sizes that :data:`SIZES` does not know."""
SECONDS = 120

SIZES: dict[str, Any] = {
    "vocab_size": 288, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 16, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 2, "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "sliding_window": 16, "shared_expert_intermediate_size": 32,
    "tie_word_embeddings": False, "first_k_dense_replace": 1, "n_layer": 4, "n_head": 4, "n_embd": 64, "n_positions": 256,
    "d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 256, "initializer_range": 0.15,
}  # fmt: skip
"""Values for the keys that a config has."""
_LATENT = {"num_key_value_heads": 4}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "deepseek_v2", "deepseek_v3", "dots3_note_text", "glm4_moe_lite", "minicpm3", "youtu"), _LATENT
    ),
    "modernbert-decoder": {"pad_token_id": 0},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "dots1": {"n_shared_experts": 1},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 16},
    "mamba2": {"num_heads": 8, "expand": 2},
    "zaya": {"num_experts_per_tok": 1},
    "gemma4_text": {"vocab_size_per_layer_input": 288, "hidden_size_per_layer_input": 16},
    "gemma3n_text": {"vocab_size_per_layer_input": 288, "num_kv_shared_layers": 0},
    "plbart": {"decoder_attention_heads": 4, "decoder_ffn_dim": 96, "decoder_layers": 4},
    "whisper": {"decoder_attention_heads": 4, "decoder_ffn_dim": 96, "decoder_layers": 4},
    "xlm": {"emb_dim": 64, "causal": True},
    "xlnet": {"d_head": 16},
    "longcat_flash": {"ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "zero_expert_num": 1},
}
"""Architecture -> values that its own rules need."""


class TooSlow(Exception):
    """A model took longer than :data:`SECONDS`."""


@dataclass(frozen=True)
class Row:
    """A model of the scan."""

    architecture: str
    outcome: str
    """``equal``, ``refused``, ``different``, ``not tried`` or ``crash``."""
    detail: str
    zeros: tuple[str, ...] = ()
    """Keys of random draws that are 0, and by default are not."""
    loaded: bool = False
    """Whether it trains from files only: Titan cannot draw a parameter's initial values."""
    rope: Counter[str] = field(default_factory=Counter)
    """Spellings of the rotary frequencies: read as by the library, refused, rejected by the library too, or different."""


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise :class:`TooSlow` after ``seconds``."""

    def ring(number: int, frame: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def small_args(architecture: str) -> Iterator[HFArgs]:
    """Yield arguments of small models that the config class accepts, the one with most of :data:`SIZES` first.

    Raises:
        UserError: it accepts none.
    """
    default = library.plain_config(library.configuration(architecture, {}))
    renamed = library.renamed_keys(architecture)
    written = {name for name, other in renamed.items() if other in default} | (default.keys() - set(renamed.values()))
    known = library.config_keys(architecture) & written
    own = {key: value for key, value in OWN.get(architecture, {}).items() if key in library.config_keys(architecture)}
    keys = {key: value for key, value in SIZES.items() if key in known} | own
    refused: list[UserError] = []
    accepted = False
    for without in ([], ["sliding_window"], ["head_dim"], ["head_dim", "num_key_value_heads"]):
        args = HFArgs(architecture=architecture, config={key: one for key, one in keys.items() if key not in without})
        try:
            configuration(args)
        except UserError as error:
            refused.append(error)
        else:
            accepted = True
            yield args
    if not accepted:
        raise refused[0]


def compared(args: HFArgs) -> tuple[float, bool]:
    """Return the difference of the logits of Titan's model and of the library's, as a share of the largest logit; and
    whether the model has parameters that Titan cannot draw."""
    facts = derive(args)
    described = layout.layout(args, facts)
    with torch.device("meta"):
        model: Any = layout.define(args).build()
    check_layout(model, described, args.architecture)
    torch.manual_seed(0)
    config = configuration(args)
    reference = library.build(config)
    library.use_experts(reference, library.EAGER)
    model.to_empty(device="cpu")
    weights, rows = dict(reference.named_parameters()), rearranged_model(args)[1]
    with torch.no_grad():
        for parameter in weights.values():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for name, parameter in model.named_parameters():
            of = rows.get(name)
            source = weights[name] if of is None else weights[of.parameter][of.first : of.first + of.size]
            parameter.copy_(source.view_as(parameter))
        for name, tensor in model.named_buffers():
            tensor.copy_(next(compute for pattern, compute in described.buffers.items() if matches(name, [pattern]))())
        tokens = torch.randint(3, 288, (2, 48))
        expected = reference.eval()(input_ids=tokens, use_cache=False).logits
        found = model.eval()(tokens)
        changed = model(torch.cat((tokens[:, :-1], tokens[:, -1:] % 200 + 5), dim=1))
    if not torch.allclose(changed[:, :-1], found[:, :-1], rtol=0.0, atol=TOLERANCE * float(found.abs().max())):
        raise UserError.one(args.architecture, "positions depend on later ones: it is no decoder (the trial refuses it)", "")
    loaded = any(name == "loaded" for name, _ in facts.parameters.values())
    return float((found - expected).abs().max() / expected.abs().max()), loaded


def scan(architecture: str) -> Row:
    """Try one architecture: in the largest number of small sizes that it accepts, and, if it is refused, in others."""
    first: Row | None = None
    try:
        for args in small_args(architecture):
            row = without_draws(args)
            if row.outcome in ("equal", "different", "crash"):
                return row
            first = first or row
    except Exception as error:  # noqa: BLE001 - config classes raise whatever a wrong size leads to
        return first or Row(architecture, "not tried", f"its config rejects the small sizes: {_text(error)}")
    assert first is not None, "small_args() yields or raises"
    return first


def without_draws(args: HFArgs) -> Row:
    """Compare one model; if it is refused for keys that let it draw, with these at 0."""
    zeros: list[str] = []
    row = tried(args)
    while row.outcome == "refused" and "draw random numbers" in row.detail and len(zeros) < 16:
        zeros += (found := re.findall(r"(\S+) = [\d.]+(?= and | let it draw)", row.detail))
        if not found:
            break
        args = args.model_copy(update={"config": {**args.config, **dict.fromkeys(found, 0.0)}})
        row = tried(args)
    return replace(row, zeros=tuple(zeros), rope=rotary(args) if row.outcome == "equal" else Counter())


def rotary(args: HFArgs) -> Counter[str]:
    """Count what becomes of the spellings of a family's rotary frequencies."""
    found: Counter[str] = Counter()
    if "rope_parameters" not in library.config_keys(args.architecture):
        return found
    base = from_args(args)
    for key in ("rope_parameters", "rope_theta", "partial_rotary_factor"):
        base.pop(key, None)
    files = [{**base, **keys} for kind in KINDS for keys in list(spellings(kind).values())[::19]]
    with TemporaryDirectory() as folder:
        for contents in files:
            theirs = library_config(contents, Path(folder))
            try:
                ours = configuration(arguments(contents))
            except ValueError:
                found["refused" if theirs is not None else "rejected by the library"] += 1
            else:
                found["equal" if theirs is not None and ours.rope_parameters == theirs.rope_parameters else "different"] += 1
    return found


def tried(args: HFArgs) -> Row:
    """Compare one model."""
    architecture = args.architecture
    try:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in library.build(configuration(args)).parameters())
    except Exception as error:  # noqa: BLE001 - the library raises whatever a wrong size leads to
        return Row(architecture, "not tried", f"the library rejects the small sizes: {_text(error)}")
    if size > LARGEST:
        return Row(architecture, "not tried", f"its config is not small: {size:,} parameters")
    try:
        with at_most(SECONDS):
            difference, loaded = compared(args)
    except UserError as error:
        return Row(architecture, "refused", " ".join("; ".join(problem.why for problem in error.problems).split()))
    except TooSlow:
        return Row(architecture, "not tried", f"took over {SECONDS} s")
    except Exception as error:  # noqa: BLE001 - the scan lists whatever a model raises
        return Row(architecture, "crash", f"{_text(error)}\n{traceback.format_exc()}")
    return Row(architecture, "equal" if difference <= TOLERANCE else "different", f"{difference:.0e}", loaded=loaded)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def page(rows: list[Row]) -> str:
    """Return the list as a page of the docs."""
    counts = Counter(row.outcome for row in rows)
    chosen = [row for row in rows if row.outcome == "equal"]
    equal = ", ".join(f"`{row.architecture}`" for row in chosen if not row.zeros)
    loaded = ", ".join(f"`{row.architecture}`" for row in chosen if row.loaded)
    drawing = [f"| `{row.architecture}` | {', '.join(f'`{key}`' for key in row.zeros)} |" for row in chosen if row.zeros]
    rope = sum((row.rope for row in chosen), Counter[str]())
    spelled = ", ".join(f"{number:,} {outcome}" for outcome, number in rope.most_common())
    lines = [
        "# Models of transformers",
        "",
        "Which causal language models of the library `transformers` Titan trains ([models.md](models.md)). Generated by",
        "`uv run python -m benchmarks.hf_scan --write docs/transformers.md`, which builds each in small and compares its",
        f"logits with the library's eager implementation (at most {TOLERANCE:g} of the largest logit). Do not edit.",
        "",
        f"transformers {library.VERSION}: {', '.join(f'{number} {outcome}' for outcome, number in counts.most_common())}.",
        "",
        "## Equal",
        "",
        equal,
        "",
        "## Equal with keys at 0",
        "",
        "With the library's defaults these draw random numbers in training, which is refused.",
        "",
        "| model_type | set to 0.0 |",
        "| --- | --- |",
        *drawing,
        "",
        f"From files only, because Titan does not know their initial values: {loaded}.",
        "",
        f"Spellings of rotary frequencies in files of {sum(bool(row.rope) for row in chosen)} of all these: {spelled}.",
        "",
    ]
    for outcome in ("different", "crash", "not tried", "refused"):
        if chosen := [row for row in rows if row.outcome == outcome]:
            lines += [f"## {outcome.capitalize()}", "", "| model_type | why |", "| --- | --- |"]
            lines += [
                f"| `{row.architecture}` | {row.detail.splitlines()[0].replace('|', chr(92) + '|')} |" for row in chosen
            ]
            lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the list")
    parser.add_argument("-v", "--verbose", action="store_true", help="print tracebacks")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    rows = []
    with multiprocessing.get_context("fork").Pool(arguments.jobs) as pool:
        for row in pool.imap(scan, arguments.names or library.architectures()):
            rows.append(row)
            detail = row.detail if arguments.verbose else row.detail.splitlines()[0][:200]
            zeros = f"  with 0: {', '.join(row.zeros)}" if row.zeros else ""
            print(f"{row.architecture:32} {row.outcome:10} {detail}{zeros}  {dict(row.rope) or ''}", flush=True)
    print(dict(Counter(row.outcome for row in rows)))
    if arguments.write is not None:
        arguments.write.write_text(page(rows), encoding="utf-8")
    return int(any(row.outcome in ("different", "crash") or row.rope["different"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
