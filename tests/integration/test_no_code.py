"""Every call that could import, execute or unpickle what a string names is known, with the reason why it is safe."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from ci.workspace import ROOT

PLUGIN_CODE = "names come from plugins: what a component registers, which discovery has loaded"
EXPORTED = "a class of transformers, for files that the plugin under test has just written"
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
    ("titan-debug/src/titan_debug/certificate/certify.py", "find_spec"): (1, "installed plugins, and imports none"),
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
    ("titan-core/src/titan_core/plugins/lifecycle.py", "getattr"): (2, OWN_NAMES),
    ("titan-core/src/titan_core/plugins/unchanged.py", "getattr"): (1, CONTRACT),
    ("titan-testing/src/titan_testing/checks/registration.py", "getattr"): (1, OWN_NAMES),
    ("titan-testing/src/titan_testing/checks/formats.py", "find_spec"): (1, OWN_NAMES),
    ("titan-testing/src/titan_testing/checks/formats.py", "getattr"): (1, EXPORTED),
    ("titan-testing/src/titan_testing/checks/formats.py", "library.from_pretrained"): (1, EXPORTED),
    ("titan-testing/src/titan_testing/meshes.py", "getattr"): (1, OWN_NAMES),
    ("titan-testing/src/titan_testing/tiny.py", "getattr"): (1, OWN_NAMES),
    ("titan-testing/src/titan_testing/cli/new.py", "Template"): (3, "string.Template, which replaces names"),
    ("titan-testing/src/titan_testing/gloo_pool.py", "pickle.loads"): (1, "a pipe between a process and its parent"),
    # Processes
    ("titan-testing/src/titan_testing/checks/registration.py", "subprocess.run"): (1, CHILD),
    ("titan-testing/src/titan_testing/gloo_pool.py", "subprocess.run"): (1, CHILD),
    ("titan-testing/src/titan_testing/suites/run.py", "subprocess.run"): (1, CHILD),
    ("titan-core/src/titan_core/toolkit/runs/child_runs.py", "subprocess.Popen"): (1, CHILD),
    ("titan-cluster/src/titan_cluster/rendering.py", "subprocess.run"): (1, CHILD),
    ("titan-launch/src/titan_launch/ranks/attempt.py", "subprocess.Popen"): (1, CHILD),
    ("titan-ckpt/src/titan_ckpt/save/export_process.py", "subprocess.Popen"): (1, CHILD),
    ("titan-data/src/titan_data/template_process.py", "subprocess.Popen"): (1, CHILD),
    ("titan-debug/src/titan_debug/doctor/software.py", "subprocess.Popen"): (1, CHILD),
    ("titan-debug/src/titan_debug/numerics/loss_spike.py", "subprocess.run"): (1, CHILD),
    ("titan-simulate/src/titan_simulate/engine/stub_libraries.py", "subprocess.run"): (1, CHILD),
    # Pickles
    ("titan-core/src/titan_core/api/parallel/tree.py", "pickle.loads"): (
        2,
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
            ("resume/optimizer_restore", 1),
            ("contents/tensors", 1),
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
    ("titan-core/src/titan_core/job/checks.py", "getattr"): (1, OWN_NAMES),
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
    ("titan-core/src/titan_core/cli/model_show.py", "getattr"): (3, FIELD),
    ("titan-launch/src/titan_launch/meeting/handler.py", "getattr"): (1, OWN_NAMES),
    ("titan-models-hf/src/titan_models_hf/derive.py", "getattr"): (1, OWN_NAMES),
    ("titan-models-hf/src/titan_models_hf/experts.py", "getattr"): (2, OWN_NAMES),
    ("titan-models-hf/src/titan_models_hf/transformers_private.py", "getattr"): (1, "functions of transformers"),
    ("titan-models-hf/src/titan_models_hf/transformers_private.py", "AutoConfig.from_pretrained"): (
        1,
        "the library's classes of configs, with trust_remote_code = False, from a file written before",
    ),
    ("titan-report/src/titan_report/page.py", "Environment"): (1, "the template that the package ships"),
    ("titan-models-hf/src/titan_models_hf/transformers_private.py", "setattr"): (
        3,
        "functions of transformers, which are put back; parameters of a model, by their names",
    ),
    ("titan-launch/src/titan_launch/meeting/rendezvous.py", "getattr"): (1, OWN_NAMES),
    ("titan-parallel/src/titan_parallel/activation_checkpoint.py", "getattr"): (
        3,
        "operators that a layout names",
    ),
    ("titan-parallel/src/titan_parallel/activation_offload.py", "getattr"): (
        1,
        "tensors of which torch says that another consists",
    ),
    ("titan-parallel/src/titan_parallel/torch_private.py", "getattr"): (2, OWN_NAMES),
    ("titan-parallel/src/titan_parallel/local_parameters.py", "getattr"): (1, OWN_NAMES),
    ("titan-simulate/src/titan_simulate/calibrate/fit.py", "getattr"): (1, OWN_NAMES),
    ("titan-simulate/src/titan_simulate/estimate/pipeline.py", "getattr"): (2, OWN_NAMES),
    ("titan-simulate/src/titan_simulate/estimate/pipeline.py", "setattr"): (2, OWN_NAMES),
    ("titan-simulate/src/titan_simulate/estimate/pipeline.py", "delattr"): (1, OWN_NAMES),
    ("titan-simulate/src/titan_simulate/engine/simulate.py", "setattr"): (1, OWN_NAMES),
    ("titan-debug/src/titan_debug/numerics/replay.py", "setattr"): (1, OWN_NAMES),
    ("titan-simulate/src/titan_simulate/estimate/short_pipeline.py", "getattr"): (1, FIELD),
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
        assert "shell" not in given, (file, name)
        if "trust_remote_code" in given:
            assert ast.unparse(given["trust_remote_code"]) == "False", (file, name)
        if name == "torch.load":
            assert ast.unparse(given["weights_only"]) == "True", file


def test_jinja_renders_strangers_templates_in_the_bounded_sandbox_alone() -> None:
    """The page of a report is a template of Titan's own, and escapes all values."""
    files = [
        file
        for file in (ROOT / "packages").glob("*/src/**/*.py")
        if any(
            isinstance(node, ast.ImportFrom) and node.module in ("jinja2", "jinja2.sandbox")
            and {"Environment", "SandboxedEnvironment", "ImmutableSandboxedEnvironment"} & {one.name for one in node.names}
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        )
    ]  # fmt: skip
    assert sorted(file.name for file in files) == ["page.py", "template_worker.py"]
    (page,) = [file.read_text(encoding="utf-8") for file in files if file.name == "page.py"]
    assert page.count("Environment(") == page.count("Environment(autoescape=True, ") == 1
    assert page.count(".from_string(") == page.count('.from_string(_resource("page.html"))') == 1
