"""Draws the bird's-eye pictures: pixel for pixel what highway-env's own viewer draws, several times faster.

What is drawn is a Snapshot, so that the same moment can be drawn later, and at several scales.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
import numpy as np
import pygame

Array = np.ndarray[Any, np.dtype[np.uint8]]
Color = tuple[int, int, int]

SIZE = 224  # px, both ways
CENTER = (0.25, 0.5)  # where the ego car is, of the picture
GREY: Color = (100, 100, 100)
WHITE: Color = (255, 255, 255)
EDGE: Color = (60, 60, 60)  # a car's outline
CAR_LENGTH, CAR_WIDTH = 5.0, 2.0  # m
FRAME_M = 1.0  # around a car's sprite
STRIPE_EVERY, STRIPE_LENGTH = 4.33, 3.0  # m
MIN_HEADING = 2 * math.pi / 180  # below it a car is drawn straight


@dataclass(frozen=True)
class Car:
    """A car where it is now; x along the road, y to the right [m], heading [rad]."""

    x: float
    y: float
    heading: float
    color: Color


@dataclass(frozen=True)
class Line:
    """A line along the road from x0 to x1 [m]."""

    y: float
    striped: bool
    x0: float = 0.0
    x1: float = math.inf


@dataclass(frozen=True)
class Snapshot:
    """What there is to see; the first car is the ego, the last is drawn on top."""

    cars: tuple[Car, ...]
    lines: tuple[Line, ...]
    ground: Ground | None = None
    things: tuple[Thing, ...] = field(default=())  # drawn over the cars


@dataclass(frozen=True)
class Ground:
    """A texture beside the road, fixed to the world: cells of cell_m, brightness GREY +- depth."""

    tile: Array  # [cells, cells] of brightness
    cell_m: float  # a whole number of pixels
    top: float  # the road's edges; no texture between them
    bottom: float
    paved: tuple[float, float, float, float] | None = None  # x0, x1, y0, y1: neither there


@dataclass(frozen=True)
class Thing:
    """Something that is no car: a filled circle in the world [m]."""

    x: float
    y: float
    radius: float
    color: Color


def lane_lines(lanes: int, width: float) -> tuple[Line, ...]:
    """The lines of a straight road whose lane 0 is centred on y = 0."""
    inner = [Line((i - 0.5) * width, striped=True) for i in range(1, lanes)]
    return (Line(-width / 2, striped=False), *inner, Line((lanes - 0.5) * width, striped=False))


def between(before: Snapshot, after: Snapshot, share: float) -> Snapshot:
    """That part of the way from one to the next; what is only in one of them is as in the later."""
    if len(before.cars) != len(after.cars) or len(before.things) != len(after.things):
        return after

    def mean(a: float, b: float) -> float:
        return a + (b - a) * share

    cars = tuple(
        Car(mean(a.x, b.x), mean(a.y, b.y), mean(a.heading, b.heading), b.color)
        for a, b in zip(before.cars, after.cars, strict=True)
    )
    things = tuple(
        Thing(mean(a.x, b.x), mean(a.y, b.y), b.radius, b.color)
        for a, b in zip(before.things, after.things, strict=True)
    )
    return Snapshot(cars, after.lines, after.ground, things)


class Painter:
    """Draws snapshots at one scale [px/m]."""

    def __init__(self, scaling: float) -> None:
        self.scaling = scaling
        self._sprites: dict[Color, pygame.Surface] = {}

    def paint(self, shot: Snapshot) -> Array:
        """The picture, [SIZE, SIZE, 3] RGB; read-only."""
        ego = shot.cars[0]
        ox = ego.x - CENTER[0] * SIZE / self.scaling
        oy = ego.y - CENTER[1] * SIZE / self.scaling
        surface = pygame.Surface((SIZE, SIZE), depth=32)  # its own: painters are shared by threads
        surface.fill(GREY)
        if shot.ground is not None:
            self._draw_ground(surface, shot.ground, ox, oy)
        for line in shot.lines:
            self._draw_line(surface, line, ox, oy)
        for car in shot.cars:
            self._draw_car(surface, car, ox, oy)
        for thing in shot.things:
            pygame.draw.circle(
                surface,
                thing.color,
                (self._pix(thing.x - ox), self._pix(thing.y - oy)),
                self._pix(thing.radius),
            )
        pixels = np.frombuffer(pygame.image.tobytes(surface, "RGB"), np.uint8)
        return pixels.reshape(SIZE, SIZE, 3)

    def _pix(self, length: float) -> int:
        return int(length * self.scaling)

    def _draw_line(self, surface: pygame.Surface, line: Line, ox: float, oy: float) -> None:
        y = self._pix(line.y - oy)
        width = max(self._pix(0.3), 1)
        if not (0 <= y < SIZE):
            return
        count = int(4 * SIZE / (STRIPE_EVERY * self.scaling))
        start = (int(ox) // STRIPE_EVERY - count // 2) * STRIPE_EVERY
        if line.striped:
            starts = [start + k * STRIPE_EVERY for k in range(count)]
            spans = [(s, s + STRIPE_LENGTH) for s in starts]
        else:
            spans = [(start, start + count * STRIPE_EVERY + STRIPE_LENGTH)]
        for begin, end in spans:
            begin, end = max(begin, line.x0), min(end, line.x1)
            if end - begin > 0.5 * STRIPE_LENGTH:
                left, right = self._pix(begin - ox), self._pix(end - ox)
                if right >= 0 and left < SIZE:
                    pygame.draw.line(surface, WHITE, (left, y), (right, y), width)

    def _draw_car(self, surface: pygame.Surface, car: Car, ox: float, oy: float) -> None:
        x, y = self._pix(car.x - ox), self._pix(car.y - oy)
        if not (-50 < x < SIZE + 50 and -50 < y < SIZE + 50):
            return
        sprite = self._sprites.get(car.color)
        if sprite is None:
            sprite = self._sprites[car.color] = self._sprite(car.color)
        if abs(car.heading) <= MIN_HEADING:
            w, h = sprite.get_size()
            surface.blit(sprite, (x - w / 2, y - h / 2))
            return
        angle = math.degrees(-car.heading)
        w, h = sprite.get_size()
        corners = [pygame.math.Vector2(p).rotate(angle) for p in ((0, 0), (w, 0), (w, -h), (0, -h))]
        pivot = pygame.math.Vector2(w / 2, -h / 2)
        moved = pivot.rotate(angle) - pivot
        origin = (
            x - w / 2 + min(c[0] for c in corners) - moved[0],
            y - h / 2 - max(c[1] for c in corners) + moved[1],
        )
        surface.blit(pygame.transform.rotate(sprite, angle), origin)

    def _sprite(self, color: Color) -> pygame.Surface:
        length = CAR_LENGTH + 2 * FRAME_M
        p = self._pix
        sprite = pygame.Surface((p(length), p(length)), flags=pygame.SRCALPHA, depth=32)
        body = (p(FRAME_M), p(length / 2 - CAR_WIDTH / 2), p(CAR_LENGTH), p(CAR_WIDTH))
        light = tuple(min(int(c / 0.68), 255) for c in color)
        pygame.draw.rect(sprite, color, body, 0)
        for y in (length / 2 - 1.4 * CAR_WIDTH / 3, length / 2 + 0.6 * CAR_WIDTH / 5):
            lamp = (p(FRAME_M + CAR_LENGTH - 0.72), p(y), p(0.72), p(0.6))
            pygame.draw.rect(sprite, light, lamp, 0)
        pygame.draw.rect(sprite, EDGE, body, 1)
        return sprite

    def _draw_ground(self, surface: pygame.Surface, ground: Ground, ox: float, oy: float) -> None:
        """The cells that are in the picture, one pixel each, enlarged; then the road over them."""
        cells, size = ground.tile.shape[0], self._pix(ground.cell_m)
        count = SIZE // size + 2
        column, row = math.floor(ox / ground.cell_m), math.floor(oy / ground.cell_m)
        columns, rows = (np.arange(first, first + count) % cells for first in (column, row))
        seen = np.repeat(ground.tile[np.ix_(rows, columns)][:, :, None], 3, axis=2)
        patch = pygame.image.frombuffer(seen.tobytes(), (count, count), "RGB")
        surface.blit(
            pygame.transform.scale(patch, (count * size, count * size)),
            (-self._pix(ox - column * ground.cell_m), -self._pix(oy - row * ground.cell_m)),
        )
        top, bottom = self._pix(ground.top - oy), self._pix(ground.bottom - oy)
        surface.fill(GREY, (0, top, SIZE, bottom - top))
        if ground.paved is not None:
            x0, x1, y0, y1 = ground.paved
            left, top = self._pix(x0 - ox), self._pix(y0 - oy)
            surface.fill(GREY, (left, top, self._pix(x1 - x0), self._pix(y1 - y0)))


def blank(value: int = GREY[0]) -> Array:
    """A picture of one grey."""
    return np.full((SIZE, SIZE, 3), value, np.uint8)
