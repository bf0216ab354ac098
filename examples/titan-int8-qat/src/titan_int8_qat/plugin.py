"""Registers the int8 quantisation-aware training transform."""

from titan_core.api import Phase, Ref, Transform, hookimpl
from titan_int8_qat.config import Int8QATSection

api = (1, 0)


@hookimpl
def titan_precisions() -> list[Transform]:
    return [
        Transform(
            name="int8_qat",
            summary="quantisation-aware training: weights are rounded to integers whenever they are used",
            config=Int8QATSection,
            phase=Phase.PRECISION,
            active=lambda context: context.section.enable,
            apply=Ref("titan_int8_qat.fake_quantize:apply"),
        ),
    ]
