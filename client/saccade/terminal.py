"""What the live views share: styled cells, tables, a screen that is drawn over and over."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

Cell = tuple[str, str]
"""Text and style."""
_STYLES = {
    "": "",
    "title": "1;36",
    "head": "2",
    "good": "32",
    "warn": "33",
    "bad": "31",
    "dim": "2",
}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """Names come from elsewhere: none may steer the terminal."""
    return _CONTROL.sub("?", text)


def number(value: float | None, digits: int = 1) -> Cell:
    """A dash where it is not known."""
    return ("-", "dim") if value is None else (f"{value:.{digits}f}", "")


def table(title: str, heads: Sequence[str], rows: list[list[Cell]], empty: str) -> list[list[Cell]]:
    """First column to the left, the others to the right."""
    lines: list[list[Cell]] = [[], [(title, "title")]]
    if not rows:
        lines[1].append((f"  no data: {empty}", "dim"))
        return lines
    widths = [max(len(c[0]) for c in column) for column in zip(*rows, strict=True)]
    widths = [max(width, len(head)) for width, head in zip(widths, heads, strict=True)]

    def pad(cell: Cell, column: int) -> Cell:
        text = cell[0].ljust(widths[0]) if column == 0 else cell[0].rjust(widths[column] + 2)
        return (("  " if column == 0 else "") + text, cell[1])

    lines.append([pad((head, "head"), i) for i, head in enumerate(heads)])
    lines.extend([pad(cell, i) for i, cell in enumerate(row)] for row in rows)
    return lines


def paint(line: list[Cell], width: int | None, colour: bool) -> str:
    """One line, cut to a terminal's width."""
    text = ""
    for words, style in line:
        if width is not None:
            words = words[: max(0, width)]
            width -= len(words)
        if words:
            text += f"\x1b[{_STYLES[style]}m{words}\x1b[0m" if colour and _STYLES[style] else words
    return text.rstrip() if not colour else text


def picture(pixels: npt.NDArray[np.uint8], width: int) -> list[str]:
    """An RGB picture in lines of ``width`` half blocks, two pixels each, in 24-bit colour."""
    height = max(2, round(width * pixels.shape[0] / pixels.shape[1]) // 2 * 2)
    rows = np.linspace(0, pixels.shape[0] - 1, height).round().astype(int)
    columns = np.linspace(0, pixels.shape[1] - 1, width).round().astype(int)
    small = pixels[np.ix_(rows, columns)]
    found = []
    for upper, lower in zip(small[::2], small[1::2], strict=True):
        cells = (
            f"\x1b[38;2;{a[0]};{a[1]};{a[2]};48;2;{b[0]};{b[1]};{b[2]}m\u2580"
            for a, b in zip(upper, lower, strict=True)
        )
        found.append("".join(cells) + "\x1b[0m")
    return found


class Screen:
    """The terminal while a view is live."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def show(self, lines: list[list[Cell]], colour: bool, above: Sequence[str] = ()) -> None:
        """One frame in the size that the terminal has now; ``above`` is drawn as it is where it fits."""
        width, height = shutil.get_terminal_size()
        first = list(above) if len(above) + min(len(lines), 8) <= height else []
        left = max(1, height - len(first))
        if len(lines) > left:
            lines = [*lines[: left - 1], [(f"... {len(lines) - left + 1} more lines", "dim")]]
        # Erased before, not after: a line that fills its row would lose its last letter.
        text = "\n".join("\x1b[2K" + x for x in [*first, *(paint(x, width, colour) for x in lines)])
        self._out.write(f"\x1b[H{text}\x1b[J")
        self._out.flush()


@contextmanager
def screen(out: TextIO) -> Iterator[Screen]:
    """A screen of its own without a cursor; as before afterwards."""
    out.write("\x1b[?1049h\x1b[?25l")
    try:
        yield Screen(out)
    finally:
        out.write("\x1b[?25h\x1b[?1049l")
        out.flush()


class Keys:
    """A line that is typed while a view is live. `with` takes the keys one by one; nothing where there is no terminal."""

    def __init__(self) -> None:
        self.line = ""
        self._before: Any = None

    def __enter__(self) -> Keys:
        if sys.stdin.isatty():
            import termios
            import tty

            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            import termios

            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def take(self, typed: str) -> list[str]:
        """Adds keys; the lines that are finished by them."""
        done = []
        for key in typed:
            if key in "\r\n":
                done.append(self.line)
                self.line = ""
            elif key in "\x7f\b":
                self.line = self.line[:-1]
            elif key == "\x15":  # Ctrl-U
                self.line = ""
            elif key.isprintable():
                self.line += key
        return done
