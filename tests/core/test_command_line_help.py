"""``--help`` of ``titan``, of groups, of commands and of sections; ``--version``."""

from __future__ import annotations

import pytest

from titan_core.api import Command, Ref
from titan_core.cli.help import GROUPS as HEADINGS, listing, overview, parser_of
from titan_core.cli.main import main
from titan_core.plugins.registry import Components


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    try:
        status: object = main(arguments)
    except SystemExit as end:  # argparse ends the process after its help
        status = end.code
    assert status == 0
    text = capsys.readouterr().out
    assert all(len(line) <= width for line in text.splitlines())
    return text


OVERRIDES = [command.name for command in Components.from_installed().all(Command) if command.overrides]


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("command", OVERRIDES)
def test_help_fits_on_one_screen(
    command: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for option in ("--help", "-h"):
        text = shown([*command.split(), option], capsys, monkeypatch, width)
        assert len(text.splitlines()) <= 40
        assert "--section.key VALUE" in text and "lr_scheduler" in text and "--help [SECTION]" in text


def test_help_of_a_section_documents_its_keys_and_no_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(["train", "--help", "optimizer"], capsys, monkeypatch, 80)
    assert "--optimizer.lr float" in text and "Peak learning rate. (default 0.0008)" in text
    assert "Installed: AdamW, Adam." in " ".join(text.split())
    assert "--training." not in text
    key = shown(["train", "--help=optimizer.lr"], capsys, monkeypatch, 80)
    assert "--optimizer.lr float" in key and "beta1" not in key
    assert "--model.args.n_layers int" in shown(["train", "-h", "model"], capsys, monkeypatch, 80)


def test_help_of_all_sections_documents_every_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(["config", "check", "--help-all"], capsys, monkeypatch, 100)
    for section, owners in Components.from_installed().sections().items():
        assert f"\n[{section}]\n" in text
        for key in (key for cls in owners for key in cls.model_fields):
            assert f"  --{section}.{key} " in text


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("trainng", "--help trainng: is not a section of the config; did you mean 'training'?"),
        ("nothing_like_it", "is not a section of the config; available: comm, data,"),
        ("training.stepz", "section [training] has no such key; did you mean 'steps'?"),
    ],
)
def test_help_of_an_unknown_section_suggests_one(name: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", name]) == 2
    assert why in capsys.readouterr().err


GROUPS = sorted({command.name.split()[0] for command in Components.from_installed().all(Command) if " " in command.name})


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_a_group_has_help(
    group: str, option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown([group, option], capsys, monkeypatch, 80)
    names = [command.name for command in Components.from_installed().all(Command) if command.name.startswith(f"{group} ")]
    assert text.startswith(f"usage: titan {group} COMMAND")
    assert all(f"  titan {name} " in text for name in names)


def test_a_command_that_is_also_a_group_lists_its_subcommands() -> None:
    run: Ref = Ref("titan_testing.tiny:define")  # type: ignore[type-arg] # never called
    both = [Command(name="fly", summary="fly", run=run), Command(name="fly away", summary="leave", run=run)]
    assert "titan fly away" in parser_of(both[0], both, Components.from_installed()).format_help()
    assert "titan fly away   leave" in listing(both)
    assert "  fly   fly\n" in overview(both)


@pytest.mark.parametrize("width", [80, 100])
def test_the_overview_fits_on_one_screen_and_leaves_rare_commands_to_the_list_of_all(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = Components.from_installed().all(Command)
    text, everything = (shown([option], capsys, monkeypatch, width) for option in ("--help", "--help-all"))
    assert len(text.splitlines()) <= 42
    assert [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")] == [
        heading for heading in HEADINGS if any(command.group == heading for command in commands)
    ]
    for command in commands:
        assert f"  titan {command.name} " in everything
        assert (f"\n  {command.name.split()[0]} " in text) or command.rare


def test_the_version_lists_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("titan-core ")
    assert "titan-harness 1.0" in others and others[-2].startswith("torch 2.") and others[-1].startswith("Python 3.")
    assert any(line.startswith("titan-parallel ") and line.endswith(" (switched off)") for line in others) == (
        "titan-parallel" in {plugin.distribution for plugin in Components.from_installed().found.disabled}
    )
