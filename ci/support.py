"""Writes the table of what works with what into docs/install.md, from the metadata of the packages::

uv run python -m ci.support
"""

from __future__ import annotations

import re

from ci.workspace import CORE, ROOT, Package, distributions

PAGE = ROOT / "docs/install.md"
MARK = "<!-- uv run python -m ci.support -->"
_TABLE = re.compile(rf"(?<={re.escape(MARK)}\n)(\|.*\n)*")
_API = re.compile(r"(?m)^api = \((\d+), (\d+)\)$")


def table() -> str:
    """Return the table: the versions of Python are those that CI tries, and the contract is the one that a plugin needs."""
    rows = [["package", "version", "Python", "torch", CORE, "contract"], ["---"] * 6]
    for package in distributions().values():
        pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(package.project["classifiers"]))
        bounds = [(package.requires(name) or "").removeprefix(name).replace(",", ", ") for name in ("torch", CORE)]
        rows.append([f"`{package.name}`", package.project["version"], ", ".join(pythons), *bounds, _contract(package)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _contract(package: Package) -> str:
    """Return the version of the contract that ``package`` needs, or has; empty if it is no plugin."""
    plugin = package.folder / "src" / package.module / "plugin.py"
    found = _API.search(plugin.read_text(encoding="utf-8")) if plugin.exists() else None
    return ".".join(found.groups()) if found else ""


def render() -> str:
    """Return the page with its table.

    Raises:
        SystemExit: the page has no place for it.
    """
    text, tables = _TABLE.subn(table(), PAGE.read_text(encoding="utf-8"), count=1)
    if not tables:
        raise SystemExit(f"{PAGE.relative_to(ROOT)}: has no line `{MARK}`, below which its table is written: put it back")
    return text


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
