"""The table of eval.sh --table: the settings in it, and its place in server/kv/README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval_server import CAUSAL, FLOW, ROOT

from saccade.eval.summary import honesty, markdown, shown

README = ROOT / "server" / "kv" / "README.md"
BEGIN, END = "<!-- settings: begin -->", "<!-- settings: end -->"
SEEDS = range(
    9_000_000, 9_000_067
)  # never used in training or tuning; 402 episodes over six groups
SESSIONS = 15
"""So many cars at a time: in real time, 37 requests a second."""

SERVING = [*(f"stale={ms}" for ms in (100, 200, 300, 500)), *(f"replan={n}" for n in (3, 5))]
LOADS = ["pace=real+class=driving", *(f"pace=real+class=driving+load={n}" for n in (50, 200))]
SETTINGS = {
    CAUSAL: [f"model={CAUSAL}_bf16", *SERVING, *LOADS],
    FLOW: [
        f"model={FLOW}_bf16",
        *SERVING,
        *(f"steps={n}" for n in (5, 3, 2, 1)),
        *LOADS,
        "pace=real+least=2+class=driving_degrades+load=200",
    ],
}
"""What ``--table`` drives beside full recompute: what makes a policy cheaper, and what others ask meanwhile."""


def _is_a_choice(row: dict[str, Any]) -> bool:
    """A setting that a server could run with: no control, no stress, no load of others."""
    knobs = row["knobs"]
    return knobs["mode"] == "policy" and knobs["stress"] == "none" and not knobs["load"]


def write(results: dict[str, dict[str, Any]], readme: Path, margin: float) -> None:
    """Between its markers; at the end of a README without them."""
    parts = []
    for model, result in results.items():
        driven = [r for r in result["settings"] if r["n"]]
        judged = [r for r in driven if "paired" in r and _is_a_choice(r)]
        off = [shown(r) for r in judged if r["paired"]["ratio"] < 1 - margin]
        least_sure = max(judged, key=lambda r: r["paired"]["detectable_harm"], default=None)
        parts.append(
            f"### {model}\n\n{markdown(driven)}\n\n"
            f"Below {100 * (1 - margin):g} % of full recompute's success, so off by default:"
            f" {', '.join(f'`{name}`' for name in off) or 'none'}."
            + (f" Least sure: {honesty(least_sure, margin)}." if least_sure else "")
        )
    text = readme.read_text()
    if BEGIN not in text:
        text = text.rstrip("\n") + f"\n\n## What each setting costs in success\n{BEGIN}\n{END}\n"
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    seeds_of = next(iter(results.values()))["seeds"]
    head = (
        f"Made by `deploy/demo/eval.sh --table`: hard scenes, seeds {seeds_of[0]} to {seeds_of[1] - 1}, six groups,"
        f" the same for each setting. `pace=real`: against the wall clock, {SESSIONS} cars at a time, where the table was made."
    )
    readme.write_text(f"{before}{BEGIN}\n{head}\n\n" + "\n\n".join(parts) + f"\n{END}{after}")
