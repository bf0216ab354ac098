"""A tokenizer trained here works from training to generation, and in transformers."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.contexts import tokenizer_at
from titan_core.api import Tokenizer, TokenizerContext, UserError
from titan_core.cli.main import main
from titan_core.plugins.registry import Components
from titan_data.tokenizers.hugging_face import build as build_hf
from titan_testing.jobs import TINY, run_recipe

DOCS = Path(__file__).parents[2] / "docs"
CODE = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
EMOJI = "🙂🚀👩‍🚀🏳️‍🌈🇫🇷👍🏽❤️‍🔥①½Ⅷ"
SCRIPTS = (
    "Привет, мир! ",
    "你好世界，",
    "こんにちは。",
    "مرحبا بالعالم ",
    "Übergröße naïve ",
    "नमस्ते दुनिया ",
    "a\u0301\u200b\u00a0",
)


def mixed(size: int) -> Iterator[str]:
    """Yield documents of prose, code, and other scripts with emoji: about ``size`` bytes in all."""
    rng = random.Random(0)
    prose = [file.read_text() for file in sorted(DOCS.glob("*.md"))]
    while size > 0:
        words = "".join(rng.choice(SCRIPTS) + rng.choice(EMOJI) * rng.randrange(4) for _ in range(300))
        for text in (rng.choice(prose)[:20_000], rng.choice(CODE).read_text()[:20_000], words):
            size -= len(text.encode())
            yield text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 2,000 tokens."""
    folder = tmp_path_factory.mktemp("trained")
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in mixed(300_000)))
    text = ["--training.dataset", "json", "--training.dataset_path", str(corpus)]
    assert main(["tokenizer", "train", *text, "--output", str(folder / "bpe"), "--vocab-size", "2000"]) == 0
    return folder / "bpe"


def test_each_document_is_decoded_to_its_text(folder: Path) -> None:
    tokenizer = build_hf(tokenizer_at(folder))
    for text in mixed(300_000):
        assert tokenizer.decode(list(tokenizer.encode_document(text))[1:-1]) == text


def test_transformers_reads_the_folder(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ours = build_hf(tokenizer_at(folder))
    text = next(mixed(1)).replace("<|", "< |")  # transformers would read the name of a special token as that token
    assert tokenizer(text)["input_ids"] == list(ours.encode_document(text))[:-1]
    assert [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id] == [1994, 1995, 1996]
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert tokenizer.convert_tokens_to_ids("<|eot_id|>") == 1999


def test_a_model_is_trained_exported_and_continued_with_it(
    folder: Path, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, object] = {
        **TINY,
        "model.args": "{dim = 32, n_layers = 1, n_heads = 2, n_kv_heads = 1, ffn_dim = 64, vocab_size = 2000}",
        "model.tokenizer": "hf",
        "model.tokenizer_path": str(folder),
        "training.steps": 2,
        "checkpoint.enable": "true",
        "job.dump_folder": "run",
        "job.device": "cpu",
    }
    run_recipe("llama3_debug", settings)
    assert main(["checkpoint", "convert", "run/checkpoint/step-2", "exported"]) == 0
    assert {path.name for path in Path("exported").iterdir()} >= {"tokenizer.json", "tokenizer_config.json"}
    answers = []
    for model in ("run", "exported"):
        capsys.readouterr()
        command = ["generate", model, "--prompt", "import", "--max-new-tokens", "4", "--temperature", "0", "--json"]
        assert main([*command, "--job.device", "cpu", "--ignore-end"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]


def from_files() -> list[str]:
    """The tokenizers that read a file."""
    registry = Components.from_installed()
    return [
        name for name in registry.names(Tokenizer) if registry.distribution(registry.get(Tokenizer, name)) != "titan-core"
    ]


@pytest.mark.parametrize("path", [None, "nowhere", "damaged"])
@pytest.mark.parametrize("name", from_files())
def test_a_missing_or_damaged_tokenizer_names_the_command_that_makes_one(name: str, path: str | None, in_tmp: Path) -> None:
    Path("damaged").write_text("[]")
    component = Components.from_installed().get(Tokenizer, name)
    with pytest.raises(UserError, match=r"`titan tokenizer (download|train)") as raised:
        component.build.load()(TokenizerContext(section=None, path=path))
    assert path is None or path in str(raised.value)
