"""All of ``torchao.prototype`` that this package uses, which may change with any release. Checked with torchao 0.18."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from titan_core.api import UserError

try:
    from torchao.prototype.mx_formats.config import (
        MXFP8Dim0CastKernelChoice as MXFP8Dim0CastKernelChoice,
        MXFP8Dim1CastKernelChoice as MXFP8Dim1CastKernelChoice,
        ScaleCalculationMode as ScaleCalculationMode,
    )
    from torchao.prototype.mx_formats.kernels import (
        f4_unpacked_to_f32 as f4_unpacked_to_f32,
        f32_to_f4_unpacked as f32_to_f4_unpacked,
        pack_uint4 as pack_uint4,
    )
    from torchao.prototype.mx_formats.mx_tensor import to_dtype as to_dtype, to_mx as to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import (
        E4M3_EPS as E4M3_EPS,
        per_tensor_amax_to_scale as per_tensor_amax_to_scale,
    )
    from torchao.prototype.mx_formats.utils import to_blocked as to_blocked
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference as KernelPreference
except ImportError as error:
    found = version("torchao")
    raise ImportError(f"[mx] needs prototypes of torchao 0.18, and torchao {found} has others ({error})") from error


def mx_product() -> Any:
    """Return torchao's product in MXFP8, forward and backward, an autograd function.

    Raises:
        UserError: torchao cannot be used with this triton, or has no such product.
    """
    try:
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    except ValueError as error:  # torchao 0.18 on a GPU with triton 3.9: github.com/pytorch/ao, pull request 4880
        reason = f"its MX kernels cannot be imported ({error})"
        raise UserError.one("package torchao", reason, "install torchao above 0.18, or triton below 3.9") from None
    except ImportError as error:
        reason = f"version {version('torchao')} has no product in MXFP8 ({error})"
        raise UserError.one("package torchao", reason, "install torchao 0.18") from None
    return mx_mm
