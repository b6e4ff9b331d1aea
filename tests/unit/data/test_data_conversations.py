"""Formats of other projects, as their own documentation shows them: the same data in each gives the same samples."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

import audiorl
from audiorl.audio import AudioClip
from audiorl.cli import main
from audiorl.data.corpus import bundled_speech
from audiorl.data.manifest import read_samples
from audiorl.data.preferences import read_judged, read_pairs
from audiorl.recipes._common import supervised_turns
from audiorl.rewards import AnswerAccuracy
from audiorl.types import Sample
from tests.cases.readers import cut, tar

SPEECH = bundled_speech(("en",), min_seconds=0.5, max_seconds=2)[:3]
CLIPS = [f"a{i}.wav" for i in range(3)]
QUESTIONS = [
    {"id": f"q{i}", "audio": clip, "question": "What is said?", "answer": u.text}
    for i, (clip, u) in enumerate(zip(CLIPS, SPEECH, strict=True))
]
WHOLE = {"array": [1, 2], "sampling_rate": 16_000}
HEARD = {"type": "audio", "audio": "a0.wav"}
EFFECTS = [
    ("1.wav", "What's that sound?", "It is the sound of glass shattering."),
    ("2.wav", "What can you hear?", "A woman is coughing."),
    ("3.wav", "What does the person say?", "We are glad to welcome his gospel."),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Real recordings at 16 kHz: a0.wav … a2.wav, and again below data/, clips/ and mllm_demo_data/."""
    for names in (
        CLIPS,
        [f"data/{n}" for n in CLIPS],
        [f"clips/{n}" for n in CLIPS],
        ["mllm_demo_data/" + e[0] for e in EFFECTS],
    ):
        for name, u in zip(names, SPEECH, strict=True):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            soundfile.write(tmp_path / name, u.clip.load(16_000), 16_000)
    return tmp_path


def lines(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def table(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], dialect="excel-tab" if path.suffix == ".tsv" else "excel")
        writer.writeheader()
        writer.writerows(rows)
    return path


def content(sample: Sample) -> Any:
    """Return everything about a sample, its clips by their content."""
    said = [
        (m.role, [c if isinstance(c, str) else c.load(16_000).tobytes() for c in m.content]) for m in sample.messages
    ]
    return sample.id, said, sample.references, sample.choices, sample.task, sample.metadata


def chat(question: str, answer: Any = None, role: str = "role", text: str = "content") -> list[dict[str, Any]]:
    user, assistant = ("human", "gpt") if role == "from" else ("user", "assistant")
    return [{role: user, text: question}, *([{role: assistant, text: answer}] if answer else [])]


