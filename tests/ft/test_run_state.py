"""Which states a replica group could load."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from titan_core.api import UserError
from titan_ft.run_state import require_sendable


class Quantised(torch.Tensor):
    """A type of tensor that the receiver's unpickler does not know."""


@pytest.mark.parametrize("value", [torch.zeros(2).as_subclass(Quantised), object()], ids=["tensor", "object"])
def test_a_state_that_no_peer_could_load_is_refused_early(value: Any) -> None:
    require_sendable({"step": 1, "optimizer": {"state": {"weight": torch.zeros(2), "parameter": torch.nn.Parameter()}}})
    with pytest.raises(UserError, match="the state of optimizer: is neither tensors nor plain values") as caught:
        require_sendable({"step": 1, "optimizer": {"state": {"weight": [value]}}})
    assert "set fault_tolerance.enable = false" in str(caught.value)
