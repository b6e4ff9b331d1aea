"""Hotwords of rows and files, in requests and with words beside them that nobody says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from audiorl.audio import AudioClip
from audiorl.data.corpus import bundled_speech
from audiorl.data.hotwords import read_hotwords, with_context
from audiorl.data.manifest import read_samples
from audiorl.data.prompts import asr_prompt, transcript_request, with_hotwords
from audiorl.data.synth import phonemes
from audiorl.models.families import generic
from audiorl.types import Message, Sample
from tests.conftest import make_omni

CLIP = AudioClip(path="a.wav")
NAMES = ("Kerberos", "Cerberus", "Zabbix", "Nagios", "Carbonara", "Kubernetes", "Bravo", "The Hague", "Haig", "hog")


def sample(id: str, text: str, hotwords: tuple[str, ...] = (), language: str = "en") -> Sample:
    metadata = {"language": language} | ({"hotwords": list(hotwords)} if hotwords else {})
    return Sample(id, asr_prompt(CLIP, language, hotwords=hotwords), (text,), metadata=metadata)


def listed(sample: Sample) -> tuple[str, ...]:
    """Return the hotwords of the request, which are those of the metadata."""
    asked = transcript_request("".join(part for part in sample.messages[-1].content if isinstance(part, str)))
    assert asked.language is not None and list(asked.hotwords) == sample.metadata.get("hotwords", [])
    return asked.hotwords


def test_a_request_says_the_hotwords_once() -> None:
    plain = asr_prompt(CLIP, "fr")[0].content[1]
    asked = with_hotwords(with_hotwords(plain, ["Ann"]), ["Dr. Who", "St. Malo Jr."])
    assert transcript_request(asked) == transcript_request(plain).__class__("fr", ("Dr. Who", "St. Malo Jr."), plain)
    assert with_hotwords(asked, ()) == plain and transcript_request(plain).hotwords == ()
    tagged = asr_prompt(CLIP, think=True, ask="Qu'entends-tu ?", hotwords=["Ann"])[0].content[1]
    assert tagged.startswith("Qu'entends-tu ?\nThese words may occur: Ann.\nFirst think")
    assert with_hotwords(with_hotwords(tagged, ()), ["Ann"]) == tagged
    assert transcript_request(tagged).language is None and transcript_request(tagged).hotwords == ("Ann",)


def test_hotwords_of_a_row_are_in_its_request(tmp_path: Path) -> None:
    row = {"id": "a", "audio": "a.wav", "text": "call ann", "hotwords": [" Ann ", "Zoe\u0308"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "rows.tsv").write_text('audio\ttext\thotwords\na.wav\tcall ann\t["Ann", "Zoë"]\n')
    for file in ("rows.jsonl", "rows.tsv"):
        (read,) = read_samples(tmp_path / file, think=False).samples
        assert listed(read) == ("Ann", "Zoë")


@pytest.mark.parametrize(
    ("hotwords", "message"),
    [
        ([], "field 'hotwords': [] is not a list of words; give one or more, or leave the column out"),
        ("Ann", "field 'hotwords': 'Ann' is not a list of words"),
        (["Ann", " "], "field 'hotwords[1]': ' ' is not a text"),
        (["Ann", "…"], "field 'hotwords[1]': '…' has no letter; give a word"),
        (["<|es|>"], "field 'hotwords[0]': '<|es|>' holds '<', which is markup or divides hotwords"),
        (["Ann, Bob"], "holds ',', which is markup or divides hotwords; give the word as it is said"),
        (["An\u200bn"], "holds a character that no text shows; remove it"),
        (["Ann", "Bob", "ann"], "field 'hotwords[2]': 'ann' stands in hotwords[0] too; give it once"),
    ],
)
def test_rows_whose_hotwords_cannot_be_read(hotwords: object, message: str) -> None:
    with pytest.raises(ValueError) as error:
        read_samples([{"id": "a", "audio": "a.wav", "text": "call ann", "hotwords": hotwords}], kind="asr")
    assert str(error.value).startswith("rows: row 1, ") and message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no hotwords; write one a line, or leave the file out"),
        (b"\xef\xbb\xbf\n \n", "no hotwords"),
        (b"Ann\nZo\xeb\n", "line 2: byte 0xeb at column 3 is not UTF-8; save the file as UTF-8"),
        (b"Ann\n\nBob\nANN\n", "line 4: 'ANN' stands in line 1 too; give it once"),
        (b"Ann\n\n[Bob]\n", "line 3: '[Bob]' holds '[', which is markup"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "words.txt"
    file.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_hotwords(file)
    assert str(error.value).startswith(f"{file}") and message in str(error.value)
    with pytest.raises(ValueError, match="missing; give a text file with one hotword a line"):
        read_hotwords(tmp_path / "none.txt")
    file.write_text("\ufeffAnn\r\n\r\n  The   Hague \r\n", encoding="utf-8")
    assert read_hotwords(file) == ("Ann", "The Hague")


def test_a_list_for_all_rows() -> None:
    mixed = [sample("a", "nothing here"), sample("b", "call Ann", ("Ann",))]
    assert [listed(s) for s in with_context(mixed, NAMES)] == [NAMES, ("Ann",)]
    silent = with_context(mixed, NAMES, prompt=False)
    assert [s.messages for s in silent] == [asr_prompt(CLIP, "en")] * 2
    assert [s.metadata["hotwords"] for s in silent] == [list(NAMES), ["Ann"]]


def test_distractors_are_drawn_by_sound_and_are_not_said() -> None:
    said = [
        sample("a", "The kerberos daemon, and carbonara!"),
        sample("b", "nothing of them"),
        sample("c", "to the Hague with Haig", ("The Hague",)),
    ]
    a, b, c = (listed(s) for s in with_context(said, NAMES, 4))
    assert {"Kerberos", "Carbonara"} < set(a) and len(a) == 6
    assert len(b) == 4 and set(b) < set(NAMES)
    assert "The Hague" in c and "Haig" not in c and len(c) == 5  # its reference has Haig, so that is no distractor
    # the nearest come from all seeds, those of any sound from some
    drawn = [set(listed(with_context([sample("k", "kerberos")], NAMES[:7], 1, seed=s)[0])) for s in range(12)]
    assert {"Kerberos", "Cerberus"} in drawn and not any("Zabbix" in words for words in drawn)
    assert with_context(said, NAMES, 4) == with_context(said, NAMES, 4) != with_context(said, NAMES, 4, seed=1)
    assert {listed(s)[0] for s in with_context([sample(str(n), "kerberos") for n in range(20)], NAMES, 3)} != {
        "Kerberos"
    }
    assert [listed(s) for s in with_context(said, NAMES, 0)][1] == ()
    spelled = with_context([sample("x", "kerberos", language="tlh")], NAMES, 3)  # no language of espeak-ng's
    assert len(listed(spelled[0])) == 4
    with pytest.raises(ValueError, match="sample 'a': 9 distractors, but only 8 other hotwords to draw from"):
        with_context(said, NAMES, 9)


def test_phonemes() -> None:
    assert phonemes(["night", "knight", "The Hague"], "en-us") == ["naɪt", "naɪt", "ðə heɪɡ"]
    (foreign,) = phonemes(["Kerberos"], "zh")
    assert "(" not in foreign and foreign
    with pytest.raises(ValueError, match="no language 'tlh'"):
        phonemes(["a"], "tlh")


def test_families_write_hotwords_in_their_own_form() -> None:
    """Qwen3-ASR has a place for a context and none for a request; most read the sentence; Whisper has a test."""
    texts = ["Write down exactly what is said", "These words may occur: Ann, Le Havre."]
    clip = bundled_speech(("en",))[0].clip
    messages = asr_prompt(clip, "en", hotwords=["Ann", "Le Havre"])
    qwen3_asr = generic.tiny("qwen3_asr", texts)
    text = qwen3_asr.tokenizer.decode(qwen3_asr.prompt(Sample("a", messages)).ids).replace("<|audio_pad|>", "")
    asks = "<|im_start|>user\n<|audio_start|><|audio_end|><|im_end|>\n<|im_start|>assistant\nlanguage English<asr_text>"
    assert text == f"<|im_start|>system\nAnn, Le Havre<|im_end|>\n{asks}"
    told = Sample("a", (Message("system", ("A call.",)), *messages))
    text = qwen3_asr.tokenizer.decode(qwen3_asr.prompt(told).ids)
    assert text.startswith("<|im_start|>system\nA call.\nAnn, Le Havre<|im_end|>\n<|im_start|>user\n<|audio_start|>")
    plain = Sample("a", asr_prompt(clip, "en"))
    assert qwen3_asr.tokenizer.decode(qwen3_asr.prompt(plain).ids).replace("<|audio_pad|>", "") == asks
    omni = make_omni()
    assert "the words only.\nThese words may occur: Ann, Le Havre.<|im_end|>" in omni.tokenizer.decode(
        omni.prompt(Sample("a", messages)).ids
    )
