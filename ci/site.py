"""Builds the documentation site from the pages of this repository and the docstrings of the contract, offline::

    uv run python -m ci.site [FOLDER] [--versions URL]

The pages stay ordinary Markdown, whose links work on a forge. In the site, a link to another page leads to that page, one to
a file of the contract to its reference, one to code of an example or a package to a page with that code, and any other to
the repository (``project.urls`` in ``pyproject.toml``).
The navigation is README's table of pages and :data:`CHILDREN`.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace

from ci.contract import API, contents
from ci.reference import reference
from ci.workspace import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CHILDREN = {
    "index": ["install", "plugins/tutorial", "guides", "plugins", "reference/index", "architecture", "project"],
    "data": ["data/*"],
    "plugins": ["plugins/*", "examples"],
    "examples": ["examples/*"],
    "architecture": ["architecture/*", "decisions"],
    "decisions": ["decisions/*"],
    "project": ["contributing", "changelog", "benchmarks"],
    "benchmarks": ["benchmarks/*"],
}
"""Page -> pages below it in the navigation (patterns). A page that no file has is a list of them."""
_SPANS = re.compile(r"(?ms)^ *```.*?^ *```$|`[^`\n]+`|(?<=\]\()(?!https?:|mailto:)([^)#\s]*)((?:#[^)\s]*)?)(?=\))")


def pages() -> dict[Path, str]:
    """Return file -> name of its page in the site."""
    found = {ROOT / "README.md": "index", ROOT / "CHANGELOG.md": "changelog", ROOT / "CONTRIBUTING.md": "contributing"}
    for file in (ROOT / "docs").rglob("*.md"):
        found[file] = file.relative_to(ROOT / "docs").with_suffix("").as_posix()
    for file in ROOT.glob("examples/**/README.md"):
        found[file] = file.parent.relative_to(ROOT).as_posix()
    for kind in ("pyproject.toml", "src/**/*.py", "src/**/*.toml"):
        found |= {file: _code_page(file) for file in ROOT.glob(f"examples/*/{kind}")}
    for file in (ROOT / "benchmarks").glob("**/*.md"):
        found[file] = "benchmarks" if file.name == "README.md" else f"benchmarks/{file.stem}"
    return found


def _code_page(file: Path) -> str:
    return f"code/{file.relative_to(ROOT).as_posix()}"


def write_sources(folder: Path) -> None:
    """Write what Sphinx reads: the pages with their links as in the site, and the pages of the reference."""
    known = pages()
    shutil.copytree(ROOT / "docs/images", folder / "images")
    below = {page: _below(patterns, known.values()) for page, patterns in CHILDREN.items()}
    for file, page in list(known.items()):
        if file.suffix == ".md":
            text = _SPANS.sub(partial(_link, known, file), file.read_text(encoding="utf-8"))
            code = _toctree(sorted(fnmatch.filter(known.values(), f"code/{page}/*")), "Code")
            _write(folder / f"{page}.md", text + code + _toctree(below.get(page, []), hidden=True))
    for file, page in known.items():  # with the files of packages to which pages link
        if file.suffix != ".md":
            head = f"---\norphan: true\n---\n\n# `{file.name}`\n\n{file.relative_to(ROOT).as_posix()}\n\n"
            _write(folder / f"{page}.md", f"{head}````{file.suffix[1:]}\n{file.read_text(encoding='utf-8')}````\n")
    for page in CHILDREN.keys() - known.values():
        _write(folder / f"{page}.md", f"# {page.capitalize()}\n" + _toctree(below[page]))
    _write(folder / "guides.md", "# Guides\n" + "".join(_guides(known)))
    for page, text in reference():
        _write(folder / f"reference/{page}.rst", text)


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def _link(known: dict[Path, str], file: Path, span: re.Match[str]) -> str:
    """Return where a link in ``file`` leads in the site, or a span of code as it is."""
    path, anchor = span[1], span[2]
    if not path:
        return span[0]
    target = (file.parent / path).resolve()
    for page in (target, target / "README.md"):
        if page in known:
            return f"{_up(known[file])}{known[page]}.md{anchor}"
    if target == ROOT / "docs/decisions":
        return f"{_up(known[file])}decisions.md"
    if target.is_relative_to(ROOT / "docs/images"):
        return f"{_up(known[file])}images/{target.name}"
    if target.is_relative_to(API):
        module = target.relative_to(API).with_suffix("").as_posix().removesuffix("/__init__").replace("/", ".")
        for chapter, files in contents().items():
            if module == chapter:
                return f"{_up(known[file])}reference/{chapter}/index.rst"
            if module in files:
                return f"{_up(known[file])}reference/{chapter}/{module.rpartition('.')[2]}.rst"
    if target.suffix == ".py" and target.is_relative_to(ROOT / "packages"):
        known[target] = _code_page(target)
        return f"{_up(known[file])}{known[target]}.md"
    assert target.exists(), f"{file}: {path} does not exist"
    return f"{PROJECT['urls']['Repository']}/blob/main/{target.relative_to(ROOT).as_posix()}{anchor}"


def _up(page: str) -> str:
    return "../" * page.count("/")


def _below(patterns: list[str], known: Collection[str]) -> list[str]:
    """Return the pages that ``patterns`` name, without those of the first level."""
    top = CHILDREN["index"] if patterns is not CHILDREN["index"] else []
    return [page for pattern in patterns for page in sorted(fnmatch.filter(known, pattern)) or [pattern] if page not in top]


def _toctree(entries: list[str], caption: str = "", hidden: bool = False) -> str:
    if not entries:
        return ""
    options = [":maxdepth: 1", *([":hidden:"] if hidden else []), *([f":caption: {caption}"] if caption else [])]
    return "\n```{toctree}\n" + "\n".join([*options, "", *(f"/{entry}" for entry in entries)]) + "\n```\n"


def _guides(known: dict[Path, str]) -> Iterator[str]:
    """Yield a table of contents for each row of README's table of pages."""
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("| I want to |")[2].partition("\n\n")[0]
    for row in table.splitlines()[2:]:
        task, links = row.strip("| ").split(" | ")
        listed = [known.get(ROOT / path, "") for path in re.findall(r"\]\(([^)]+)\)", links)]
        guides = [page for page in listed if page and "/" not in page and page not in {"contributing", "changelog"}]
        yield _toctree([page for page in guides if page not in CHILDREN["index"]], task[0].upper() + task[1:])


