"""Ranks, collectives and tensors in words."""

from __future__ import annotations

from collections.abc import Sequence

from titan_core.api.tools.rank_names import ranks as ranks
from titan_debug.flight.dump import Dump, Entry, Frame, Group
from titan_debug.flight.stacks import location, short_path

_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Byte": "uint8", "Char": "int8",
    "Short": "int16", "Int": "int32", "Long": "int64", "Bool": "bool",
}  # fmt: skip
_FUNCTIONS = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_collectives.py")


def verb(numbers: Sequence[int], one: str, many: str) -> str:
    """``one`` for a single rank, ``many`` for several."""
    return one if len(numbers) == 1 else many


def group_name(group: Group) -> str:
    """``dp_shard (ranks 0-3)``."""
    return group.label if group.label.startswith("all ranks") else f"{group.label} ({ranks(group.ranks)})"


def collective(entry: Entry, group: Group) -> str:
    """``all_reduce, number 57 of dp_shard (ranks 0-3)``."""
    return f"{entry.op}, number {entry.seq} of {group_name(group)}"


def tensors(entry: Entry) -> str:
    """What is sent: ``[4, 2] float32``; empty where nothing is."""
    pairs = zip(entry.input_sizes, entry.input_dtypes, strict=False)
    return ", ".join(f"{size} {_DTYPES.get(dtype, dtype)}" for size, dtype in pairs)


def call(entry: Entry, dump: Dump) -> str:
    """What a rank calls and where: ``all_reduce of [4] float32, called at my_plugin.py:12 in titan_step_start``."""
    stack = dump.stacks[entry.stack] if entry.stack < len(dump.stacks) else []
    of = f" of {tensors(entry)}" if tensors(entry) else ""
    function = _function(stack)
    called = f" ({function})" if function not in ("", entry.op) else ""
    return f"{entry.op}{called}{of}, called at {location(stack)}" if stack else f"{entry.op}{of}"


def _function(stack: Sequence[Frame]) -> str:
    """Torch's function that was called; gloo reduces and scatters by all_reduce, and records that."""
    outermost = ""
    for frame in stack:
        if frame.file.endswith(_FUNCTIONS):
            outermost = frame.function
        elif not frame.file.endswith("/torch/distributed/c10d_logger.py"):
            break
    return outermost


def main_calls(dump: Dump) -> str:
    """The innermost calls of the main thread in one line, outermost last."""
    return " < ".join(f"{frame.function} ({frame.file.rpartition('/')[2]}:{frame.line})" for frame in dump.main_stack[:6])


def stack_lines(dump: Dump, stack: int) -> list[str]:
    """The innermost calls of a stack, a line each."""
    frames = dump.stacks[stack] if stack < len(dump.stacks) else []
    return [f"  {short_path(frame.file)}:{frame.line} in {frame.function}" for frame in frames[:12]]
