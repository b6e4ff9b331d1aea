"""Held-out evaluation: greedy answers, scored by the rewards that train and by measures that no phase optimises."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from audiorl.config import SamplingConfig
from audiorl.data.text import TextQuestion
from audiorl.eval._common import Row, paired_changes, progress_display, read_rows, summarize, summarize_outside
from audiorl.eval.metrics.corpus import estimate, ratio
from audiorl.eval.metrics.text import Normalizer, char_errors, hotword_errors, word_errors
from audiorl.eval.text import measure_text_phase
from audiorl.models import AudioPolicy
from audiorl.protocols import Request, Reward, RolloutEngine
from audiorl.report.summary import metric_name
from audiorl.rewards import StandardisedSum, WeightedSum
from audiorl.rewards.answers import final_text, language_of
from audiorl.rewards.asr import hotwords_of, references_of
from audiorl.rewards.combine import check_scores, scored_rollouts
from audiorl.rollout.hf import HFEngine
from audiorl.run.folder import Run
from audiorl.types import Rollout, Sample

AT_ONCE = 64
"""Samples that are answered between two movements of the progress bar."""


def answer(
    policy: AudioPolicy, samples: Sequence[Sample], reward: Reward, max_new_tokens: int, title: str = ""
) -> list[Rollout]:
    """Return one greedy, scored rollout per sample, but for those that the reward skips.

    With a `title` a progress bar is shown, where stderr is a terminal.
    """
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=max_new_tokens, max_batch_tokens=16_384)
    with progress_display(bool(title) and sys.stderr.isatty()) as display:
        bar = display.add_task(title, total=len(samples))
        rollouts = greedy_answers(
            HFEngine(policy, sampling), samples, AT_ONCE, lambda done: display.update(bar, completed=done)
        )
    return scored_rollouts(reward, rollouts)


def greedy_answers(
    engine: RolloutEngine, samples: Sequence[Sample], several: int, moved: Callable[[int], None]
) -> list[Rollout]:
    """Return one greedy rollout per sample, `several` at a time; `moved` is told how many there are."""
    rollouts: list[Rollout] = []
    for start in range(0, len(samples), several):
        rollouts += engine.generate([Request(s, greedy=True) for s in samples[start : start + several]])
        moved(len(rollouts))
    return rollouts


@dataclass(frozen=True)
class ErrorRate:
    """WER or CER of transcripts: all errors over all words or characters, overall and by language."""

    unit: Literal["word", "char"] = "word"
    normalizer: Normalizer = "basic"

    @property
    def name(self) -> str:
        return {"word": "wer", "char": "cer"}[self.unit]

    def columns(self, rollout: Rollout) -> Row:
        """Return the columns of a transcript in eval/NAME.jsonl: errors, length of the reference, language."""
        errors = word_errors if self.unit == "word" else char_errors
        sample, text, language = rollout.sample, final_text(rollout.text), language_of(rollout.sample)
        references = references_of(sample, self.normalizer, language)
        every = [(errors(reference, text, self.normalizer, language), reference) for reference in references]
        counts, reference = min(every, key=lambda pair: pair[0].rate)
        row: Row = {"errors": counts.errors, "length": counts.reference_length}
        row["language"] = str(sample.metadata.get("language") or "unknown")
        if hotwords := hotwords_of(sample):
            divided = hotword_errors(reference, text, hotwords, self.normalizer, language)
            for part, measured in (("b_wer", divided.biased), ("u_wer", divided.unbiased)):
                row[part] = [measured.errors, measured.reference_length]
        return row | {"rate": counts.rate}

    def cells(self, rows: Sequence[Row], before: Mapping[str, Row] | None = None) -> Row:
        """Return {wer, n, low, high, by_task: {language: …}} of rows with `columns`; by_task for several languages.
        Of rows with hotwords also b_wer and u_wer, the rates in hotwords and in other words.

        before: earlier rows by id; adds changes: {wer: [mean, low, high]} of the samples in both, paired.
        """

        def counts(rows: Sequence[Row]) -> NDArray[np.float64]:
            return np.array([[row["errors"], row["length"]] for row in rows], np.float64)

        def cell(rows: Sequence[Row]) -> Row:
            measured = estimate(counts(rows), ratio)
            values: Row = {self.name: measured.value, "n": len(rows), "low": measured.low, "high": measured.high}
            if paired := [row for row in rows if row["id"] in (before or {})]:
                earlier = counts([before[row["id"]] for row in paired])  # type: ignore[index]
                change = estimate(counts(paired), ratio, baseline_NK=earlier)
                values["changes"] = {self.name: [change.value, change.low, change.high]}
            for part in ("b_wer", "u_wer"):
                if divided := [row for row in rows if part in row]:
                    values[part] = ratio(np.sum([row[part] for row in divided], 0))
                if paired := [row for row in divided if part in (before or {}).get(row["id"], {})]:
                    earlier = np.array([before[row["id"]][part] for row in paired])  # type: ignore[index]
                    change = estimate(np.array([row[part] for row in paired]), ratio, baseline_NK=earlier)
                    values["changes"][part] = [change.value, change.low, change.high]
            return values

        languages = sorted({row["language"] for row in rows})
        named = {name: cell([row for row in rows if row["language"] == name]) for name in languages}
        return cell(rows) | ({"by_task": named} if len(named) > 1 else {})


@dataclass(frozen=True)
class Evaluation:
    """What a run measures before, during and after its training, on which samples.

    The entries of eval.json are called before, after, control, …; those of a set NAME are NAME_before, NAME_after, ….
    Every later entry holds the paired change since its `before`.

    Raises ValueError for an outside measure that the reward optimises.
    """

    reward: Reward
    """What training optimises; its part `metric` is the headline."""
    held_out: Sequence[Sample]
    """Samples of the kind that is trained on."""
    max_new_tokens: int
    """Most tokens of a greedy answer."""
    sets: Mapping[str, Sequence[Sample]] = field(default_factory=dict)
    """Other sets by name; `UNSEEN` are speakers that no phase trains on."""
    outside: WeightedSum | None = None
    """Measures, higher is better, that no phase optimises; the sum's weights do not matter."""
    metric: str = "accuracy"
    """The reward's part that tables begin with."""
    errors: ErrorRate | None = None
    """Of transcripts: the rate that is reported in place of the part `metric`, which is 1 - that of each."""
    passages: Sequence[str] = ()
    """Text without audio whose perplexity is measured, as the set `text`."""
    questions: Sequence[TextQuestion] = ()
    """Questions without audio, in the same set."""

    def __post_init__(self) -> None:
        optimised = self.reward.terms if isinstance(self.reward, WeightedSum | StandardisedSum) else ()
        for term in self.outside.terms if self.outside else ():
            if any(term.reward == other.reward for other in optimised):
                raise ValueError(f"outside measure {term.name!r}: the reward optimises it; give another")

    def measure(self, run: Run, when: str, policy: AudioPolicy) -> None:
        """Measure every set once, as phases of the run, into eval/NAME.jsonl and eval.json; the held-out data last."""
        if self.passages or self.questions:
            measure_text_phase(run, f"text_{when}", policy, self.passages, self.questions, "text_before")
        for prefix, samples in [*((f"{name}_", samples) for name, samples in self.sets.items()), ("", self.held_out)]:
            name, baseline = prefix + when, f"{prefix}before"
            if not run.finished(name):
                rollouts = answer(policy, samples, self.reward, self.max_new_tokens, name)
                outside: list[dict[str, float]] = [{} for _ in rollouts]
                if self.outside:
                    scores = check_scores("outside", self.outside(rollouts), rollouts)
                    outside = [{} if score is None else dict(score.parts) for score in scores]
                rows = self._rows(rollouts)
                results = self._summary(rollouts, rows) | summarize_outside(outside)
                headline = next(iter(results))
                both = zip(rows, outside, strict=True)
                run.write_eval(name, results, rollouts, [row | {"outside": measured} for row, measured in both])
                earlier, later = (run.dir / "eval" / f"{phase}.jsonl" for phase in (baseline, name))
                if name != baseline and earlier.exists():
                    changes = paired_changes(measures_of(earlier), measures_of(later))
                    if self.errors and headline == self.errors.name:
                        cells = self.errors.cells(rows, {row["id"]: row for row in read_rows(earlier)})
                        changes |= cells.get("changes", {})
                        results |= cells
                    run.write_result(name, results | {"changes": changes})
                run.finish(name, {headline: results[headline], "n": results["n"]})
            result = run.result(name)
            headline = next(iter(result))
            print(f"{name}: {metric_name(headline)} {result[headline]:.3f} on {result['n']} samples", flush=True)

    def _rows(self, rollouts: Sequence[Rollout]) -> list[Row]:
        """Return what eval/NAME.jsonl says of each rollout: if it is correct, its parts, of a transcript its errors."""
        rows: list[Row] = [{"id": r.sample.id} for r in rollouts]
        if self.errors is not None:
            rows = [row | self.errors.columns(r) for row, r in zip(rows, rollouts, strict=True)]
        silent = self.errors is not None and not any(row["length"] for row in rows)
        for row, r in zip(rows, rollouts, strict=True):
            parts = {} if r.score is None else dict(r.score.parts)
            if self.errors is None:
                row |= {"correct": parts.get(self.metric, 0.0) >= 1, "parts": parts}
                continue
            rate = row.pop("rate")
            measured = {"silent": 1 - rate} if silent else {self.errors.name: rate}
            row |= {"correct": not rate, "parts": measured | {k: v for k, v in parts.items() if k != self.metric}}
        return rows

    def _summary(self, rollouts: Sequence[Rollout], rows: Sequence[Row]) -> Row:
        """Return an entry of eval.json, the headline first; of clips without speech the share without a text."""
        if self.errors is None or not rows:
            return summarize_answers(rollouts, self.metric)
        name = next(iter(rows[0]["parts"]))
        parts = dict.fromkeys(part for row in rows for part in row["parts"])
        columns = {part: [row["parts"][part] for row in rows if part in row["parts"]] for part in parts}
        summary = summarize(columns.pop(name), name, columns, share=name == "silent")
        return summary if name == "silent" else summary | self.errors.cells(rows)

    def headlines(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the headline of scored rollouts, an error rate also as LANGUAGE/NAME."""
        summary = self._summary(rollouts, self._rows(rollouts))
        name = next(iter(summary))
        languages = summary.get("by_task", {}) if self.errors is not None else {}
        return {name: summary[name], **{f"{language}/{name}": cell[name] for language, cell in languages.items()}}

    def probe(self, policy: AudioPolicy) -> Probe:
        """Return what the training loop calls to measure the held-out data with the policy as it is at the moment."""
        return Probe(self, policy)


@dataclass(frozen=True)
class Probe:
    """The headline of an evaluation on the held-out data: by the policy itself, or by an engine with its weights."""

    evaluation: Evaluation
    policy: AudioPolicy

    @property
    def max_new_tokens(self) -> int:
        return self.evaluation.max_new_tokens

    def __call__(self) -> dict[str, float]:
        e = self.evaluation
        return self._measured(answer(self.policy, e.held_out, e.reward, e.max_new_tokens))

    def by_engine(self, engine: RolloutEngine, several: int, note: Callable[[str], None]) -> dict[str, float]:
        samples = self.evaluation.held_out
        rollouts = greedy_answers(engine, samples, several, lambda done: note(f"held-out {done}/{len(samples)}"))
        return self._measured(scored_rollouts(self.evaluation.reward, rollouts))

    def _measured(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        return self.evaluation.headlines(rollouts)


def summarize_answers(rollouts: Sequence[Rollout], metric: str = "accuracy") -> dict[str, Any]:
    """Return `summarize` of the reward's part `metric`, means of its other parts, and by_task: {task: {metric, n}}."""
    parts = [dict(r.score.parts) for r in rollouts if r.score]
    if parts and metric not in parts[0]:
        raise ValueError(f"the reward has no part {metric!r}; it has {', '.join(sorted(parts[0]))}")
    values = [p[metric] for p in parts]
    others = {name: [p[name] for p in parts] for name in (parts[0] if parts else ()) if name != metric}
    by_task: dict[str, list[float]] = {}
    for r, value in zip(rollouts, values, strict=True):
        by_task.setdefault(r.sample.task or "all", []).append(value)
    tasks = {task: {metric: float(np.mean(v)), "n": len(v)} for task, v in sorted(by_task.items())}
    return summarize(values, metric, others, share=metric == "accuracy") | {"by_task": tasks}


def measures_of(path: Path) -> dict[str, dict[str, float]]:
    """Read a file of `Run.write_eval`: by sample the parts of the reward and the outside measures."""
    return {row["id"]: row["parts"] | row.get("outside", {}) for row in read_rows(path)}


def measure_phase(run: Run, name: str, hits: Callable[[], Sequence[bool]]) -> None:
    """Measure the share of `hits` once, as a phase of the run: the entry NAME of eval.json, with its interval."""
    if not run.finished(name):
        result = summarize([float(hit) for hit in hits()], "accuracy", share=True)
        run.write_result(name, result)
        run.finish(name, result)
    result = run.result(name)
    print(f"{name}: accuracy {result['accuracy']:.3f} on {result['n']}", flush=True)
