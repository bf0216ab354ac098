"""The tests that ``.ci/run`` repeats on the lowest versions of all dependencies: of each of them, what Titan uses most.

A bound that is wrong mostly fails at the first use. ``python -m ci PACKAGE --resolution lowest-direct`` runs a whole suite.
The list takes some 130 s of CPU time, environment included (``time uv run python -m ci titan --resolution lowest-direct``).
"""

from __future__ import annotations

TESTS = (
    # torch: private names; two ranks by the launcher; saved and resumed on another mesh; pipelines; dumps; a simulated rank
    "tests/integration/test_private_torch.py",
    "tests/integration/test_train_command.py::test_two_processes_have_the_losses_of_one_without_any_flag",
    "tests/integration/test_resume_on_meshes.py::test_on_the_same_mesh_it_is_bit_for_bit_the_same",
    "tests/debug/test_flight_recorder.py::test_a_healthy_job_dumps_on_request_and_shows_no_mismatch",
    "tests/simulate/test_command.py",
    # torchao, torchft
    "tests/float8/test_training.py::test_two_ranks_change_nothing_but_rounding",
    "tests/ft/test_gradients.py::test_the_sums_of_two_groups",
    # datasets, pyarrow, zstandard, tokenizers, jinja2, huggingface-hub, tiktoken
    "tests/data/test_datasets.py",
    "tests/data/test_compressed.py",
    "tests/data/test_chat_tokens.py::test_ids_and_mask_are_those_of_transformers",
    "tests/data/test_hub_download.py::test_a_download_that_is_cut_resumes_in_the_same_call",
    "tests/models_llama/test_tokenizer.py::test_llama3_rank_file",
    # safetensors, fsspec: weights of others, trained on chats, generating
    "tests/integration/test_finetuning.py::test_titan_generate_answers_and_stops",
    "tests/ckpt/test_resume.py::test_a_url_that_fsspec_supports",
    # pydantic, pluggy, importlib-metadata, tomli, rich: config, discovery, the command line
    "tests/core/test_discovery.py",
    "tests/core/test_command_line_help.py",
    "tests/core/test_taken_names.py",
    # tensorboard, wandb, pyyaml, nvidia-ml-py
    "tests/integration/test_resumed_loggers.py",
    "tests/cluster/test_kubernetes.py::test_containers_receive_each_argument_as_it_was",
    "tests/debug/test_doctor.py::test_the_command",
)
"""Test files, or tests, as pytest accepts them."""
