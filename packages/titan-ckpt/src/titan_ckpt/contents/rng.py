"""States of a process's random generators, for the manifest.

Titan's own random values come from counters, so few jobs ever draw from these generators. The state of one that has only
been seeded is its seed: with thousands of ranks, whole states (11 KiB each) would be most of a manifest.
"""

from __future__ import annotations

import base64
import random
from typing import Any

import torch


def collect(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's generator, of torch's CPU generator, and of torch's generator on ``device`` if CUDA."""
    seed = torch.initial_seed()
    cpu, python = torch.get_rng_state(), random.getstate()
    version, words, gauss = python
    states: dict[str, Any] = {
        "python": seed if random.Random(seed).getstate() == python else [version, list(words), gauss],
        "cpu": seed if torch.equal(torch.Generator().manual_seed(seed).get_state(), cpu) else _text(cpu),
    }
    if device.type == "cuda":
        states["cuda"] = _text(torch.cuda.get_rng_state(device))
    return states


def apply(states: dict[str, Any], device: torch.device) -> None:
    """Set the generators to ``states``, a result of :func:`collect`.

    Raises:
        ValueError: ``states`` is not a result of :func:`collect`.
    """
    try:
        python, cpu = states["python"], states["cpu"]
        if isinstance(python, int):
            random.seed(python)
        else:
            version, words, gauss = python
            if not all(type(word) is int for word in words) or type(gauss) not in (float, type(None)):
                raise TypeError("the state of Python's generator is not made of numbers")
            random.setstate((version, tuple(words), gauss))
        if isinstance(cpu, int):
            torch.default_generator.manual_seed(cpu)
        else:
            torch.set_rng_state(_tensor(cpu))
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(_tensor(states["cuda"]), device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"the state of a random generator is damaged: {error}") from None


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
