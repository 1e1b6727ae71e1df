"""HTML of the report: sections, tables, numbers as they are shown, and the style."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saccade.eval import film
from saccade.eval.plots import text

Row = Mapping[str, Any]
"""What a section is made of: a setting of ``summary.summarise``'s result, or an episode or a window of the log."""
SOURCES = {"computed": "--computed", "reused": "--reused", "evicted": "--evicted"}
"""CSS variables of the colours by ``types.TokenRun.source``."""
_NBSP = "\u00a0"


def section(title: str, inner: str, note: str = "", wide: bool = False) -> str:
    """A card, over both columns where ``wide``; empty with nothing in it. All but the title is HTML already."""
    if not inner:
        return ""
    said = f'<p class="note">{note}</p>' if note else ""
    return f"<section{' class=wide' if wide else ''}><h2>{text(title)}</h2>{inner}{said}</section>"


def percent(share: float | None, digits: int = 1) -> str:
    """Of a share from 0 to 1."""
    return "-" if share is None else f"{100 * share:.{digits}f}{_NBSP}%"


def ms(value: float | None) -> str:
    """Milliseconds."""
    return "-" if value is None else f"{value:.1f}{_NBSP}ms"


def count(value: float) -> str:
    """Whole, with narrow spaces between thousands."""
    return f"{value:,.0f}".replace(",", "\u202f")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of HTML, which become blocks on a narrow page: each cell knows its head."""
    top = "".join(f"<th>{text(h)}</th>" for h in heads)
    lines = []
    for row in rows:
        cells = "".join(
            f'<td data-head="{text(h)}">{c}</td>' for h, c in zip(heads, row, strict=True)
        )
        lines.append(f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def style() -> str:
    """The page's CSS, with the film's colours."""
    tints = ";".join(
        f"--{name}:rgb{colour}".replace(" ", "") for name, colour in film.COLOURS.items()
    )
    return _CSS.replace("/*tints*/", tints + ";")


_CSS = """
:root{color-scheme:light dark;/*tints*/
--ink:#1d2530;--soft:#55606f;--faint:#a3adba;--rule:#dfe4ea;--paper:#f5f6f8;--card:#fff;
--good:#178a55;--warn:#d99a06;--bad:#cf3b32;
--s0:#1f63d1;--s1:#c2570c;--s2:#178a55;--s3:#8b46c1;--s4:#b8336a;--s5:#5c6b7a}
@media(prefers-color-scheme:dark){:root{
--ink:#e8ecf1;--soft:#a9b4c1;--faint:#66717e;--rule:#2c343f;--paper:#12161b;--card:#1a2027;
--good:#3cc384;--warn:#edbb3f;--bad:#f2726a;
--s0:#6aa5ff;--s1:#ff9a52;--s2:#46c98d;--s3:#c08df0;--s4:#f27aa8;--s5:#9fb0c0}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI","Helvetica Neue",Arial,"DejaVu Sans",sans-serif}
header,main{max-width:1180px;margin:0 auto;padding:0 20px}
header{padding-top:36px}
.kicker{margin:0;color:var(--soft);font-size:13px;letter-spacing:.08em;text-transform:uppercase}
h1{margin:2px 0 0;font-size:34px;line-height:1.15;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{margin:0 0 14px;font-size:18px;line-height:1.3;overflow-wrap:anywhere}
.sub{margin:6px 0 22px;color:var(--soft)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:1px;
background:var(--rule);border:1px solid var(--rule);border-radius:10px;overflow:hidden}
.figures div{background:var(--card);padding:16px 18px}
.figures b{display:block;font-size:28px;line-height:1.2;font-variant-numeric:tabular-nums}
.figures span{overflow-wrap:anywhere;color:var(--soft);font-size:14px;line-height:1.4;display:block;margin-top:4px}
main{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:20px;padding-top:20px;padding-bottom:48px}
section{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:20px;min-width:0}
section.wide{grid-column:1/-1}
.note{margin:14px 0 0;color:var(--soft);font-size:14px}
.film{display:block;width:100%;max-width:720px;height:auto;margin:0 auto;border-radius:8px}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:6px 22px;margin:14px 0 0;padding:0;font-size:14px;
color:var(--soft);justify-content:center}
.legend i{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:7px}
.legend b{color:var(--ink);font-weight:600}
svg{display:block;width:100%;height:auto;overflow:visible}
svg+svg{margin-top:18px}
svg text{font-family:inherit;font-size:12px;fill:var(--soft)}
svg .name{fill:var(--ink)}svg .strong{font-weight:700}svg .axis{fill:var(--soft)}
svg .grid{stroke:var(--rule);stroke-width:1}
svg .curve{fill:none;stroke-width:2.2;stroke-linejoin:round}
svg .mark{stroke-width:1.4;stroke-dasharray:5 4}
svg .range{stroke-width:4;stroke-linecap:round;opacity:.45}
table{width:100%;border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:8px 14px 8px 0;border-bottom:1px solid var(--rule)}
td:first-child{overflow-wrap:anywhere;min-width:9em}
th{color:var(--soft);font-weight:600;font-size:13px}
tbody tr:last-child td{border-bottom:0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:6px 18px;margin:0;font-size:14px}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
ul{margin:0;padding-left:18px;font-size:14px}ul.legend{padding:0}
a{color:var(--s0)}
@media(max-width:860px){main{grid-template-columns:minmax(0,1fr)}}
@media(max-width:700px){
header,main{padding-left:12px;padding-right:12px}section{padding:16px 14px}
h1{font-size:27px}svg text{font-size:14px}
.figures{grid-template-columns:repeat(2,minmax(0,1fr))}.figures div{padding:12px 14px}.figures b{font-size:22px}
thead{display:none}tr{display:block;padding:10px 0;border-bottom:1px solid var(--rule)}
tbody tr:last-child{border-bottom:0}
td{display:grid;grid-template-columns:118px minmax(0,1fr);gap:10px;border:0;padding:3px 0;overflow-wrap:anywhere}
td::before{content:attr(data-head);color:var(--soft)}
dl{grid-template-columns:1fr;gap:2px}dd{margin-bottom:8px}
.legend{justify-content:flex-start}}
@media print{section{break-inside:avoid}}
"""