def test_the_same_data_in_every_format_gives_the_same_samples(folder: Path) -> None:
    import datasets

    heard = "<audio>What is said?"
    part = {"type": "text", "text": "What is said?"}
    forms: dict[str, Any] = {
        "ms-swift": lambda q: {"messages": chat(heard, q["answer"]), "audios": [q["audio"]]},
        "ms-swift GRPO": lambda q: {
            "messages": chat(heard), "audios": [q["audio"]], "solution": f"<answer> {q['answer']} </answer>",
        },
        "ms-swift query": lambda q: {"query": "What is said?", "response": q["answer"], "audios": [q["audio"]]},
        "LLaMA-Factory sharegpt": lambda q: {
            "conversations": chat(heard, q["answer"], "from", "value"), "audios": q["audio"],
        },
        "LLaMA-Factory alpaca": lambda q: {
            "instruction": heard, "input": "", "output": q["answer"], "audios": [q["audio"]],
        },
        "TRL": lambda q: {
            "prompt": [{"role": "user", "content": [{"type": "audio", "audio": q["audio"]}, part]}],
            "solution": q["answer"],
        },
        "TRL, clip in a column": lambda q: {
            "prompt": [{"role": "user", "content": [{"type": "audio"}, part]}], "audio": q["audio"],
            "completion": [{"role": "assistant", "content": q["answer"]}],
        },
        "TRL, plain": lambda q: {"prompt": "What is said?", "audio": q["audio"], "completion": q["answer"]},
    }  # fmt: skip
    expected = [content(sample) for sample in read_samples(lines(folder / "native.jsonl", *QUESTIONS)).samples]
    assert expected[0][2] == (SPEECH[0].text,) and "<think>" in expected[0][1][0][1][1]
    sources: dict[str, Any] = {
        name: lines(folder / f"{i}.jsonl", *({"id": q["id"], **form(q)} for q in QUESTIONS))
        for i, (name, form) in enumerate(forms.items())
    }
    for name, path in list(sources.items()):  # the same as columns: what a row lacks is null in a table
        pq.write_table(
            pa.Table.from_pylist([json.loads(line) for line in path.open()]), folder / f"{path.stem}.parquet"
        )
        sources[f"{name}, parquet"] = folder / f"{path.stem}.parquet"
    files = [{"file_name": f"data/{q['audio']}", **{k: v for k, v in q.items() if k != "audio"}} for q in QUESTIONS]
    sources["audiofolder"] = table(folder / "metadata.csv", files).parent
    sources["CSV"] = table(folder / "rows.csv", QUESTIONS)
    rows: list[dict[str, Any]] = [{**q, "audio": str(folder / q["audio"])} for q in QUESTIONS]
    dataset = datasets.Dataset.from_list(rows)
    sources |= {"list": rows, "Dataset": dataset.cast_column("audio", datasets.Audio())}
    sources["DatasetDict"] = datasets.DatasetDict(train=dataset)
    for name, source in sources.items():
        assert [content(sample) for sample in read_samples(source, check_audio=True).samples] == expected, name
    with pytest.raises(ValueError, match=r"a DatasetDict with the splits train, test; give one, dataset\[SPLIT\]"):
        read_samples(datasets.DatasetDict(train=dataset, test=dataset))
    relative = datasets.Dataset.from_list(QUESTIONS)
    with pytest.raises(ValueError, match=r"start from \(audio_root\)"):
        read_samples(relative, check_audio=True)
    assert [content(sample) for sample in read_samples(relative, audio_root=folder).samples] == expected


