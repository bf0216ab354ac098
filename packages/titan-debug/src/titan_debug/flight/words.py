"""How ranks, collectives and tensors appear in messages."""

from __future__ import annotations

from collections.abc import Sequence

from titan_core.toolkit.text import ranks as ranks
from titan_debug.flight.dump import Dump, Entry, Frame, Group
from titan_debug.flight.stacks import location, short_path

_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Byte": "uint8", "Char": "int8",
    "Short": "int16", "Int": "int32", "Long": "int64", "Bool": "bool",
}  # fmt: skip
_FUNCTIONS = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_collectives.py")


def verb(numbers: Sequence[int], one: str, many: str) -> str:
    """Return ``one`` for a single rank and ``many`` for several."""
    return one if len(numbers) == 1 else many


def group_name(group: Group) -> str:
    """Return ``dp_shard (ranks 0-3)``."""
    return group.label if group.label.startswith("all ranks") else f"{group.label} ({ranks(group.ranks)})"


def collective(entry: Entry, group: Group) -> str:
    """Return ``all_reduce #57 on dp_shard (ranks 0-3)``."""
    return f"{entry.op} #{entry.seq} on {group_name(group)}"


def tensors(entry: Entry) -> str:
    """Return the shapes and types of the inputs: ``[4, 2] float32``; empty if there are none."""
    pairs = zip(entry.input_sizes, entry.input_dtypes, strict=False)
    return ", ".join(f"{size} {_DTYPES.get(dtype, dtype)}" for size, dtype in pairs)


def call(entry: Entry, dump: Dump) -> str:
    """Return a rank's call and its location: ``all_reduce of [4] float32 at my_plugin.py:12 in titan_step_start``."""
    stack = dump.stacks[entry.stack] if entry.stack < len(dump.stacks) else []
    of = f" of {tensors(entry)}" if tensors(entry) else ""
    function = _function(stack)
    called = f" ({function})" if function not in ("", entry.op) else ""
    return f"{entry.op}{called}{of} at {location(stack)}" if stack else f"{entry.op}{of}"


def _function(stack: Sequence[Frame]) -> str:
    """Return the torch function that was called. It may differ from the recorded operation: gloo implements reduce-scatter
    by all_reduce and records the latter."""
    outermost = ""
    for frame in stack:
        if frame.file.endswith(_FUNCTIONS):
            outermost = frame.function
        elif not frame.file.endswith("/torch/distributed/c10d_logger.py"):
            break
    return outermost


def main_calls(dump: Dump) -> str:
    """Return the innermost calls of the main thread on one line, innermost first."""
    return " < ".join(f"{frame.function} ({frame.file.rpartition('/')[2]}:{frame.line})" for frame in dump.main_stack[:6])


def stack_lines(dump: Dump, stack: int) -> list[str]:
    """Return the innermost calls of a stack, one per line."""
    frames = dump.stacks[stack] if stack < len(dump.stacks) else []
    return [f"  {short_path(frame.file)}:{frame.line} in {frame.function}" for frame in frames[:12]]
