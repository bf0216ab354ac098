set -e
command -v uv > /dev/null || python3 -m pip install --quiet uv
uv sync --locked
