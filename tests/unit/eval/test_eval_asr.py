import base64
import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from audiorl.audio import AudioClip
from audiorl.cli import main
from audiorl.data.no_speech import no_speech_samples
from audiorl.data.prompts import asr_prompt
from audiorl.eval import asr
from audiorl.types import Message, Sample
from tests.conftest import make_omni

TONE = (0.3 * np.sin(np.arange(8000) / 10)).astype(np.float32)


def spoken(id: str, reference: str, **metadata) -> Sample:
    clip = AudioClip(array=TONE, sample_rate=16_000)
    return Sample(id=id, messages=(Message("user", (clip,)),), references=(reference,), metadata=metadata)


def test_scores_files_and_page(manifest, scripted, tmp_path, capsys) -> None:
    manifest(
        [spoken("a", "The cat sat down."), spoken("b", "hello"), spoken("<i>c</i>", "<b>one</b> two & three")],
        skipped=["d: unreadable"],
    )
    texts = {
        "a": "the cat sat",  # 1 deletion of 4
        "b": "<answer>Hello!</answer>",
        "<i>c</i>": "two & <script>alert(1)</script>four",
    }
    options = asr.ASROptions(data=tmp_path / "test.jsonl", model="m", out=tmp_path / "out", normalizer="none")
    asr.main(options, engine=scripted(texts))
    options = asr.ASROptions(data=tmp_path / "test.jsonl", model="m", out=tmp_path / "out", batch_size=1)
    scores = asr.main(options, engine=scripted({}))  # other scoring options reuse the transcripts

    # basic normalisation drops <…> and (…): "one two three" against "two alertfour", 2 edits over 3 words
    assert (scores["files"], scores["reference_length"], scores["skipped"], scores["exact"]) == (3, 8, 1, 1)
    assert scores["wer"] == pytest.approx((1 + 0 + 2) / 8)
    assert scores["mean_wer"] == pytest.approx((1 / 4 + 0 + 2 / 3) / 3)
    assert scores["substitutions"] + scores["insertions"] + scores["deletions"] == 3
    assert json.loads((tmp_path / "out" / "scores.json").read_text()) == scores
    assert "37.5 (0.0–66.7)" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [r["rate"] for r in rows] == pytest.approx([0.25, 0.0, 2 / 3])
    first = ("the cat sat down", 1, 3)
    assert tuple(rows[0][key] for key in ("normalized_reference", "deletions", "hits")) == first
    page = (tmp_path / "out" / "worst.html").read_text()
    assert page.index("&lt;i&gt;c&lt;/i&gt;") < page.index("the cat sat")  # worst first
    assert "<script>" not in page and "<b>one" not in page
    assert page.count("<audio") == 2  # the correct file is not shown
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(page.split("base64,")[1].split('"')[0])))
    assert (len(samples), rate) == (8000, 16_000) and np.abs(samples - TONE).max() < 1e-4


def test_rescoring_by_characters_and_with_numbers_of_a_language(tmp_path) -> None:
    file = tmp_path / "results.jsonl"
    rows = [
        {"id": "1", "reference": "今天天气好。", "hypothesis": "今天 天汽好"},
        {"id": "2", "reference": "...", "hypothesis": "啊"},
    ]
    file.write_text("\n".join(json.dumps(r) for r in rows))  # no newline at the end
    scores = asr.main(asr.ASROptions(score=file, metric="cer"))
    assert scores["cer"] == pytest.approx(2 / 5)  # one substituted, one inserted where nothing was said
    assert scores["mean_cer"] == pytest.approx((1 / 5 + 1) / 2)
    assert (scores["substitutions"], scores["insertions"], scores["empty_references"]) == (1, 1, 1)
    file.write_text('{"id": "1", "reference": "vingt et un", "hypothesis": "21", "language": "fr"}\n')
    assert asr.main(asr.ASROptions(score=file))["wer"] == 0.0


