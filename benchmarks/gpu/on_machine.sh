#!/usr/bin/env bash
# Installs wheels/ without a network into an environment of its own, on top of the packages of this machine's Python (torch
# is not touched), and runs the benchmark there. Arguments are those of `python -m benchmarks.gpu`.
#
#   PYTHON=python3 TITAN_VENV=/tmp/titan-gpu benchmarks/gpu/on_machine.sh --out results
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-python3}"
venv="${TITAN_VENV:-/tmp/titan-gpu}"

if ! compgen -G "wheels/titan_core-*.whl" >/dev/null; then
    echo "wheels/ has no wheels: run \`uv run python -m benchmarks.gpu.carry\` first, where there is a network" >&2
    exit 2
fi
"$python" -m venv --clear --without-pip "$venv"
# Where $python is itself an environment's, system site packages would be those of the Python below it.
"$python" - "$venv" <<'PY'
import site, sys, sysconfig
from pathlib import Path

paths = [*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
inner = Path(sys.argv[1]) / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
(inner / "below.pth").write_text("\n".join(dict.fromkeys(paths)) + "\n")
PY
"$python" -m pip --python "$venv/bin/python" install --quiet --no-index --no-deps --no-compile --no-cache-dir \
    --ignore-installed --disable-pip-version-check wheels/*.whl
exec "$venv/bin/python" -m benchmarks.gpu "$@"
