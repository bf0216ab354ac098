"""Trials of a model on a few tokens, before it is divided.

A trial applies the planned division to a small copy of the model, in one process, and compares the logits with those of the
undivided copy. This finds mistakes that a layout cannot show: a ``forward`` that mixes positions, changes hidden states
between two stages or ignores its positions.

Limits: sequences have :data:`LENGTHS` tokens, or as many as a mixer asks for (``Mixer.trial_positions``), so effects that
reach further (a convolution with a dilation of 16, summaries of 64 tokens) are not seen; nor are effects that depend on the
step or on values that random weights do not produce. Windows of attention are shortened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from titan_core.api import Around, Extra, ExtraField, ModelLayout, ModuleCall, Problem, RandomStream, Shares
from titan_core.model.draws import Draws
from titan_core.model.preserved import preserved_module
from titan_core.model.small_copy import positions_to_try, short_windows
from titan_core.model.stand_in import StandInMode, stand_in
from titan_core.model.streams import streams_begun
from titan_core.toolkit.random_state import python_states, reseed

LENGTHS = (16, 20, 24)
"""Candidates for the tokens per sequence. The first that differs from all sizes of the model is used, so that a dimension's
size identifies it."""

_BATCH = 2


def zero_extras(fields: Mapping[str, ExtraField], tokens: Tensor) -> dict[str, Extra]:
    """Return extra tensors for ``tokens``, ``[batch, seq]``, whose values are 0."""
    return {
        name: Extra(
            tokens.new_zeros((*tokens.shape[: 1 + field.sequence], *field.shape), dtype=getattr(torch, field.dtype)),
            field.sequence,
        )
        for name, field in fields.items()
    }


class CannotTry(Exception):
    """The model raised when it was called with a few tokens; the message quotes the error."""


class SmallModelTrial:
    """A small copy of a model, with its logits and calls for a few tokens.

    Raises:
        CannotTry: the model cannot be copied or called.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        name: str,
        device: torch.device,
        length: int | None = None,
        extras: Mapping[str, ExtraField] | None = None,
    ) -> None:
        """
        Args:
            length: most tokens of a sequence (default: one of :data:`LENGTHS`).
            extras: extra tensors of the job's batches. The model receives zeros.
        """
        self._extras = {name: extra for name, extra in (extras or {}).items() if name in layout.inputs}
        self.layout, self.name = layout, name
        heads = {mixer.heads for mixer in layout.mixers.values() if mixer.heads}
        keys = {mixer.key_heads for mixer in layout.mixers.values()}
        sizes = {layout.dim, layout.vocab_size, *heads, *keys, *(layout.dim // count for count in heads)}
        if length is None:
            longer = positions_to_try(layout) - LENGTHS[0]
            length = next((longer + one for one in LENGTHS if longer + one not in sizes), longer + LENGTHS[0])
        self.seq = min(length, layout.max_seq_len)
        numbers = torch.arange(_BATCH * self.seq, device=device) * 7 + 1
        self.tokens = (numbers % layout.vocab_size).view(_BATCH, self.seq)
        self.positions = torch.arange(self.seq, device=device).expand(_BATCH, -1)
        try:
            self._model = stand_in(model, layout, device)
            self.layout = short_windows(self._model, layout)
            self._has_streams = any(isinstance(module, RandomStream) for module in self._model.modules())
            self._names = {id(module): path for path, module in self._model.named_modules()}
            self.draws = Draws()
            """The draws of the call that gave :attr:`logits`."""
            of_head: list[Any] = []
            kept = self.module(layout.head[-1]).register_forward_hook(lambda _, __, output: of_head.append(output))
            with self._recording(_shapes) as events:
                self.logits = self.run(self.tokens, draws=self.draws)
            kept.remove()
            self.returns_the_head = len(of_head) == 1 and self.logits is of_head[0]
            """Whether the model returns the output of its last module."""
            if isinstance(self.logits, Tensor) and self.logits.is_meta:
                raise RuntimeError(
                    "the logits are on the meta device: a tensor of the model is neither a parameter nor a buffer"
                )
        except Exception as error:
            raise CannotTry(_text_of(error)) from error
        self.flops = _operations_by_module(events)
        """Floating-point operations of each module's matmuls."""
        self.calls = [ModuleCall(event.name, event.arguments, event.output) for event in events if event.exit]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch the copy to evaluation mode for the body; otherwise it is in training mode."""
        self._model.eval()
        training, self.logits = self.logits, self.run(self.tokens)
        try:
            yield
        finally:
            self.logits = training
            self._model.train()

    def streams(self) -> AbstractContextManager[None]:
        """Let the model's random streams draw as in training within the block; outside, their draws are those of torch."""
        return streams_begun(self._model, self.tokens) if self._has_streams else nullcontext()

    def in_training(self) -> tuple[Any, Draws]:
        """Return the logits within :meth:`streams`, and the other draws of the call."""
        if not self._has_streams:
            return self.logits, self.draws
        draws = Draws()
        return self.run(self.tokens, draws=draws), draws

    def run(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        around: Mapping[str, Around] | None = None,
        draws: Draws | None = None,
        seed: int | None = None,
    ) -> Any:
        """Call the copy, and restore its state afterwards: modules may count their calls or draw random numbers.

        Args:
            around: module name -> function that is called in place of its forward.
            draws: what random operators return, and what they are; ``None``: constants.
            seed: of the generators; ``None``: they are as the caller has them.
        """
        optional = {"positions": positions, "documents": documents}
        optional |= {name: extra.tensor for name, extra in zero_extras(self._extras, tokens).items()}
        changed: list[tuple[nn.Module, Any]] = []
        try:
            for path, replacement in (around or {}).items():
                module = self._model.get_submodule(path)
                changed.append((module, vars(module).get("forward")))
                module.forward = partial(replacement, module.forward)
            given = {key: value for key, value in optional.items() if value is not None}
            draws = draws or Draws()
            self._mode = StandInMode(self._model, draws)
            with torch.no_grad(), preserved_module(self._model), self._mode:
                if seed is not None:
                    reseed(seed)
                before = python_states()
                result = self._model(tokens, **given)
                draws.in_python = python_states() != before
                return result
        finally:
            for module, own in changed:
                del module.forward
                if own is not None:
                    module.forward = own

    def module(self, name: str) -> nn.Module:
        """Return the copy's module ``name``."""
        return self._model.get_submodule(name)

    def same(self, logits: Any, expected: Tensor | None = None) -> bool:
        """Return whether ``logits`` equal those of the undivided copy, to rounding."""
        expected = self.logits if expected is None else expected
        if not isinstance(logits, Tensor) or logits.shape != expected.shape:
            return False
        tolerance = max(1e-4, 32 * torch.finfo(expected.dtype).eps) * float(expected.abs().max())
        return torch.allclose(logits, expected, rtol=0.0, atol=tolerance, equal_nan=True)

    def fault(self, run: Callable[[], Any], shares: Shares | None = None, sequence: int | None = None) -> str | None:
        """Return ``None`` if ``run`` gives the logits of the undivided copy, else a description of the first difference.

        Args:
            shares: the division of positions by ``run``, to compare each rank's tensors with those of the undivided copy.
            sequence: the only sequence of the batch that ``run`` computes; ``None``: it computes all.
        """
        rows = slice(None) if sequence is None else slice(sequence, sequence + 1)
        try:
            logits, error = run(), None
        except Exception as raised:  # noqa: BLE001 - the undivided model works, so the division is at fault
            logits, error = None, raised
        if error is None and self.same(logits, self.logits[rows]):
            return None
        with self._recording(_some_features) as whole:
            self.run(self.tokens)
        with self._recording(_some_features) as divided:
            try:
                run()
            except Exception as raised:  # noqa: BLE001 - as above
                error = raised
        place = _first_difference(whole, divided, partial(_agree, shares=shares, rows=rows))
        # With a share of the positions, a shape that does not fit is no other fault than a wrong result.
        return place if error is None or shares is not None else f"{place} ({_text_of(error)})"

    def difference(self, run: Callable[[], Any], other: Callable[[], Any], positions: Sequence[slice]) -> str | None:
        """Return where ``other`` first computes something else than ``run`` of some positions; ``None`` if their logits are
        equal.

        Args:
            positions: of each sequence.
        """
        if _agree_at(run(), other(), positions, self.seq):
            return None
        with self._recording(_some_features) as expected:
            run()
        with self._recording(_some_features) as found:
            other()
        return _first_difference(expected, found, partial(_agree_at, positions=positions, seq=self.seq))

    def drawing(self) -> Counter[tuple[str, str]]:
        """Return how often each module calls each random operator: (name of the module, name of the operator)."""
        draws, found = Draws(), Counter[tuple[str, str]]()
        inside, counted, states = [""], 0, python_states()

        def count(*_: Any) -> None:
            nonlocal counted, states
            found.update((inside[-1], name) for name in draws.operators[counted:])
            counted, before, states = len(draws.operators), states, python_states()
            if states != before and len(inside) > 1:
                found.update([(inside[-1], "numbers of Python or numpy")])

        def enter(module: nn.Module, arguments: Any) -> None:
            count()
            inside.append(self._names.get(id(module), inside[-1]))

        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            count()
            inside.pop()

        with _hooks(enter, leave):
            self.run(self.tokens, draws=draws)
        return found

    def positions_fault(self) -> str | None:
        """Return the :meth:`fault` of a call with explicit positions ``0 .. seq - 1``, which are the default."""
        return self.fault(lambda: self.run(self.tokens, self.positions))

    def problem(self, why: str, fix: str) -> Problem:
        """Return a problem in the layout or in the model."""
        return Problem(f"layout of model {self.name!r}", why, fix)

    def units(self) -> list[str]:
        """Return the modules that hidden states pass through, in order: embedding, blocks, head."""
        layout = self.layout
        return [*layout.embedding, *(f"{layout.blocks}.{index}" for index in range(layout.num_blocks)), *layout.head]

    def calls_of(self, names: Iterable[str]) -> list[ModuleCall]:
        """Return the calls of modules ``names``, in call order."""
        wanted = set(names)
        return [call for call in self.calls if call.name in wanted]

    @contextmanager
    def _recording(self, keep: Callable[[Any], Any]) -> Iterator[list[_Event]]:
        events: list[_Event] = []

        def enter(module: nn.Module, arguments: Any) -> None:
            name = self._names.get(id(module))
            if name is not None:
                events.append(_Event(name, False, tuple(map(keep, arguments)), None, self._mode.flops))

        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            name = self._names.get(id(module))
            if name is not None:
                events.append(_Event(name, True, tuple(map(keep, arguments)), keep(output), self._mode.flops))

        with _hooks(enter, leave):
            yield events


@contextmanager
def _hooks(enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class _Event:
    name: str
    exit: bool
    arguments: tuple[Any, ...]
    output: Any
    flops: float
    """Floating-point operations of the pass before it."""

    @property
    def value(self) -> Any:
        return self.output if self.exit else self.arguments[0] if self.arguments else None


def _operations_by_module(events: list[_Event]) -> dict[str, float]:
    found: dict[str, float] = {}
    begun: list[float] = []
    for event in events:
        if event.exit:
            found[event.name] = found.get(event.name, 0.0) + event.flops - begun.pop()
        else:
            begun.append(event.flops)
    return found


def _shapes(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else value if value is None else type(value)


def _some_features(value: Any) -> Any:
    """Return a few features of hidden states, which can be kept for every module."""
    value = value[0] if isinstance(value, tuple) and value else value
    hidden = isinstance(value, Tensor) and value.dim() > 2 and value.is_floating_point()
    return value[..., :8].clone() if hidden else None


def _first_difference(whole: list[_Event], divided: list[_Event], agree: Callable[[Any, Any], bool]) -> str:
    """Return where two recordings of one model begin to differ: the module with the first wrong output, or, if an input is
    wrong first, the code of the module that contains the call."""
    inside: list[str] = []
    for expected, found in zip(whole, divided, strict=False):
        if expected.name != found.name or expected.exit != found.exit:
            break
        if (found.exit or found.name) and not agree(expected.value, found.value):
            if found.exit:
                return f"module {found.name!r}" if found.name else "the model's forward, after its last module,"
            return f"the forward of {_shown(inside)}, before it calls {found.name!r},"
        if found.exit:
            inside.pop()
        else:
            inside.append(found.name)
    return f"the forward of {_shown(inside)}"


def _shown(inside: list[str]) -> str:
    return f"module {inside[-1]!r}" if inside and inside[-1] else "the model"


def _agree(whole: Tensor | None, found: Tensor | None, shares: Shares | None, rows: slice) -> bool:
    if whole is None or found is None or whole.dim() != found.dim():
        return True  # not comparable
    if whole.shape[0] == _BATCH:
        whole = whole[rows]
    elif whole.shape[0] == 1 and shares is not None:
        whole = whole.expand(_BATCH, *whole.shape[1:])  # the same for all sequences, such as angles of positions
    candidates = [found]
    if shares is not None and found.shape != whole.shape:
        candidates = [shares.join(found, dim) for dim in (1, 2) if _divisible(found, shares, dim)]
    tolerance = 1e-4 * float(whole.abs().max()) if whole.numel() else 0.0
    return any(
        candidate.shape == whole.shape and torch.allclose(candidate, whole, rtol=0.0, atol=tolerance, equal_nan=True)
        for candidate in candidates
    )


def _agree_at(whole: Tensor | None, found: Tensor | None, positions: Sequence[slice], seq: int) -> bool:
    if whole is None or found is None or whole.shape != found.shape or seq not in whole.shape[1:]:
        return True  # not comparable
    dim = whole.shape.index(seq, 1)
    rows = zip(whole.movedim(dim, 1), found.movedim(dim, 1), positions, strict=False)
    return all(equal_but_rounding(one[own], other[own]) for one, other, own in rows)


def equal_but_rounding(one: Tensor, other: Tensor) -> bool:
    """Return whether two results of the same computation differ by no more than another order of its sums explains."""
    tolerance = max(1e-5, 8 * torch.finfo(one.dtype).eps) * float(one.abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=tolerance, equal_nan=True)


def _divisible(found: Tensor, shares: Shares, dim: int) -> bool:
    return found.shape[0] % len(shares.positions) == 0 and found.shape[dim] == len(shares.positions[0])


def _text_of(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
