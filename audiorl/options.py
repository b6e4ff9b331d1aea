"""Command lines read into dataclasses by tyro. Booleans may be flags or values; renamed options give their new name."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

T = TypeVar("T")

RENAMED: dict[str, str] = {
    "ear-steps": "recogniser-steps",
    "ear-texts": "recogniser-texts",
    "weights.whole": "weights.stream-quality",
    "weights": "rewards.weights",
    "waits": "rewards.waits",
    "kl-in": "kl.place",
    "kl-kind": "kl.kind",
    "kl-control": "kl.control",
    "kl-target": "kl.target",
    "kl-horizon": "kl.horizon",
    "kl-gain": "kl.gain",
    "advantage-std": "estimator.std",
    "no-advantage-std": "estimator.no-std",
    "advantage-eps": "estimator.eps",
    "step-gamma": "estimator.step-gamma",
    "gamma": "estimator.gamma",
    "lam": "estimator.lam",
    "whiten": "estimator.whiten",
    "no-whiten": "estimator.no-whiten",
    "score-clip": "scores.clip",
    "score-normalize": "scores.normalize",
    "dual-clip": "loss-options.dual-clip",
    "ratio-cap": "loss-options.ratio-cap",
    "cov-fraction": "loss-options.cov-fraction",
    "cov-low": "loss-options.cov-low",
    "cov-high": "loss-options.cov-high",
    "cov-coef": "loss-options.cov-coef",
    "sapo-positive": "loss-options.sapo-positive",
    "sapo-negative": "loss-options.sapo-negative",
    "frame-ratio": "loss-options.frame-ratio",
    "codebook-weights": "loss-options.codebook-weights",
    "engine-cap": "tis-cap",
    "overlap": "generation.overlap",
    "partial-tokens": "generation.partial-tokens",
    "ptx-coef": "ptx.coef",
    "ptx-batch": "ptx.batch",
    "audio-check": "listening.action",
    "audio-check-every": "listening.every",
    "audio-check-prompts": "listening.prompts",
    "audio-check-min": "listening.min-gain",
}
"""Names of options in earlier versions and what they are now: the last parts of the path, such as "grpo.old"."""

SUBCOMMANDS = {"model.lora:lora-config": "--model.lora.rank=16", "model.lora:None": "--model.lora.rank=0"}
"""Words that stood between the options of earlier versions, and the options that they are now."""

RENAMED_VALUES: dict[tuple[str, str], str] = {
    ("placement", "apart"): "dedicated",
    ("placement", "together"): "colocated",
    ("judge", "ear"): "recogniser",
    ("advantage", "group"): "grpo",
    ("advantage", "mean-relative"): "maxrl",
    ("advantage", "decoupled"): "gdpo",
    ("advantage", "leave-one-out"): "rloo",
    ("loss", "clip"): "ppo",
}
"""{(last part of the option's path, value of an earlier version): today's value}."""


def parse(
    options: type[T] | Any, args: Sequence[str], *, prog: str, description: str | None = None, default: T | None = None
) -> T:
    """An instance of the dataclass `options` with the values in `args`, on top of `default`.

    A boolean is written `--lora`, `--lora True` or `--no-lora`. Help and errors of tyro end in SystemExit. An option
    that was renamed raises ValueError with its new name.
    """
    for given, renamed in zip(args, with_new_names(options, args), strict=True):
        if renamed != given:
            raise ValueError(f"{given.split('=')[0]} is now {renamed.split('=')[0]}")
    _check_values(args)
    chosen: Any = {} if default is None else {"default": default}
    parsed: T = tyro.cli(options, args=_flags(options, args), prog=prog, description=description, **chosen)
    return parsed


def parse_known(options: type[T], args: Sequence[str], *, prog: str) -> tuple[T, list[str]]:
    """`parse` for the first of two dataclasses that share a command line: also returns what it has no option for."""
    _check_values(args)
    parsed: tuple[T, list[str]] = tyro.cli(options, args=_flags(options, args), prog=prog, return_unknown_args=True)
    return parsed


def new_name(option: str) -> str | None:
    """Today's name of an option of an earlier version, such as "grpo.old" or "--grpo.old"; None if it has no other."""
    for old, new in RENAMED.items():
        if option.lstrip("-") == old or option.endswith(f".{old}"):
            return option.removesuffix(old) + new
    return None


def _check_values(args: Sequence[str]) -> None:
    words = [word for arg in args for word in arg.split("=", 1)]
    for option, value in pairwise(words):
        new = RENAMED_VALUES.get((option.rpartition(".")[2].lstrip("-"), value))
        if option.startswith("--") and new is not None:
            raise ValueError(f"{option.lstrip('-')} {value} is now called {new}")


def names(options: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path of the option, type) for all fields of a dataclass or a union of them: ("model.dtype", ...)."""
    members = get_args(options) if get_origin(options) in (Union, types.UnionType) else (options,)
    for member in members:
        kind = get_args(member)[0] if get_origin(member) is Annotated else member
        if not dataclasses.is_dataclass(kind):
            continue
        for name, hint in get_type_hints(kind, include_extras=True).items():
            path = f"{prefix}{name}".replace("_", "-")
            if get_origin(hint) is Annotated:
                hint, *marks = get_args(hint)
                if any(getattr(mark, "name", None) == "" for mark in marks):
                    path = ""
            yield path, hint
            yield from names(hint, f"{path}." if path else prefix)


def with_new_names(options: Any, args: Sequence[str]) -> list[str]:
    """The arguments with today's names in the place of those of earlier versions."""
    existing = {f"--{path}" for path, _ in names(options)}

    def renamed(arg: str) -> str:
        if arg in SUBCOMMANDS:
            return SUBCOMMANDS[arg]
        option, equals, value = arg.partition("=")
        option = option.replace("_", "-")
        new = None if option in existing or not option.startswith("--") else new_name(option)
        return arg if new is None else new + equals + value

    return list(map(renamed, args))


def _flags(options: Any, args: Sequence[str]) -> list[str]:
    """`--x True` as `--x` and `--x False` as `--no-x`, which is how tyro reads booleans."""
    booleans = {f"--{path}" for path, hint in names(options) if hint is bool}
    words: list[str] = []
    for arg in args:
        option, equals, value = arg.partition("=")
        words += [option, value] if equals and option.replace("_", "-") in booleans else [arg]
    flags: list[str] = []
    for word in words:
        if word.lower() not in ("true", "false") or not flags or flags[-1].replace("_", "-") not in booleans:
            flags.append(word)
        elif word.lower() == "false":
            path, dot, name = flags[-1].removeprefix("--").rpartition(".")
            flags[-1] = f"--{path}{dot}no-{name}"
    return flags
