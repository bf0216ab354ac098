"""No string of a recipe, a checkpoint, a dataset or a folder of a model reaches an import, a process or code, except
through the entry points of installed plugins and the files of ``titan --plugin``.

``uv run pytest -m long tests/integration/test_hostile_values.py`` tries hostile values at each place of a manifest."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.chat_model import save_model, write_chats

HOSTILE = (
    "os:system",
    "../../../../tmp/x",
    "__import__('os').system('touch owned')",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "evil_module",
    "evil_module:owned",
    "evil_module.owned",
    "$(touch owned)",
    "; touch owned",
)
EVIL = "import pathlib\npathlib.Path(__file__).with_name('owned').touch()\ndef owned(*_, **__): return ''\n"

HOOK = r"""
import json, os, sys

here = os.getcwd()
found = []
active = False

def hook(event, arguments):
    if not active:
        return
    subject = str(arguments[0]) if arguments else ""
    if event == "import" and subject.partition(".")[0] in ("evil_module", "os:system"):
        found.append(("import", subject))
    elif event == "exec" and str(arguments[0].co_filename).startswith(here):
        found.append(("exec", subject))
    elif event == "open" and isinstance(arguments[0], int):
        pass  # another object for a descriptor: its path has been opened before
    elif event == "open" and (arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or "evil" in subject):
        if subject != "/dev/null" and not os.path.abspath(subject).startswith(writes_into):
            found.append(("open", repr(arguments)))
    elif event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pty.spawn",
                   "ctypes.dlopen", "socket.connect", "pickle.find_class"):
        if subject.partition(".")[0] not in allowed.get(event, ()):
            found.append((event, repr(arguments)))

writes_into, allowed = "/dev/null", {}
sys.addaudithook(hook)
"""

WATCH = r"""
from titan_core.api import UserError
from titan_core.api.config.resolved import Override
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.plugins.registry import Components
import titan_data.huggingface, titan_data.records, titan_data.chat.source, titan_data.tokenizers.chat_template

titan_data.records.RecordTemplate("{{ text }}", "data.format")  # starts the renderer
registry = Components.from_installed()
keys = [f"{name}.{key}" for name, owners in registry.sections().items() for cls in owners for key in cls.model_fields]
chosen = json.loads(sys.argv[1])
base = json.loads(sys.argv[3])
reached = 0
for number, key in enumerate(keys):
    # Any text is a valid description, so that each share assembles a job.
    if number % int(sys.argv[4]) != int(sys.argv[5]) and key != "job.description":
        continue
    for text in chosen:
        values = [text, f"[{text!r}]", "{evil = %r}" % text]
        if key == "data.mixture":
            values = ["[{dataset = 'json', dataset_path = 'x.jsonl', %s = %s}]" % (name, json.dumps(text))
                      for name in ("format", "text_field", "name", "dataset", "dataset_split", "dataset_path")]
        for value in values:
            overrides = [Override(name, one) for name, one in base.items() if name != key]
            before = len(found)
            active = True
            try:
                config, used = load_config(sys.argv[2], [*overrides, Override(key, value)], registry)
                assemble(config, used, 1)
                reached += 1
            except UserError:
                pass
            finally:
                active = False
            found[before:] = [(key, value, *one) for one in found[before:]]
print(json.dumps({"keys": len(keys), "reached": reached, "found": found}))
"""


DOORS = r"""
import copy, hashlib, shutil, tempfile
from pathlib import Path
from harness.chat_model import finetuning
from titan_testing.jobs import TINY, run_recipe
from titan_core.api import RunStopped, TokenizerContext, UserError
from titan_core.cli.main import main
from titan_data.records import RecordTemplate
from titan_data.tokenizers.hugging_face import build
import titan_models_hf.derive  # transformers loads libraries of C that are installed beside it
import transformers.models.llama.modeling_llama

RecordTemplate("{{ text }}", "data.format")  # starts the renderer
os.environ["XDG_CACHE_HOME"] = os.path.abspath("runs/cache")
tempfile.tempdir = os.path.abspath("runs")  # of the config.json that transformers reads
share, shares = int(sys.argv[1]), int(sys.argv[2])
texts = ("evil_module:owned", "evil_module", "../evil", os.path.abspath("evil.pkl"), "file://evil.pkl")
writes_into = os.path.abspath("runs")
# Constant names of torch's and Python's; between its ranks, torch passes its plans as pickles.
allowed = {"ctypes.dlopen": ("libc",), "subprocess.Popen": ("uname", "/sbin/ldconfig"),
           "pickle.find_class": ("torch", "titan_ckpt")}
