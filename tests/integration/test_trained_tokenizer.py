"""A tokenizer trained here gives the same ids in ``tiktoken`` and ``tokenizers``, and works from training to generation."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.contexts import tokenizer_at
from harness.jobs import TINY, run_recipe
from titan_core.api import TextTokenizer, Tokenizer, TokenizerContext, UserError
from titan_core.api.data.tokenizer import fingerprint
from titan_core.cli.main import main
from titan_core.plugins.registry import Components
from titan_data.tokenizers import bpe
from titan_data.tokenizers.hugging_face import build as build_hf
from titan_models_llama.tokenizer import build_described

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
    command = ["tokenizer", "train", "--corpus", str(corpus), "--output", str(folder / "bpe"), "--vocab-size", "2000"]
    assert main(command) == 0
    return folder / "bpe"


def pair(folder: Path) -> tuple[TextTokenizer, TextTokenizer]:
    return build_hf(tokenizer_at(folder)), build_described(tokenizer_at(folder / "tokenizer.model"))


def test_both_libraries_give_the_same_ids(folder: Path) -> None:
    ours, theirs = pair(folder)
    assert fingerprint(ours) == fingerprint(theirs)
    total = 0
    for text in mixed(1_000_000):
        ids = list(ours.encode_document(text))
        assert ids == list(theirs.encode_document(text))
        assert theirs.decode(ids[1:-1]) == ours.decode(ids[1:-1]) == text
        total += len(text.encode())
    assert total >= 1_000_000


def test_both_libraries_give_the_same_ids_of_random_text(folder: Path) -> None:
    ours, theirs = pair(folder)
    rng = random.Random(1)
    ranges = ((0, 0x80), (0x80, 0x3000), (0x2000, 0x2070), (0x1F300, 0x1FAFF), (0, 0xD800), (0xE000, 0x110000))
    special = [*" \n\r\t'sSdDtTmMK0١²\u017f\u212a\x00\x85\u2028", *bpe.SPECIAL_TOKENS, "'ll", "'RE"]
    for _ in range(1_000):
        parts = [
            rng.choice(special) if rng.random() < 0.4 else chr(rng.randrange(*rng.choice(ranges)))
            for _ in range(rng.randrange(40))
        ]
        text = "".join(parts) * rng.choice((1, 1, 1, 50))
        assert list(ours.encode_document(text)) == list(theirs.encode_document(text)), repr(text)


@pytest.mark.parametrize("letters", ["ab", "a ", "=-", "é🙂"])
def test_few_letters_merge_in_the_same_order(letters: str, tmp_path: Path) -> None:
    """Long tokens of few letters overlap in many ways, so that an order of merges that differs anywhere shows."""
    rng = random.Random(2)

    def text(size: int) -> str:
        return "".join(rng.choices(letters, (3, 1), k=size))

    tokenizer = bpe.train((text(400) for _ in range(200)), 600, bpe.SPECIAL_TOKENS)
    bpe.write(tokenizer, bpe.SPECIAL_TOKENS, tmp_path)
    ours, theirs = pair(tmp_path)
    assert max(map(len, bpe.ranks_of(tokenizer))) > 8
    for _ in range(300):
        sample = text(rng.randrange(1, 700))
        assert list(ours.encode_document(sample)) == list(theirs.encode_document(sample)), sample


def test_every_token_is_the_merge_of_its_own_bytes(folder: Path) -> None:
    """So ``ignore_merges``, and tiktoken's look-up of whole pieces, change nothing."""
    from tokenizers import Tokenizer as Library, pre_tokenizers

    library = Library.from_file(str(folder / "tokenizer.json"))
    ranks = bpe.ranks_of(library)
    contents = json.loads(library.to_str())
    contents["model"]["ignore_merges"] = False
    contents["pre_tokenizer"], contents["post_processor"] = None, None
    merging = Library.from_str(json.dumps(contents))
    merging.pre_tokenizer = pre_tokenizers.Sequence([])
    names = {number: name for name, number in contents["model"]["vocab"].items()}
    assert [merging.encode(names[number], add_special_tokens=False).ids for number in range(len(ranks))] == [
        [number] for number in range(len(ranks))
    ]


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
    losses, answers = [], []
    for name, path in (("hf", folder), ("tiktoken", folder / "tokenizer.model")):
        settings: dict[str, object] = {
            **TINY,
            "model.args": "{dim = 32, n_layers = 1, n_heads = 2, n_kv_heads = 1, ffn_dim = 64, vocab_size = 2000}",
            "model.tokenizer": name,
            "model.tokenizer_path": str(path),
            "training.steps": 2,
            "checkpoint.enable": "true",
            "job.dump_folder": name,
            "job.device": "cpu",
        }
        losses.append(run_recipe("llama3_debug", settings).losses)
        exported = f"{name}-exported"
        assert main(["checkpoint", "convert", f"{name}/checkpoint/step-2", exported]) == 0
        assert {path.name for path in Path(exported).iterdir()} >= {"tokenizer.json", "tokenizer_config.json"}
        for model in (name, exported):
            capsys.readouterr()
            command = ["generate", model, "--prompt", "import", "--max-new-tokens", "4", "--temperature", "0", "--json"]
            assert main([*command, "--job.device", "cpu", "--ignore-end"]) == 0
            answers.append(json.loads(capsys.readouterr().out))
    assert losses[0] == losses[1]
    assert answers[0] == answers[1] == answers[2] == answers[3]


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
