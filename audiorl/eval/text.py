"""Text without audio: perplexity and questions, to see what training on speech cost the text model.

    audiorl eval text --model runs/asr/checkpoints/grpo/step_000200 --baseline START --out results/text
    audiorl eval text --model MODEL --text essays.txt --questions none --out results/essays

Without files it takes passages of Python's documentation and 107 simple questions in English, whose four choices are
compared by their probability. Writes scores.json to --out. Perplexity depends on the tokenizer and, with the bundled
passages, on the version of Python; compare models on one machine, with --baseline.
"""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from audiorl.algos.experience import Experience
from audiorl.config.checks import refuse
from audiorl.data.text import BUNDLED, TextQuestion, read_passages, read_questions
from audiorl.eval._common import evaluation_config, print_table, run_evaluation, with_interval, write_scores
from audiorl.eval.metrics.corpus import bootstrap_interval, estimate, ratio
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.examples import Example, answer_logprobs, experience
from audiorl.run.folder import Run
from audiorl.types import Message, Rollout, Sample, Segment

NONE = "none"
MEASURES = ("perplexity", "nats_per_token", "bits_per_byte", "accuracy")
WINDOW = 512
"""Most tokens of a passage; what comes after is not scored."""
REQUEST = "Answer with the words only."


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Measure a model on text alone, and compare it with the one before training."""

    model: str
    """A Hugging Face model folder or hub id, a checkpoint, or a run folder (its newest checkpoint)."""
    phase: str | None = None
    """The phase of a run folder whose newest checkpoint is taken; by default the one that the run is for."""
    baseline: str | None = None
    """The model before training: differences with paired intervals."""
    text: str = BUNDLED
    """Passages for the perplexity: `bundled`, a .txt file divided by empty lines, rows with `text`, or `none`."""
    questions: str = BUNDLED
    """Questions: `bundled`, rows with question, choices and answer, or `none`."""
    limit: int | None = None
    """Only the first passages and questions."""
    out: Path | None = None
    """Folder for scores.json."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one."""


def main(options: TextOptions) -> dict[str, Any]:
    """Do what the options say and return the scores."""
    refuse(
        (options.limit is not None and options.limit < 1, "--limit: give at least 1"),
        (options.text == options.questions == NONE, "--text and --questions are both none: nothing to measure"),
    )
    passages = [] if options.text == NONE else read_passages(options.text, options.limit)
    questions = [] if options.questions == NONE else read_questions(options.questions, options.limit)

    def measured(model: str) -> TextResults:
        return measure_text(load_policy(model, evaluation_config(options.device)), passages, questions)

    before = None if options.baseline is None else measured(options.baseline)
    results = measured(options.model)
    scores = results.scores(before)
    scores |= {"text": options.text, "questions_from": options.questions, "python": platform.python_version()}
    if before is not None:
        scores["baseline"] = before.scores()
    if options.out is not None:
        write_scores(options.out, scores)
    rows = []
    for name in (name for name in MEASURES if name in scores):
        cells = [with_interval(scores[name], name="value")]
        if before is not None:
            change = scores["change"].get(name)
            cells.append(with_interval(scores["baseline"][name], name="value"))
            cells.append("" if change is None else with_interval(change, "+.3f", "value"))
        rows.append([name.replace("_", " "), *cells])
    head = ["", "model", *(["baseline", "model − baseline"] if before is not None else [])]
    print_table(head, rows, f"{options.model} · {len(passages)} passages, {len(questions)} questions", width=100)
    return scores


