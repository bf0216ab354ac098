"""Work that fails on one rank ends alike on all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from titan_ckpt.all_ranks import on_all_ranks
from titan_core.api import MeshPlan, UserError, World
from titan_core.api.parallel.mesh import STANDARD_DIMS
from titan_testing.gloo_pool import GlooPool


class OfALibrary(Exception):
    """Cannot be unpickled: it needs a second argument."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def ended(errors: list[Exception | None]) -> Any:
    """Return how work ends on this rank that raises one of ``errors`` on each."""
    dist.init_process_group("gloo")
    try:
        rank, size = dist.get_rank(), dist.get_world_size()
        plan = MeshPlan(STANDARD_DIMS, {dim.name: size if dim.name == "dp_shard" else 1 for dim in STANDARD_DIMS})
        world = World(rank, torch.device("cpu"), plan, None)  # type: ignore[arg-type]

        def work() -> int:
            if (error := errors[rank]) is not None:
                raise OfALibrary("a", "b") if type(error) is RuntimeError else error
            return rank

        return on_all_ranks(work, world, (ValueError, OSError))
    except Exception as error:  # noqa: BLE001 - compared by the test
        return type(error).__name__, str(error)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([None, None, None], [(0, ""), (1, ""), (2, "")]),
        ([None, ValueError("bad"), OSError("gone")], [(0, "bad"), (None, "bad"), (None, "bad")]),
        ([None, None, KeyError("a")], [*[("RuntimeError", "KeyError('a')")] * 2, ("KeyError", "'a'")]),
        ([ValueError("bad"), None, MemoryError("full")], [("MemoryError", "full")] * 3),
        ([RuntimeError(), None, None], [("OfALibrary", "a"), *[("RuntimeError", "OfALibrary('a')")] * 2]),
        ([UserError.one("a", "is wrong"), KeyError("b"), None], [("UserError", "a: is wrong")] * 3),
    ],
    ids=str,
)
def test_all_ranks_end_alike(gloo: GlooPool, errors: list[Exception | None], expected: list[Any]) -> None:
    assert gloo.run(3, ended, errors) == expected