def write_rows(path: Path, texts: dict[str, str], **columns: str) -> Path:
    rows = [{"id": id, "reference": "one two three four", "hypothesis": text} | columns for id, text in texts.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_slices_by_language_speaker_and_group(tmp_path, capsys) -> None:
    said = "one two three four"
    rows = [
        {"id": "1", "language": "en", "speaker": "Ann", "hypothesis": said},
        {"id": "2", "language": "en", "speaker": "Bob", "hypothesis": "one two"},
        {"id": "3", "language": "es", "speaker": "Eva", "hypothesis": said + " five six"},
        {"id": "4", "language": "es", "speaker": "Pia", "hypothesis": "one one one one one one"},
        {"id": "5", "language": "es", "speaker": "Sol", "hypothesis": "two three four five"},
    ]
    file, trained = tmp_path / "results.jsonl", tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"reference": said, **row}) + "\n" for row in rows))
    trained.write_text(json.dumps({"audio": "a.wav", "text": "a", "speaker": "Ann"}) + "\n")
    scores = asr.main(asr.ASROptions(score=file, known_speakers=(str(trained), "Eva"), normalizer="none"))
    parts = scores["systems"]["model"]
    assert list(parts) == [
        *("all", "en", "es", "known speakers", "unseen speakers"),
        *("known speakers, en", "known speakers, es", "unseen speakers, en", "unseen speakers, es"),
        *("en, Ann", "en, Bob", "es, Eva", "es, Pia", "es, Sol"),
    ]
    # deletions 2; insertions 2; 3 substitutions and 2 insertions; 1 deletion and 1 insertion, or 4 substitutions
    assert parts["known speakers"]["wer"]["value"] == pytest.approx(2 / 8)
    assert parts["en, Bob"]["wer"]["value"] == 0.5
    assert (parts["en"]["deletions"], parts["es, Eva"]["insertions"]) == (2, 2)
    assert parts["es, Eva"]["length_ratio"] == pytest.approx(6 / 4)
    assert parts["es, Pia"]["repetition"] == pytest.approx(3 / 4)
    assert parts["all"]["wer"]["low"] < parts["all"]["wer"]["value"] < parts["all"]["wer"]["high"]
    unseen = parts["unseen speakers"]["wer"]
    assert unseen["speakers"] == 3 and unseen["low_speakers"] <= unseen["value"] <= unseen["high_speakers"]
    assert "speakers" not in parts["known speakers"]["wer"]  # two say nothing about others
    assert parts["all"]["cer"]["value"] > 0
    assert "unseen speakers, es" in capsys.readouterr().out


def test_errors_in_hotwords_and_in_other_words(tmp_path, capsys) -> None:
    rows = [  # of six words said in hotwords four are right; of five listed words that nobody says one is written
        {
            "id": "1",
            "language": "en",
            "reference": "start kerberos and nagios",
            "hypothesis": "start kerberos and nagios",
        },
        {"id": "2", "language": "en", "reference": "start kerberos now", "hypothesis": "start zabbix now please"},
        {"id": "3", "language": "fr", "reference": "va au havre", "hypothesis": "va au havre"},
    ]
    listed = [["kerberos", "nagios", "zabbix"], ["kerberos", "zabbix", "nagios"], ["zabbix", "ann", "bob"]]
    for row, words in zip(rows, listed, strict=True):
        row["hotwords"] = words
    file, start = tmp_path / "results.jsonl", tmp_path / "start.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    start.write_text("".join(json.dumps({**row, "hypothesis": "start"}) + "\n" for row in rows))
    scores = asr.main(asr.ASROptions(score=file, baseline=str(start), out=tmp_path / "out"))
    part = scores["systems"]["model"]
    value = {name: cell["value"] for name, cell in part["all"].items() if isinstance(cell, dict)}
    # 3 hotwords said, one of them replaced by another one; 7 other words and one inserted
    assert value["b_wer"] == pytest.approx(1 / 3) and value["u_wer"] == pytest.approx(1 / 7)
    assert value["recall"] == pytest.approx(2 / 3) and value["precision"] == pytest.approx(2 / 3)
    assert value["false_alarms"] == pytest.approx(1 / 6)  # zabbix; of zabbix, zabbix, nagios, zabbix, ann, bob
    assert part["all"]["b_wer"]["low"] == 0 and part["all"]["b_wer"]["high"] == 1
    assert "b_wer" not in part["fr"] and part["fr"]["false_alarms"]["value"] == 0
    assert scores["difference"]["all"]["b_wer"]["value"] == pytest.approx(1 / 3 - 1)
    printed = capsys.readouterr().out
    assert "33.3 (0.0–100.0)" in printed and "model − baseline" in printed
    kept = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert (kept[1]["missed_hotwords"], kept[1]["false_hotwords"]) == (["kerberos"], ["zabbix"])
    page = (tmp_path / "out" / "worst.html").read_text()
    assert "hotwords missed" in page and "hotwords nobody said" in page and "B-WER % 33.3" in page
    assert "| B-WER %" in asr.model_card_section(tmp_path / "out")
    words = tmp_path / "words.txt"
    words.write_text("start\n")
    file.write_text(json.dumps({"id": "1", "reference": "start it", "hypothesis": "stop it"}) + "\n")
    assert asr.main(asr.ASROptions(score=file, hotwords=str(words)))["systems"]["model"]["all"]["b_wer"]["value"] == 1


