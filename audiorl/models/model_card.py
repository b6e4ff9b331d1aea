"""The model card of an export: what was trained how and on what, what was measured, and what was not."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from audiorl.data.sets import parse_set
from audiorl.models.lora import adapted_model

DATA_OPTIONS = {"data": "training", "ptx_data": "auxiliary loss", "held_out": "held out", "unseen": "strangers"}
"""The options of recipes that name data sets, and what the sets are for."""
BUNDLED_LICENCE = "CC BY-SA 3.0"
NOT_STATED = "not stated"
_NO_METRIC = ("n", "low", "high")
_WHENS = ("before", "after", "control")


def model_card(
    checkpoint: Path,
    adapter: bool,
    base: str | None = None,
    notes: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
    sections: Sequence[str] = (),
) -> str:
    """README.md in Markdown with the hub's metadata. Of a checkpoint in a run folder also what the run recorded.

    adapter: the export is a low-rank adapter. base: the model that training began with, where the checkpoint does not
    name it. notes: paragraphs about the export. defaults: the recipe's default config; without it the card cannot say
    which options differ. sections: what else was measured, in Markdown. Data files that are still there are read for
    the `licence` of their rows.
    """
    run = run_of(checkpoint)
    recorded = {} if run is None else json.loads((run / "config.json").read_text())
    results = json.loads((run / "eval.json").read_text()) if run is not None and (run / "eval.json").is_file() else {}
    base = base or adapted_model(checkpoint)
    if base is None or (run is not None and Path(base).resolve().is_relative_to(run.resolve())):
        base = recorded.get("config", {}).get("path")  # what a phase of the run began with is no base to name
    front = {"library_name": "peft" if adapter else "transformers", "tags": ["audiorl"]}
    if base is not None and _is_hub_id(base):
        front["base_model"] = base
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", ""]
    lines += [f"# {Path(public_name(base)).name if base else 'A model'}, trained with audiorl", ""]
    lines += [f"- Base model: {public_name(base) if base else 'none, or not recorded'}"]
    lines += [f"- Weights: {'a low-rank adapter; load it with the base model' if adapter else 'the whole model'}"]
    if run is not None:
        phase, step = checkpoint.resolve().parent.name, checkpoint.resolve().name
        lines += [f"- Recipe: {Path(recorded['recipe']).name}, phase {phase}, {step.replace('_', ' ')}"]
        lines += ["- Trained with: " + ", ".join(f"{n} {v}" for n, v in recorded.get("versions", {}).items())]
    lines += ["", *(line for note in notes for line in (note, ""))]
    lines += [
        "The weights derive from those of the base model: its licence, and those of the training data, hold for them "
        "too. Add the licence to this card before you publish the model.",
        "",
    ]
    if results:
        lines += ["## Held-out results", "", *_results(results), ""]
    lines += [line for section in sections for line in (section, "")]
    lines += ["## What was not measured", "", *(f"- {limit}" for limit in _limits(run, checkpoint, results)), ""]
    if run is not None:
        lines += ["## Data", "", *_data(recorded["config"]), ""]
        lines += ["## Options that differ from the recipe's defaults", "", *_options(recorded["config"], defaults), ""]
        config = json.dumps(_without_paths(recorded["config"]), indent=1)
        lines += ["## Configuration", "", "```json", config, "```", ""]
    return "\n".join(lines)


def run_of(checkpoint: Path) -> Path | None:
    """The run folder of RUN/checkpoints/PHASE/step_N; None for a checkpoint that lies elsewhere."""
    folder = checkpoint.resolve().parent.parent
    return folder.parent if folder.name == "checkpoints" and (folder.parent / "state.json").is_file() else None


def public_name(name: str) -> str:
    """A hub id as it is, of a local folder its name alone."""
    return name if _is_hub_id(name) else Path(name).name


# -- results -------------------------------------------------------------------------------------------------------


def _results(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The numbers of eval.json: a row for each evaluation and metric, and what the columns are."""
    rows = [
        "| Evaluation | Metric | Value | 95% interval | Change since before (95%) | Samples |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        metrics = _metrics(result)
        for metric in metrics:
            change = result.get("changes", {}).get(metric)
            cells = [
                name,
                metric,
                f"{metrics[metric]:.4g}",
                _interval(_interval_of(result, metric)),
                "" if change is None else f"{change[0]:+.4g} {_interval(change[1:])}",
                str(result.get("n", "")),
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return [
        *rows,
        "",
        "Intervals are bootstrap intervals over the samples; an empty cell was not recorded. Changes are paired "
        "differences on the same samples. `before` is the policy that the training began with, `after` the policy at "
        "the run's end, `control` a policy trained on the same data without reinforcement learning. Names with a "
        "prefix measure other sets; `unseen` are speakers that no phase trained on. One training run, one seed.",
    ]


def _metrics(result: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in result.items()
        if name not in _NO_METRIC and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _interval_of(result: Mapping[str, Any], metric: str) -> Sequence[float] | None:
    """`low` and `high` belong to an entry's first metric, `outside` has those of others."""
    outside = result.get("outside", {})
    if metric in outside:
        interval: Sequence[float] = outside[metric]
        return interval
    first = next(iter(_metrics(result)))
    return [result["low"], result["high"]] if metric == first and "low" in result and "high" in result else None


def _interval(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"({interval[0]:.4g} to {interval[1]:.4g})"


def _limits(run: Path | None, checkpoint: Path, results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What a reader could take for measured and is not."""
    if not results:
        yield "No held-out result was recorded with this checkpoint."
    else:
        sets = {name.removesuffix(f"_{when}") for name in results for when in _WHENS if name.endswith(f"_{when}")}
        if not any(name in results for name in ("after", *(f"{s}_after" for s in sets))):
            yield "The model after its training: no evaluation called `after` had finished."
        if not any(name == "before" or name.endswith("_before") for name in results):
            yield "The model before its training: there is nothing to compare with."
        if "unseen" not in sets:
            yield "Strangers: no set of speakers that no phase trained on (`unseen`) was measured in the run."
        if "control" not in results:
            yield "What supervised training on the same data gives: there is no `control`."
        without = [name for name, r in results.items() if all(_interval_of(r, m) is None for m in _metrics(r))]
        if without:
            yield f"Intervals of {', '.join(without)}."
    if run is not None and results:
        phase, step = checkpoint.resolve().parent.name, checkpoint.resolve().name
        newest = json.loads((run / "state.json").read_text()).get("checkpoints", {})
        if phase in newest and Path(newest[phase]).name != step:
            last = Path(newest[phase]).name.replace("_", " ")
            yield f"This checkpoint: its phase was evaluated at its end, with the policy of {last}."
        if others := [name for name in newest if name != phase]:
            yield f"Perhaps this phase: the run also trained in {', '.join(others)}; its recipe says when it evaluates."
    yield "Other tasks, languages, accents, noise and speakers than those of the sets above; bias and safety."
    yield "The exported files: the results are those of the run, which the export did not repeat."


# -- recipe and data -----------------------------------------------------------------------------------------------


def _options(config: Mapping[str, Any], defaults: Mapping[str, Any] | None) -> list[str]:
    if defaults is None:
        return ["Not determined: the recipe is no installed one. All options are below."]
    flat, default = dict(_flat(_without_paths(config))), dict(_flat(_without_paths(defaults)))
    changed = [name for name in flat if default.get(name) != flat[name]]
    rows = [f"| `{n}` | `{json.dumps(flat[n])}` | `{json.dumps(default.get(n))}` |" for n in changed]
    table = ["| Option | Value | Default |", "|---|---|---|", *rows] if rows else ["None."]
    return ["Compared with the recipe of this name in the audiorl that wrote this card.", "", *table]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{name}.")
        else:
            yield prefix + name, item


def _data(config: Mapping[str, Any]) -> list[str]:
    """A row for each data set that the config names, with the licences of its rows."""
    rows = []
    for option, purpose in DATA_OPTIONS.items():
        sets = config.get(option) or []
        for given in [sets] if isinstance(sets, str) else sets:
            name = given if "://" in given else Path(given).name
            rows.append(f"| {name} | {purpose} | {_licences(parse_set(given)[0])} |")
    if not config.get("data"):
        rows.append(f"| the recipe's own data, see the recipe | training | {NOT_STATED} |")
    return ["| Set | Used for | Licence |", "|---|---|---|", *rows]


def _licences(source: str) -> str:
    """The licences of a data set's rows with their number; rows of JSON and JSON lines can have a `licence`."""
    if source.startswith("bundled"):
        return BUNDLED_LICENCE
    path = Path(source)
    if not path.exists() and "://" not in source:
        return f"{NOT_STATED} (the file is not there any more)"
    if not path.is_file() or path.suffix not in (".json", ".jsonl"):
        return NOT_STATED
    try:
        licences = Counter(_licence(row) for row in _rows(path))
    except ValueError:
        return f"{NOT_STATED} (the file cannot be read)"
    if set(licences) <= {NOT_STATED}:
        return NOT_STATED
    return ", ".join(f"{name} (rows: {count})" for name, count in licences.most_common())


def _rows(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    rows = json.loads(text)
    return rows if isinstance(rows, list) else []


def _licence(row: Any) -> str:
    stated = (row.get("licence") or row.get("license")) if isinstance(row, Mapping) else None
    return " ".join(str(stated).replace("|", "/").split()) if stated else NOT_STATED


def _is_hub_id(name: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and not Path(name).exists()


def _without_paths(value: Any) -> Any:
    """A config without the folders of the machine that it was written on."""
    if isinstance(value, Mapping):
        return {k: _without_paths(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_paths(v) for v in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
