"""Which metrics share a picture. Every recorded metric lands in exactly one panel: nothing is hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

# How a line is drawn: every step faint under a moving average, marked points, or just as recorded.
Style = Literal["average", "points", "exact"]
Rule = tuple[str, tuple[str, ...], Style]


@dataclass(frozen=True)
class Panel:
    """A small picture of a few metrics on one axis."""

    title: str
    names: tuple[str, ...]
    style: Style = "average"


# (title, patterns, style): the first rule that matches a name takes it.
_MAIN: tuple[Rule, ...] = (
    ("Reward", ("reward/mean",), "average"),
    ("Held-out accuracy", ("eval/accuracy",), "points"),
    ("Held-out chrF", ("eval/chrf",), "points"),
    ("Held-out mel distance", ("eval/mel_distance",), "points"),
    ("Mel loss", ("loss/mel",), "average"),
    ("Codes in use (perplexity)", ("codebook/perplexity",), "average"),
    ("Held-out latency (s)", ("eval/laal", "eval/stream_laal"), "points"),
    ("Reward parts", ("reward/*",), "average"),
    ("Pairs put in the right order", ("preference/accuracy", "reward_model/accuracy"), "average"),
    ("Steps judged right", ("process_reward/accuracy",), "average"),
    ("Margin between the answers", ("preference/margin", "reward_model/margin"), "average"),
    ("Log-prob of the answers", ("preference/*_logprob",), "average"),
    ("Variance explained by the critic", ("critic/explained_variance",), "average"),
    ("KL to the reference", ("kl",), "average"),
    ("Entropy", ("policy/entropy", "entropy"), "average"),
    ("Response length (tokens)", ("response/length",), "average"),
    ("Clip fraction", ("policy/clip_frac", "*/clip_frac"), "average"),
    ("Throughput (tokens/s)", ("tokens_per_s", "*/tokens_per_s"), "average"),
)
_MORE: tuple[Rule, ...] = (
    ("Spread of the reward", ("reward/std", "reward/min", "reward/max"), "average"),
    ("Held-out, other", ("eval/*",), "points"),
    ("KL coefficient", ("kl/beta",), "exact"),
    ("Groups dropped, refilled, trained", ("group/dropped", "group/refilled", "group/trained"), "average"),
    ("Loss", ("loss", "*/loss"), "average"),
    ("Learning rate", ("lr", "lr/*", "critic/lr"), "exact"),
    ("Seconds per step", ("time/*",), "average"),
)


def arrange(names: Sequence[str]) -> tuple[list[Panel], list[Panel]]:
    """(the panels to look at first, the rest), each in a fixed order; a name without a rule gets a panel of its own."""
    special = {name for name in names if any(name in patterns for _, patterns, _ in _MORE)}
    left = list(names)

    def take(rules: tuple[Rule, ...], skip: set[str]) -> list[Panel]:
        panels = []
        for title, patterns, style in rules:
            found = [n for n in left if n not in skip and any(fnmatchcase(n, p) for p in patterns)]
            if found:
                panels.append(Panel(title, tuple(found), style))
                left[:] = [n for n in left if n not in found]
        return panels

    main = take(_MAIN, special)
    more = take(_MORE, set())
    return main, more + [Panel(name, (name,)) for name in left]


def short(name: str, panel: Panel) -> str:
    """The name without the prefix that all names of its panel share: ``reward/format`` is ``format``."""
    prefixes = {n.rpartition("/")[0] for n in panel.names}
    return name.rpartition("/")[2] if len(prefixes) == 1 else name