manifest = Path("runs/run/checkpoint/step-1/checkpoint.json")
reached = {}

def enter(door, call, *arguments):
    # What a door refuses, it must refuse as a mistake of the user.
    global active
    before, active = len(found), True
    try:
        call(*arguments)
        reached[door] = reached.get(door, 0) + 1
    except (UserError, RunStopped):
        pass
    except Exception as error:
        found.append(("crash", repr(error)))
    finally:
        active = False
        found[before:] = [(door, *one) for one in found[before:]]

def command(*words):
    if status := main(list(words)):
        raise RunStopped(status)

def places(value, path=()):
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield from places(one, (*path, key))

def write(contents):
    text = json.dumps(contents, sort_keys=True, separators=(",", ":"))
    manifest.write_text('{"sha256": "%s", "checkpoint": %s}' % (hashlib.sha256(text.encode()).hexdigest(), text))

def of_manifest(contents):
    # One tensor, parameter, shard and section of the config stand for all.
    seen = set()
    for path in places(contents):
        kind = tuple("*" if parent in ("tensors", "parameters", "group_of", "shards") or isinstance(key, int) else key
                     for parent, key in zip(("", *path), path))
        if path and kind not in seen and kind[:2] != ("about", "config"):
            seen.add(kind)
            yield path
    yield ("about", "config")

settings = {**TINY, "job.device": "cpu", "training.dataset": "json", "training.dataset_path": "x.jsonl",
            "training.steps": 2, "checkpoint.enable": "true", "job.dump_folder": "runs/run"}
enter("step", run_recipe, "tiny", {**settings, "training.stop_at_step": 1})

whole = json.loads(manifest.read_text())["checkpoint"]
if share == 0:
    enter("resume", run_recipe, "tiny", settings)
    shutil.rmtree("runs/run/checkpoint/step-2", ignore_errors=True)
