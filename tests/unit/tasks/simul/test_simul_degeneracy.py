"""Signs of a policy that is no interpreter: OmniSTEval's test, and planted babblers and silent ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from audiorl.eval._streams import instance_of
from audiorl.tasks.simul.bundled import bundled_streams
from audiorl.tasks.simul.logs import Instance, read_log
from audiorl.tasks.simul.scoring import Degeneracy, degeneracy, score, simultaneous_words
from audiorl.tasks.simul.streams import ChunkConfig, Stream, interpretation_sample
from audiorl.types import Rollout, Segment

VECTORS = json.loads((Path(__file__).parents[3] / "data" / "simuleval_1.1.4.json").read_text(encoding="utf-8"))
OMNISTEVAL = (
    (48.10126582278481, 70.03468283429933),
    (64.28571428571429, 69.19991739046267),
    (53.46534653465346, 77.28677589957304),
    (44.0, 84.10531734061146),
    (50.495049504950494, 74.52698230562007),
)
"""SWF and EFSW by ShortformDegeneracyScorer of OmniSTEval 0.1.10 for the logs of text output."""
REFERENCE = "la puerta está abierta y la luz de la entrada está apagada desde hace una hora"


def interpreted(prediction: str, lag: float = 2000.0, index: int = 0, seconds: float = 10.0) -> Instance:
    """The words spread over the source, each `lag` ms late, the last ones at its end."""
    words = prediction.split()
    step = 1000 * seconds / max(len(words), 1)
    delays = tuple(min(1000 * seconds, i * step + lag) for i in range(len(words)))
    return Instance(index, prediction, delays, (), len(words), REFERENCE, f"{index}.wav", 1000 * seconds)


def test_simultaneous_words_equal_omnisteval(tmp_path: Path) -> None:
    logs = [log for log in VECTORS["logs"] if log["target_type"] == "text"]
    assert len(logs) == len(OMNISTEVAL)
    for log, expected in zip(logs, OMNISTEVAL, strict=True):
        (tmp_path / "instances.log").write_text("".join(json.dumps(line) + "\n" for line in log["instances"]))
        (tmp_path / "config.yaml").write_text(f"source_type: {log['source_type']}\ntarget_type: text\n")
        language = "zh" if log["unit"] == "char" else "en"
        assert simultaneous_words(read_log(tmp_path), language) == pytest.approx(expected, abs=1e-9)


def test_sound_interpreters_have_no_sign() -> None:
    words = REFERENCE.split()
    outputs = [REFERENCE, " ".join(words[1:]), " ".join([*words, "ya", "pues"]), " ".join(words[::-1])]
    for lag in (500.0, 1500.0, 3000.0):
        for output in outputs:
            assert degeneracy([interpreted(output, lag, i) for i in range(4)], "es").signs == ()


def test_planted_policies_are_named() -> None:
    sound = [interpreted(REFERENCE, index=i) for i in range(4)]
    babbler = [interpreted(f"{REFERENCE} {'marque ' * 12}", index=i) for i in range(4)]
    result = degeneracy(babbler, "es")
    assert result.length_ratio == pytest.approx(28 / 16)
    assert any("1.75 times as long" in sign for sign in result.signs)
    assert any("were written before" in sign for sign in result.signs)

    silent = degeneracy([*sound[:2], *(interpreted("", index=i) for i in range(2))], "es")
    assert silent.silent == 0.5 and "nothing is written in 50% of the streams" in silent.signs
    mute = degeneracy([interpreted("", index=0)], "es")
    assert mute.swf is None and mute.dsptv is None and "only 0.00 times as long" in mute.signs[1]

    # two early words per stream, and all others when the source has ended
    early = [replace(i, delays=(100.0, 200.0, *[10_000.0] * 14)) for i in sound]
    result = degeneracy(early, "es")
    assert result.swf == pytest.approx(12.5) and result.efsw is not None and result.efsw > 90
    assert any("12 % of the words come before the end" in sign for sign in result.signs)


# -- the gate, on recorded streams -------------------------------------------------------------------------------------

Interpreter = Callable[[Stream], Rollout]


def said(stream: Stream, lag: int, change: Callable[[str, int], str] = lambda text, turn: text) -> Rollout:
    """What an interpreter writes that says each unit `lag` chunks after it could; `change(text, turn)` of each turn."""
    sample = interpretation_sample(stream, ChunkConfig(), [lag] * len(stream.units))
    segments = tuple(
        Segment(
            prompt_ids=torch.zeros(1, dtype=torch.long),
            ids=torch.zeros(1, dtype=torch.long),
            logprobs=torch.zeros(1),
            text=change(turn.reference, t),
            source_time=turn.end,
            emit_time=turn.end + 0.1 * (t + 1),
        )
        for t, turn in enumerate(sample.turns)
    )
    return Rollout(sample, segments, stream.id)


def without_every_sixth_word(text: str, turn: int) -> str:
    words = text.split(" ")
    return " ".join(w for i, w in enumerate(words) if (i + turn) % 6 != 5)


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[Stream]]:
    """Ten streams of human recordings in each language, with their translations."""
    return {language: bundled_streams("test", language, count=10) for language in ("es", "fr")}  # type: ignore[arg-type]


def judged(streams: list[Stream], interpreter: Interpreter) -> Degeneracy:
    return degeneracy([instance_of(interpreter(s), i) for i, s in enumerate(streams)], streams[0].target_language)


@pytest.mark.parametrize("language", ["es", "fr"])
def test_the_gate_on_recorded_streams(recorded: dict[str, list[Stream]], language: str) -> None:
    """Honest runs, punctual to five chunks late, of which some leave out words, pass; babblers and silent ones fail."""
    streams = recorded[language]
    for lag in (0, 1, 2, 3, 5):
        change = without_every_sixth_word if lag % 2 else lambda text, turn: text
        assert judged(streams, lambda s, lag=lag, change=change: said(s, lag, change)).signs == (), lag
    babbler = judged(streams, lambda s: said(s, 1, lambda text, turn: f"{text} marque marque marque"))
    assert any("times as long as the references" in sign for sign in babbler.signs)
    assert any("were written before" in sign for sign in babbler.signs)
    silent = judged(streams, lambda s: said(s, 0, lambda text, turn: ""))
    assert silent.silent == 1.0 and silent.signs[0] == "nothing is written in 100% of the streams"
    mumbler = judged(streams, lambda s: said(s, 0, lambda text, turn: "" if turn else "sí"))  # one word a stream
    assert any("only" in sign for sign in mumbler.signs)


def test_counts_of_the_scores_are_used(recorded: dict[str, list[Stream]]) -> None:
    instances = [instance_of(said(s, 1, without_every_sixth_word), i) for i, s in enumerate(recorded["es"])]
    scores = score(instances, "text", "es")
    assert degeneracy(instances, "es", scores) == degeneracy(instances, "es")
    assert "the output is 3.00 times" in degeneracy(instances, "es", scores | {"LengthRatio": 3.0}).signs[0]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="no instances"):
        degeneracy([], "es")
    with pytest.raises(ValueError, match="instance 3: reference: none"):
        degeneracy([replace(interpreted("a", index=3), reference=None)], "es")