def test_turns_clips_and_what_is_learned(folder: Path) -> None:
    """SFT learns every turn of the assistant that has a loss; GRPO answers the last user turn after the others."""
    turns = [
        {"role": "user", "content": "<audio>One?"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "And <audio> this? And <audio>?"},
        {"role": "assistant", "content": "B", "loss": False},
        {"role": "user", "content": "All?"},
        {"role": "assistant", "content": "<think>Hm.</think><answer>C</answer>"},
    ]
    row = {"system": "Be brief.", "messages": turns, "audios": CLIPS, "level": 3}
    path = lines(folder / "m.jsonl", row)
    (kept,) = read_samples(path, keep_conversations=True, think=False).samples
    assert [m.role for m in kept.messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    heard = [Path(c.path or "").name if isinstance(c, AudioClip) else c for m in kept.messages for c in m.content]
    assert heard == ["Be brief.", "a0.wav", "One?", "A", "And ", "a1.wav", " this? And ", "a2.wav", "?", "B", "All?"]
    assert (kept.references, kept.metadata["level"]) == (("C",), 3)
    learned = [(len(e.sample.messages), e.target) for e in supervised_turns(kept)]
    assert learned == [(2, "A"), (6, "<think>Hm.</think><answer>C</answer>")]
    accuracy = AnswerAccuracy()
    assert accuracy.correct("<answer>c.</answer>", kept) and not accuracy.correct("C", kept)
    (asked,) = read_samples(path).samples
    assert str(asked.messages[-1].content[0]).startswith("All?\nFirst think it over")
    assert content(asked)[1][:-1] == content(kept)[1][:-1] and len(asked.audio) == 3
    plain = lines(folder / "plain.jsonl", {"messages": chat("Which?", "a cat"), "audios": "a0.wav"})
    (kept,), (asked,) = (read_samples(plain, keep_conversations=keep).samples for keep in (True, False))
    assert accuracy.correct("A cat.", kept) and not accuracy.correct("A cat.", asked)
    prompt = [*turns[:3], {"role": "user", "content": "In <answer> tags."}]
    (sample,) = read_samples(
        lines(folder / "p.jsonl", {"prompt": prompt, "audios": CLIPS, "answer": [3, "three"]})
    ).samples
    assert sample.messages[-1].content == ("In <answer> tags.",) and sample.references == ("3", "three")
    assert [e.target for e in supervised_turns(sample)] == ["<answer>3</answer>"]  # of a prompt no turn is learned


def test_a_part_of_the_clip_in_audios(folder: Path) -> None:
    asked = {"messages": chat("<audio>Which?", "a cat"), "start": 0.1}
    rows = [
        {**asked, **named, **end}
        for named in ({"audios": ["a0.wav"]}, {"audios": "a0.wav"}, {"audio": "a0.wav"})
        for end in ({"end": 0.4}, {"duration": 0.3})
    ]
    rows.append(
        {"messages": chat("Which?", "a cat"), "audios": CLIPS[:2], "duration": 9.0}
    )  # which says how long it is
    *parts, whole = read_samples(lines(folder / "m.jsonl", *rows), check_audio=True).samples
    assert {(c.path, c.start, c.duration) for s in parts for c in s.audio} == {(str(folder / "a0.wav"), 0.1, 0.3)}
    assert [(c.start, c.duration) for c in whole.audio] == [(0.0, None)] * 2


def test_pairs_and_judged_answers_of_other_projects(folder: Path) -> None:
    swift = {"messages": chat("<audio>What is said?", "yes"), "audios": ["a0.wav"]}
    factory = {"conversations": chat("<audio>What is said?", role="from", text="value"), "audios": ["a0.wav"]}
    factory |= {name: {"from": "gpt", "value": text} for name, text in (("chosen", "yes"), ("rejected", "no"))}
    rows = [{**swift, "rejected_response": "no"}, factory]
    for pair in read_pairs(lines(folder / "pairs.jsonl", *rows), check_audio=True).samples:
        assert (pair.chosen, pair.rejected, [m.role for m in pair.sample.messages]) == ("yes", "no", ["user"])
        assert pair.sample.messages[0].content[1] == "What is said?" and not pair.sample.references
    judged = read_judged(lines(folder / "judged.jsonl", {**swift, "label": False})).samples
    assert [(j.answer, j.desirable, len(j.sample.messages)) for j in judged] == [("yes", False, 1)]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": chat("<audio>Which?", "a")}, "audio", "0 clips, 1 place for one in messages; write <audio> once"),
    ({"messages": chat("<audio>?", "a"), "audios": ["a0.wav"] * 2}, "audios", "2 clips, 1 place for one in messages"),
    ({"messages": chat("Which?", "a")}, "messages", "holds no audio; name it in audios"),
    ({"messages": chat("Which?"), "audios": CLIPS}, "answer", r"missing; end with the assistant's turn, .*=NAME"),
    ({"messages": chat("Which?", " "), "audios": CLIPS}, r"messages\[1\]\.content", "text is empty; give an answer"),
    ({"messages": chat("", "a")[1:], "audios": CLIPS}, "messages", "no user's turn before the assistant's last"),
    ({"messages": [], "audios": CLIPS}, "messages", r"\[\] is not a list of messages; give at least the user's"),
    ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\]\.role", "'tool' is not one of system, user"),
    ({"messages": ["Which?"], "audios": CLIPS}, r"messages\[0\]", "'Which.' is not a message; give role"),
    ({"conversations": [{"from": "gpt"}]}, r"conversations\[0\]\.content", "missing; give"),
    ({"messages": chat("<audio>?", "a"), "audios": ["gone.wav"]}, r"audios\[0\]", r"gone\.wav: missing"),
    ({"messages": chat("?", "a"), "audios": [WHOLE]}, r"audios\[0\]\.array", "its samples are whole numbers"),
    ({"messages": chat("<audio>?", "a"), "audios": ["https://x.org/a.wav"]}, r"audios\[0\]", "is a URL, which is"),
    ({"messages": chat("?", "a"), "audios": CLIPS, "start": 0.1}, "start", "that of one clip, and audios holds 3; put"),
    ({"messages": chat("?", "a"), "audios": CLIPS, "channel": 1}, "channel", "that of one clip, and audios holds 3"),
    ({"messages": chat("?", "a"), "audios": ["a0.wav"], "channel": 1}, r"audios\[0\]", "channel 1"),
    ({"messages": chat("?", "a"), "audios": CLIPS, "sample_rate": 8000}, r"audios\[0\]", "declared as 8000 Hz"),
    ({"messages": chat("?", "a"), "images": ["a.png"], "audios": CLIPS}, "images", r"a\.png: missing"),
    ({"messages": chat("?", "a"), "images": ["a0.wav"], "audios": CLIPS}, "images", "no picture that Pillow reads"),
    ({"messages": chat("<image>?", "a"), "images": ["a.png"] * 2, "audios": CLIPS}, "images", "2 pictures, 1 place"),
    ({"messages": chat("?", "a"), "images": ["https://a.org/b.png"], "audios": CLIPS}, r"images\[0\]", "is a URL"),
    ({"messages": chat("?", "a"), "images": [3], "audios": CLIPS}, r"images\[0\]", "no picture; give a path"),
    ({"messages": chat("?", "a"), "videos": ["a.mp4"], "audios": CLIPS}, "videos", "videos are not read; give frames"),
    ({"query": "Which?", "history": ["a"], "audios": CLIPS}, "history", "not pairs of a question and its answer"),
    ({"audio": "a0.wav", "question": "Which?", "answer": "a"}, "messages", r"missing; .* messages=NAME \(the"),
    ({"messages": chat("Which?", [HEARD])}, "messages", "ends with a spoken answer; give a text"),
    ({"messages": chat("?", "a"), "audios": CLIPS, "choices": ["b", "c"]}, "messages", "'a' is not among the choices"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "field", "message"), BAD)
