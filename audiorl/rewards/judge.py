"""A chat model as a reward: it rates answers by a rubric, or chooses the better of two.

    endpoint = ChatEndpoint("Qwen/Qwen2.5-Omni-7B", "http://127.0.0.1:8000/v1", cache="judge_cache")
    OpenAIJudge(endpoint, JudgePrompt("5: the answer is right and says why. 1: it is wrong.", audio="prompt"))
    PairwiseJudge(endpoint, JudgePrompt("The right answer is better; of two right ones the shorter."))

A verdict that cannot be used (no number, out of the scale, a refusal, a timeout, an answer to another question) is
never a score: the rollout is skipped (None), and above `max_failed` the run stops.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, TypeVar

import msgspec

from audiorl.audio import AudioClip, wav_bytes
from audiorl.rewards.chat import Answer, BadAnswer, ChatEndpoint, Failure, JudgeError, Question
from audiorl.rewards.judge_prompt import SYSTEM, JudgePrompt, quoted
from audiorl.types import Rollout, Score

Content = str | AudioClip
_RATE = 16_000
_FENCE = re.compile(r"^```(?:json)?\s*\n(.*?)\n?```$", re.DOTALL)


class _Rating(msgspec.Struct):
    id: str
    score: float
    reason: str = ""


class Choice(msgspec.Struct):
    """The value of the answer to a `comparison`."""

    id: str
    winner: Literal["A", "B", "tie"]
    reason: str = ""

    @property
    def points(self) -> float:
        """What A wins: 1, 0.5 or 0."""
        return {"A": 1.0, "tie": 0.5, "B": 0.0}[self.winner]


Verdict = TypeVar("Verdict", _Rating, Choice)


@dataclass(frozen=True)
class OpenAIJudge:
    """The rating of a chat model, (rating - low) / (high - low), in [0, 1].

    `votes` requests for each rollout, combined by their median or mean; a rollout with half of its votes or more failed
    is skipped. Parts: `rating` (on the scale), `spread` (largest vote - smallest), `failed` (share of failed votes),
    `tokens` and `seconds` (what its votes cost now, 0 from the cache: the sum of tokens, and the mean latency).

    Raises JudgeError naming the sample when more than the share `max_failed` of a call's rollouts would be skipped.
    """

    endpoint: ChatEndpoint
    prompt: JudgePrompt
    scale: tuple[float, float] = (1, 5)
    """The lowest and the highest rating."""
    votes: int = 1
    """Requests for each rollout, with seeds 0, 1, …; more than one needs a temperature above 0 to differ."""
    combine: Literal["median", "mean"] = "median"
    """How votes become one rating."""
    max_failed: float = 0.1
    """Largest share of a call's rollouts that may be skipped; above it the run stops."""
    reason: bool = True
    """Ask for a reason before the rating: slower, and usually nearer to what people say."""

    def __post_init__(self) -> None:
        low, high = self.scale
        if not -float("inf") < low < high < float("inf"):
            raise ValueError(f"OpenAIJudge: scale is {self.scale}; give the lowest and the highest rating")
        if self.votes < 1:
            raise ValueError(f"OpenAIJudge: votes is {self.votes}; it must be at least 1")
        if self.combine not in ("median", "mean"):
            raise ValueError(f"OpenAIJudge: combine {self.combine!r} is not one of 'median', 'mean'")
        _check_share(self.max_failed, "OpenAIJudge")

    @property
    def by_group(self) -> bool:
        """It waits for a server; see `audiorl.rewards.early`."""
        return True

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        return self.finish(rollouts, self.begin(rollouts))

    def begin(self, rollouts: Sequence[Rollout]) -> list[list[Answer | Failure]]:
        """The votes on each rollout."""
        answers = iter(self.endpoint.ask([q for r in rollouts for q in self._questions(r)]))
        return [[next(answers) for _ in range(self.votes)] for _ in rollouts]

    def finish(self, rollouts: Sequence[Rollout], votes: Sequence[Sequence[Answer | Failure]]) -> list[Score | None]:
        """The scores by the votes on all rollouts of a step."""
        scores = [self._score(one) for one in votes]
        _check_failures(f"OpenAIJudge {self.endpoint.model}", rollouts, scores, votes, self.max_failed)
        return scores

    def _questions(self, rollout: Rollout) -> list[Question]:
        low, high = self.scale
        shown = self.prompt.conversation(rollout)
        score = {"type": "number", "minimum": low, "maximum": high}
        task = f"Rate the answer from {low:g} to {high:g} by this rubric:\n{self.prompt.rubric}"
        messages, schema, id = _request(task, shown, {"score": score}, self.reason)
        return [Question(messages, schema, lambda text: self._read(text, id), seed) for seed in range(self.votes)]

    def _read(self, text: str, id: str) -> float:
        rating = _verdict(text, _Rating, id).score
        if not self.scale[0] <= rating <= self.scale[1]:
            raise BadAnswer(
                "out of scale", f"the score {rating:g} lies outside of {self.scale[0]:g} to {self.scale[1]:g}"
            )
        return rating

    def _score(self, votes: Sequence[Answer | Failure]) -> Score | None:
        answers = [vote for vote in votes if isinstance(vote, Answer)]
        if 2 * len(answers) <= len(votes):
            return None
        ratings = [float(a.value) for a in answers]
        rating = statistics.median(ratings) if self.combine == "median" else statistics.fmean(ratings)
        low, high = self.scale
        parts = {"rating": rating, "spread": max(ratings) - min(ratings)} | _costs(votes)
        return Score((rating - low) / (high - low), parts)