@dataclass(frozen=True)
class TextResults:
    """Results by passage and by question; made by `measure_text`."""

    passages: NDArray[np.float64]
    """[N, 3]: negative log-likelihood in nats, tokens that it is of, bytes of the passage that they spell."""
    correct: NDArray[np.float64]
    """[M]: whether the most probable choice is the answer."""

    def scores(self, baseline: TextResults | None = None) -> dict[str, Any]:
        """Return {passages, questions, perplexity, nats_per_token, bits_per_byte, accuracy}; measures have intervals.

        `baseline`: of the same texts; adds change: {nats_per_token, …} with paired intervals. Perplexities of different
        tokenizers do not compare; bits per byte do. Without passages or questions their measures are absent.
        """
        result: dict[str, Any] = {"passages": len(self.passages), "questions": len(self.correct)}
        counts = self._counts()
        if "nats_per_token" in counts:
            result["perplexity"] = asdict(estimate(counts["nats_per_token"], lambda sums: math.exp(ratio(sums))))
        result |= {name: asdict(estimate(columns, ratio)) for name, columns in counts.items()}
        if len(self.correct):
            low, high = bootstrap_interval(self.correct.tolist(), share=True)
            result["accuracy"] |= {"low": low, "high": high}
        if baseline is not None:
            before = baseline._counts()
            result["change"] = {n: asdict(estimate(c, ratio, baseline_NK=before[n])) for n, c in counts.items()}
        return result

    def _counts(self) -> dict[str, NDArray[np.float64]]:
        """Return the counts [N, 2] whose ratio each measure is."""
        counts = {}
        if len(self.passages):
            counts["nats_per_token"] = self.passages[:, :2]
            counts["bits_per_byte"] = self.passages[:, [0, 2]] / [math.log(2), 1]
        if len(self.correct):
            counts["accuracy"] = np.stack([self.correct, np.ones(len(self.correct))], 1)
        return counts


def measure_text(policy: AudioPolicy, passages: Sequence[str], questions: Sequence[TextQuestion]) -> TextResults:
    """Measure the passages as raw text from their second token on, and the questions in the model's chat template.

    The answer to a question is the choice with the highest log-prob, the end of the turn included. The choices are not
    shown; the question ends with a request for the words only, so that a model needs to know no format.
    """
    laid_out = []
    for number, text in enumerate(passages, 1):
        name = f"passage {number}"
        ids = torch.tensor(policy.tokenizer.encode(text, add_special_tokens=False)[:WINDOW], dtype=torch.long)
        if len(ids) < 2:
            raise ValueError(f"{name}: {text!r} is one token; a perplexity needs two or more")
        segment = Segment(ids[:1], ids[1:], torch.zeros(len(ids) - 1))
        rollout = Rollout(Sample(name, ()), (segment,), name)
        laid_out.append(Experience.from_rollout(rollout).replace(rollout_logprobs=None))
    counts = [
        [-float(values.sum()), e.num_sampled, len(policy.decode(e.ids[1:]).encode())]
        for e, values in zip(laid_out, answer_logprobs(policy, laid_out), strict=True)
    ]
    answers = [
        experience(policy, Example(Sample(q.id, (Message("user", (f"{q.question} {REQUEST}",)),)), choice), q.id)
        for q in questions
        for choice in q.choices
    ]
    totals = iter([float(values.sum()) for values in answer_logprobs(policy, answers)])
    correct = []
    for q in questions:
        logprobs = [next(totals) for _ in q.choices]
        correct.append(float(q.choices[int(np.argmax(logprobs))] == q.answer))
    return TextResults(np.array(counts, np.float64).reshape(-1, 3), np.array(correct, np.float64))


def measure_text_phase(
    run: Run, name: str, policy: AudioPolicy, passages: Sequence[str], questions: Sequence[TextQuestion], baseline: str
) -> None:
    """Measure once, as a phase of the run: the entry NAME of eval.json, and eval/NAME.json, the parts of its sums."""
    if run.finished(name):
        return
    results = measure_text(policy, passages, questions)
    folder = run.dir / "eval"
    parts = {"passages": results.passages.tolist(), "correct": results.correct.tolist()}
    (folder / f"{name}.json").write_text(json.dumps(parts), encoding="utf-8")
    before = None
    if name != baseline and (folder / f"{baseline}.json").exists():
        saved = json.loads((folder / f"{baseline}.json").read_text(encoding="utf-8"))
        before = TextResults(np.array(saved["passages"]), np.array(saved["correct"]))
    scores = results.scores(before)
    entry: dict[str, Any] = {measure: value["value"] for measure, value in scores.items() if measure in MEASURES}
    changes = {measure: [c["value"], c["low"], c["high"]] for measure, c in scores.get("change", {}).items()}
    run.write_result(name, entry | ({"changes": changes} if changes else {}))
    run.finish(name, entry)
    print(f"{name}: " + ", ".join(f"{measure} {value:.3f}" for measure, value in entry.items()), flush=True)


if __name__ == "__main__":
    run_evaluation(sys.modules[__name__], sys.argv[1:])
