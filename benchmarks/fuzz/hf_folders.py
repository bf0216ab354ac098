"""Damaged Hugging Face folders: each must be refused in one line, or convert to exactly the original model and weights.

A small model's folder is made once. Each case damages a copy: the JSON of the index or the config, the headers of the
safetensors files, the set of tensors and their types, or the files of the tokenizer. The copy is then converted by the
command that a user runs, and its tokenizer is opened. Changing the value of a weight is undetectable, and is not tried.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.fuzz.damage import damage_bytes, places, wrong_type
from titan_ckpt.format.catalogue import pick
from titan_ckpt.format.chunks import read_whole
from titan_core.api import TokenizerContext, UserError
from titan_core.cli.main import main
from titan_data.tokenizers.hugging_face import build

SECONDS = 10.0
"""Processor time that a case may take: the machine may be busy."""
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX, CONFIG, TOKENIZER = "model.safetensors.index.json", "config.json", "tokenizer.json"
SIZE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def run(count: int, seed: int, folder: Path) -> list[str]:
    """Try ``count`` damaged folders in ``folder``; return the failures."""
    original = folder / "original"
    make_folder(original)
    failures = []
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        known = _converted(original, folder)
        assert known is not None, "the undamaged folder cannot be converted"
        for number in range(count):
            chance = random.Random(f"{seed} {number}")
            place = folder / "case"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(original, place)
            case = f"folder {number} of seed {seed}: {chance.choice(_DAMAGE)(chance, place)}"
            began = time.process_time()
            try:
                found = _converted(place, folder)
                if found is not None and not _same(found, known):
                    failures.append(f"{case}: converted to another model")
                _open_tokenizer(place)
            except Exception as error:  # noqa: BLE001 - any exception is a failure
                last = traceback.extract_tb(error.__traceback__)[-1]
                failures.append(f"{case}: {type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})")
            if time.process_time() - began > SECONDS:
                failures.append(f"{case}: took {time.process_time() - began:.0f} s")
    return failures


def make_folder(folder: Path) -> None:
    """Write a ``LlamaForCausalLM`` model in two files, with an index and a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder.mkdir(parents=True)
    vocab = Tokenizer(models.BPE())
    vocab.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = ["<|begin_of_text|>", "<|end_of_text|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab.train_from_iterator(
        ["a few words"], trainers.BpeTrainer(vocab_size=300, special_tokens=names, initial_alphabet=alphabet)
    )
    vocab.save(str(folder / TOKENIZER))
    marks = {"bos_token": names[0], "eos_token": names[1]}
    (folder / "special_tokens_map.json").write_text(json.dumps(marks))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **marks}))
    dim, hidden, size = SIZE["hidden_size"], SIZE["intermediate_size"], vocab.get_vocab_size()
    shapes = {"model.embed_tokens.weight": (size, dim), "model.norm.weight": (dim,), "lm_head.weight": (size, dim)}
    for layer in range(SIZE["num_hidden_layers"]):
        block = {
            "self_attn.q_proj": (dim, dim), "self_attn.k_proj": (dim // 2, dim), "self_attn.v_proj": (dim // 2, dim),
            "self_attn.o_proj": (dim, dim), "mlp.gate_proj": (hidden, dim), "mlp.up_proj": (hidden, dim),
            "mlp.down_proj": (dim, hidden), "input_layernorm": (dim,), "post_attention_layernorm": (dim,),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    file_of = {name: FILES[number % 2] for number, name in enumerate(tensors)}
    for file in FILES:
        save_file({name: tensor for name, tensor in tensors.items() if file_of[name] == file}, folder / file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": file_of}))
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **SIZE, "vocab_size": size,
        "head_dim": dim // 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 5000.0,
        "rope_scaling": {**rope, "original_max_position_embeddings": 16}, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(config))


def _converted(source: Path, folder: Path) -> tuple[dict[str, Tensor], Any] | None:
    """Convert ``source``; return the weights and the model's arguments, or ``None`` if it is refused."""
    target = folder / "converted"
    shutil.rmtree(target, ignore_errors=True)
    if main(["checkpoint", "convert", str(source), str(target)]) != 0:
        return None
    found = pick(str(target), None)
    assert found.manifest is not None
    tensors = {name: read_whole(found.folder, found.manifest, name) for name in found.manifest.tensors}
    return tensors, found.manifest.about["model_args"]


def _same(one: tuple[dict[str, Tensor], Any], other: tuple[dict[str, Tensor], Any]) -> bool:
    same_names = one[0].keys() == other[0].keys() and one[1] == other[1]
    return same_names and all(torch.equal(tensor, other[0][name]) for name, tensor in one[0].items())


def _open_tokenizer(folder: Path) -> None:
    try:
        build(TokenizerContext(str(folder), section=None)).encode_document("a few words")
    except UserError:
        return


def _json(chance: random.Random, file: Path) -> str:
    """Give a value of a JSON file another type, or delete it."""
    contents = json.loads(file.read_text())
    path, (container, key) = chance.choice(list(places(contents)))
    # A missing RoPE key takes its default value, which makes a valid config of another model.
    if chance.random() < 0.3 and not path.startswith("rope"):
        del container[key]
        done = f"{path} deleted"
    else:
        container[key] = wrong_type(chance, container[key])
        done = f"{path} = {container[key]!r}"
    if chance.random() < 0.1:
        contents = wrong_type(chance, contents)
        done = f"is {contents!r}"
    file.write_text(json.dumps(contents))
    return f"{file.name}: {done}"


def _any_bytes(chance: random.Random, folder: Path) -> str:
    """Damage the bytes of a file without weights."""
    return damage_bytes(
        chance, folder / chance.choice([INDEX, TOKENIZER, "tokenizer_config.json", "special_tokens_map.json"])
    )


def _config(chance: random.Random, folder: Path) -> str:
    return _json(chance, folder / CONFIG)


def _index(chance: random.Random, folder: Path) -> str:
    file = folder / INDEX
    contents = json.loads(file.read_text())
    name = chance.choice(sorted(contents["weight_map"]))
    to = chance.choice(
        ["../x.safetensors", "/etc/passwd", "", *FILES, "missing.safetensors", ".safetensors", "a\0.safetensors"]
    )
    if chance.random() < 0.4 and contents["weight_map"][name] != to:
        contents["weight_map"][name] = to
        file.write_text(json.dumps(contents))
        return f"the index has {name} in {to!r}"
    return _json(chance, file)


def _tokenizer(chance: random.Random, folder: Path) -> str:
    return _json(chance, folder / chance.choice([TOKENIZER, "tokenizer_config.json", "special_tokens_map.json"]))


def _deep(chance: random.Random, folder: Path) -> str:
    file = chance.choice([INDEX, CONFIG, TOKENIZER, "tokenizer_config.json"])
    (folder / file).write_text(
        chance.choice(["[" * 50_000, '{"a":' * 50_000, "1" * 5_000, '{"weight_map": ' + "9" * 5_000 + "}"])
    )
    return f"{file} is absurd"


def _header(chance: random.Random, folder: Path) -> str:
    """Flip a bit of a safetensors header; or truncate, extend or remove the file."""
    file = folder / chance.choice(FILES)
    data = bytearray(file.read_bytes())
    length = 8 + struct.unpack("<Q", data[:8])[0]
    kind = chance.choice(["flipped", "cut", "longer", "missing"])
    at = chance.randrange(length)
    match kind:
        case "flipped":
            data[at] ^= 1 << chance.randrange(8)
        case "cut":
            del data[chance.randrange(len(data)) :]
        case "longer":
            data += bytes(4)
    file.write_bytes(data)
    if kind == "missing":
        file.unlink()
    return f"{file.name} {kind} at {at}"


def _tensors(chance: random.Random, folder: Path) -> str:
    """Add, rename, remove or duplicate a tensor, or give it another shape or a type that no weight has."""
    file, other = chance.sample(FILES, 2)
    tensors = load_file(folder / file)
    name = chance.choice(sorted(tensors))
    kind = chance.choice(["bias", "layer", "removed", "renamed", "doubled", "quantised", "complex", "shape", "scale"])
    match kind:
        case "bias":
            tensors[name.replace("weight", "bias")] = torch.zeros(4)
        case "layer":
            tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(24, 16)
        case "removed":
            del tensors[name]
        case "renamed":
            tensors[name + "_"] = tensors.pop(name)
        case "doubled":
            tensors |= dict(list(load_file(folder / other).items())[:1])
        case "quantised":
            to = chance.choice([torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32, torch.bool])
            tensors[name] = tensors[name].to(to)
        case "complex":
            tensors[name] = tensors[name].to(torch.complex64)
        case "shape":
            tensors[name] = tensors[name][:-1].contiguous()
        case "scale":
            tensors[name + "_scale_inv"] = torch.ones(1)
    save_file(tensors, folder / file)
    index = json.loads((folder / INDEX).read_text())
    if chance.random() < 0.5 and kind != "doubled":  # the index agrees with the change
        index["weight_map"] = {key: value for key, value in index["weight_map"].items() if value != file}
        index["weight_map"] |= dict.fromkeys(tensors, file)
        (folder / INDEX).write_text(json.dumps(index))
    elif chance.random() < 0.5:
        (folder / INDEX).unlink()
    return f"{name} {kind}"


def _quantised(chance: random.Random, folder: Path) -> str:
    config = json.loads((folder / CONFIG).read_text())
    key = chance.choice(["quantization_config", "compression_config"])
    config[key] = chance.choice([{"quant_method": "fp8"}, {"quant_method": "gptq", "bits": 4}, "int8", {"x": 1}])
    (folder / CONFIG).write_text(json.dumps(config))
    converted = folder.parent / "quantised"
    shutil.rmtree(converted, ignore_errors=True)
    if main(["checkpoint", "convert", str(folder), str(converted)]) == 0:
        raise AssertionError(f"{key} was ignored")
    return f"{key} added"


_DAMAGE: list[Callable[[random.Random, Path], str]] = [
    _any_bytes, _config, _config, _index, _tokenizer, _deep, _header, _header, _tensors, _tensors, _tensors, _quantised,
]  # fmt: skip
