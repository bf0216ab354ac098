"""Fixtures of the tests across packages."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import pytest

from harness.third_party import install


@pytest.fixture(scope="session")
def site_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function that installs an example, once, and returns the folder with its package."""

    @functools.cache
    def installed(example: str) -> str:
        folder = tmp_path_factory.mktemp(example)
        install(folder, example)
        return str(folder)

    return installed


@pytest.fixture(scope="session")
def experts(site_of: Callable[[str], str]) -> str:
    """Return a folder with the example plugin of a mixture of experts."""
    return site_of("titan-model-moe")


TASKS = {
    "choice": """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "rolling": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question * 24}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "generate": """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[1]}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="session")
def lm_eval_tasks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with tasks of lm-eval without a network: ``titan_choice``, ``titan_rolling``, ``titan_generate``, and
    ``titan_absent``, whose data are missing."""
    folder = tmp_path_factory.mktemp("tasks")
    questions = [
        {"question": f"{n} plus {n} is", "choices": [str(n), str(2 * n), "many words"], "answer": n % 3}
        for n in range(1, 12)
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    for name, task in {**TASKS, "absent": TASKS["choice"]}.items():
        questions = folder / ("absent.jsonl" if name == "absent" else "questions.jsonl")
        data = f'dataset_path: json\ndataset_kwargs: {{data_files: {{test: "{questions}"}}}}\ntest_split: test\n'
        (folder / f"{name}.yaml").write_text(f"task: titan_{name}\n{data}{task}")
    return str(folder)
