"""What a speech model still knows about text alone: perplexity of passages, and questions with choices."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from audiorl.algos.experience import Experience
from audiorl.data.text import TextQuestion
from audiorl.eval.metrics.corpus import estimate, ratio
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, answer_logprobs, experience
from audiorl.run.folder import Run
from audiorl.types import Message, Rollout, Sample, Segment

MEASURES = ("perplexity", "nats_per_token", "bits_per_byte", "accuracy")
WINDOW = 512
"""Most tokens of a passage; what comes after is not scored."""
REQUEST = "Answer with the words only."
BUDGET = 2048
"""Tokens of a forward pass."""


@dataclass(frozen=True)
class TextResults:
    """Per passage and per question; made by `measure_text`."""

    passages: NDArray[np.float64]
    """[N, 3]: negative log-likelihood in nats, tokens that it is of, bytes of the passage that they spell."""
    correct: NDArray[np.float64]
    """[M]: whether the most probable choice is the answer."""

    def scores(self, baseline: TextResults | None = None) -> dict[str, Any]:
        """{passages, questions, perplexity, nats_per_token, bits_per_byte, accuracy}, each measure {value, low, high}.

        `baseline`: of the same texts; adds change: {nats_per_token, …} with paired intervals. Perplexities of different
        tokenizers do not compare; bits per byte do.
        """
        result: dict[str, Any] = {"passages": len(self.passages), "questions": len(self.correct)}
        counts = self._counts()
        if "nats_per_token" in counts:
            result["perplexity"] = asdict(estimate(counts["nats_per_token"], lambda sums: math.exp(ratio(sums))))
        result |= {name: asdict(estimate(columns, ratio)) for name, columns in counts.items()}
        if baseline is not None:
            before = baseline._counts()
            result["change"] = {n: asdict(estimate(c, ratio, baseline_NK=before[n])) for n, c in counts.items()}
        return result

    def _counts(self) -> dict[str, NDArray[np.float64]]:
        """What each measure is the ratio of, [N, 2]; without passages or questions theirs are absent."""
        counts = {}
        if len(self.passages):
            counts["nats_per_token"] = self.passages[:, :2]
            counts["bits_per_byte"] = self.passages[:, [0, 2]] / [math.log(2), 1]
        if len(self.correct):
            counts["accuracy"] = np.stack([self.correct, np.ones(len(self.correct))], 1)
        return counts


def measure_text(policy: AudioPolicy, passages: Sequence[str], questions: Sequence[TextQuestion]) -> TextResults:
    """The passages as raw text from their second token on, and the questions in the model's chat template.

    The answer to a question is the choice with the highest log-prob, the end of the turn included. The choices are not
    shown; the question ends with a request for the words only, so that a model needs to know no format.
    """
    laid_out = [_passage(policy, text, f"passage {i + 1}") for i, text in enumerate(passages)]
    counts = [
        [-total, e.num_sampled, len(policy.decode(e.ids[1:]).encode())]
        for e, total in zip(laid_out, _logprobs(policy, laid_out), strict=True)
    ]
    answers = [
        experience(policy, Example(Sample(q.id, (Message("user", (f"{q.question} {REQUEST}",)),)), choice), q.id)
        for q in questions
        for choice in q.choices
    ]
    totals = iter(_logprobs(policy, answers))
    correct = []
    for q in questions:
        logprobs = [next(totals) for _ in q.choices]
        correct.append(float(q.choices[int(np.argmax(logprobs))] == q.answer))
    return TextResults(np.array(counts, np.float64).reshape(-1, 3), np.array(correct, np.float64))


def _passage(policy: AudioPolicy, text: str, name: str) -> Experience:
    ids = torch.tensor(policy.tokenizer.encode(text, add_special_tokens=False)[:WINDOW], dtype=torch.long)
    if len(ids) < 2:
        raise ValueError(f"{name}: {text!r} is one token; a perplexity needs two or more")
    segment = Segment(ids[:1], ids[1:], torch.zeros(len(ids) - 1))
    return Experience.from_rollout(Rollout(Sample(name, ()), (segment,), name)).replace(rollout_logprobs=None)


def _logprobs(policy: AudioPolicy, experiences: Sequence[Experience]) -> list[float]:
    """The log-prob of each one's answer, in nats."""
    return [float(values.sum()) for values in answer_logprobs(policy, experiences)]


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
