"""Reading TOML."""

from __future__ import annotations

from titan_core.api._toml import LONGEST as LONGEST, BadToml as BadToml, parse_toml as parse_toml
