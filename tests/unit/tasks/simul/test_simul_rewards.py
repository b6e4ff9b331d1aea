"""The rewards of simultaneous interpretation, by hand, and fused over a batch of chunks."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from audiorl.algos.experience import Experience
from audiorl.algos.experimental import gdpo
from audiorl.audio import AudioClip
from audiorl.protocols import Reward
from audiorl.rewards import StandardisedSum, WeightedSum
from audiorl.tasks.simul.quality import Translation, similarities, units_like_references
from audiorl.tasks.simul.rewards import (
    Detection,
    FormatMatch,
    HingedPromptness,
    Initiative,
    LatencyPenalty,
    SequenceQuality,
    StreamLength,
    TimeCompliance,
    TurnQuality,
    hpo,
    multi_turn,
    single_turn,
    spoken_frames,
)
from audiorl.types import Rollout, Sample, Score, Segment, Turn

CLIP = AudioClip(array=np.zeros(16, np.float32), sample_rate=16_000)


def interpreted(
    *turns: tuple[str, str],
    cut: tuple[int, ...] = (),
    lasts: tuple[float | None, ...] = (),
    frames: int | None = None,
    tokens: int = 2,
    language: str = "es",
    id: str = "talk",
) -> Rollout:
    """One turn per (written, reference). `cut`: turns without room to end; `lasts`: seconds of the references;
    `frames`: of two codebooks, in place of `tokens` text tokens."""
    heard = tuple(
        Turn(CLIP, t + 1.0, reference, f"source {t}", lasts[t] if lasts else None)
        for t, (_, reference) in enumerate(turns)
    )
    segments = tuple(
        Segment(
            prompt_ids=torch.arange(3),
            ids=torch.arange(tokens if frames is None else frames + 5),
            logprobs=torch.zeros(tokens if frames is None else frames + 5),
            text=written,
            # between two tokens; the delay pattern of two codebooks has three more rows than frames
            codes=None if frames is None else torch.tensor([[-1, -1], *[[0, 0]] * (frames + 3), [-1, -1]]),
            stop_reason="length" if t in cut else "eos",
        )
        for t, (written, _) in enumerate(turns)
    )
    return Rollout(Sample(id, (), metadata={"target_language": language}, turns=heard), segments, "g")


def equal(written: str, reference: str) -> float:
    return float(written == reference)


def of(reward: Reward, rollout: Rollout) -> tuple[float, tuple[float, ...] | None]:
    (score,) = reward([rollout])
    return score.total, score.per_segment


TALK = interpreted(("", ""), ("hola", "hola"), ("", "buenos días"), ("adiós ", "adiós"), ("y", ""))


def test_per_turn_by_hand() -> None:
    """Silent, right, silent where something can be said, right, speaking where nothing can be said."""
    assert of(Detection(), TALK) == (1 / 5, (1, 0, 0, 0, 0))
    assert of(Initiative(), TALK) == (2 / 5, (0, 1, 0, 1, 0))
    blank = interpreted((" ", "\n"), (" ", "a"), ("a", "a"))  # blanks are silence
    assert of(Detection(), blank)[1] == (1, 0, 0) and of(Initiative(), blank)[1] == (0, 0, 1)
    total, values = of(TurnQuality(equal), TALK)
    assert values is not None and values[1:4] == (1, 0, 1) and math.isnan(values[0]) and math.isnan(values[4])
    assert total == 2 / 3  # the mean over the turns with a reference
    for metric in ("chrf", "bleu"):
        assert of(TurnQuality(metric), TALK)[0] == pytest.approx(2 / 3)
    assert 0 < of(TurnQuality(), interpreted(("la conferencia", "las conferencias")))[0] < 1
    # chrF2 of "ab" and "ac": 1-grams 1 of 2, 2-grams 0 of 1, precision = recall = 1/4
    assert similarities("chrf", [Translation("ab", "ac")]) == [pytest.approx(0.25)]
    # One of ten characters is wrong: 1 of 10 edits; the 4-grams with it fail, the precisions are 9/10, 7/9, 5/8, 3/7.
    written, wanted = "我们明天去北京看你吧", "我们明天去南京看你吧"
    chinese = interpreted((written, wanted), language="zh")
    bleu = (9 / 10 * 7 / 9 * 5 / 8 * 3 / 7) ** (1 / 4)
    for metric, expected in (("ter", 0.9), ("bleu", bleu)):
        assert of(TurnQuality(metric), chinese)[0] == of(SequenceQuality(metric), chinese)[0] == pytest.approx(expected)


def test_quality_asks_once_for_the_batch_and_only_where_both_are_there() -> None:
    asked: list[tuple[str, str]] = []

    def metric(written: str, reference: str) -> float:
        asked.append((written, reference))
        return len(asked) / 10

    first, second = TurnQuality(metric)([TALK, interpreted(("no", "sí"))])
    assert asked == [("hola", "hola"), ("adiós", "adiós"), ("no", "sí")]
    assert first.per_segment is not None and first.per_segment[1:4] == (0.1, 0, 0.2) and second.total == 0.3


def test_frames_are_counted_speech_by_speech() -> None:
    """Q = 2: three rows of each speech are not frames. A speech that was cut off early has none."""
    frame, token = [0, 0], [-1, -1]
    assert spoken_frames(torch.tensor([token, *[frame] * 7, token, *[frame] * 4])) == 4 + 1
    assert spoken_frames(torch.tensor([frame, frame])) == 0
    assert spoken_frames(torch.tensor([token])) == 0


def test_time_compliance_of_codes_and_of_text() -> None:
    """25 frames a second: 50 frames last 2 s, of 2.5 s: 1 - 0.5 / 2.5. Of 4 characters in 2 s, 5 last 2.5 s."""
    coded = interpreted(("", "a"), ("", ""), lasts=(2.5, None), frames=50)
    total, values = of(TimeCompliance(), coded)
    assert values is not None and values[0] == pytest.approx(0.8) and math.isnan(values[1])
    assert total == pytest.approx(0.8)
    assert of(TimeCompliance(), interpreted(("xx", "a"), ("", "b"), lasts=(1.0, 4.0))) == (0, (0, 0))
    assert of(TimeCompliance(), interpreted(("a b cde", "ab cd"), lasts=(2.0,)))[0] == pytest.approx(0.75)
    for text, language in (("我们明天去", "zh"), ("พรุ่งนี้", "th"), (" buenos días", "es")):
        assert of(TimeCompliance(), interpreted((text.strip(), text), lasts=(1.6,), language=language))[0] == 1
    assert of(TimeCompliance(), interpreted(("x", "a"), lasts=(None,)))[0] == 0  # nowhere defined


def test_format_by_turn() -> None:
    assert of(FormatMatch(), interpreted(("a", "a"), ("<b>", ""), ("", ""), ("c", ""), cut=(3,))) == (0.5, (1, 0, 1, 0))
    marked = ((" >> sí", ">> sí"), ("no >>", ""), ("a>b", ""), (">>> a", ""), ("> a", ""), (">> a <b>", ""))
    assert of(FormatMatch(), interpreted(*marked))[1] == (1, 1, 0, 0, 0, 0)
    assert of(FormatMatch(r"[a-z]+"), interpreted(("ab", "a"), ("A", "a"))) == (0.5, (1, 0))


def test_waits_by_hand() -> None:
    """Turns 0 to 6; references at 1, 2 and 5; written at 0, 3, 4 and 6.

    Since available: at 0 nothing was open; at 3 the oldest was that of 1, so 2, and both are answered; at 4 nothing was
    open; at 6 that of 5. In silence: none before 0; turns 1 and 2 before 3; none before 4; turn 5 before 6.
    """
    talk = interpreted(("a", ""), ("", "r"), (" ", "r"), ("b", ""), ("c", ""), ("", "r"), ("d", ""))
    available = LatencyPenalty(waits="available")
    assert available.waited(talk) == LatencyPenalty().waited(talk) == [0, 2, 0, 1]
    late = interpreted(("", ""), ("", ""), ("a", "r"), ("", ""), ("", "r"))
    assert available.waited(late) == [0] and LatencyPenalty().waited(late) == [2]
    assert of(LatencyPenalty(), talk) == (-3 / 4, None)
    assert of(LatencyPenalty(longest=1.5), talk) == (-0.5 / 4, None)
    assert of(LatencyPenalty(), late)[0] == -2 and of(available, late)[0] == 0
    parts = [multi_turn(equal, waits=waits)([late])[0].parts["latency"] for waits in ("silence", "available")]
    assert parts == [-2, 0]
    with pytest.raises(ValueError, match="waits is 'listening', expected one of silence, available"):
        LatencyPenalty(waits="listening")  # type: ignore[arg-type]
    assert of(LatencyPenalty(), interpreted(("", "r"), ("", "")))[0] == 0


def test_quality_of_the_sequence() -> None:
    """References "uno dos" (7 characters) and "tres" (4); written one turn late, the second one wrong.

    1 · 7 / 11 + 0 · 4 / 11.
    """
    talk = interpreted(("", "uno dos"), ("uno dos", ""), (" seis", "tres"))
    assert of(SequenceQuality(equal), talk) == (pytest.approx(7 / 11), None)
    right = interpreted(("", "uno dos"), ("uno dos", ""), (" tres", "tres"))
    silent = interpreted(("", "uno dos"), ("", "tres"))
    assert of(SequenceQuality(equal), right)[0] == 1 and of(SequenceQuality(equal), silent)[0] == 0
    chinese = interpreted(("", "你好"), ("你好", "吗"), ("呢", ""), language="zh")
    assert of(SequenceQuality(equal), chinese)[0] == pytest.approx(2 / 3)
    mixed = interpreted(("我用 Deep ", "我用 Deep Learning"), ("Learning 写　Python", "写 Python"), language="zh")
    assert [of(SequenceQuality(metric), mixed)[0] for metric in ("word_f1", "bleu", "ter")] == pytest.approx([1, 1, 1])
    thai = interpreted(("สวัสดีครับ ผมชื่อ", "สวัสดีครับ ผมชื่อ"), (" สมชาย", "สมชาย"), language="th")
    assert of(SequenceQuality("ter"), thai)[0] == pytest.approx(1)
    assert units_like_references("uno dos seis", ["uno dos", "tres"], "es") == [["uno", "dos"], ["seis"]]
    assert units_like_references("你好吗", ["你 好", "吗"], "zh") == [["你", "好"], ["吗"]]


def test_length_of_the_stream_by_hand() -> None:
    """References of 2 and 2 words after turns 0 and 2; high 1.5, low 0.75. Written 4, 1, 0 words.

    Excess: 4 - 1.5 · 2 = 1 of 4; then 5 - 3 = 2 of 4; then 5 - 6 = 0. The changes: -1/4, -1/4, +1/2.
    """
    reward = StreamLength(low=0.75, high=1.5)
    early = interpreted(("a b c d", "r s"), (" e", ""), ("", "t u"))
    assert of(reward, early) == (pytest.approx(0), pytest.approx((-0.25, -0.25, 0.5)))
    babble = interpreted(("a b", "r s"), (" c d e f g h i", "t u"))
    assert of(reward, babble) == (pytest.approx(-0.75), pytest.approx((0, -0.75)))  # 9 words, 6 allowed
    short = interpreted(("", "r s"), ("a", "t u"))
    assert of(reward, short) == (pytest.approx(-0.5), pytest.approx((0, -0.5)))  # 1 of at least 3
    assert of(reward, interpreted(("x " * 99, "r")))[0] == -1
    with pytest.raises(ValueError, match="need 0 <= low <= 1 <= high"):
        StreamLength(low=1.2)


def test_hinged_promptness_by_hand() -> None:
    """References at 1 s and 2 s; the first is written right at 3 s, so 2 s late, the second one wrong."""
    talk = interpreted(("", "uno dos"), ("", "tres"), ("uno dos seis", ""))
    assert of(HingedPromptness(1.0, 4.0, equal), talk) == (pytest.approx((1 - 2 / 4) / 2), None)
    assert of(HingedPromptness(0.0, 4.0, equal), talk)[0] == pytest.approx((0.5 + 0.75) / 2)
    assert of(HingedPromptness(1.0, 1.5, equal), talk)[0] == 0
    # one of its two words came at once, the other 2 s late: 1 s on average; words ahead of their reference wait 0 s
    halves = interpreted(("uno", "uno dos"), ("", ""), (" dos tres", ""), ("", "tres"))
    assert of(HingedPromptness(1.0, 4.0, equal), halves)[0] == pytest.approx((0.75 + 1.0) / 2)
    # a word counts from when all of it is written, here 2 s late; a cut-off word stays open, here until the end, 1 s
    letter = interpreted(("a", "adelante"), ("", ""), ("delante", ""))
    assert of(HingedPromptness(1.0, 4.0, equal), letter)[0] == 0.5
    open = interpreted(("adelante", "adelante"), ("", ""), cut=(0,))
    assert of(HingedPromptness(1.0, 4.0, equal), open)[0] == 0.75
    assert of(HingedPromptness(0.0, 4.0, equal), interpreted(("", "uno")))[0] == 0
    with pytest.raises(ValueError, match="longest is 0; give seconds above 0"):
        HingedPromptness(longest=0)


def test_a_babbler_earns_more_chrf_and_less_with_guards() -> None:
    """Saying more costs chrF little; the guards, TER and word F1 see it."""
    plain = interpreted(("", "el botón verde abre la puerta"), ("el botón rojo abre", ""))
    babble = interpreted(("", "el botón verde abre la puerta"), ("el botón rojo abre la puerta" + " la puerta" * 4, ""))
    chrf = [of(SequenceQuality("chrf"), r)[0] for r in (plain, babble)]
    assert chrf[1] > chrf[0]
    for metric in ("ter", "word_f1"):
        values = [of(SequenceQuality(metric), r)[0] for r in (plain, babble)]
        assert values[1] < values[0]
    guarded = multi_turn(guards=True)([plain, babble])
    assert guarded[0].parts["repetition"] == 0 > guarded[1].parts["repetition"]
    assert guarded[1].parts["length"] < guarded[0].parts["length"] < 0
    assert "length" in single_turn(guards=True)([plain])[0].parts
    hinged = multi_turn(equal, hinge=1.0)([plain])[0].parts["latency"]
    assert hinged == 0


def test_hpo_is_normalised_within_its_group() -> None:
    """The decoupled estimator of HPO's two terms, by hand: each standardised in the group, 1 and 0.5 as weights."""
    right = interpreted(("uno", "uno"), ("", ""))
    late = interpreted(("", "uno"), ("uno", ""))
    wrong = interpreted(("dos", "uno"), ("", ""))
    scores = hpo(equal, 1.0, 2.0)([right, late, wrong])
    assert [(s.parts["stream_quality"], s.parts["promptness"]) for s in scores] == [(1, 1), (1, 0.5), (0, 0)]
    assert scores[0].weights == {"stream_quality": 1.0, "promptness": 0.5}
    terms = torch.tensor([[1.0, 1.0], [1.0, 0.5], [0.0, 0.0]])
    advantages = gdpo(terms, [1.0, 0.5], ["g"] * 3)
    assert advantages[0] > advantages[1] > 0 > advantages[2]