def test_hotwords_of_a_file_are_in_the_prompt(manifest, scripted, tmp_path) -> None:
    clip = spoken("a", "x").audio[0]
    samples = [Sample(id, asr_prompt(clip, "en"), (text,)) for id, text in (("a", "call ann"), ("b", "call bob"))]
    manifest(samples)
    words = tmp_path / "words.txt"
    words.write_text("Ann\nBob\nZabbix\nNagios\n")
    asked: list[str] = []

    class Heard(scripted):
        def generate(self, requests):
            asked.extend(str(r.sample.messages[0].content[1]).partition("\n")[2] for r in requests)
            return super().generate(requests)

    given = {"data": tmp_path / "test.jsonl", "model": "m", "out": tmp_path / "out", "hotwords": str(words)}
    scores = asr.main(asr.ASROptions(**given, distractors=1), engine=Heard({"a": "call ann", "b": "call ann"}))
    assert len(asked) == 2 and all(len(text.split(",")) == 2 for text in asked)
    assert "Ann" in asked[0] and "Bob" in asked[1]
    assert scores["systems"]["model"]["all"]["recall"]["value"] == 0.5
    with pytest.raises(ValueError, match="prompt_hotwords: True -> False"):  # not mixed with other prompts' answers
        asr.main(asr.ASROptions(**given, distractors=1, prompt_hotwords=False), engine=Heard({}))
    with pytest.raises(ValueError, match="--distractors: give 0 or more"):
        asr.main(asr.ASROptions(**given, distractors=-1))
    with pytest.raises(ValueError, match="--hotwords: a translation has none"):
        asr.main(asr.ASROptions(**given, task="translate"))


def test_two_results_files_in_pairs(tmp_path, capsys) -> None:
    said = "one two three four"
    better = {str(i): said if i % 2 else "one two three" for i in range(20)}
    worse = {str(i): "one two three" if i % 2 else "one two" for i in reversed(range(20))}  # one error more in each
    files = [write_rows(tmp_path / f"{name}.jsonl", texts) for name, texts in (("a", better), ("b", worse))]
    scores = asr.main(asr.ASROptions(score=files[0], baseline=str(files[1])))
    difference = scores["difference"]["all"]["wer"]
    assert difference["value"] == pytest.approx(-0.25)
    assert (difference["low"], difference["high"]) == pytest.approx((-0.25, -0.25))  # no row differs from that
    assert "-25.0 (-25.0 to -25.0)" in capsys.readouterr().out


JUDGE = """
class Judge:
    name = "echo"

    def transcribe(self, waves, sample_rate):
        return ["the cat sat down" if len(wav) == 8000 else "" for wav in waves]

def load(device):
    return Judge()
"""


