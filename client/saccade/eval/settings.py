"""Settings: what is changed against full recompute, written as knobs joined by "+"."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

FULL = "full"
REPLAN_STEPS = 2


@dataclass(frozen=True)
class Setting:
    """One way to drive. The first four are the scene, the others how it is served."""

    level: str = "base"
    """How hard the scenes are."""
    stress: str = "none"
    """What goes wrong in them."""
    mode: str = "policy"
    """``shuffled`` and ``blank`` are controls: another group's instruction, a grey picture."""
    pace: str = "fast"
    """``fast``: every action is waited for; ``real``: against the wall clock."""
    model: str = ""
    """Served name; empty: the run's."""
    stale_ms: int = 0
    """An act uses pictures taken this long before; speed and state are of now."""
    replan: int = REPLAN_STEPS
    """Steps from one request to the next; in between the chunk is carried out."""
    flow_steps: int = 0
    """Denoise steps of a model that denoises; 0: its own."""
    least_flow_steps: int = 0
    """Steps that a class which degrades may cut an act to; 0: none."""
    latency_class: str = "best_effort"
    load: float = 0.0
    """Act requests a second of others meanwhile."""

    @property
    def name(self) -> str:
        """The knobs that are not at their default, as ``parse`` reads them."""
        knobs = []
        for knob, field in KNOBS.items():
            value = getattr(self, field)
            if value != getattr(_DEFAULT, field):
                knobs.append(f"{knob}={value:g}" if field == "load" else f"{knob}={value}")
        return "+".join(knobs) or FULL

    @property
    def scene(self) -> Setting:
        """The same scenes, served by full recompute."""
        return Setting(level=self.level, stress=self.stress, mode=self.mode, pace=self.pace)

    @property
    def baseline(self) -> Setting:
        """What it is paired with: the same scenes by full recompute; for that, the plain scenes."""
        whole = dataclasses.replace(self.scene, mode="policy")
        return whole if whole != self else Setting(level=self.level)


_DEFAULT = Setting()
KNOBS = {
    "level": "level",
    "stress": "stress",
    "mode": "mode",
    "pace": "pace",
    "model": "model",
    "stale": "stale_ms",
    "replan": "replan",
    "steps": "flow_steps",
    "least": "least_flow_steps",
    "class": "latency_class",
    "load": "load",
}
_LEAST = {"stale_ms": 0, "replan": 1, "flow_steps": 0, "least_flow_steps": 0}


def parse(text: str, level: str = "base") -> Setting:
    """``full``, or e.g. ``stress=noise+stale=200+replan=1``. Raises ValueError."""
    values: dict[str, object] = {"level": level}
    if text != FULL:
        for knob in text.split("+"):
            name, equals, value = knob.partition("=")
            if not equals or name not in KNOBS or not value:
                raise ValueError(
                    f"setting {text!r}: {knob!r} is not {FULL} or one of {', '.join(KNOBS)} with =VALUE"
                )
            field = KNOBS[name]
            try:
                if field in _LEAST:
                    values[field] = int(value)
                elif field == "load":
                    values[field] = float(value)
                else:
                    values[field] = value
            except ValueError:
                raise ValueError(f"setting {text!r}: {value!r} is no number") from None
    for field, least in _LEAST.items():
        got = values.get(field, least)
        if isinstance(got, int) and got < least:
            raise ValueError(f"setting {text!r}: at least {least}")
    load = values.get("load", 0.0)
    if isinstance(load, float) and not 0 <= load < 1e6:
        raise ValueError(f"setting {text!r}: a load is a rate per second")
    return Setting(**values)  # type: ignore[arg-type]


def with_baselines(wanted: list[Setting]) -> list[Setting]:
    """Each once, every baseline before what is paired with it."""
    found: list[Setting] = []

    def add(setting: Setting) -> None:
        if setting not in found:
            if setting.baseline != setting:
                add(setting.baseline)
            found.append(setting)

    for setting in wanted:
        add(setting)
    return found