def test_bad_conversations(folder: Path, row: dict[str, Any], field: str, message: str) -> None:
    good = {"messages": chat("Which?", "a"), "audios": ["a0.wav"]}
    path = lines(folder / "m.jsonl", good, row)
    with pytest.raises(ValueError, match=rf"m\.jsonl: row 2, field '{field}': .*(?:{message})") as caught:
        read_samples(path, check_audio=True)
    assert "\n" not in str(caught.value)


def test_data_show(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    rows = [{"messages": chat("<audio>What is said?", e[2]), "audios": [f"mllm_demo_data/{e[0]}"]} for e in EFFECTS]
    rows += [{**rows[0], "audios": ["gone.wav"]}, {"messages": chat("Which?")}]
    lines(Path("demo.jsonl"), *rows)
    assert main(["data", "show", "demo.jsonl", "--recipe", "sft-audio", "--rows", "1"]) == 0
    out = capsys.readouterr().out
    seconds = SPEECH[0].duration
    assert f"1. demo:1, row 1, task qa\n   audio: mllm_demo_data/1.wav, {seconds:.2f} s, " in out
    assert "│<|audio_bos|>│<|AUDIO|> × " in out and f"   learned: {EFFECTS[0][2]}\n" in out
    assert "\nrows: 3 usable, 3 turns learned, 2 skipped\naudio: 3 clips, " in out and "\ntasks: 3 × qa\n" in out
    assert "\nlanguages: 3 × not named\n" in out and "1 × audios: check the path, or the folder" in out
    assert "demo.jsonl: row 4, field 'audios': gone.wav: missing" in out
    table(Path("rows.csv"), QUESTIONS)
    assert main(["data", "show", "rows.csv", "--limit", "2"]) == 0
    assert "2. q1, row 2" in (out := capsys.readouterr().out) and f"answer: {SPEECH[1].text}" in out and "q2" not in out
    assert main(["data", "show", "gone.csv"]) == 2 and "gone.csv: missing" in capsys.readouterr().err


@pytest.mark.slow
def test_files_as_their_projects_document_them_are_trained(folder: Path) -> None:
    """Two steps of SFT, GRPO and DPO on the examples of each project's documentation, over recordings of ours."""
    demo = [{"messages": chat(f"<audio>{q}", a), "audios": [f"mllm_demo_data/{n}"]} for n, q, a in EFFECTS]
    (folder / "mllm_audio_demo.json").write_text(json.dumps(demo, indent=2))  # LLaMA-Factory's file
    names = [{"file_name": f"data/{clip}", "transcription": u.text} for clip, u in zip(CLIPS, SPEECH, strict=True)]
    table(folder / "metadata.csv", names)  # datasets: audiofolder
    voices = [
        {
            "client_id": f"c{i}",
            "path": clip,
            "sentence": u.text,
            "up_votes": "2",
            "down_votes": "0",
            "age": "",
            "gender": "",
        }
        | {"accents": "", "locale": "en", "segment": ""}
        for i, (clip, u) in enumerate(zip(CLIPS, SPEECH, strict=True))
    ]
    sound = (folder / "a0.wav").read_bytes()
    tar(
        folder / "shard-000.tar",
        {"a.wav": sound, "a.txt": "good morning", "b.wav": sound, "b.json": '{"text": "hello"}'},
    )
    sharegpt = [
        {"conversations": chat(f"<audio>{q}", a, "from", "value"), "audios": [f"mllm_demo_data/{n}"]}
        for n, q, a in EFFECTS
    ]
    said = {"role": "user", "content": "<audio>What did the audio say?"}
    swift = {
        "messages": [said, {"role": "assistant", "content": "The weather is really nice today."}],
        "audios": ["a0.wav"],
    }
    system = {"role": "system", "content": "You are a useful and harmless assistant"}
    learned = [
        folder / "mllm_audio_demo.json",
        lines(folder / "swift.jsonl", swift),
        lines(folder / "sharegpt.jsonl", *sharegpt),
        folder,
        table(folder / "validated.tsv", voices),
        lines(
            folder / "cuts.jsonl",
            cut("hi", 0, sources=[{"type": "file", "channels": [0], "source": "a0.wav"}], duration=0.5),
        ),
        folder / "shard-000.tar",
    ]
    short: dict[str, Any] = {"steps": 2, "held_out_count": 2, "eval_tokens": 4}
    result = audiorl.train_sft("tiny", learned, task="transcripts", batch_size=9, **short)
    assert [row["step"] for row in result.metrics] == [1, 2] and result.evaluation["after"]["n"] == 2
    rows = [
        {
            "prompt": [
                system,
                {"role": "user", "content": [{"type": "audio", "audio": clip}, {"type": "text", "text": "What?"}]},
            ]
        }
        | {"solution": u.text}
        for clip, u in zip(CLIPS, SPEECH, strict=True)
    ]
    asked = [
        lines(folder / "trl.jsonl", *rows),
        lines(folder / "grpo.jsonl", {**swift, "messages": [system, said], "solution": "nice"}),
    ]
    drawn: dict[str, Any] = {"group_size": 2, "prompts_per_step": 2, "max_new_tokens": 4}
    result = audiorl.train_grpo("tiny", [*asked, table(folder / "rows.csv", QUESTIONS)], **short, **drawn)
    assert [row["step"] for row in result.metrics] == [1, 2]
    ranked = {"conversations": sharegpt[0]["conversations"][:1], "audios": ["a0.wav"]}
    ranked |= {name: {"from": "gpt", "value": text} for name, text in (("chosen", "yes"), ("rejected", "no"))}
    pairs = [{**swift, "rejected_response": "I don't know"}, ranked, {**ranked, "audios": ["a1.wav"]}]
    result = audiorl.train_dpo(
        "tiny", lines(folder / "dpo.jsonl", *pairs), batch_size=1, steps=2, held_out_count=1, eval_tokens=4
    )
    assert [row["step"] for row in result.metrics] == [1, 2]
