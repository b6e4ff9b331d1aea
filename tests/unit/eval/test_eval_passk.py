"""pass@k of a base model and one that was trained from it, sampled and scored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import soundfile

from audiorl.data.corpus import Utterance
from audiorl.data.manifest import read_samples
from audiorl.eval._questions import sample_answers
from audiorl.eval.passk import AnswerCounts, PassKOptions, main, named_models, passk_scores, sentences
from audiorl.models.examples import Example
from audiorl.models.families import qwen_omni
from tests.conftest import TEXTS, make_omni
from tests.support.learning import learn

CHOICES = ("yes", "no", "why")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, speech: list[Utterance]) -> Path:
    """rows.jsonl with four questions; the models `base` and `trained`, and `other`, whose tokenizer is another."""
    folder = tmp_path_factory.mktemp("passk")
    rows = []
    for i in range(4):
        soundfile.write(folder / f"{i}.wav", speech[25 * i].clip.load(16_000), 16_000)
        row = {"id": f"q{i}", "audio": f"{i}.wav", "question": f"Which {i}?", "choices": CHOICES}
        rows.append({**row, "answer": CHOICES[i % 3]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    samples = read_samples(folder / "rows.jsonl", think=False).samples
    policy = make_omni()
    policy.save(folder / "base")
    learn(policy, [Example(s, s.references[0]) for s in samples[:3]], steps=40)
    policy.save(folder / "run" / "checkpoints" / "grpo" / "step_000040")
    other = qwen_omni.tiny([*TEXTS, "wholly other words"], hidden=64, layers=2, vocab_size=300, whisper=False)
    other.save(folder / "other")
    return folder


def options(folder: Path, out: Path, **given: object) -> PassKOptions:
    settings = {"data": folder / "rows.jsonl", "model": str(folder / "base"), "out": out, "device": "cpu"}
    return PassKOptions(**{**settings, "max_new_tokens": 4, "samples": 6, **given})  # type: ignore[arg-type]


def test_base_and_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = main(options(folder, tmp_path, trained=(str(folder / "run"),)))
    trained, base = scores["models"]["grpo step_000040"]["pass"], scores["models"]["base"]["pass"]
    assert list(base) == ["1", "2", "4", "6"] and base["6"]["n"] == 4
    assert trained["1"]["mean"] > 0.5 and base["1"]["mean"] < 0.2
    against = scores["against_base"]["grpo step_000040"]
    assert against["difference"]["1"]["mean"] == pytest.approx(trained["1"]["mean"] - base["1"]["mean"])
    assert sum(against["coverage"].values()) == 4 and against["coverage"]["only_trained"] >= 3
    assert "the curves do not cross up to k = 6" in capsys.readouterr().out
    assert (tmp_path / "passk.png").stat().st_size > 10_000
    page = (tmp_path / "passk.html").read_text()
    assert "<svg" in page and "only the base" in page
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["q0", "q1", "q2", "q3"]
    answers = tmp_path / "base" / "answers.jsonl"
    before = answers.read_bytes()
    fewer = main(options(folder, tmp_path, samples=3, ks=(3, 1)))
    assert answers.read_bytes() == before and list(fewer["models"]["base"]["pass"]) == ["1", "3"]
    with pytest.raises(ValueError, match="belongs to a run with other settings"):
        main(options(folder, tmp_path, temperature=0.5))


def test_scores_by_hand() -> None:
    base = AnswerCounts("base", "b", (1, 1, 1, 0), ())
    trained = AnswerCounts("rl", "t", (4, 2, 0, 0), ())
    scores = passk_scores([base, trained], 4, (1, 4))
    assert scores["models"]["base"]["pass"]["1"]["mean"] == pytest.approx(3 / 16)
    assert scores["models"]["rl"]["pass"]["1"]["mean"] == pytest.approx(6 / 16)
    assert scores["models"]["base"]["pass"]["4"]["mean"] == 0.75
    against = scores["against_base"]["rl"]
    assert against["difference"]["4"]["mean"] == pytest.approx(-0.25)
    # pass@2: base (½ + ½ + ½ + 0) / 4 = 0.375, trained (1 + 5/6) / 4 = 0.458; pass@3: 0.5625 and 0.5
    assert against["crosses_at"] == [3]
    assert against["coverage"] == {"both": 2, "only_base": 1, "only_trained": 0, "neither": 1}
    assert sentences(scores)[0].startswith("rl against base: the curves cross at k = 3; +18.8%")


def test_interrupted_sampling_continues(folder: Path, tmp_path: Path, scripted: Callable[..., Any]) -> None:
    samples = read_samples(folder / "rows.jsonl", think=False).samples
    texts = {s.id: s.references[0] for s in samples}
    file = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        sample_answers(scripted(texts, fail_after=2), samples, 1, file, batch_size=1)
    engine = scripted(texts)
    answers = sample_answers(engine, samples, 1, file, batch_size=1)
    assert engine.asked == ["q2", "q3"] and answers == [[texts[s.id]] for s in samples]
    file.write_text('{"id": "q0", "answers": "yes"}\n')
    with pytest.raises(ValueError, match="row 'q0': field 'answers' is no list of texts"):
        sample_answers(engine, samples, 1, file)
    with pytest.raises(ValueError, match="repeated: q0"):
        sample_answers(engine, [samples[0], samples[0]], 1, file)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ks": (7,)}, "--ks 7: each question has 6 answers; give k from 1 to 6, or more --samples"),
        ({"ks": (0,)}, "--ks 0"),
        ({"samples": 0}, "--samples 0: give at least 1"),
        ({"temperature": 0.0}, "--temperature 0: all answers would be the same"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"data": None}, "give --data, --model and --out"),
        ({"trained": ("other",), "samples": 1}, r"other: has another tokenizer than .*base"),
    ],
)
def test_bad_options(folder: Path, tmp_path: Path, given: dict[str, Any], message: str) -> None:
    given |= {"trained": tuple(str(folder / name) for name in given.get("trained", ()))}
    with pytest.raises(ValueError, match=message):
        main(options(folder, tmp_path, **given))


def test_names(folder: Path, tmp_path: Path) -> None:
    step = str(folder / "run" / "checkpoints" / "grpo" / "step_000040")
    given = ("org/base", f"rl={folder / 'run'}", f"last={step}")
    assert named_models(given) == {"base": "org/base", "rl grpo step_000040": step, "last": step}
    with pytest.raises(ValueError, match="are both called 'base'; write NAME=PATH"):
        named_models(("a/base", "b/base"))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="a run without checkpoints of any phase"):
        named_models(("a/base", str(tmp_path)))
