"""Says how to install a package of Titan: from where titan-core came, or from the index in ``TITAN_PACKAGE_INDEX``.

Titan is not on the public index. There, ``titan-core`` is another project's package, and anybody may register the other
names: no error may send its reader to that index.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import zipfile
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from titan_core.api.config.secrets import redact_text
from titan_core.plugins.names import PACKAGE, ours

INDEX = "TITAN_PACKAGE_INDEX"
"""Environment variable: URL of a package index that has Titan's packages and what they depend on."""
_SCHEMES = ("https", "http", "file")


def how_to_install(package: str) -> str:
    """Return how to install Titan's ``package``: a command for a shell, if the source of titan-core is known."""
    index = os.environ.get(INDEX, "")
    if index:
        return _from_index(package, index)
    source = _source()
    command = _beside(package, source) if source is not None else None
    if command is not None:
        return f"install {package} (`{shlex.join(command)}`)"
    return (
        f"install the wheel of {package} from where titan-core's came, or set {INDEX}: the public index does not have Titan"
    )


def _from_index(package: str, index: str) -> str:
    """Return how to install ``package`` from ``index`` and no other. The command does not contain a URL with secrets, but
    the variable that does."""
    try:
        scheme = urlsplit(index).scheme
    except ValueError:
        scheme = ""
    if scheme not in _SCHEMES or any(letter.isspace() or not letter.isprintable() for letter in index):
        return f"set {INDEX} to the URL of a package index ({', '.join(_SCHEMES)}), and install {package} from there"
    url = shlex.quote(index) if redact_text(index) == index else f'"${INDEX}"'
    return f"install {package} (`uv pip install --default-index {url} {package}`)"


def _source() -> Path | None:
    """Return the folder or the wheel from which this titan-core was installed, if the installer has recorded it."""
    distribution = ours()
    recorded = distribution.read_text("direct_url.json") if distribution is not None else None
    try:
        url: SplitResult = urlsplit(json.loads(recorded)["url"]) if recorded else urlsplit("")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # another program's file: it only makes the hint more precise
    if url.scheme != "file" or not url.path:
        return None
    from urllib.request import url2pathname  # imports ssl and http: 15 ms of every command's start

    return Path(url2pathname(url.path))


def _beside(package: str, core: Path) -> list[str] | None:
    """Return the command that installs ``package`` from beside ``core``: its folder in a workspace, or its wheel. It names
    the wheels of titan-core and of Titan's libraries too, for which an installer would otherwise look in an index."""
    if (core.parent / package / "pyproject.toml").is_file():
        return ["uv", "pip", "install", "--editable", str(core.parent / package)]  # a workspace member, as titan-core is
    if core.suffix != ".whl" or not core.is_file():
        return None
    try:
        wheel = _wheel(package, core.parent)
        needed = [_wheel(name, core.parent) for name in _libraries(wheel)]
    except (OSError, LookupError, zipfile.BadZipFile):
        return None
    return ["uv", "pip", "install", *map(str, (core, wheel, *needed))]


def _wheel(package: str, folder: Path) -> Path:
    return sorted(folder.glob(f"{package.replace('-', '_')}-*.whl"))[-1]


def _libraries(wheel: Path) -> list[str]:
    """Return Titan's packages that ``wheel`` requires besides titan-core."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next((name for name in archive.namelist() if name.endswith(".dist-info/METADATA")), "")
        with archive.open(metadata) as file:  # KeyError, a LookupError, if there is none
            text = file.read(1 << 20).decode(errors="replace")
    return re.findall(rf"(?m)^Requires-Dist: (?!{PACKAGE}\b)(titan-[a-z0-9-]+)", text)