def test_recognisers_silence_and_a_baseline_on_the_same_rows(manifest, scripted, tmp_path, monkeypatch, capsys):
    samples = [spoken("a", "The cat sat down.", language="en"), spoken("b", "the cat sat", language="es")]
    manifest(samples)
    (tmp_path / "judge.py").write_text(JUDGE)
    talking = {s.id: "thanks for watching" for s in no_speech_samples(13)}
    texts = {"a": "language English<asr_text>the cat sat down", "b": "the cat"}
    start = scripted({"a": "the", "b": "the"} | dict.fromkeys(talking, "language None<asr_text>"))
    monkeypatch.setattr(asr, "greedy_engine", lambda model, tokens, device: start)
    options = asr.ASROptions(
        data=tmp_path / "test.jsonl",
        model="trained",
        baseline="start",
        recognisers=(str(tmp_path / "judge.py"),),
        silence=13,
        out=tmp_path / "out",
    )
    scores = asr.main(options, engine=scripted(texts | talking))
    rates = {name: slices["all"]["wer"]["value"] for name, slices in scores["systems"].items()}
    assert rates == {"model": 1 / 7, "baseline": 5 / 7, "judge.py": 1 / 7}
    assert scores["difference"]["all"]["wer"]["value"] == pytest.approx(-4 / 7)
    silent = {name: kinds["all"] for name, kinds in scores["no_speech"].items()}
    assert (silent["model"]["words"], silent["baseline"]["words"], silent["judge.py"]["words"]) == (39, 0, 0)
    assert silent["model"]["words_per_minute"]["value"] == pytest.approx(39 / silent["model"]["minutes"])
    assert set(scores["no_speech"]["model"]) == {"all", "silence", "white", "pink", "hum", "clicks"}
    assert silent["model"]["clips_with_words"] == 1.0
    shown = capsys.readouterr().out
    assert "judge.py" in shown and "words written per minute without speech" in shown
    assert json.loads((tmp_path / "out" / "scores.json").read_text()) == scores

    again = asr.main(options, engine=scripted({}))  # everything is there already
    assert again == scores
    with pytest.raises(ValueError, match="belongs to a run with other settings"):
        asr.main(dataclasses.replace(options, baseline="another"), engine=scripted({}))


def test_translation_into_english(manifest, scripted, tmp_path, capsys) -> None:
    pytest.importorskip("sacrebleu")
    manifest(
        [
            spoken("a", "el gato", translation="the cat sat on the mat", language="es", speaker="Eva"),
            spoken("b", "le chat", translation="a dog ran over the hill", language="fr", speaker="June"),
            spoken("c", "the mouse", language="en", speaker="Ann"),
        ]
    )
    options = asr.ASROptions(data=tmp_path / "test.jsonl", model="m", task="translate", out=tmp_path / "out")
    scores = asr.main(options, engine=scripted({"a": "the cat sat on the mat", "b": "a cat"}))
    parts = scores["systems"]["model"]
    assert list(parts) == ["all", "es", "fr", "es, Eva", "fr, June"]
    assert parts["es, Eva"]["bleu"]["value"] == pytest.approx(100)
    assert parts["es"]["chrf"]["value"] == pytest.approx(100)
    assert parts["fr"]["chrf"]["value"] < 30
    file = write_rows(tmp_path / "numbers.jsonl", {"a": "21 people"}, reference="twenty one people", language="es")
    scored = asr.main(asr.ASROptions(score=file, task="translate"))["systems"]["model"]["all"]
    assert scored["length_ratio"] == 1  # numbers are read as the target's
    shown = capsys.readouterr()
    assert "1 of 3 rows have no translation" in shown.err and "chrF" in shown.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recognisers": ("judges/whisper-base",)}, "--recognisers: needs recordings"),
        ({"silence": 3}, "--silence: needs recordings"),
        ({"baseline": "runs/start"}, r"--baseline: with --score give the baseline's results\.jsonl"),
        ({"music": Path("hold")}, "--silence: give the number of clips"),
        ({"silence": -1, "score": None}, "--silence: give the number of clips"),
        ({"score": None, "recognisers": ("a/base", "b/base")}, "two of base, base have one name"),
        ({"score": None}, "give --data, --model and --out"),
        ({"score": "half.jsonl"}, r"half\.jsonl: row 1, field 'hypothesis': missing; give the text"),
        ({"score": "half.jsonl", "task": "translate"}, r"half\.jsonl: row 1, field 'hypothesis': missing"),
        ({"score": "results.jsonl", "baseline": "half.jsonl"}, r"half\.jsonl: row 1, field 'hypothesis': missing"),
        ({"score": "empty.jsonl"}, "no rows"),
        ({"known_speakers": ("Ann",)}, "row '1' names no speaker"),
        ({"known_speakers": ("gone.jsonl",)}, r"--known-speakers .*gone\.jsonl: missing"),
        ({"known_speakers": ("nobody.jsonl",)}, r"nobody\.jsonl: no row of this manifest names a speaker"),
        ({"baseline": "other.jsonl"}, r"other\.jsonl: no row '2'"),
        ({"score": "other.jsonl", "baseline": "results.jsonl"}, r"results\.jsonl: row '2' is not among the others"),
        ({"score": "other.jsonl", "baseline": "another.jsonl"}, "row '1' has another reference"),
    ],
)
def test_what_cannot_be_scored(tmp_path, monkeypatch, options, message) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(Path("results.jsonl"), {"1": "one", "2": "two"})
    write_rows(Path("other.jsonl"), {"1": "one"})
    write_rows(Path("another.jsonl"), {"1": "one"}, reference="five")
    Path("half.jsonl").write_text('{"id": "1", "reference": "a"}\n')
    Path("empty.jsonl").write_text("")
    Path("nobody.jsonl").write_text('{"audio": "a.wav", "text": "a"}\n')
    given = {"score": "results.jsonl"} | options
    if given["score"]:
        given["score"] = Path(given["score"])
    with pytest.raises(ValueError, match=message):
        asr.main(asr.ASROptions(**given))