def test_single_turn_fused_by_hand() -> None:
    """Two rollouts of two turns; quality is defined in the second turns only.

    detection 1 0 | 0 0, mean 1/4, deviation √3/4: 3/√3 and -1/√3. initiative 0 1 | 0 1: -1 1 | -1 1. quality - 1 | - 0:
    1 and -1, nothing in the first turns. format is 1 everywhere and adds nothing.
    """
    good, bad = interpreted(("", ""), ("sí", "sí")), interpreted(("x", ""), ("no", "sí"))
    first, second = single_turn(equal)([good, bad])
    high, low = 3 / math.sqrt(3), -1 / math.sqrt(3)
    assert first.per_segment == pytest.approx((high - 1, low + 1 + 1))
    assert second.per_segment == pytest.approx((low - 1, low + 1 - 1))
    assert first.total == pytest.approx(high + low + 1) and second.total == pytest.approx(2 * low - 1)
    assert first.parts == {"detection": 0.5, "initiative": 0.5, "quality": 1, "format": 1}
    assert first.segment_parts["detection"] == (1, 0) and second.segment_parts["format"] == (1, 1)
    assert math.isnan(first.segment_parts["quality"][0]) and first.segment_parts["quality"][1] == 1
    assert first.per_token is None

    weighted = single_turn(equal, weights={"quality": 3.0, "initiative": 0.0})([good, bad])
    assert weighted[0].per_segment == pytest.approx((high, low + 3))
    lasting = interpreted(("", ""), ("x" * 15, "sí"), lasts=(None, 1.0))
    assert list(single_turn(equal, time=True)([lasting])[0].parts) == [*first.parts, "time"]


