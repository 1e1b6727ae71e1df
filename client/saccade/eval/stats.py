"""What paired drives prove: intervals, tests, and how small a harm this many pairs could show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Z_TWO_SIDED = 1.959964
"""Of 95 %."""
Z_ONE_SIDED = 1.644854
"""Of 95 %."""
Z_POWER = 0.841621
"""Of 80 %."""


def wilson(successes: int, n: int, z: float = Z_TWO_SIDED) -> tuple[float, float]:
    """Interval of a proportion; nothing is known (0..1) without a drive."""
    if n == 0:
        return 0.0, 1.0
    p, d = successes / n, 1 + z * z / n
    centre = (p + z * z / (2 * n)) / d
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / d
    return max(0.0, centre - half), min(1.0, centre + half)


def mcnemar(only_base: int, only_this: int) -> float:
    """Two-sided exact p that both win equally often where just one of them succeeds."""
    n, k = only_base + only_this, min(only_base, only_this)
    if n == 0:
        return 1.0
    tail = math.fsum(
        math.exp(math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) - n * math.log(2))
        for i in range(k + 1)
    )
    return min(1.0, 2 * tail)


def score(only_base: int, only_this: int, n: int, difference: float) -> float:
    """Tango's score statistic of n pairs against a true difference (this - base) of success.

    Standard normal where that difference is true; positive where more was seen.
    """
    b, c, d = only_this, only_base, difference
    seen = b - c - n * d
    big = 2.0 * n
    linear = -b - c + (2 * n - b + c) * d
    constant = -c * d * (1 - d)
    root = math.sqrt(max(0.0, linear * linear - 4 * big * constant))
    q = (root - linear) / (2 * big)  # share of pairs that only the base wins, given the difference
    variance = n * (2 * q + d * (1 - d))
    if variance <= 0:
        return 0.0 if seen == 0 else math.copysign(math.inf, seen)
    return seen / math.sqrt(variance)


def paired_interval(
    only_base: int, only_this: int, n: int, z: float = Z_TWO_SIDED
) -> tuple[float, float]:
    """Of the difference of success, this - base (Tango 1998)."""
    if n == 0:
        return -1.0, 1.0
    seen = (only_this - only_base) / n

    def at(difference: float) -> float:
        return score(only_base, only_this, n, difference)

    low = -1.0 if seen <= -1 else _falls_to(at, z, -1.0, seen)
    high = 1.0 if seen >= 1 else _falls_to(at, -z, seen, 1.0)
    return low, high


def _falls_to(f: Callable[[float], float], level: float, low: float, high: float) -> float:
    for _ in range(60):
        middle = (low + high) / 2
        if f(middle) > level:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def normal_above(z: float) -> float:
    """Probability of more than z."""
    return 0.5 * math.erfc(z / math.sqrt(2))


@dataclass(frozen=True)
class Paired:
    """A setting against its baseline, on the seeds that both drove."""

    n: int
    both: int
    only_base: int
    only_this: int
    difference: float
    """Of success: this - base."""
    low: float
    high: float
    """Its 95 % interval."""
    mcnemar_p: float
    ratio: float
    """Success over the baseline's; 1 where the baseline never succeeds."""
    margin: float
    """What may be lost, as a difference: the margin's fraction of the baseline's success."""
    noninferior_p: float
    """One-sided p that as much as the margin, or more, is lost."""
    noninferior: bool
    """That is below 5 %."""
    power: float
    """Probability that n such pairs show it where nothing at all is lost."""
    provable_margin: float
    """The smallest margin that they show with 80 % probability where nothing is lost."""
    detectable_harm: float
    """The smallest loss that they tell from none with 80 % probability."""
    pairs_needed: int
    """Pairs for 80 % probability of showing the margin where nothing is lost."""

    @property
    def verdict(self) -> str:
        """``keeps``: shown to lose less than the margin; ``loses``: shown to lose more; else
        ``undecided``, ``below`` or ``above`` by the ratio seen."""
        if self.noninferior:
            return "keeps"
        if self.high < -self.margin:
            return "loses"
        return "undecided, below" if self.difference < -self.margin else "undecided, above"


def paired(pairs: Sequence[tuple[bool, bool]], margin: float = 0.01) -> Paired:
    """Of (base, this) successes; ``margin`` is the fraction of the baseline's success."""
    n = len(pairs)
    both = sum(base and this for base, this in pairs)
    only_base = sum(base and not this for base, this in pairs)
    only_this = sum(this and not base for base, this in pairs)
    low, high = paired_interval(only_base, only_this, n)
    base_rate = (both + only_base) / n if n else 0.0
    allowed = margin * base_rate
    p = normal_above(score(only_base, only_this, n, -allowed)) if n and allowed > 0 else 1.0
    # How often pairs disagree decides what they can show; never taken as 0, for none seen is not none.
    disagree = (only_base + only_this + 0.5) / (n + 1)
    spread = math.sqrt(disagree / n) if n else 1.0
    return Paired(
        n=n,
        both=both,
        only_base=only_base,
        only_this=only_this,
        difference=(only_this - only_base) / n if n else 0.0,
        low=low,
        high=high,
        mcnemar_p=mcnemar(only_base, only_this),
        ratio=(both + only_this) / (both + only_base) if both + only_base else 1.0,
        margin=allowed,
        noninferior_p=p,
        noninferior=p < 0.05,
        power=normal_above(Z_ONE_SIDED - allowed / spread),
        provable_margin=min(1.0, (Z_ONE_SIDED + Z_POWER) * spread),
        detectable_harm=min(1.0, (Z_TWO_SIDED + Z_POWER) * spread),
        pairs_needed=math.ceil((Z_ONE_SIDED + Z_POWER) ** 2 * disagree / allowed**2)
        if allowed > 0
        else 0,
    )


def quantile(values: Sequence[float], q: float) -> float:
    """Interpolated; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
