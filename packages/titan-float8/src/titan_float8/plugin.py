"""The components that titan-float8 registers."""

from __future__ import annotations

from titan_core.api import Checks, HealthCheck, Phase, Planning, Ref, StepUse, Transform, hookimpl
from titan_float8.config import Float8Section, MXSection

api = (1, 0)


@hookimpl
def titan_precisions() -> list[Transform]:
    return [
        Transform(
            name="float8",
            summary="linear layers in float8: tensorwise, rowwise, rowwise with exact weight gradients",
            config=Float8Section,
            phase=Phase.PRECISION,
            active=lambda context: context.section.enable,
            check=Ref("titan_float8.checks:check"),
            checks=Checks(hardware=Ref("titan_float8.hardware:float8")),
            apply=Ref("titan_float8.float8:apply"),
            steps=StepUse(observer=Ref("titan_float8.float8:observe")),
            planning=Planning(
                choices=Ref("titan_float8.config:float8_choices"), costs=Ref("titan_float8.config:float8_costs")
            ),
        ),
        Transform(
            name="mxfp8",
            summary="linear layers in MXFP8 or NVFP4, with one scale per 32 or 16 numbers",
            config=MXSection,
            phase=Phase.PRECISION,
            active=lambda context: context.section.enable,
            check=Ref("titan_float8.checks:check_mx"),
            checks=Checks(model=Ref("titan_float8.mx:check_model"), hardware=Ref("titan_float8.hardware:mxfp8")),
            apply=Ref("titan_float8.mx:apply"),
            planning=Planning(costs=Ref("titan_float8.config:mx_costs")),
        ),
    ]


@hookimpl
def titan_health_checks() -> list[HealthCheck]:
    return [
        HealthCheck(
            name="low precision",
            summary="which formats each GPU computes",
            check=Ref("titan_float8.hardware:check"),
            slow=True,
        ),
    ]