def test_multi_turn_adds_the_whole_on_the_last_turn() -> None:
    """latency 0 | -1: 1 and -1. whole 1 | 0: 1 and -1. Both go to the last turn."""
    good, late = interpreted(("sí", "sí"), ("", "")), interpreted(("", "sí"), ("no", ""))
    single, multi = single_turn(equal)([good, late]), multi_turn(equal)([good, late])
    for one, more, sign in zip(single, multi, (1, -1), strict=True):
        assert one.per_segment is not None
        assert more.per_segment == pytest.approx((one.per_segment[0], one.per_segment[1] + 2 * sign))
        assert more.total == pytest.approx(one.total + 2 * sign)
    assert multi[1].parts["latency"] == -1 and multi[0].parts["stream_quality"] == 1
    assert "latency" not in multi[0].segment_parts and "stream_quality" not in multi[0].segment_parts
    patient = multi_turn(equal, longest=1.0)([good, late])
    assert patient[1].parts["latency"] == 0


def test_rewards_land_on_the_tokens_that_earned_them() -> None:
    """Three turns of 3 observed and 2, 0, 3 sampled tokens: the second was forced to be silent.

    A turn's reward lies on its last token, that of the empty turn on the sampled token before it, and what the whole
    stream earned on the last sampled token of all.
    """

    @dataclass(frozen=True)
    class Fixed:
        values: tuple[float, ...]
        whole: bool = False

        def __call__(self, rollouts: list[Rollout]) -> list[Score]:
            if self.whole:
                return [Score(v) for v in self.values]
            return [Score(sum(self.values), per_segment=tuple(x * s for x in self.values)) for s in (1, -1)]

    talk = interpreted(("a", "r"), ("", ""), ("b", "r"))
    segments = tuple(
        Segment(torch.arange(3), torch.arange(n), torch.zeros(n), text=s.text)
        for n, s in zip((2, 0, 3), talk.segments, strict=True)
    )
    rollout = Rollout(talk.sample, segments, "g")
    # ±1, ±2, ±6 have mean 0 and variance 2·(1 + 4 + 36) / 6; 5 and 3 have mean 4 and deviation 1.
    fused = StandardisedSum.of(turn=Fixed((1.0, 2.0, 6.0)), stream=(Fixed((5.0, 3.0), whole=True), 10.0))
    score, _ = fused([rollout, rollout])
    unit = 1 / math.sqrt(82 / 6)
    assert score.per_segment == pytest.approx((unit, 2 * unit, 6 * unit + 10))
    e = Experience.from_rollout(rollout.with_score(score))
    assert e.rewards is not None
    #                observed    sampled       observed x2          sampled
    expected = [0.0] * 3 + [0.0, 3 * unit] + [0.0] * 6 + [0.0, 0.0, 6 * unit + 10]
    assert e.rewards.tolist() == pytest.approx(expected)
    assert e.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 6 + [True] * 3
    assert e.rewards.sum().item() == pytest.approx(score.total) and e.score == score.total

    # A turn in which the policy itself listened on sampled its end-of-turn token alone, and is rewarded there.
    listening = (*segments[:1], Segment(torch.arange(3), torch.arange(1), torch.zeros(1)), segments[2])
    heard = Experience.from_rollout(Rollout(talk.sample, listening, "g").with_score(score))
    assert heard.rewards is not None and heard.rewards[8].item() == pytest.approx(2 * unit)


