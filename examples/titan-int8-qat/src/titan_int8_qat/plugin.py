from titan_core.api.components import PrecisionTransform
from titan_core.api.hookspecs import hookimpl
from titan_core.api.ref import Ref
from titan_int8_qat.config import Int8QATSection

api = (1, 0)


@hookimpl
def titan_precisions() -> list[PrecisionTransform]:
    return [
        PrecisionTransform(
            name="int8_qat",
            summary="quantisation-aware training: weights rounded to integers where they are used",
            config=Int8QATSection,
            active=lambda facts: facts.section(Int8QATSection).enable,
            apply=Ref("titan_int8_qat.fake_quantize:apply"),
        ),
    ]
