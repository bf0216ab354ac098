"""No string of a recipe, a checkpoint, a dataset or a folder of a model reaches an import, a process or code, except through
the entry points of installed plugins and the files of ``titan --plugin``.

``uv run pytest -m long tests/integration/test_no_code.py`` tries hostile values at each place of a manifest."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ci.workspace import ROOT
from harness.chat_model import save_model, write_chats

PLUGIN_CODE = "names come from plugins: what a component registers, which discovery has loaded"
OWN_NAMES = "the names are constants of the same package"
DTYPE = "the name is checked against a list of types before"
FIELD = "the name is a field of a dataclass or of a section class, which Titan iterates over"
CHILD = "its own command with a list of arguments, without a shell; the user started it"
CONSENT = "titan --plugin: the user's consent"
CONTRACT = "the contract's own names, which are constants of the core, for the guard of calls into plugins"
PIPE = "what this process, or one that it has started, has written itself"

KNOWN: dict[tuple[str, str], tuple[int, str]] = {
    # file (below packages/), call: number of sites, reason
    ("titan-core/src/titan_core/__init__.py", "getattr"): (1, OWN_NAMES),
    ("titan-core/src/titan_core/api/_lazy.py", "import_module"): (1, OWN_NAMES),
    ("titan-core/src/titan_core/api/_lazy.py", "getattr"): (1, OWN_NAMES),
    ("titan-core/src/titan_core/api/_lazy.py", "setattr"): (1, OWN_NAMES),
    ("titan-core/src/titan_core/api/plugins/ref.py", "importlib.import_module"): (1, PLUGIN_CODE),
    ("titan-core/src/titan_core/api/plugins/ref.py", "getattr"): (1, PLUGIN_CODE),
    ("titan-core/src/titan_core/toolkit/plugin_files.py", "spec_from_file_location"): (
        1,
        CONSENT,
    ),
    ("titan-core/src/titan_core/toolkit/plugin_files.py", "module_from_spec"): (1, CONSENT),
    ("titan-core/src/titan_core/toolkit/plugin_files.py", "compile"): (1, CONSENT),
    ("titan-core/src/titan_core/toolkit/plugin_files.py", "exec"): (1, CONSENT),
    ("titan-core/src/titan_core/toolkit/plugin_files.py", "find_spec"): (
        1,
        "imports none",
    ),
    ("titan-core/src/titan_core/api/model/dropout.py", "find_spec"): (1, OWN_NAMES),
    ("titan-debug/src/titan_debug/doctor/software.py", "find_spec"): (1, OWN_NAMES),
    ("titan-inference/src/titan_inference/evaluate.py", "find_spec"): (1, OWN_NAMES),
    ("titan-inference/src/titan_inference/task_checks.py", "find_spec"): (1, OWN_NAMES),
    ("titan-ckpt/src/titan_ckpt/foreign/hub_push.py", "find_spec"): (1, OWN_NAMES),
    ("titan-report/src/titan_report/config.py", "find_spec"): (1, OWN_NAMES),
    ("titan-simulate/src/titan_simulate/engine/stub_libraries.py", "importlib.util.find_spec"): (2, OWN_NAMES),
    ("titan-simulate/src/titan_simulate/engine/forks.py", "importlib.import_module"): (1, OWN_NAMES),
    ("titan-debug/src/titan_debug/doctor/software.py", "run_path"): (
        1,
        "torch's version.py, which importing torch runs",
    ),
    ("titan-core/src/titan_core/plugins/guarded_object.py", "getattr"): (3, CONTRACT),
    ("titan-core/src/titan_core/plugins/guarded_object.py", "import_module"): (1, CONTRACT),
    ("titan-core/src/titan_core/plugins/lifecycle.py", "getattr"): (2, OWN_NAMES),
    ("titan-core/src/titan_core/plugins/result_models.py", "getattr"): (2, OWN_NAMES),
    ("titan-core/src/titan_core/plugins/result_models.py", "setattr"): (1, OWN_NAMES),
    ("titan-core/src/titan_core/plugins/result_objects.py", "getattr"): (1, OWN_NAMES),
    ("titan-core/src/titan_core/plugins/results.py", "getattr"): (1, "fields of Costs"),
    ("titan-core/src/titan_core/plugins/unchanged.py", "getattr"): (1, CONTRACT),
    # Processes
    ("titan-core/src/titan_core/toolkit/runs/child_runs.py", "subprocess.Popen"): (1, CHILD),
    ("titan-cluster/src/titan_cluster/rendering.py", "subprocess.run"): (1, CHILD),
    ("titan-launch/src/titan_launch/ranks/attempt.py", "subprocess.Popen"): (1, CHILD),
    ("titan-ckpt/src/titan_ckpt/save/export_process.py", "subprocess.Popen"): (1, CHILD),
    ("titan-debug/src/titan_debug/doctor/software.py", "subprocess.Popen"): (1, CHILD),
    ("titan-debug/src/titan_debug/numerics/rewinding.py", "subprocess.run"): (1, CHILD),
    ("titan-simulate/src/titan_simulate/engine/stub_libraries.py", "subprocess.run"): (1, CHILD),
    # Pickles
    ("titan-core/src/titan_core/api/parallel/world.py", "pickle.loads"): (
        1,
        "from ranks of the job (docs/security.md)",
    ),
    ("titan-simulate/src/titan_simulate/engine/forks.py", "pickle.loads"): (2, PIPE),
    ("titan-debug/src/titan_debug/torch_private.py", "pickle.loads"): (1, PIPE),
    ("titan-ckpt/src/titan_ckpt/foreign/dcp_metadata.py", "_Unpickler"): (1, "resolves the names of a fixed list only"),
    ("titan-ckpt/src/titan_ckpt/foreign/dcp_files.py", "torch.load"): (1, "weights_only=True, with the user's consent"),
    ("titan-ckpt/src/titan_ckpt/foreign/files.py", "torch.load"): (1, "weights_only=True"),
    ("titan-ft/src/titan_ft/run_state.py", "torch.load"): (1, "weights_only=True"),
    # Libraries of C
    ("titan-core/src/titan_core/toolkit/processes.py", "ctypes.CDLL"): (1, "this process itself"),
    ("titan-simulate/src/titan_simulate/engine/stub_libraries.py", "ctypes.CDLL"): (2, "built by this user: _require_own"),
    # Attributes by name
    **{
        (f"titan-ckpt/src/titan_ckpt/{name}.py", "getattr"): (number, DTYPE)
        for name, number in (
            ("format/chunks", 2),
            ("foreign/arrangement", 1),
            ("foreign/convert", 1),
            ("foreign/dcp_files", 1),
            ("foreign/exporting", 1),
            ("foreign/load", 1),
            ("resume/optimizer_restore", 1),
            ("format/reader", 1),
            ("save/converting", 1),
        )
    },
    ("titan-debug/src/titan_debug/mfu.py", "getattr"): (1, DTYPE),
    ("titan-parallel/src/titan_parallel/fsdp.py", "getattr"): (3, DTYPE),
    ("titan-parallel/src/titan_parallel/pipeline.py", "getattr"): (1, DTYPE),
    ("titan-cluster/src/titan_cluster/slurm.py", "getattr"): (1, OWN_NAMES),
    ("titan-completion/src/titan_completion/recipe_copy.py", "getattr"): (1, FIELD),
    ("titan-core/src/titan_core/api/training/batch.py", "getattr"): (3, FIELD),
    ("titan-core/src/titan_core/api/config/resolved.py", "getattr"): (
        1,
        "reads a key of a config that was validated, for a message",
    ),
    ("titan-core/src/titan_core/api/parallel/model_part.py", "setattr"): (1, "parameters of a model, by their names"),
    ("titan-core/src/titan_core/api/config/run_folder.py", "getattr"): (1, FIELD),
    ("titan-core/src/titan_core/config/problems.py", "getattr"): (2, OWN_NAMES),
    ("titan-core/src/titan_core/job/assemble.py", "getattr"): (1, OWN_NAMES),
    ("titan-core/src/titan_core/job/data_plan.py", "getattr"): (1, OWN_NAMES),
    ("titan-core/src/titan_core/model/layout_check.py", "getattr"): (3, OWN_NAMES),
    ("titan-core/src/titan_core/model/materialise.py", "setattr"): (1, "buffers of a model, by their names"),
    ("titan-core/src/titan_core/model/trial.py", "getattr"): (1, DTYPE),
    ("titan-core/src/titan_core/model/preserved.py", "setattr"): (1, "buffers of a model, by their names"),
    ("titan-core/src/titan_core/model/stand_in.py", "setattr"): (2, "parameters of a model, by their names"),
    ("titan-core/src/titan_core/plugins/component_checks.py", "getattr"): (2, FIELD),
    ("titan-core/src/titan_core/plugins/discovery.py", "getattr"): (1, OWN_NAMES),
    ("titan-debug/src/titan_debug/torch_private.py", "getattr"): (1, OWN_NAMES),
    ("titan-ft/src/titan_ft/torchft_api.py", "getattr"): (1, "a wrapper that passes on what its callers name"),
    ("titan-inference/src/titan_inference/evaluate.py", "getattr"): (1, OWN_NAMES),
    ("titan-core/src/titan_core/cli/model_show.py", "getattr"): (2, FIELD),
    ("titan-launch/src/titan_launch/meeting/handler.py", "getattr"): (1, OWN_NAMES),
    ("titan-models-hf/src/titan_models_hf/derive.py", "getattr"): (1, OWN_NAMES),
    ("titan-models-hf/src/titan_models_hf/experts.py", "getattr"): (2, OWN_NAMES),
    ("titan-models-hf/src/titan_models_hf/transformers_private.py", "getattr"): (1, "functions of transformers"),
    ("titan-models-hf/src/titan_models_hf/transformers_private.py", "setattr"): (
        3,
        "functions of transformers, which are put back; parameters of a model, by their names",
    ),
    ("titan-launch/src/titan_launch/meeting/rendezvous.py", "getattr"): (1, OWN_NAMES),
    ("titan-core/src/titan_core/toolkit/status_line.py", "getattr"): (3, OWN_NAMES),
    ("titan-core/src/titan_core/toolkit/status_line.py", "setattr"): (3, OWN_NAMES),
    ("titan-parallel/src/titan_parallel/activation_checkpoint.py", "getattr"): (
        3,
        "operators that a layout names",
    ),
    ("titan-parallel/src/titan_parallel/torch_private.py", "getattr"): (2, OWN_NAMES),
    ("titan-parallel/src/titan_parallel/vocabulary_shards.py", "getattr"): (1, OWN_NAMES),
    ("titan-simulate/src/titan_simulate/calibrate/fit.py", "getattr"): (1, OWN_NAMES),
    ("titan-simulate/src/titan_simulate/estimate/pipeline.py", "getattr"): (2, OWN_NAMES),
    ("titan-simulate/src/titan_simulate/estimate/pipeline.py", "setattr"): (2, OWN_NAMES),
    ("titan-simulate/src/titan_simulate/estimate/pipeline.py", "delattr"): (1, OWN_NAMES),
    ("titan-simulate/src/titan_simulate/engine/simulate.py", "setattr"): (1, OWN_NAMES),
    ("titan-debug/src/titan_debug/numerics/replay.py", "setattr"): (1, OWN_NAMES),
    ("titan-simulate/src/titan_simulate/estimate/work.py", "attrgetter"): (1, FIELD),
    # Libraries that could load code
    ("titan-data/src/titan_data/huggingface.py", "datasets.load_dataset_builder"): (
        1,
        "names and files of the hub",
    ),
}
"""Every call that could import, execute or unpickle what a string names, with the reason why none of a stranger does."""

_BUILTINS = {"eval", "exec", "compile", "__import__", "breakpoint"}
_ATTRIBUTES = {"getattr", "setattr", "delattr"}
_LAST = {
    "import_module", "find_spec", "run_path", "run_module", "exec_module", "spec_from_file_location", "module_from_spec",
    "load_module", "resolve_name", "Popen", "popen", "CDLL", "load_library", "attrgetter", "methodcaller", "load_dataset",
    "load_dataset_builder", "from_pretrained", "extractall", "unpack_archive", "Unpickler", "_Unpickler",
    "SandboxedEnvironment", "NativeEnvironment",
}  # fmt: skip
_WHOLE = {
    "pickle.loads", "pickle.load", "marshal.loads", "marshal.load", "shelve.open", "torch.load", "yaml.load",
    "yaml.unsafe_load", "yaml.full_load", "os.system", "jinja2.Environment", "Environment", "Template",
}  # fmt: skip
_STARTS = ("subprocess.", "os.exec", "os.spawn", "os.posix_spawn", "dill.", "cloudpickle.", "joblib.")


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Yield file, name and node of every call that could run what a string names."""
    for file in sorted((ROOT / "packages").glob("*/src/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            last = name.rpartition(".")[2]
            by_name = name in _ATTRIBUTES and not isinstance(node.args[1], ast.Constant)
            # A function that is passed on is called with a name elsewhere.
            for passed in (one.id for one in node.args if isinstance(one, ast.Name)):
                if passed in _ATTRIBUTES | _BUILTINS:
                    yield str(file.relative_to(ROOT / "packages")), passed, node
            if by_name or name in _BUILTINS | _WHOLE or last in _LAST or name.startswith(_STARTS):
                yield str(file.relative_to(ROOT / "packages")), name, node


def test_every_call_that_can_run_code_is_known() -> None:
    """A new call needs a line in KNOWN with the reason why no string of a stranger reaches it."""
    found = Counter((file, name) for file, name, _ in calls())
    assert found == {site: number for site, (number, _) in KNOWN.items()}


def test_no_call_goes_through_a_shell_or_trusts_remote_code() -> None:
    for file, name, node in calls():
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        assert not {"shell", "trust_remote_code"} & set(given), (file, name)
        if name == "torch.load":
            assert ast.unparse(given["weights_only"]) == "True", file


def test_jinja_is_used_through_the_bounded_sandbox_alone() -> None:
    files = [
        file
        for file in (ROOT / "packages").glob("*/src/**/*.py")
        if any(
            isinstance(node, ast.ImportFrom) and node.module in ("jinja2", "jinja2.sandbox")
            and {"Environment", "SandboxedEnvironment", "ImmutableSandboxedEnvironment"} & {one.name for one in node.names}
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        )
    ]  # fmt: skip
    assert [file.name for file in files] == ["bounded_templates.py"]


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
import titan_data.huggingface, titan_data.record_template, titan_data.chat.source, titan_data.tokenizers.chat_template

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
import copy, hashlib, shutil
from pathlib import Path
from harness.chat_model import finetuning
from harness.jobs import TINY, run_recipe
from titan_core.api import RunStopped, TokenizerContext, UserError
from titan_core.cli.main import main
from titan_data.tokenizers.hugging_face import build
import titan_models_hf.derive  # transformers loads libraries of C that are installed beside it
import transformers.models.llama.modeling_llama

os.environ["XDG_CACHE_HOME"] = os.path.abspath("runs/cache")
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
