"""The report's sections on success: by setting, by instruction, and what so many episodes can show."""

from __future__ import annotations

from collections.abc import Sequence

from saccade.eval import plots, summary
from saccade.eval.plots import text
from saccade.eval.report import markup


def by_setting(rows: Sequence[markup.Row]) -> str:
    """Each setting's share with its interval."""
    estimates = [
        plots.Estimate(
            r["name"],
            r["success"],
            r["interval"][0],
            r["interval"][1],
            f"{100 * r['success']:.1f} % of {r['n']}",
            "paired" not in r,
        )
        for r in rows
        if r["n"]
    ]
    return markup.section(
        "Success by setting",
        plots.intervals(
            estimates,
            "episodes that succeeded, with the 95 % interval (Wilson)",
            "Success by setting",
        ),
        "Bold and in the first colour: baselines. Each episode is driven on the same seeds in every setting; see the"
        " differences of pairs in the table.",
    )


def by_instruction(rows: Sequence[markup.Row]) -> str:
    """Of the first setting, by group."""
    driven = [r for r in rows if r["n"]][:1]
    estimates = [
        plots.Estimate(
            g, v["success"], v["interval"][0], v["interval"][1], f"{v['ok']} of {v['n']}"
        )
        for r in driven
        for g, v in r["groups"].items()
    ]
    title = "Success by instruction"
    note = f"Setting: {text(driven[0]['name'])}." if driven else ""
    axis = "episodes that succeeded, with the 95 % interval"
    return markup.section(title, plots.intervals(estimates, axis, title), note)


def settings_table(rows: Sequence[markup.Row]) -> str:
    """A row for each setting: success, the difference from its baseline, and what it cost."""
    heads = [
        "setting",
        "success",
        "against baseline",
        "verdict",
        "action error",
        "on time",
        "p50, p99",
        "cached",
        "calls",
    ]
    lines = []
    for r in rows:
        if not r["n"]:
            continue
        low, high = r["interval"]
        p = r.get("paired")
        against = (
            f"{100 * p['difference']:+.1f} [{100 * p['low']:+.1f}, {100 * p['high']:+.1f}] points,"
            f" {p['only_base']} lost, {p['only_this']} won"
            if p and p["n"]
            else "-"
        )
        wrong = r["action_error"]
        lines.append(
            [
                f"<b>{text(r['name'])}</b>",
                f"{100 * r['success']:.1f} % [{100 * low:.1f}, {100 * high:.1f}] of {r['n']}",
                against,
                text(p["verdict"]) if p and p["n"] else "baseline",
                f"{wrong['p50']:.3f}, p99 {wrong['p99']:.3f}" if wrong else "-",
                markup.percent(r["deadlines"]["met_share"]),
                f"{markup.ms(r['latency_ms']['p50'])}, {markup.ms(r['latency_ms']['p99'])}",
                markup.percent(r["work"]["cached_share"], 0),
                markup.count(r["work"]["calls"]),
            ]
        )
    note = (
        "Against baseline: difference of success on the episodes both drove, with Tango's 95 % interval. Action error:"
        " median and p99 of the largest difference from full recompute in the same state, in the model's own units."
    )
    return markup.section("Settings", markup.table(heads, lines) if lines else "", note, wide=True)


def reading(rows: Sequence[markup.Row], margin: float) -> str:
    """How large a harm the pairs of each setting could have shown."""
    honest = [
        f"<li>{text(summary.honesty(r, margin))}.</li>"
        for r in rows
        if r.get("paired", {}).get("n")
    ]
    inner = f"<ul>{''.join(honest)}</ul>" if honest else ""
    return markup.section("What so many episodes can show", inner, wide=True)
