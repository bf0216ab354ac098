"""Built wheels in fresh environments: a job installs only what it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ci.isolated import build_wheels
from ci.workspace import packages, requirement_name, with_dependencies

pytestmark = [pytest.mark.wheels, pytest.mark.full]

MODEL, COMPLETION = "titan-models-llama", "titan-completion"
OTHERS = {
    "aiohttp", "datasets", "huggingface-hub", "multiprocess", "pandas", "plotly", "protobuf", "pyarrow",
    "safetensors", "tensorboard", "tokenizers", "torchao", "transformers", "wandb", "zstandard",
}  # fmt: skip
"""Dependencies of other packages. tiktoken is not among them, because the model's tokenizer needs it."""
MOST_MEGABYTES = 30
"""Maximum size without torch, its dependencies and numpy, whose wheel alone has 56."""

LISTING = """
import json
from importlib.metadata import distributions
print(json.dumps({
    one.name.lower().replace("_", "-"): {
        "requires": one.requires or [],
        "bytes": sum(file.locate().stat().st_size for file in one.files or [] if file.locate().is_file()),
    }
    for one in distributions()
}))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the core, a model, titan-completion and their dependencies, from a folder with one wheel more."""
    folder = tmp_path_factory.mktemp("environment")
    needed = with_dependencies(MODEL)
    assert {one.name for one in needed} == {"titan-core", "titan-nn", MODEL}
    built = build_wheels([*needed, packages()[COMPLETION], packages()["titan-launch"]], folder / "wheels")
    wheels = {name: wheel for name, wheel in built.items() if name != "titan-launch"}
    python = folder / "venv/bin/python"
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, str(folder / "venv")], check=True)
    version = torch.__version__.partition("+")[0]
    chosen = [*map(str, wheels.values()), f"torch=={version}"]
    subprocess.run(["uv", "pip", "install", "--quiet", "--python", str(python), *chosen], check=True)
    return python.parent


Titan = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def titan(environment: Path, tmp_path: Path) -> Titan:
    """Run the environment's ``titan`` command in a new folder."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(environment / "titan"), *arguments]
        return subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=False)

    return run


SHORT = ["--training.steps", "3", "--model.args.n_layers", "1", "--training.seq_len", "32"]


def test_core_and_a_model_train(titan: Titan, tmp_path: Path) -> None:
    listing = titan("plugins").stdout
    assert MODEL in listing and "titan-parallel" not in listing
    result = titan("train", *SHORT)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "outputs/llama3_debug/metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("command", "package"),
    [
        (["config", "check", "--parallelism.tensor_parallel_degree", "2", "--world-size", "2"], "titan-parallel"),
        (["config", "check", "--world-size", "2"], "titan-parallel"),
        (["train", *SHORT, "--nproc-per-node", "2"], "titan-launch"),
        (["train", *SHORT, "--float8.recipe_name", "rowwise"], "titan-float8"),
        (["train", *SHORT, "--metrics.enable_wandb", "true"], "titan-report"),
        (["train", *SHORT, "--training.dataset", "json", "--training.dataset_path", "x"], "titan-data"),
        (["checkpoint", "list", "outputs"], "titan-ckpt"),
        (["verify", "--mesh", "tp=2"], "titan-debug"),
    ],
    ids=lambda one: one if isinstance(one, str) else " ".join(one[:1] + one[-2:]),
)
def test_an_error_names_the_missing_package(environment: Path, titan: Titan, command: list[str], package: str) -> None:
    refused = titan(*command)
    assert refused.returncode == 2
    wheels = environment.parents[1] / "wheels"
    (core,) = wheels.glob("titan_core-*.whl")
    for wheel in wheels.glob(f"{package.replace('-', '_')}-*.whl"):
        assert f"install {package} (`uv pip install {core} {wheel}`)" in refused.stderr
        return
    assert f"install the wheel of {package} from where titan-core's came, or set TITAN_PACKAGE_INDEX" in refused.stderr


def test_no_dependency_of_other_packages_is_installed(environment: Path) -> None:
    output = subprocess.run([str(environment / "python"), "-c", LISTING], capture_output=True, text=True, check=True).stdout
    installed = json.loads(output)
    assert OTHERS.isdisjoint(installed)
    assert installed.keys().isdisjoint(packages().keys() - {"titan-core", "titan-nn", MODEL, COMPLETION})
    torchs: set[str] = set()
    waiting = ["torch"]
    while waiting:
        name = waiting.pop()
        if name in installed and name not in torchs:
            torchs.add(name)
            waiting += map(requirement_name, installed[name]["requires"])
    ours = {name: one["bytes"] for name, one in installed.items() if name not in torchs | {"numpy", "pip", "setuptools"}}
    assert sum(ours.values()) < MOST_MEGABYTES * 1e6, sorted(ours.items(), key=lambda pair: -pair[1])[:10]
