"""``titan lora export``: adapters in the files of peft, under the names that the base model has in transformers."""

import argparse
import json
from pathlib import Path

from torch import Tensor

from titan_core.api import CommandContext, ForeignTensor, UserError
from titan_lora.config import LoRASection


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run's directory, or a checkpoint")
    parser.add_argument("target", type=Path, help="the new folder")
    parser.add_argument("--base", help="name or folder of the base model, for adapter_config.json")


def run(context: CommandContext) -> int:
    from safetensors.torch import save_file

    given = context.arguments
    stored = context.models.find(given.run)
    job = context.models.job(stored, world_size=1)
    section, forms = job.section(LoRASection), [form for form in job.family.formats if form.files == "safetensors"]
    if not section.rank or not forms:
        raise UserError.one(given.run, "has no adapters, or its model no names in transformers", "train with lora.rank = 8")
    if given.target.exists():
        raise UserError.one(str(given.target), "exists already", "name a new folder")
    theirs = {one.parameter: one for one in forms[0].tensors.load()(job.model_args) if not one.copy}
    tensors, modules = dict[str, Tensor](), list[str]()
    with context.models.open(job, stored) as loaded:
        for name, module in loaded.part.named_modules():
            if hasattr(module, "lora_A"):
                for layer, b in of_layers(theirs[f"{name}.weight"], module.lora_B.detach().cpu()).items():
                    modules.append(layer)
                    tensors[f"base_model.model.{layer}.lora_A.weight"] = module.lora_A.detach().cpu().clone()
                    tensors[f"base_model.model.{layer}.lora_B.weight"] = b.clone()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": given.base, "inference_mode": True}
    config |= {"r": section.rank, "lora_alpha": section.alpha, "target_modules": modules, "bias": "none"}
    given.target.mkdir(parents=True)
    save_file(tensors, given.target / "adapter_model.safetensors", metadata={"format": "pt"})
    (given.target / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"wrote {given.target}: adapters of {len(modules)} layers")
    return 0


def of_layers(theirs: ForeignTensor, b: Tensor) -> dict[str, Tensor]:
    """Return B of each layer of the base model, whose rows follow one another in ``b``, perhaps in another order."""
    if theirs.block != len(theirs.rows):
        raise UserError.one(theirs.parameter, f"is a part of {theirs.name} in transformers", "leave it out of lora.targets")
    if theirs.rows:
        blocks = b.unflatten(0, (-1, theirs.block))
        b = blocks[:, sorted(range(theirs.block), key=theirs.rows.__getitem__)].flatten(0, 1)
    pieces = theirs.pieces or ((theirs.name, len(b)),)
    parts = b.split([rows for _, rows in pieces])
    return {name.removesuffix(".weight"): part for (name, _), part in zip(pieces, parts, strict=True)}