for number, path in enumerate(of_manifest(whole)):
    if number % shares != share:
        continue
    text = texts[number // shares % len(texts)]
    for value in ([text, {text: text}, {"$dtype": text}, {"$stored": text}, "rename"] * 2)[number % 5 :][:2]:
        contents = copy.deepcopy(whole)
        parent = contents
        for key in path[:-1]:
            parent = parent[key]
        if path == ("about", "config"):
            for section in contents["about"]["config"].values():
                for key in section:
                    section[key] = value
        elif value == "rename":
            if not isinstance(parent, dict):
                continue
            parent[text] = parent.pop(path[-1])
        else:
            parent[path[-1]] = value
        write(contents)
        enter("resume", run_recipe, "tiny", settings)
        enter("show", command, "checkpoint", ("list", "show", "verify")[number % 3], "runs/run")
        shutil.rmtree("runs/run/checkpoint/step-2", ignore_errors=True)

tuning = {**finetuning(Path("model"), Path("chats.jsonl")), "training.steps": 1, "checkpoint.enable": "true"}
if share == 0:
    generate = ("generate", "--prompt", "a", "--max-new-tokens", "2", "--job.device", "cpu")
    enter("code in config.json", run_recipe, "llama3_debug", {**tuning, "job.dump_folder": "runs/tuned"})
    os.replace("config.json", "model/config.json")
    enter("folder", run_recipe, "llama3_debug", {**tuning, "job.dump_folder": "runs/tuned"})
    enter("export", command, "checkpoint", "convert", "runs/tuned", "runs/export")
    enter("generate", command, *generate, "--chat", "model")
    enter("pickles", command, *generate, "pickles")
    shown = []
    for template in json.loads(sys.argv[3]):
        in_config = json.dumps({"chat_template": template})
        for file, text in (("chat_template.jinja", template), ("tokenizer_config.json", in_config)):
            Path("model/chat_template.jinja").unlink(missing_ok=True)
            Path("model", file).write_text(text)
            enter("template", lambda: shown.append(
                build(TokenizerContext("model", section=None)).render_chat([{"role": "user", "content": "a"}], True).text))
    found += [("template", one) for one in shown if "evil" in one or "class" in one]
print(json.dumps({"reached": reached, "found": found}))
"""


@pytest.mark.parametrize(
    ("share", "shares"), [pytest.param(0, 16), *(pytest.param(n, 16, marks=pytest.mark.full) for n in range(1, 16))]
)
def test_no_key_of_a_recipe_runs_code(share: int, shares: int, in_tmp: Path) -> None:
    """Each key of each section with hostile values, watched by an audit hook: assembling the job imports nothing, starts no
    process and writes no file."""
    (in_tmp / "evil_module.py").write_text(EVIL)
    (in_tmp / "x.jsonl").write_text(json.dumps({"text": "text"}) + "\n")
    base = {"training.dataset": "json", "training.dataset_path": "x.jsonl"}
    result = watched(in_tmp, json.dumps(HOSTILE), "tiny", json.dumps(base), str(shares), str(share))
    assert result["keys"] > 100
    assert result["reached"] > 0
    assert result["found"] == []
    assert not (in_tmp / "owned").exists()


def test_the_watch_sees_code_that_runs(in_tmp: Path) -> None:
    """A format that is a template is rendered; the old form, a function, would be imported."""
    (in_tmp / "evil_module.py").write_text(EVIL)
    script = HOOK + WATCH.replace("assemble(config, used, 1)", "__import__('evil_module'); os.system('true')")
    result = watched(in_tmp, json.dumps(["text"]), "tiny", "{}", "1000", "0", script=script)
    kinds = {one[2] for one in result["found"]}
    assert {"import", "exec", "os.system", "open"} <= kinds
    assert (in_tmp / "owned").exists()


TEMPLATES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ (''|attr('__class__')) }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ raise_exception.__globals__['os'].system('touch owned') }}",
    "{{ strftime_now.__self__.__class__ }}",
    "{{ self.__init__.__globals__ }}",
    "{% include 'evil.txt' %}",
    "{% import 'evil_module' as m %}{{ m }}",
    "{% extends 'evil.txt' %}",
)


@pytest.fixture
def hostile(in_tmp: Path) -> Path:
    """A folder with a file of each kind that could be imported or unpickled, and a model whose files name them."""
    (in_tmp / "evil_module.py").write_text(EVIL)
    (in_tmp / "evil.txt").write_text("evil")
    (in_tmp / "evil.pkl").write_bytes(pickle.dumps(Touch()))
    (in_tmp / "x.jsonl").write_text((json.dumps({"text": "text " * 20}) + "\n") * 8)
    write_chats(in_tmp / "chats.jsonl")
    save_model(in_tmp / "model")
    shutil.copy(in_tmp / "model/config.json", in_tmp)
    code = {name: f"evil_module.{name}" for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM")}
    hub = {"AutoTokenizer": ["stranger/evil--evil_module.Slow", "evil_module.Fast"]}
    more = {"trust_remote_code": True, "_name_or_path": "stranger/evil", "_commit_hash": "evil", "custom_generate": "evil"}
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        path = in_tmp / "model" / file
        named = {
            **json.loads(path.read_text()),
            "auto_map": {**code, **hub},
            "custom_pipelines": {"x": {"impl": "evil_module.X"}},
        }
        path.write_text(json.dumps({**named, **more}))
    for name in ("evil_module.py", "sitecustomize.py", "__init__.py", "custom_generate/generate.py", "modeling_llama.py"):
        (in_tmp / "model" / name).parent.mkdir(exist_ok=True)
        (in_tmp / "model" / name).write_text(EVIL)
    (in_tmp / "pickles").mkdir()
    (in_tmp / "pickles/params.json").write_text(json.dumps({"dim": 16, "n_layers": 1, "n_heads": 2, "vocab_size": 300}))
    for name in ("model/pytorch_model.bin", "model/training_args.bin", "pickles/consolidated.00.pth"):
        torch.save({"x": Touch()}, in_tmp / name)
    return in_tmp


class Touch:
    """Creates a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("owned",)


SHARES = 32


@pytest.mark.full
@pytest.mark.parametrize("share", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, SHARES))])
def test_no_door_runs_code(share: int, hostile: Path) -> None:
    """A step of a job; a checkpoint whose manifest names files and modules at each place; a folder of a model with code,
    pickles and templates."""
    result = watched(hostile, str(share), str(SHARES), json.dumps(TEMPLATES), script=HOOK + DOORS)
    assert result["found"] == []
    assert not list(hostile.rglob("owned"))
    assert {"step", "show"} <= set(result["reached"])
    if share == 0:  # in other shares, each manifest may be refused
        assert {"resume", "folder", "export", "generate", "template"} <= set(result["reached"])
        assert not {"code in config.json", "pickles"} & set(result["reached"])  # refused


def watched(folder: Path, *arguments: str, script: str = HOOK + WATCH) -> Any:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(folder)])}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
