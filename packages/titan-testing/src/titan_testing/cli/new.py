"""``titan plugin new``: writes a distribution with a small plugin that works, and its tests."""

from __future__ import annotations

import argparse
import datetime
import keyword
import re
import shlex
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from titan_core.api import CommandContext, UserError
from titan_core.toolkit.text import say


@dataclass(frozen=True)
class StageTemplate:
    """A kind of plugin that a template exists for. ``$name`` stands for the plugin's name."""

    summary: str
    """What the template does."""
    use: str
    """A command that uses it."""
    keys: str = ""
    """What ``titan plugin check --set`` needs to try it."""


_TRAIN = "titan train small.toml"
_RECIPE = """```toml
# small.toml
{model}[training]
dataset = "stdlib"
steps = 20
seq_len = 64
local_batch_size = 2
global_batch_size = 8
```

"""
STAGES = {
    "model": StageTemplate("a small decoder", _TRAIN),
    "parallelism": StageTemplate(
        "data parallelism over a mesh dimension of its own",
        "torchrun --nproc-per-node 2 -m titan_core train small.toml --$name.count 2",
        "$name.count=2",
    ),
    "precision": StageTemplate("linear layers with rounded weights", _TRAIN + " --$name.enable true"),
    "checkpoint": StageTemplate("checkpoints of one rank in one file", _TRAIN + " --$name.interval 10"),
    "debug": StageTemplate("a count of slow steps", _TRAIN + " --$name.limit 0.5", "$name.limit=0.5"),
    "dataset": StageTemplate(
        "a document for each line of a text file",
        _TRAIN + " --training.dataset $name --training.dataset_path tests/lines.txt",
        "training.dataset_path=tests/lines.txt",
    ),
    "tokenizer": StageTemplate("the bytes of UTF-8", _TRAIN + " --model.tokenizer $name"),
    "optimizer": StageTemplate(
        "updates by the sign of the momentum", _TRAIN + " --optimizer.name $name --optimizer.lr 1e-4", "optimizer.lr=1e-4"
    ),
    "schedule": StageTemplate("a linear warmup, then half a cosine", _TRAIN + " --lr_scheduler.name $name"),
    "objective": StageTemplate("cross entropy with a penalty on the softmax normaliser", _TRAIN + " --objective.name $name"),
    "metrics": StageTemplate("a table of each step's loss", _TRAIN + " --$name.enable true", "$name.enable=true"),
    "command": StageTemplate("counts the recipes of each distribution", "titan $name --json"),
}
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_PLACES = {"pyproject.toml": "", "README.md": "", "LICENSE": "", "ci.yml": ".github/workflows", "lines.txt": "tests"}
"""Folders of the files that are not part of the package."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan plugin new``."""
    parser.add_argument("name", metavar="NAME", help="name of the distribution, such as titan-rotary or tinylm")
    parser.add_argument("--stage", required=True, choices=list(STAGES), help="what it adds")
    parser.add_argument("--output", metavar="DIR", help="new folder to write to (default: NAME)")


def run(context: CommandContext) -> int:
    """Write the distribution.

    Raises:
        UserError: the name cannot be used, or the folder exists.
    """
    arguments = context.arguments
    distribution: str = arguments.name
    package = distribution.replace("-", "_")
    if not _NAME.fullmatch(distribution) or any(
        keyword.iskeyword(one) or not one.isidentifier() for one in (package, package.removeprefix("titan_"))
    ):
        fix = "use lower-case letters, digits and dashes, first a letter and no word of Python's own, as in titan-rotary"
        raise UserError.one(f"name {distribution!r}", "is no name of a distribution", fix)
    folder = Path(arguments.output or distribution)
    if folder.exists():
        raise UserError.one(str(folder), "exists", "choose another --output, or remove it")
    values = values_of(distribution, arguments.stage)
    taken = {plugin.name for plugin in context.registry.found.plugins}  # type: ignore[attr-defined]
    if values["name"] in taken:
        raise UserError.one(f"name {distribution!r}", f"a plugin {values['name']!r} is installed", "choose another name")
    for file, text in files_of(arguments.stage, values).items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    say(f"wrote {folder}: {STAGES[arguments.stage].summary}, and its tests. Next:")
    place = shlex.quote(str(folder))
    say(f"  cd {place}\n  uv pip install --no-deps -e .\n  titan plugin check {values['name']}{values['check']}\n  pytest")
    return 0


def values_of(distribution: str, stage: str) -> dict[str, str]:
    """Return the values of the placeholders of a template."""
    package = distribution.replace("-", "_")
    name = package.removeprefix("titan_")
    template = STAGES[stage]
    model = f'[model]\nname = "{name}"\n\n' if stage == "model" else "# trains the installed model, or that of [model]\n"
    return {
        "distribution": distribution,
        "package": package,
        "name": name,
        "class": "".join(word.capitalize() for word in name.split("_")),
        "summary": template.summary,
        "use": Template(template.use).substitute(name=name),
        "recipe": "" if stage == "command" else _RECIPE.format(model=model),
        "check": f" --set {Template(template.keys).substitute(name=name)}" if template.keys else "",
        "year": str(datetime.date.today().year),
    }


def files_of(stage: str, values: dict[str, str]) -> dict[str, str]:
    """Return the contents of the files of a distribution by their names."""
    templates = resources.files("titan_testing") / "templates"
    found: dict[str, str] = {}
    for template in (*(templates / "common").iterdir(), *(templates / stage).iterdir()):
        name = template.name.removesuffix(".txt")
        found[_place(name, values)] = Template(_text(template)).substitute(values)
    return dict(sorted(found.items()))


def _text(file: Traversable) -> str:
    return file.read_text(encoding="utf-8")


def _place(name: str, values: dict[str, str]) -> str:
    package = values["package"]
    match name:
        case "test.py":
            return f"tests/test_{values['name']}.py"
        case "init.py":
            return f"src/{package}/__init__.py"
        case _ if name in _PLACES:
            return f"{_PLACES[name]}/{name}".lstrip("/")
    return f"src/{package}/{name}"
