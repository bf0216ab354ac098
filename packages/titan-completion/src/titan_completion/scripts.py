"""The completion scripts. All shells share one awk program and one table, which the script contains: a completion starts no
Python, whose start would take longer than a user waits for a completion."""

from __future__ import annotations

from importlib import resources

from titan_completion.table import rows
from titan_core.api import Registry

SHELLS = {
    "bash": "titan completion bash > ~/.local/share/bash-completion/completions/titan",
    "zsh": "titan completion zsh > DIR/_titan, where DIR is in $fpath",
    "fish": "titan completion fish > ~/.config/fish/completions/titan.fish",
}
"""Shell -> how to install its script."""


def script(shell: str, registry: Registry) -> str:
    """Return the completion script of ``shell``, one of :data:`SHELLS`, for the installed plugins."""
    folder = resources.files(__package__)
    text = folder.joinpath(f"completion.{shell}").read_text(encoding="utf-8")
    awk = folder.joinpath("candidates.awk").read_text(encoding="utf-8")
    # Quotes would end the string or the program that contains the table.
    table = "\n".join(rows(registry)).replace("'", "\N{RIGHT SINGLE QUOTATION MARK}").replace("\\", "/")
    return text.replace("@AWK@", awk).replace("@TABLE@", table)