def test_what_cannot_be_rewarded() -> None:
    whole = interpreted(("a", "r"), ("b", ""))
    short = Rollout(whole.sample, whole.segments[:1], "g", 3)
    bare = interpreted(("a", ""), ("b", " "))
    rewards: list[Reward] = [Detection(), Initiative(), TurnQuality(), TimeCompliance(), FormatMatch()]
    for reward in (*rewards, LatencyPenalty(), SequenceQuality()):
        with pytest.raises(ValueError, match=r"'talk' \(group g, answer 3\): 1 segments for 2 turns"):
            reward([whole, short])
        with pytest.raises(ValueError, match=r"'talk' \(group g, answer 0\): the stream has no reference"):
            reward([bare])
    with pytest.raises(ValueError, match="per_segment holds a value that is not finite"):
        WeightedSum.of(quality=TurnQuality(equal))([interpreted(("a", ""), ("b", "r"))])


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="no reward is called 'latency'; there are detection, initiative, quality"):
        single_turn(weights={"latency": 1.0})
    with pytest.raises(ValueError, match=r"'time'; there are .*latency, stream_quality"):
        multi_turn(weights={"time": 1.0})
    with pytest.raises(
        ValueError, match=r"no metric is called 'meteor'; choose from chrf, .*word_f1, bertscore, comet"
    ):
        TurnQuality("meteor")([TALK])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("metric", "package", "message"),
    [
        ("bertscore", "bert_score", "pip install bert-score"),
        ("comet", "comet", "pip install unbabel-comet"),
        ("chrf", "sacrebleu.metrics", r"pip install .*\[metrics\]'"),
        ("bleu", "sacrebleu.metrics", r"pip install .*\[metrics\]'"),
    ],
)
def test_missing_packages(monkeypatch: pytest.MonkeyPatch, metric: str, package: str, message: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=message):
        similarities(metric, [Translation("a", "b")])  # type: ignore[arg-type]
    assert similarities(metric, []) == []  # type: ignore[arg-type]


def test_sentence_bleu_by_hand() -> None:
    """Two words, both right: orders 1 and 2 only, no penalty. One of two right: √(1/2 · 1/2), the 2-gram smoothed."""
    pairs = [Translation("uno dos", "uno dos"), Translation("uno tres", "uno dos")]
    assert similarities("bleu", pairs) == pytest.approx([1, 0.5])
