"""A picture of a tree in SVG: below each node its parts, as wide as their shares. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, LEVEL, LEAVES = 1160, 26, 64
"""Of the picture, height of a level of it, and how much higher the leaves of the last one are, in pixels."""
NARROWEST = 2.0
"""Pixels below which siblings are drawn together."""
CHARACTER, MARGIN = 6.6, 6.0
"""Width of a character, about, and of what is left and right of a label, in pixels."""
ITSELF, OTHERS = "itself", "others"


@dataclass
class Node:
    """A part of a whole."""

    name: str
    style: str = ""
    """Class in the page's style sheet of what is its own; ``""`` if all of it belongs to its parts."""
    own: float = 0.0
    value: float = 0.0
    parts: dict[str, Node] = field(default_factory=dict)

    def add(self, path: Sequence[str], style: str, value: float) -> None:
        """Add ``value`` to the node at ``path``, and to all that contain it."""
        self.value += value
        if path:
            self.parts.setdefault(path[0], Node(path[0])).add(path[1:], style, value)
        else:
            self.own, self.style = self.own + value, style

    @property
    def depth(self) -> int:
        """Number of levels."""
        return 1 + max((one.depth for one in self.parts.values()), default=0)


def icicle(root: Node, show: Callable[[float], str], order: Sequence[str] = ()) -> str:
    """Return the SVG of a tree, whose leaves reach down to its lower edge. Siblings are sorted by size.

    Args:
        show: value -> text with its unit.
        order: names of parts of the root that come first.
    """
    height = root.depth * LEVEL + LEAVES

    def cells(node: Node, x: float, width: float, level: int, path: tuple[str, ...]) -> Iterator[str]:
        share = node.value / root.value
        tall = LEVEL if node.parts else height - level * LEVEL
        title = f"{' / '.join(path) or node.name}: {show(node.value)}, {share:.1%}"
        box = f'x="{x:.2f}" y="{level * LEVEL}" width="{width:.2f}" height="{tall}"'
        yield f'<g><title>{escape(title)}</title><rect class="{"inner" if node.parts else escape(node.style)}" {box}/>'
        yield from _label(node.name, share, x, level * LEVEL, width, tall)
        yield "</g>"
        for one in _sorted(node, width / node.value, order if level == 0 else ()):
            yield from cells(one, x, one.value * width / node.value, level + 1, (*path, one.name))
            x += one.value * width / node.value

    drawn = "".join(cells(root, 0.0, WIDTH, 0, ()))
    return f'<svg class="icicle" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(root.name)}">{drawn}</svg>'


def _sorted(node: Node, pixels: float, order: Sequence[str]) -> list[Node]:
    """Return the parts of a node, the narrow ones of which are together."""
    if not node.parts:
        return []
    itself = [Node(ITSELF, node.style, value=node.own)] if node.own else []
    wide = [one for one in (*node.parts.values(), *itself) if one.value * pixels >= NARROWEST]
    wide.sort(key=lambda one: (order.index(one.name) if one.name in order else len(order), -one.value))
    rest = node.value - sum(one.value for one in wide)
    return [*wide, Node(OTHERS, OTHERS, value=rest)] if rest * pixels >= 0.1 else wide


def _label(name: str, share: float, x: float, y: float, width: float, height: float) -> Iterator[str]:
    """Yield a label with the share if there is room, or one that reads upwards; nothing if there is no room for one."""
    room = int((width - 2 * MARGIN) / CHARACTER)
    percent = f"{share:.1%}"
    if height > LEVEL and room >= max(len(name), len(percent)):
        yield _text(x + MARGIN, y + 17, name) + _text(x + MARGIN, y + 34, percent, "share")
    elif room >= len(name) + len(percent) + 1:
        yield _text(x + MARGIN, y + 17, name) + _text(x + width - MARGIN, y + 17, percent, "share end")
    elif room >= len(name):
        yield _text(x + MARGIN, y + 17, name)
    elif width >= 14 and height >= CHARACTER * len(name) + 2 * MARGIN:
        where = f"translate({x + width / 2 + 4:.2f} {y + height - MARGIN:.0f}) rotate(-90)"
        yield f'<text transform="{where}">{escape(name)}</text>'
    elif room >= 5:
        yield _text(x + MARGIN, y + 17, f"{name[: room - 1]}…")


def _text(x: float, y: float, text: str, style: str = "") -> str:
    marked = f' class="{style}"' if style else ""
    return f'<text{marked} x="{x:.2f}" y="{y:.0f}">{escape(text)}</text>'
