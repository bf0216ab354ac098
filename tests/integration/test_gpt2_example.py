"""GPT-2 as an example of a third party: its formula and its weights are those of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_ckpt.foreign.arrangement import read, shape_in
from titan_ckpt.foreign.files import SafetensorsFiles
from titan_core.cli.main import main

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = torch.randint(0, 288, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def package(site_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(site_of("titan-model-gpt2"))


def their_model(tied: bool = True, **config: Any) -> PreTrainedModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 288, "n_positions": 64, "tie_word_embeddings": tied}
    model = GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation="eager", **config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def ours_of(folder: str, tied: bool) -> dict[str, Tensor]:
    """Return the tensors of a folder under this model's names, as the format declares them."""
    from titan_model_gpt2.config import GPT2Args
    from titan_model_gpt2.formats import tensors

    args = GPT2Args(dim=32, n_layers=2, n_heads=2, vocab_size=288, max_seq_len=64, tie_embeddings=tied)
    files = SafetensorsFiles(Path(folder))
    return {one.parameter: read(files, one, shape_in(files, one)) for one in tensors(args) if not one.copy}


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.full)])
def test_logits_and_gradients_are_those_of_transformers(in_tmp: Path, tied: bool) -> None:
    from titan_model_gpt2.config import GPT2Args
    from titan_model_gpt2.model import GPT2

    theirs = their_model(tied)
    theirs.save_pretrained("weights")
    ours: Any = GPT2(GPT2Args(dim=32, n_layers=2, n_heads=2, vocab_size=288, max_seq_len=64, tie_embeddings=tied))
    loaded = ours.load_state_dict(ours_of("weights", tied), strict=False)
    assert loaded.missing_keys == (["unembedding.weight"] if tied else []) and not loaded.unexpected_keys
    logits = ours(TOKENS)
    torch.testing.assert_close(logits, theirs(TOKENS).logits, rtol=1e-5, atol=1e-5)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    theirs(TOKENS, labels=TOKENS).loss.backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    theirs.save_pretrained("gradients")
    gradients = ours_of("gradients", tied)
    assert gradients.keys() == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.full)])
def test_an_export_is_the_imported_file(in_tmp: Path, tied: bool) -> None:
    their_model(tied).save_pretrained("theirs")
    assert main(["checkpoint", "convert", "theirs", "ours"]) == 0
    assert main(["checkpoint", "convert", "ours", "back"]) == 0
    first, second = (Path(folder, "model.safetensors").read_bytes() for folder in ("theirs", "back"))
    assert first == second
    theirs, back = (json.loads(Path(folder, "config.json").read_text()) for folder in ("theirs", "back"))
    assert {key: back[key] for key in ("n_embd", "n_layer", "n_head", "n_positions", "tie_word_embeddings")} == {
        key: theirs[key] for key in ("n_embd", "n_layer", "n_head", "n_positions", "tie_word_embeddings")
    }


@pytest.mark.usefixtures("package")
def test_files_without_a_prefix_and_with_masks_are_read(in_tmp: Path) -> None:
    """As OpenAI's published weights are."""
    from safetensors.torch import load_file, save_file

    their_model().save_pretrained("new")
    their_model().save_pretrained("old")
    tensors = {name.removeprefix("transformer."): one for name, one in load_file("new/model.safetensors").items()}
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 64, 64)}, "old/model.safetensors", {"format": "pt"})
    assert main(["checkpoint", "convert", "old", "ours"]) == 0
    assert main(["checkpoint", "convert", "ours", "back"]) == 0
    assert Path("back/model.safetensors").read_bytes() == Path("new/model.safetensors").read_bytes()


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True, and this model supports only"),
        ({"activation_function": "relu"}, "activation_function is 'relu'"),
        ({"rope_theta": 1e4}, "rope_theta is 10000.0, and this model does not know what that means"),
    ],
    ids=str,
)
def test_another_model_is_refused(in_tmp: Path, change: Any, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    their_model().save_pretrained("theirs")
    config = json.loads(Path("theirs/config.json").read_text())
    Path("theirs/config.json").write_text(json.dumps({**config, **change}))
    assert main(["checkpoint", "convert", "theirs", "ours"]) == 2
    assert message in capfd.readouterr().err
