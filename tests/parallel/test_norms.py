"""The formula of a norm of any class is found by calling it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from harness.unusual_gpts import RoundingNorm
from titan_core.api import UserError
from titan_parallel.norms import Norm, norm_of

WIDTH = 24


class WideNorm(nn.Module):
    """RMSNorm that multiplies before it rounds, like transformers' OLMo-2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(WIDTH)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps))).to(x.dtype)


class Of(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], name: str = "weight") -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.empty(WIDTH)))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, next(self.parameters()))


@pytest.mark.parametrize(
    ("build", "norm"),
    [
        (lambda: nn.RMSNorm(WIDTH, eps=1e-5), Norm(1e-5, centred=False, offset=0.0, rounds_first=False)),
        (lambda: nn.RMSNorm(WIDTH), Norm(torch.finfo(torch.float32).eps, centred=False, offset=0.0, rounds_first=False)),
        (lambda: nn.LayerNorm(WIDTH), Norm(1e-5, centred=True, offset=0.0, rounds_first=False)),
        (lambda: nn.LayerNorm(WIDTH, eps=1e-3, bias=False), Norm(1e-3, centred=True, offset=0.0, rounds_first=False)),
        (WideNorm, Norm(1e-6, centred=False, offset=0.0, rounds_first=False)),
        (lambda: RoundingNorm(WIDTH), Norm(1e-3, centred=False, offset=1.0, rounds_first=True)),
    ],
)
def test_a_norm_of_any_class_is_recognised(build: Callable[[], nn.Module], norm: Norm) -> None:
    with torch.device("meta"):
        module = build()
    assert norm_of(module, "norm") == norm
    real = module.to_empty(device="cpu")
    for parameter in real.parameters():
        nn.init.normal_(parameter)
    for dtype in (torch.float32, torch.bfloat16):
        real.to(dtype)
        x = torch.randn(3, 5, WIDTH).to(dtype)
        found = norm(x, real.weight, getattr(real, "bias", None), lambda wide: wide.mean(-1, keepdim=True))
        torch.testing.assert_close(found, real(x), rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Of(lambda x, w: x.softmax(-1) * w), "computes neither RMSNorm nor LayerNorm of its input's last dimension"),
        (Of(lambda x, w: x / x.norm(dim=-1, keepdim=True) * w), "computes neither RMSNorm nor LayerNorm"),
        (Of(lambda x, w: nn.functional.rms_norm(x, (WIDTH,), w) * 2.0), "computes neither RMSNorm nor LayerNorm"),
        (Of(lambda x, w: nn.functional.rms_norm(x, (WIDTH,), w), name="gain"), "computes neither RMSNorm nor LayerNorm"),
        (nn.GroupNorm(4, WIDTH), "computes neither RMSNorm nor LayerNorm"),
        (Of(lambda x, w: x @ w), "raises TypeError for a tensor: it does not return a tensor like its input"),
        (nn.Bilinear(1, 1, WIDTH), "raises TypeError for a tensor: .* missing 1 required positional argument"),
    ],
)
def test_what_computes_no_norm_is_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(
        UserError, match=rf"^module 'q_norm' of the model: has the rule Shard\(0, norm=True\), but {message}"
    ):
        norm_of(module, "q_norm")
