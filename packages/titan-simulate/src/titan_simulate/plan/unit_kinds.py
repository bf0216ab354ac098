"""The units of a model on a machine: those that differ, and the time of their matmuls. Free of torch."""

from __future__ import annotations

from functools import cache

from titan_simulate.hardware.machine import Machine, Matmul
from titan_simulate.plan.model_sizes import Matrix, ModelSizes, Unit


class UnitKinds:
    """The units of a model that differ. Models repeat blocks."""

    def __init__(self, sizes: ModelSizes, machine: Machine) -> None:
        self.sizes, self.machine = sizes, machine
        self.kinds: list[Unit] = []
        self.kind_of: dict[str, int] = {}
        """Name of a unit -> number of its kind."""
        for name, unit in sizes.units.items():
            if unit not in self.kinds:
                self.kinds.append(unit)
            self.kind_of[name] = self.kinds.index(unit)
        flops = [_flops(unit) for unit in self.kinds]
        total = sum(flops[kind] for kind in self.kind_of.values()) or 1.0
        self.flops = [each / total for each in flops]
        """By kind: share of the model's matmul operations."""
        self.block_seconds = cache(self._block_seconds)

    def _block_seconds(
        self, kind: int, matmul_type: str, weights: int, tokens: float, views: int, width: int, imbalance: float
    ) -> float:
        """Return the time of a block's matmuls for one microbatch. A small inner dimension is slower::

        3 products x 2 x tokens x inner x outer / weights x (1 + half_depth / inner dimension of the product) / rate
        """
        rates = self.machine.matmul_of(matmul_type)
        total = of_experts = 0.0
        for matrix in self.kinds[kind].matrices:
            inner = matrix.inner / weights if matrix.divides_inner else matrix.inner
            outer = matrix.outer / weights if matrix.divides_outer else matrix.outer
            if matrix.experts:
                of_experts += self._expert_seconds(matrix, rates, tokens / weights, views, width) * imbalance
                continue
            depth = 3 + rates.half_depth * (1 / inner + 1 / outer + 1 / max(1.0, tokens))
            # Features that no rule divides are computed for the rank's own positions.
            total += 2 * tokens * matrix.copies * matrix.inner * matrix.outer / weights * depth
        return total / (rates.achievable_tflops * 1e12) + of_experts

    def _expert_seconds(self, matrix: Matrix, rates: Matmul, tokens: float, views: int, width: int) -> float:
        """Return the time of the products of a rank's experts. Of few rows each, most of a tile is empty::

            rows of an expert = tokens x chosen experts x views / experts
            2 x rows x inner x outer x experts / views x (2 x rows of its tiles / rows + 1 + small dimensions) / rate

        and no less than the time to read the experts' weights twice, and to write their gradients.
        """
        held, rows = matrix.experts / views, max(1.0, tokens * matrix.copies * views / matrix.experts)
        padded = max(rates.tile_rows / rows, 1 + rates.tile_rows / (2 * rows))  # on average, the last tile is half empty
        depth = 2 * padded + 1 + rates.half_depth * (1 / matrix.inner + 1 / matrix.outer + 1 / rows)
        weights = held * matrix.inner * matrix.outer
        memory = self.machine.memory
        moving = 3 * weights * width / (memory.bandwidth_gb_s * 1e9 * memory.efficiency)
        return max(2 * rows * weights * depth / (rates.achievable_tflops * 1e12), moving)


def _flops(unit: Unit) -> float:
    return sum(matrix.inner * matrix.outer * matrix.copies for matrix in unit.matrices)
