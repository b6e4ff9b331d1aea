import base64
import io
import json

import numpy as np
import pytest
import soundfile

from audiorl.audio import AudioClip
from audiorl.types import Message, Sample

TONE = (0.3 * np.sin(np.arange(8000) / 10)).astype(np.float32)


def spoken(id: str, reference: str, **metadata) -> Sample:
    clip = AudioClip(array=TONE, sample_rate=16_000)
    return Sample(id=id, messages=(Message("user", (clip,)),), references=(reference,), metadata=metadata)


@pytest.fixture
def asr(load_eval):
    return load_eval("asr")


def test_scores_files_and_page(asr, manifest, scripted, tmp_path, capsys) -> None:
    manifest(
        [spoken("a", "The cat sat down."), spoken("b", "hello"), spoken("<i>c</i>", "<b>one</b> two & three")],
        skipped=["d: unreadable"],
    )
    texts = {
        "a": "the cat sat",  # 1 deletion of 4
        "b": "<answer>Hello!</answer>",
        "<i>c</i>": "two & <script>alert(1)</script>four",
    }
    options = asr.Options(data=tmp_path / "test.jsonl", model="m", out=tmp_path / "out", normalizer="none")
    asr.run(options, engine=scripted(texts))
    options = asr.Options(data=tmp_path / "test.jsonl", model="m", out=tmp_path / "out", batch_size=1)
    scores = asr.run(options, engine=scripted({}))  # other scoring options reuse the transcripts

    # basic normalisation drops <…> and (…): "one two three" against "two alertfour", 2 edits over 3 words
    assert (scores["files"], scores["reference_length"], scores["skipped"], scores["exact"]) == (3, 8, 1, 1)
    assert scores["wer"] == pytest.approx((1 + 0 + 2) / 8)
    assert scores["mean_wer"] == pytest.approx((1 / 4 + 0 + 2 / 3) / 3)
    assert scores["substitutions"] + scores["insertions"] + scores["deletions"] == 3
    assert json.loads((tmp_path / "out" / "scores.json").read_text()) == scores
    assert "37.50%" in capsys.readouterr().out

    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [r["rate"] for r in rows] == pytest.approx([0.25, 0.0, 2 / 3])
    assert rows[0]["normalized_reference"] == "the cat sat down"
    assert (rows[0]["deletions"], rows[0]["hits"]) == (1, 3)

    page = (tmp_path / "out" / "worst.html").read_text()
    assert page.index("&lt;i&gt;c&lt;/i&gt;") < page.index("the cat sat")  # worst first
    assert "<script>" not in page
    assert "<b>one" not in page
    assert page.count("<audio") == 2  # the correct file is not shown
    sound = base64.b64decode(page.split("base64,")[1].split('"')[0])
    samples, rate = soundfile.read(io.BytesIO(sound))
    assert (len(samples), rate) == (8000, 16_000)
    assert np.abs(samples - TONE).max() < 1e-4


def test_rescoring_by_characters(asr, tmp_path) -> None:
    file = tmp_path / "results.jsonl"
    rows = [
        {"id": "1", "reference": "今天天气好。", "hypothesis": "今天 天汽好"},
        {"id": "2", "reference": "...", "hypothesis": "啊"},
    ]
    file.write_text("\n".join(json.dumps(r) for r in rows))  # no newline at the end
    scores = asr.run(asr.Options(score=file, metric="cer"))
    assert scores["cer"] == pytest.approx(2 / 5)  # one substituted, one inserted where nothing was said
    assert scores["mean_cer"] == pytest.approx((1 / 5 + 1) / 2)
    assert (scores["substitutions"], scores["insertions"], scores["empty_references"]) == (1, 1, 1)


def test_language_of_a_row_wins_over_the_option(asr, tmp_path) -> None:
    pytest.importorskip("num2words")
    file = tmp_path / "results.jsonl"
    rows = [
        {"id": "1", "reference": "vingt et un", "hypothesis": "21", "language": "fr"},
        {"id": "2", "reference": "zwei", "hypothesis": "2"},
    ]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert asr.run(asr.Options(score=file, language="de"))["wer"] == 0.0
    assert asr.run(asr.Options(score=file))["wer"] > 0.0


def test_errors(asr, manifest, scripted, tmp_path) -> None:
    with pytest.raises(ValueError, match="--score"):
        asr.run(asr.Options(data=tmp_path))
    manifest([Sample(id="x", messages=())])
    options = asr.Options(data=tmp_path / "d.jsonl", model="m", out=tmp_path / "out")
    with pytest.raises(ValueError, match="'x' has no reference transcript"):
        asr.run(options, engine=scripted({}))
    manifest([])
    with pytest.raises(ValueError, match="nothing to transcribe"):
        asr.run(options, engine=scripted({}))
    file = tmp_path / "results.jsonl"
    file.write_text('{"id": "1", "reference": "a"}\n')
    with pytest.raises(ValueError, match="row '1': hypothesis is None"):
        asr.run(asr.Options(score=file))
    file.write_text("")
    with pytest.raises(ValueError, match="no rows"):
        asr.run(asr.Options(score=file))
