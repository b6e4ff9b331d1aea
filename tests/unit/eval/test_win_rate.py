"""Two systems compared by a chat model that listens: the louder recording wins, over real HTTP."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from audiorl.config import SamplingConfig
from audiorl.data.emergent import CATEGORIES, Case, read_cases
from audiorl.eval import _win_rate, tts
from audiorl.eval._win_rate import RUBRICS, ComparedPair, ListeningJudge
from audiorl.eval.metrics.corpus import bootstrap_interval
from audiorl.recipes._speech import write_tiny_part
from audiorl.rewards import JudgeError
from tests.support.chat_servers import ChatServer, recordings_of, text_of
from tests.support.reward_servers import serving

RATE = 16_000
LEVELS = {"a": (0.3, 0.1), "b": (0.1, 0.3), "c": (0.2, 0.2), "d": (0.4, 0.1), "e": (0.1, 0.2), "f": (0.3, 0.2)}
"""Of our recording and of theirs, by text: won, lost, tie, won, lost, won."""
WINS = {"a": 1.0, "b": 0.0, "c": 0.5, "d": 1.0, "e": 0.0, "f": 1.0}
PLACES = {
    "a": ("Questions", 0), "b": ("Questions", 1), "c": ("Emotions", 0),
    "d": ("Emotions", 1), "e": ("Emotions", 3), "f": ("Pronunciation", None),
}  # fmt: skip


def loudness(wav: np.ndarray) -> float:
    return round(float(np.abs(wav).max()), 2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """FOLDER/cases.jsonl, and the recordings of two systems in FOLDER/ours and FOLDER/theirs."""
    monkeypatch.setattr(_win_rate, "TRIES", 1)
    for name, levels in LEVELS.items():
        for system, level in zip(("ours", "theirs"), levels, strict=True):
            (tmp_path / system).mkdir(exist_ok=True)
            soundfile.write(tmp_path / system / f"{name}.wav", level * np.sin(np.arange(800) / 9), RATE)
    write_cases(tmp_path / "cases.jsonl")
    return tmp_path


def write_cases(path: Path, **changes: dict[str, Any]) -> None:
    rows = [
        {"unique_id_eval": name, "category": category, "text_to_synthesize": f'Say "{name}".', "evolution_depth": depth}
        for name, (category, depth) in PLACES.items()
    ]
    path.write_text("".join(json.dumps(row | changes.get(row["unique_id_eval"], {})) + "\n" for row in rows))


def options(folder: Path, url: str, **changes: Any) -> Any:
    judge = {"model": "listener", "url": f"{url}/v1"} | changes.pop("judge", {})
    given = {"cases": folder / "cases.jsonl", "audio": folder / "ours", "against": folder / "theirs"}
    return tts.TTSOptions(**given | {"out": folder / "out", "judge": ListeningJudge(**judge)} | changes)


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_win_rates_by_hand(folder: Path, capsys) -> None:
    server = ChatServer(listen=loudness)
    with serving(server.app) as url:
        scores = tts.main(options(folder, url))
        again = tts.main(options(folder, url))
        other = tts.main(options(folder, url, seed=5, out=folder / "other"))
    assert len(server.bodies) == 12 and again == scores  # the second call asked nothing
    rates = scores["win_rates"]
    low, high = bootstrap_interval(list(WINS.values()))
    assert rates["win_rate"] == {"mean": 3.5 / 6, "n": 6, "low": low, "high": high} and low < 3.5 / 6 < high
    assert rates["tie_rate"] == pytest.approx(1 / 6) and rates["failed"] == 0 and rates["judge"] == "listener"
    by_category = {name: (group["mean"], group["n"]) for name, group in rates["by_category"].items()}
    assert by_category == {"Emotions": (0.5, 3), "Pronunciation": (1, 1), "Questions": (0.5, 2)}
    by_depth = {depth: (group["mean"], group["n"]) for depth, group in rates["by_depth"].items()}
    assert by_depth == {"0": (0.75, 2), "1": (0.5, 2), "3": (0, 1)}
    assert rates["by_category"]["Emotions"]["tie_rate"] == pytest.approx(1 / 3)
    assert json.loads((folder / "out" / "scores.json").read_text()) == scores
    # The order is drawn by the seed, and what wins does not depend on it.
    firsts = [
        {id: row["first"] for id, row in rows_of(folder / out / "comparisons.jsonl").items()}
        for out in ("out", "other")
    ]
    assert firsts[0] != firsts[1] and all(set(first.values()) == {"ours", "theirs"} for first in firsts)
    assert other["win_rates"]["win_rate"] == rates["win_rate"]
    won = sum(firsts[0][id] == ("ours" if win else "theirs") for id, win in WINS.items() if win != 0.5)
    assert rates["first_won"] == won / 5
    for name, first in firsts[0].items():
        (body,) = (body for body in server.bodies[:6] if json.dumps(f'Say "{name}".') in text_of(body))
        heard = [loudness(wav) for wav in recordings_of(body) if wav is not None]
        assert heard == [*LEVELS[name]][:: 1 if first == "ours" else -1]
    page = (folder / "out" / "comparisons.html").read_text()
    assert page.index("b · Questions, depth 1 · lost") < page.index("a · Questions, depth 0 · won")
    assert page.count("<audio") == 12 and "by the rule" in page
    assert "58.3 (" in capsys.readouterr().out


def test_failed_comparisons_are_left_out_counted_and_asked_again(folder: Path, capsys) -> None:
    kinds = ("refusal", "other", "prose", "cut", "status 500", "no choices")
    server = ChatServer(listen=loudness, fail=0.5, kinds=kinds)
    with serving(server.app) as url:
        rates = tts.main(options(folder, url))["win_rates"]
        rows = rows_of(folder / "out" / "comparisons.jsonl")
        assert 0 < rates["failed"] == 6 - len(rows) < 6 and rates["win_rate"]["n"] == len(rows)
        assert rates["win_rate"]["mean"] == pytest.approx(np.mean([WINS[id] for id in rows]))
        assert sum(g["failed"] for g in rates["by_category"].values()) == rates["failed"]
        assert capsys.readouterr().err.count("not compared: ") == rates["failed"]
        server.fail, before = 0.0, len(server.bodies)
        second = tts.main(options(folder, url))["win_rates"]
        assert len(server.bodies) - before == rates["failed"] and second["failed"] == 0
        assert second["win_rate"]["mean"] == 3.5 / 6
        # A recording that changed is compared again, alone.
        soundfile.write(folder / "ours" / "b.wav", 0.9 * np.sin(np.arange(800) / 9), RATE)
        assert tts.main(options(folder, url))["win_rates"]["win_rate"]["mean"] == 4.5 / 6
        assert len(server.bodies) - before == rates["failed"] + 1
        with pytest.raises(ValueError, match="judge: 'listener' -> 'another'"):
            tts.main(options(folder, url, judge={"model": "another"}))
        server.fail = 1.0
        with pytest.raises(JudgeError, match="none of the 6 comparisons was answered; the first, 'a': "):
            tts.main(options(folder, url, out=folder / "none"))


def test_the_first_place(folder: Path) -> None:
    """A judge that prefers it is found out; the order itself is balanced."""
    falling = itertools.count(0, -1)
    with serving(ChatServer(listen=lambda wav: next(falling)).app) as url:
        rates = tts.main(options(folder, url))["win_rates"]
    assert rates["first_won"] == 1.0 and rates["tie_rate"] == 0
    pairs = [ComparedPair(Case(str(n), "x", "Questions"), None, None) for n in range(2000)]
    for seed in (0, 1):
        assert 0.45 < np.mean([pair.ours_first(seed) for pair in pairs]) < 0.55


def test_a_checkpoint_against_another_system(folder: Path) -> None:
    """A text that the checkpoint leaves unsaid is a comparison with nothing."""
    write_tiny_part("model", folder / "run" / "model")
    write_tiny_part("codec", folder / "run" / "codec")
    given = {"model": str(folder / "run" / "model"), "audio": None}
    sampling = SamplingConfig(max_new_tokens=4, max_frames=4)
    with serving(ChatServer(listen=loudness).app) as url:
        tts.main(options(folder, url, **given, sampling=sampling))
        said = {row["id"] for row in rows_of(folder / "out" / "audio" / "generated.jsonl").values() if row["seconds"]}
        rows = rows_of(folder / "out" / "comparisons.jsonl")
        assert set(rows) == set(LEVELS)
        (folder / "ours" / "c.wav").unlink()
        (folder / "ours" / "generated.jsonl").write_text(json.dumps({"id": "c", "seconds": 0.0}) + "\n")
        tts.main(options(folder, url, out=folder / "silent"))
    assert said and all(rows[id]["winner"] in ("ours", "theirs", "tie") for id in said)
    assert rows_of(folder / "silent" / "comparisons.jsonl")["c"]["winner"] == "theirs"


def test_rubrics_of_your_own(folder: Path) -> None:
    assert set(RUBRICS) == set(CATEGORIES)
    write_cases(folder / "cases.jsonl", **{name: {"category": "Poems"} for name in LEVELS})
    rubrics = folder / "rubrics.json"
    rubrics.write_text(json.dumps({"Poems": "the metre is heard"}))
    server = ChatServer(listen=loudness)
    with serving(server.app) as url:
        scores = tts.main(options(folder, url, judge={"rubrics": rubrics}))
    assert list(scores["win_rates"]["by_category"]) == ["Poems"]
    assert all("the metre is heard" in text_of(body) for body in server.bodies)
    for text, message in {"[]": "is not an object", "{": "give", "{}": "no rubric", '{"a": 1}': "both texts"}.items():
        rubrics.write_text(text)
        with pytest.raises(ValueError, match=f"rubrics.json: .*{message}"):
            tts.main(options(folder, url, judge={"rubrics": rubrics}))


def test_bad_input(folder: Path) -> None:
    def refused(message: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=message):
            tts.main(options(folder, "http://127.0.0.1:1", **changes))

    refused("--against: belongs to --cases", cases=None, texts=folder / "cases.jsonl")
    refused(r"--judge\.model: name the chat model", judge={"model": ""})
    refused(r"--judge\.model: compares two systems", against=None)
    refused("--audio: name the folder", audio=None)
    refused("nowhere: no folder", against=folder / "nowhere")
    write_cases(folder / "cases.jsonl", c={"category": "Jokes"})
    refused(r"row 3, field 'category': 'Jokes' is none of Emotions, .*Syntactic Complexity")
    write_cases(folder / "cases.jsonl")
    (folder / "theirs" / "d.wav").write_bytes(b"RIFF")
    refused(r"d\.wav")
    for name in "de":
        (folder / "theirs" / f"{name}.wav").unlink()
    refused(r"theirs: lacks 2 of the 6 texts \(d, e\); generate d\.wav too")


def test_rows_of_cases(tmp_path: Path) -> None:
    def read(*rows: dict[str, Any], **given: Any) -> tuple[Case, ...]:
        (tmp_path / "cases.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_cases(tmp_path / "cases.jsonl", **given)

    one = {"category": "Questions", "text": "Why?"}
    assert read(one, one | {"evolution_depth": 2}, one | {"id": 7}) == (
        Case("0", "Why?", "Questions"),
        Case("1", "Why?", "Questions", 2),
        Case("7", "Why?", "Questions"),
    )
    assert len(read(one, one, limit=1)) == 1
    for row, message in (
        ({"category": "Questions"}, "row 2, field 'text_to_synthesize': missing"),
        ({"text": "Why?"}, "row 2: field 'category': missing|row 2, field 'category': missing"),
        (one | {"evolution_depth": -1}, "row 2, field 'evolution_depth': -1 is not a depth"),
        (one | {"id": "0"}, "row 2, field 'id': '0' is also the id of row 1"),
    ):
        with pytest.raises(ValueError, match=message):
            read(one, row)
