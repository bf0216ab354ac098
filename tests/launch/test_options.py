"""The launcher's options for ``titan train``."""

from __future__ import annotations

import pytest

from titan_core.cli.main import main


def test_help_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["train", "--help"])
    assert exit_.value.code == 0
    assert "--nproc-per-node" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nproc-per-node", "two"], "must be a whole number from 1 to 512"),
        (["--nnodes", "2"], "several machines need an address to meet at; add the same --rdzv-endpoint"),
    ],
)
def test_mistakes_exit_with_2_and_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("titan: error: ") and error.count("\n") == 1
    assert message in error