@dataclass(frozen=True)
class PairwiseJudge:
    """The share of comparisons that an answer wins, in [0, 1]; a tie counts 1/2.

    Each comparison is asked twice, with A and B swapped, since judges prefer a position: a win in one order and a loss
    in the other is a tie. `against` "reference" compares with the sample's first reference, "group" with other answers
    to the prompt: the next `opponents` of the group, in a circle (None: all). A comparison with a failed order does not
    count; a rollout without any is skipped.

    Parts: `consistent` (the share of comparisons with the same winner in both orders), `failed`, `tokens`, `seconds`
    (as of OpenAIJudge; a comparison's cost counts for both answers).

    Raises ValueError for a sample without reference or a group of one, JudgeError as OpenAIJudge.
    """

    endpoint: ChatEndpoint
    prompt: JudgePrompt
    against: Literal["group", "reference"] = "group"
    """What an answer is compared with."""
    opponents: int | None = None
    """Answers of the group that each answer is compared with next in order; None: every pair."""
    max_failed: float = 0.1
    """Largest share of a call's rollouts that may be skipped; above it the run stops."""
    reason: bool = True
    """Ask for a reason before the choice."""

    def __post_init__(self) -> None:
        if self.against not in ("group", "reference"):
            raise ValueError(f"PairwiseJudge: against {self.against!r} is not one of 'group', 'reference'")
        if self.opponents is not None and self.opponents < 1:
            raise ValueError(f"PairwiseJudge: opponents is {self.opponents}; it must be at least 1, or None")
        _check_share(self.max_failed, "PairwiseJudge")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        pairs = self._pairs(rollouts)
        answers = iter(self.endpoint.ask([q for pair in pairs for q in self._questions(rollouts, *pair)]))
        wins: list[list[float]] = [[] for _ in rollouts]
        agreed: list[list[float]] = [[] for _ in rollouts]
        orders: list[list[Answer | Failure]] = [[] for _ in rollouts]
        for first, second in pairs:
            one, other = next(answers), next(answers)
            for i in filter(lambda i: i is not None, (first, second)):
                orders[i] += [one, other]  # type: ignore[index]
            if isinstance(one, Failure) or isinstance(other, Failure):
                continue
            share = (one.value.points + 1 - other.value.points) / 2
            for i, value in ((first, share), (second, 1 - share)):
                if i is not None:
                    wins[i].append(value)
                    agreed[i].append(float(one.value.points == 1 - other.value.points))
        scores = [
            Score(statistics.fmean(w), {"consistent": statistics.fmean(a)} | _costs(o)) if w else None
            for w, a, o in zip(wins, agreed, orders, strict=True)
        ]
        _check_failures(f"PairwiseJudge {self.endpoint.model}", rollouts, scores, orders, self.max_failed)
        return scores

    def _pairs(self, rollouts: Sequence[Rollout]) -> list[tuple[int, int | None]]:
        """Indices of the answers that are compared; None is the reference."""
        if self.against == "reference":
            for r in rollouts:
                if not r.sample.references:
                    raise ValueError(f"PairwiseJudge: sample {r.name} has no reference; use against='group'")
            return [(i, None) for i in range(len(rollouts))]
        pairs: dict[tuple[int, int], None] = {}
        order = sorted(range(len(rollouts)), key=lambda i: rollouts[i].group_id)
        for _, members in groupby(order, key=lambda i: rollouts[i].group_id):
            group = list(members)
            if len(group) < 2:
                name = rollouts[group[0]].name
                raise ValueError(f"PairwiseJudge: {name} is the only answer of its group; use against='reference'")
            for distance in range(1, min(self.opponents or len(group), len(group) - 1) + 1):
                for place, i in enumerate(group):
                    j = group[(place + distance) % len(group)]
                    pairs[min(i, j), max(i, j)] = None
        return list(pairs)

    def _questions(self, rollouts: Sequence[Rollout], first: int, second: int | None) -> list[Question]:
        """The comparison in both orders."""
        rollout = rollouts[first]
        sides: list[list[Content]] = [
            self.prompt.answer(rollout),
            [quoted(rollout.sample.references[0])] if second is None else self.prompt.answer(rollouts[second]),
        ]
        # Against the reference it is not shown as the right answer, or it would win by that.
        question = (replace(self.prompt, references=False) if second is None else self.prompt).question(rollout)
        orders = (sides, sides[::-1])
        return [comparison(self.prompt.rubric, question, a, b, self.reason) for a, b in orders]


