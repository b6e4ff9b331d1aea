"""Win rates for people: a table, and a page that plays both recordings of a text with what the judge said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from audiorl.audio import AudioClip
from audiorl.eval._win_rate import Pair
from audiorl.report.listening import Card, Take, listening_page

WIN_RATE_HEAD = ("", "win rate % (95 %)", "ties %", "compared", "failed")


def win_rate_table(rates: Mapping[str, Any]) -> list[list[str]]:
    """A row of WIN_RATE_HEAD for all texts, for each category and for each depth, of what `win_rates` returns."""

    def row(name: str, group: Mapping[str, Any]) -> list[str]:
        if not group["n"]:
            return [name, "–", "–", "0", str(group["failed"])]
        mean, low, high = (f"{100 * group[key]:.1f}" for key in ("mean", "low", "high"))
        return [name, f"{mean} ({low}–{high})", f"{100 * group['tie_rate']:.1f}", str(group["n"]), str(group["failed"])]

    overall = {**rates["win_rate"], "tie_rate": rates["tie_rate"], "failed": rates["failed"]}
    rows = [row("all texts", overall)]
    rows += [row(category, group) for category, group in rates["by_category"].items()]
    return rows + [row(f"depth {depth}", group) for depth, group in rates["by_depth"].items()]


def comparison_page(
    title: str,
    pairs: Sequence[Pair],
    rows: Mapping[str, Mapping[str, Any]],
    rates: Mapping[str, Any],
    out: Path,
    most: int,
) -> str:
    """A page in the folder `out` with the rates and `most` comparisons, lost ones first; `rows` are those of
    `compare`."""
    order = {"theirs": 0, "tie": 1, "ours": 2}
    judged = [pair for pair in pairs if "problem" not in rows[pair.case.name]]
    judged.sort(key=lambda pair: order[rows[pair.case.name]["winner"]])
    cards = [_card(pair, rows[pair.case.name]) for pair in judged[:most]]
    lead = f"{title}. Lost comparisons first."
    return listening_page("Two systems compared", lead, WIN_RATE_HEAD, win_rate_table(rates), cards, out)


def _card(pair: Pair, row: Mapping[str, Any]) -> Card:
    depth = "" if pair.case.depth is None else f", depth {pair.case.depth}"
    result = {"ours": "won", "tie": "tie", "theirs": "lost"}[row["winner"]]
    a, b = ("A", "B") if row["first"] == "ours" else ("B", "A")
    takes = (
        Take(f"this system ({a})", _path(pair.ours), {}, row["reason"]),
        Take(f"the other ({b})", _path(pair.theirs)),
    )
    return Card(f"{pair.case.name} · {pair.case.category}{depth} · {result}", pair.case.text, takes)


def _path(clip: AudioClip | None) -> str | None:
    return None if clip is None or clip.path is None else str(Path(clip.path).resolve())
