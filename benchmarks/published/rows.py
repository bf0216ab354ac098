"""All rows."""

from __future__ import annotations

from benchmarks.published import rows_experts, rows_ibm, rows_kempner, rows_meta, rows_nvidia, rows_torchtitan

EXPERTS = rows_experts.ROWS
ROWS = (*rows_torchtitan.ROWS, *rows_ibm.ROWS, *rows_kempner.ROWS, *rows_meta.ROWS, *rows_nvidia.ROWS, *EXPERTS)