def main() -> None:
    """Build the site."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "site")
    parser.add_argument("--versions", metavar="URL", help="of a versions.json, as pydata-sphinx-theme's switcher reads it")
    arguments = parser.parse_args()
    theme: dict[str, Any] = {
        "header_links_before_dropdown": len(CHILDREN["index"]),
        "navbar_persistent": ["search-button"],
        "show_prev_next": False,
        "footer_start": [],
        "footer_end": [],
        "search_as_you_type": True,
    }
    if arguments.versions:
        theme["switcher"] = {"json_url": arguments.versions, "version_match": PROJECT["version"]}
        theme |= {"navbar_start": ["navbar-logo", "version-switcher"], "check_switcher": False}
    options = {
        "project": "Titan",
        "release": PROJECT["version"],
        "html_title": "Titan" if arguments.versions else f"Titan {PROJECT['version']}",
        "root_doc": "index",
        "extensions": ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "ci.reference"],
        "myst_heading_anchors": 4,
        "highlight_language": "none",
        "autodoc_default_options": {
            "undoc-members": True,
            "special-members": "__call__, __contains__, __getitem__, __iter__",
            "exclude-members": "model_config",
        },
        "autodoc_member_order": "bysource",
        "python_maximum_signature_line_length": 100,
        "toc_object_entries_show_parents": "hide",
        "html_static_path": [str(ROOT / "ci/site.css")],
        "html_css_files": ["site.css"],
        "html_sidebars": {"install": [], "plugins/tutorial": []},
        "html_theme": "pydata_sphinx_theme",
        "html_theme_options": theme,
        "html_show_sourcelink": False,
    }
    with tempfile.TemporaryDirectory() as folder, docutils_namespace():
        sources = Path(folder, "pages")
        write_sources(sources)
        output = str(arguments.folder.resolve())
        app = Sphinx(
            sources, None, output, f"{folder}/doctrees", "html", options, status=None, warningiserror=True, freshenv=True
        )
        app.build()
    print(f"{arguments.folder}/index.html")
    sys.exit(app.statuscode)


if __name__ == "__main__":
    main()
