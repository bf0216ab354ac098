"""Mistakes in jobs for clusters."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

SLURM, KUBERNETES, MOUNTS, SECRETS, SKYPILOT = (
    "tests/cluster/test_slurm.py",
    "tests/cluster/test_kubernetes.py",
    "tests/cluster/test_mounts.py",
    "tests/cluster/test_secrets.py",
    "tests/cluster/test_skypilot.py",
)

MUTANTS = (
    Mutant("values-not-quoted", "cluster/rendering.py", 'f"{name}={shlex.quote(str(value))}"', 'f"{name}={value}"', (SLURM,)),
    Mutant("items-not-quoted", "cluster/rendering.py", 'f"    {shlex.quote(item)}"', 'f"    {item}"', (SLURM,)),
    Mutant("words-that-are-booleans", "cluster/rendering.py", " and text.lower() not in _WORDS", "", (KUBERNETES,)),
    Mutant("line-breaks-of-yaml-1.1", "cluster/rendering.py", " and _BREAKS.search(text) is None", "", (KUBERNETES,)),
    Mutant("bad-numbers-are-retried", "cluster/rendering.py", "(EXIT_USER_ERROR, EXIT_NUMERICS, ", "(EXIT_USER_ERROR, ", (SLURM, KUBERNETES, SKYPILOT)),
    Mutant("preemption-is-a-failure", "cluster/rendering.py", "(EXIT_PREEMPTED, 128 + signal.SIGTERM)", "(128 + signal.SIGTERM,)", (SLURM, KUBERNETES, SKYPILOT)),
    Mutant("links-not-mounted", "cluster/mounts.py", "[os.path.normpath(self._place(value)), os.path.realpath(self._place(value))]", "[os.path.normpath(self._place(value))]", (MOUNTS,)),
    Mutant("separators-mounted", "cluster/mounts.py", "    if _SEPARATOR.search(path):\n", "    if False:\n", (MOUNTS,)),
    Mutant("inputs-mounted-twice", "cluster/mounts.py", "                self.targets.append(path)\n", "                pass\n", (MOUNTS,)),
    Mutant("the-root-is-mounted", "cluster/mounts.py", 'if path != "/" and not any', "if not any", (MOUNTS,)),
    Mutant("secrets-in-comments", "cluster/secrets.py", '            if _has_secret(line, "=:"):\n', "            if False:\n", (SECRETS,)),
    Mutant("secrets-after-colons", "cluster/secrets.py", 'found["sign"] in signs', 'found["sign"] == "="', (SECRETS,)),
    Mutant("placeholders-are-secrets", "cluster/secrets.py", "return not placeholder and", "return", (SECRETS,)),
    Mutant("time-to-save-is-short", "cluster/options.py", "int(given.grace) - END_SECONDS", "END_SECONDS", (SLURM, KUBERNETES)),
    Mutant("ranges-upside-down", "cluster/options.py", "    if most < least:\n", "    if False:\n", (SLURM, KUBERNETES)),
    Mutant("ranks-contradict-gpus", "cluster/options.py", "if gpus and ranks not in (None, gpus):", "if False:", (SLURM, KUBERNETES)),
    Mutant("names-end-with-a-dash", "cluster/options.py", 'slug[:LONGEST_NAME].strip("-")', "slug[:LONGEST_NAME]", (SLURM, KUBERNETES)),
    Mutant("dollars-expand", "cluster/pods.py", 'text.replace("$", "$$")', "text", (KUBERNETES,)),
    Mutant("a-later-recipe-for-earlier-pods", "cluster/pods.py", 'f"{recipe.name}\\n{recipe.text}"', 'f"{recipe.name}"', (KUBERNETES,)),
    Mutant("variables-may-be-secrets", "cluster/pods.py", "if is_secret(name) or redact_text(value) != value:", "if False:", (KUBERNETES, SECRETS)),
    Mutant("claims-mounted-twice", "cluster/pods.py", "if len(set(values)) < len(values):", "if False:", (KUBERNETES,)),
    Mutant("options-of-ours-overridden", "cluster/slurm.py", "if any(own.startswith(name) for own in _OWN):", "if name in _OWN:", (SLURM,)),
    Mutant("lost-machines-end-elastic-jobs", "cluster/slurm.py", '*(["--no-kill"] if machines.elastic else []),', "", (SLURM,)),
    Mutant("existing-files-overwritten", "cluster/rendering.py", '"w" if given.force else "x"', '"w"', (SLURM, KUBERNETES)),
)  # fmt: skip