# -- requests and verdicts ---------------------------------------------------------------------------------------------


def comparison(
    rubric: str, question: Sequence[Content], a: Sequence[Content], b: Sequence[Content], reason: bool = True
) -> Question:
    """Which of two answers, A or B, is better by the rubric, or neither; the value of its answer is a `Choice`.

    question: what was asked, shown before the answers. Texts of models belong between tags: see `quoted`. Clips are
    sent as WAV at 16 kHz.
    """
    shown = [*question, "\nAnswer A:", *a, "\nAnswer B:", *b]
    winner = {"type": "string", "enum": ["A", "B", "tie"]}
    task = f'Which answer is better, "A", "B", or "tie", by this rubric:\n{rubric}'
    messages, schema, id = _request(task, shown, {"winner": winner}, reason)
    return Question(messages, schema, lambda text: _verdict(text, Choice, id))


def _request(
    task: str, shown: Sequence[Content], verdict: dict[str, Any], reason: bool
) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """(messages, schema, id) of a request; the answer must repeat the id, so that one to another request is noticed."""
    parts = _parts(shown)
    content = json.dumps([task, parts], sort_keys=True).encode()
    id = hashlib.sha256(content).hexdigest()[:12]
    properties: dict[str, Any] = {"id": {"type": "string", "const": id}}
    properties |= {"reason": {"type": "string"}} if reason else {}
    properties |= verdict
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    wanted = ", ".join(f'"{name}"' for name in properties)
    order = f'{task}\n\nAnswer with one JSON object with the fields {wanted}, and nothing else. "id" is "{id}".'
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": [*parts, _text("\n" + order)]},
    ]
    return messages, schema, id


def _verdict(text: str, kind: type[Verdict], id: str) -> Verdict:
    """The verdict in an answer, which may stand in a Markdown code block."""
    text = text.strip()
    if match := _FENCE.match(text):
        text = match[1]
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):  # NaN is no JSON either
        raise BadAnswer("not JSON", f"the answer is not JSON: {text[:100]!r}") from None
    try:
        verdict = msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise BadAnswer("wrong fields", f"the answer is no verdict ({error}): {text[:100]!r}") from None
    if verdict.id != id:
        raise BadAnswer("another sample", f"the answer belongs to another question ({verdict.id[:20]!r}, not {id!r})")
    return verdict


def _check_failures(
    name: str,
    rollouts: Sequence[Rollout],
    scores: Sequence[Score | None],
    votes: Sequence[Sequence[Answer | Failure]],
    max_failed: float,
) -> None:
    """Raise JudgeError where more rollouts are skipped than allowed."""
    skipped = [i for i, score in enumerate(scores) if score is None]
    if len(skipped) <= max_failed * len(rollouts):
        return
    failure = next(vote for vote in votes[skipped[0]] if isinstance(vote, Failure))
    raise JudgeError(
        f"{name}: {len(skipped)} of {len(rollouts)} rollouts could not be judged, max_failed allows the share "
        f"{max_failed:g}; the first is {rollouts[skipped[0]].name}: {failure.kind}: {failure.message}"
    )


def _costs(votes: Sequence[Answer | Failure]) -> dict[str, float]:
    """Parts that say what the votes of a rollout cost."""
    failed = sum(isinstance(vote, Failure) for vote in votes)
    seconds = [vote.seconds for vote in votes if isinstance(vote, Answer)]
    return {
        "failed": failed / len(votes),
        "tokens": float(sum(vote.tokens for vote in votes)),
        "seconds": statistics.fmean(seconds) if seconds else 0.0,
    }


def _check_share(value: float, name: str) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: max_failed is {value}; it must be a share between 0 and 1")


# -- parts of messages -------------------------------------------------------------------------------------------------


def _parts(contents: Sequence[Content]) -> list[dict[str, Any]]:
    """As parts of a chat message; neighbouring texts are one, since servers join parts in ways of their own."""
    out: list[dict[str, Any]] = []
    for is_text, group in groupby(contents, key=lambda content: isinstance(content, str)):
        run = list(group)
        out += [_text("\n".join(map(str, run)))] if is_text else [_audio(c) for c in run if isinstance(c, AudioClip)]
    return out


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text.encode("utf-8", "replace").decode()}  # a model may write half a character


def _audio(clip: AudioClip) -> dict[str, Any]:
    """The clip as a WAV file of 16 bits at 16 kHz."""
    data = base64.b64encode(wav_bytes(clip.load(_RATE), _RATE)).decode("ascii")
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