def test_samples_that_cannot_be_compared(manifest, scripted, tmp_path) -> None:
    for number, (samples, task, message) in enumerate(
        (
            ([Sample(id="x", messages=())], "transcribe", "'x' has no reference transcript"),
            ([], "transcribe", "nothing to transcribe"),
            ([spoken("c", "the mouse")], "translate", "nothing to translate"),
        )
    ):
        manifest(samples)
        options = asr.ASROptions(data=tmp_path / "d.jsonl", model="m", out=tmp_path / str(number), task=task)
        with pytest.raises(ValueError, match=message):
            asr.main(options, engine=scripted({}))


def test_scores_in_a_model_card(tmp_path, capsys) -> None:
    def results(name: str, written: str) -> Path:
        rows = [
            {"id": "1", "reference": "one two", "hypothesis": written, "language": "en", "speaker": "A"},
            {"id": "2", "reference": "uno dos", "hypothesis": "uno dos", "language": "es", "speaker": "B"},
        ]
        (tmp_path / name).write_text("\n".join(json.dumps(r) for r in rows))
        return tmp_path / name

    base = results("base.jsonl", "none")
    asr.main(asr.ASROptions(score=results("model.jsonl", "one to"), baseline=str(base), out=tmp_path / "evals"))
    make_omni().save(tmp_path / "model")
    command = ["export", str(tmp_path / "model"), "--out", str(tmp_path / "export"), "--scores"]
    assert main([*command, str(tmp_path)]) == 2
    assert f"{tmp_path}: no scores of `audiorl eval asr` there" in capsys.readouterr().err
    assert not (tmp_path / "export").exists()
    assert main([*command, str(tmp_path / "evals")]) == 0
    card = (tmp_path / "export" / "README.md").read_text()
    assert "## Recognition\n" in card
    assert "|  | files | model: WER % | model: CER % | baseline: WER % | baseline: CER % |" in card
    assert "| es | 1 | 0.0 (0.0–0.0) | 0.0 (0.0–0.0) | 0.0 (0.0–0.0) | 0.0 (0.0–0.0) |" in card
    assert "| en, A | 1 | 50.0 (50.0–50.0) |" in card and "| 100.0 (100.0–100.0) |" in card
