"""What recipes share: held-out rows, mixed sets, supervised rows for ptx, a reward file."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from audiorl.audio import AudioClip, write_wav
from audiorl.cli import main
from audiorl.config import LoraConfig, ModelConfig, PtxConfig, RLConfig, SFTConfig
from audiorl.config.recipe import RecipeConfig, RewardOptions
from audiorl.data.bundled import bundled_set
from audiorl.data.corpus import bundled_speech
from audiorl.data.sets import parse_set, split_held_out, stratified
from audiorl.models import load_policy
from audiorl.recipes import dpo_audio_qa, omni_grpo, opa_dpo
from audiorl.recipes._common import (
    Given,
    RowCheck,
    policy_from,
    ptx_examples,
    read_questions,
    supervised_turn,
    with_user_reward,
)
from audiorl.recipes.dpo_audio_qa import DPOConfig
from audiorl.rewards import Repetition, StandardisedSum, WeightedSum
from audiorl.run.metrics_log import read_metrics
from audiorl.tasks.simul.streams import Stream, Unit, split_stream
from audiorl.tasks.sound.rows import read_sounds
from audiorl.types import Message, Sample
from tests.conftest import make_text

LANGUAGES = bundled_set("bundled:languages/train")  # each sample's task is its language
SPEECH = bundled_speech(("en",), max_seconds=2)


def test_held_out_rows_are_drawn_from_every_set_and_task(capsys: pytest.CaptureFixture[str]) -> None:
    other = [replace(s, id=f"other/{s.id}", task="qa", metadata={"recording": s.id}) for s in LANGUAGES[:60]]
    sets = [("languages", LANGUAGES), ("other", other)]
    count, total = 40, len(LANGUAGES) + 60
    train, held_out = split_held_out(sets, [], count)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("held out: ")]
    assert len(held_out) == count == sum(int(line.split()[2]) for line in printed) and len(train) == total - count
    assert not {s.id for s in train} & {s.id for s in held_out}
    drawn = Counter(s.task for s in held_out)
    for task, size in {**Counter(s.task for s in LANGUAGES), "qa": 60}.items():
        assert abs(drawn[task] - count * size / total) < 1, task
    assert held_out != (LANGUAGES + other)[:count], "not the first rows"
    assert split_held_out(sets, [], count) == (train, held_out)
    assert split_held_out(sets, [], count, seed=1)[1] != held_out


def test_a_small_set_holds_a_fifth_out() -> None:
    assert len(split_held_out([("a", LANGUAGES[:20])], [], None)[1]) == 4
    others = [replace(s, id=f"other/{s.id}") for s in LANGUAGES]
    both = [("a", LANGUAGES), ("b", others)]
    assert RecipeConfig().held_out_count is None and len(split_held_out(both, [], None)[1]) == 200
    with pytest.raises(ValueError, match=r"20 rows read, 20 held out; give fewer by --held-out-count, or a set"):
        split_held_out([("a", LANGUAGES[:20])], [], 200)


def test_held_out_recordings_that_are_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are found by what is in the files, whatever they are called."""
    copy = tmp_path / "copy.wav"
    copy.write_bytes(Path(str(SPEECH[0].clip.path)).read_bytes())
    first, other, third = (Sample(str(i), (Message("user", (SPEECH[i].clip, "?")),)) for i in range(3))
    again = Sample("again", (Message("user", (AudioClip(path=str(copy)), "?")),))
    sets = [("train.jsonl", [first, other])]
    split_held_out(sets, [("test.jsonl", [third])], None)
    assert capsys.readouterr().err == ""
    split_held_out(sets, [("test.jsonl", [third, again])], None)
    assert "1 of 2 held-out rows are about recordings that are trained on, such as 'again'" in capsys.readouterr().err
    split_held_out(sets, [("train.jsonl", [first, other])], None)
    assert "2 of 2 held-out rows are about recordings that are trained on" in capsys.readouterr().err


def test_questions_of_dpo_audio_qa_that_are_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"audio": str(SPEECH[0].clip.path), "question": "?", "answer": "a"}
    (tmp_path / "asked.jsonl").write_text(json.dumps(row))
    (tmp_path / "pairs.jsonl").write_text(json.dumps({**row, "chosen": "a", "rejected": "b"}))
    asked, pairs = str(tmp_path / "asked.jsonl"), str(tmp_path / "pairs.jsonl")
    check = RowCheck(make_text, trained=lambda row: (), measured=lambda row: ())
    config = DPOConfig(data=(pairs,), held_out=(asked,))
    trained, measured = dpo_audio_qa.read(config, Given(), check)
    assert [(item.chosen, s.references) for item, s in zip(trained, measured, strict=True)] == [("a", ("a",))]
    assert "1 of 1 held-out rows are about recordings that are trained on" in capsys.readouterr().err
    with pytest.raises(ValueError, match="name what to train on: --data FILE"):
        dpo_audio_qa.read(replace(config, data=()), Given(), check)


def test_an_adapter_of_another_shape_than_is_asked_for(tmp_path: Path) -> None:
    make_text().save(tmp_path / "base")
    lora = LoraConfig(rank=2, target_modules=("q_proj",))
    load_policy(tmp_path / "base", ModelConfig(lora=lora)).save(tmp_path / "adapter")
    config = RecipeConfig(path=str(tmp_path / "adapter"), lora=True, model=ModelConfig(lora=lora))
    for same in (config, replace(config, model=ModelConfig())):
        assert policy_from(same).config.lora == lora
    for name, value in (("rank", 4), ("alpha", 7), ("target_modules", ("v_proj",))):
        other = replace(config, model=ModelConfig(lora=replace(lora, **{name: value})))
        with pytest.raises(
            ValueError, match=f"--model.lora.{name.replace('_', '-')}: the adapter in .* has .* already"
        ):
            policy_from(other)


def test_only_the_thinker_of_omni_grpo_is_measured_in_between() -> None:
    config = omni_grpo.tiny()
    with pytest.raises(ValueError, match=r"--talker-rl\.eval-every: spoken answers are measured before and after"):
        replace(config, talker_rl=replace(config.talker_rl, eval_every=1))


def test_opa_dpo_keeps_the_thought() -> None:
    sample = Sample("q", (Message("user", ("Which animal?",)),), references=("cat",))
    own = ["<think>it meows</think><answer>dog</answer>", "<think>it meows</think><answer>cat</answer>", "a cat"]
    examples, pairs = opa_dpo.learned([sample] * 3, own, opa_dpo.correct, think=True)
    assert {e.target for e in examples} == {own[1]}
    assert [(p.chosen, p.rejected) for p in pairs] == [(own[1], own[0])], "a right answer is no pair"
    assert len(opa_dpo.learned([sample] * 3, own, opa_dpo.correct)[1]) == 4


def test_captions_of_one_sound_are_not_parted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flow is asked without audio: the sound that it learns to make stands in the metadata."""
    rows = [
        {"id": f"{i}-{n}", "audio": u.clip.path, "caption": f"{u.text}, {n}"}
        for i, u in enumerate(SPEECH[:20])
        for n in "abc"
    ]
    (tmp_path / "sounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sounds = read_sounds(tmp_path / "sounds.jsonl").samples
    train, held_out = split_held_out([("sounds.jsonl", sounds)], [], 4)
    assert len(held_out) == 4 and len(train) == 60 - 3 * len({s.id.split("-")[0] for s in held_out})
    assert not {s.metadata["audio"].path for s in train} & {s.metadata["audio"].path for s in held_out}
    capsys.readouterr()
    split_held_out([("sounds.jsonl", sounds)], [("sounds.jsonl", sounds)], None)
    assert "60 of 60 held-out rows are about recordings that are trained on" in capsys.readouterr().err


def test_parts_of_one_talk_are_not_parted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = []
    for i in range(5):
        (file := tmp_path / f"{i}.wav").write_bytes(bytes([i]))
        units = tuple(Unit(start, start + 5.0, "b") for start in range(0, 60, 10))
        talk = Stream(f"talk{i}", AudioClip(path=str(file), duration=60.0), 60.0, units, "en", "de")
        parts += split_stream(talk, 20.0)
    assert len(parts) == 15
    train, held_out = split_held_out([("talks.jsonl", parts)], [], 3)
    assert len(train) == 12 and len({part.audio.path for part in held_out}) == 1
    capsys.readouterr()
    split_held_out([("talks.jsonl", parts[1:])], [("talks.jsonl", parts[:1])], None)
    assert (
        "1 of 1 held-out rows are about recordings that are trained on, such as 'talk0@0.00'" in capsys.readouterr().err
    )
    train, held_out = split_held_out([("talk.jsonl", parts[:3])], [], 1)
    assert len(train) == 2 and "parts of the one talk that is trained on" in capsys.readouterr().err


def test_the_draw_of_a_row_does_not_depend_on_the_order_or_on_other_tasks() -> None:
    drawn = {s.id for s in stratified([("a", LANGUAGES)], 30)[1]}
    assert {s.id for s in stratified([("a", LANGUAGES[::-1])], 30)[1]} == drawn
    english = [s for s in LANGUAGES if s.task == "English"]
    quota = sum(s.task == "English" for s in LANGUAGES if s.id in drawn)
    assert {s.id for s in stratified([("a", english)], quota)[1]} == {s.id for s in english if s.id in drawn}


def test_rows_of_one_prompt_stay_together() -> None:
    twice = [s for s in LANGUAGES[:20] for _ in range(2)]
    rest, drawn = stratified([("a", twice)], 5)
    assert 5 <= len(drawn) <= 8 and not {s.id for s in rest} & {s.id for s in drawn}


def manifest(path: Path, count: int, first: int = 0) -> Path:
    rows = [
        {"id": i, "audio": u.clip.path, "question": "Which?", "choices": [u.text, "none"], "answer": u.text}
        for i, u in enumerate(SPEECH[first : first + count])
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_sets_are_mixed_by_count(tmp_path: Path) -> None:
    a, b = manifest(tmp_path / "a.jsonl", 10), manifest(tmp_path / "b.jsonl", 10, 10)
    config = RecipeConfig(data=(f"{a}:6", f"{b}:3"), held_out=("bundled:languages/test",), check_audio=False)
    train, _ = read_questions(config, think=True)
    files = {u.clip.path: i // 10 for i, u in enumerate(SPEECH[:20])}
    assert Counter(files[s.audio[0].path] for s in train) == {0: 6, 1: 3}
    assert len({s.id for s in train}) == 9, "rows of two sets share no id"
    ids = [s.id for s in train]
    assert [s.id for s in read_questions(replace(config, seed=5), think=True)[0]] == ids, "the same rows for every seed"
    assert [s.id for s in read_questions(replace(config, data_seed=5), think=True)[0]] != ids
    with pytest.raises(ValueError, match=r"a\.jsonl:11: 11 rows are asked for, but .*a\.jsonl has 10 usable ones"):
        read_questions(replace(config, data=(f"{a}:11",)), think=True)
    with pytest.raises(ValueError, match=r"a\.jsonl:0: 0 rows are asked for"):
        read_questions(replace(config, data=(f"{a}:0",)), think=True)


def test_sets_are_mixed_by_weight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = manifest(tmp_path / "a.jsonl", 10), manifest(tmp_path / "b.jsonl", 10, 10)
    config = RecipeConfig(data=(f"{a}:x2.5", f"{b}:6x0.5"), held_out=("bundled:languages/test",), check_audio=False)
    train, _ = read_questions(config, think=True)
    shown = Counter(s.id for s in train)
    first, second = [shown[str(i)] for i in range(10)], [n for id, n in shown.items() if id.startswith("2:")]
    assert Counter(first) == {2: 5, 3: 5} and second == [1, 1, 1]
    assert f"mix: 25 rows (89%) of {a}:x2.5, which has 10" in capsys.readouterr().out
    assert Counter(s.metadata["data_set"] for s in train) == {"a": 25, "b": 3}
    assert config.with_steps_for(RLConfig(prompts_per_step=4), len(train)).steps == 7, "copies count as rows"
    assert [s.id for s in read_questions(replace(config, seed=3), think=True)[0]] == [s.id for s in train]
    other = Counter(s.id for s in read_questions(replace(config, data_seed=3), think=True)[0])
    assert other != shown and sum(other.values()) == 28
    # Rows are held out before weights copy rows.
    mixed = RecipeConfig(data=(f"{a}:x3",), held_out_count=4, check_audio=False)
    train, held_out = read_questions(mixed, think=True)
    assert len(held_out) == 4 == len({s.id for s in held_out}) and len(train) == 18
    assert not {s.id for s in train} & {s.id for s in held_out}


def test_weights_that_mean_nothing(tmp_path: Path) -> None:
    assert parse_set("a.jsonl:5000x0.5") == ("a.jsonl", 5000, 0.5)
    assert parse_set("a.jsonl:x2") == ("a.jsonl", None, 2.0)
    assert parse_set("bundled:languages/train") == ("bundled:languages/train", None, 1.0)
    assert parse_set("a:x") == ("a:x", None, 1.0)
    (tmp_path / "odd:x2").write_text("")
    assert parse_set(f"{tmp_path}/odd:x2") == (f"{tmp_path}/odd:x2", None, 1.0)
    some = RecipeConfig(data=("bundled:languages/train:5",), held_out=("bundled:languages/test:3",))
    assert list(map(len, read_questions(some, think=True))) == [5, 3]
    a = manifest(tmp_path / "a.jsonl", 10)
    with pytest.raises(ValueError, match=r"a\.jsonl:x0: a weight of 0 leaves the set out"):
        read_questions(RecipeConfig(data=(f"{a}:x0",), check_audio=False), think=True)
    with pytest.raises(ValueError, match=r"a\.jsonl:x2: a weight is for training data"):
        read_questions(RecipeConfig(data=("bundled",), held_out=(f"{a}:x2",), check_audio=False), think=True)


def test_only_drawn_clips_are_decoded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = manifest(tmp_path / "a.jsonl", 10)
    rows = [json.loads(line) for line in a.read_text().splitlines()]
    config = RecipeConfig(data=(f"{a}:6",), held_out=("bundled:languages/test",))
    drawn = {s.id for s in read_questions(config, think=True)[0]}

    def without(broken: set[str]) -> None:
        changed = [row | ({"audio": "gone.wav"} if str(row["id"]) in broken else {}) for row in rows]
        a.write_text("".join(json.dumps(row) + "\n" for row in changed))

    without({str(i) for i in range(10)} - drawn)
    assert {s.id for s in read_questions(config, think=True)[0]} == drawn
    first = min(drawn)
    without({first})
    with pytest.raises(ValueError, match=r"gone\.wav: missing"):
        read_questions(config, think=True)
    rest = {s.id for s in read_questions(replace(config, on_error="skip"), think=True)[0]}
    assert len(rest) == 6 and rest > drawn - {first}, "the next in the draw takes its place"
    assert f"skipped {first}: " in capsys.readouterr().out
    without({str(i) for i in range(5)})
    with pytest.raises(ValueError, match=r"6 rows are asked for, but .* has 5 usable ones"):
        read_questions(replace(config, on_error="skip"), think=True)


def test_held_out_rows_have_the_answers_of_the_data() -> None:
    base = LANGUAGES[0]
    answers = ["yes"] * 60 + ["no"] * 30 + [f"rare {i}" for i in range(10)]
    rows = [
        replace(base, id=str(i), task="qa", references=(answer,), choices=(answer, "other"), messages=())
        for i, answer in enumerate(answers)
    ]
    drawn = Counter(s.references[0] for s in stratified([("a", rows)], 20)[1])
    assert drawn["yes"] == 12 and drawn["no"] == 6 and sum(drawn.values()) == 20


@pytest.mark.slow
def test_avqa_and_musicbench_as_published_through_the_command_line(tmp_path: Path) -> None:
    avqa = {"question_text": "What is the main source of sound?", "multi_choice": ["Car", "siren", "gun fire", "x"]}
    avqa |= {"question_relation": "Both"}
    music = {"key": ["F#", "minor"], "prompt_bpm": "The tempo of this song is Allegro.", "prompt_bt": ""}
    music |= {"prompt_key": ""}
    for i, u in enumerate(SPEECH[:6]):
        write_wav(tmp_path / f"video{i}.wav", u.clip.load(16_000), 16_000)
    rows = [avqa | {"id": i, "video_name": f"video{i}", "answer": i % 4} for i in range(6)]
    (tmp_path / "train_qa.json").write_text(json.dumps(rows))
    lines = [json.dumps(music | {"location": f"video{i}.wav"}) for i in range(6)]
    (tmp_path / "MusicBench_train.json").write_text("\n".join(lines))
    data = (f"{tmp_path}/train_qa.json:4", f"{tmp_path}/MusicBench_train.json:6x0.5")
    command = ["train", "mmau-grpo", "--tiny", "--data", *data, "--held-out", data[0], "--max-steps", "2"]
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    steps = [m for m in read_metrics(tmp_path / "run" / "metrics.jsonl") if m["phase"] == "grpo"]
    assert len(steps) == 2 and all("reward/accuracy" in m for m in steps)


def test_steps_follow_from_epochs_or_are_refused() -> None:
    config = RecipeConfig(epochs=2)
    assert config.with_steps_for(RLConfig(prompts_per_step=8), 100).steps == 25
    assert replace(config, max_steps=7).with_steps_for(SFTConfig(batch_size=10), 100).steps == 7
    # 3 batches an epoch, the last of 2 rows; sorted ones come in random order
    assert config.with_steps_for(SFTConfig(batch_size=4), 10).steps == 5
    assert config.with_steps_for(SFTConfig(batch_size=4, sort=True), 10).steps == 6

    with pytest.raises(ValueError, match=r"steps of this recipe follow from its epochs"):
        config.with_steps_for(RLConfig(steps=5), 100)


def test_supervised_turns() -> None:
    sample = LANGUAGES[0]
    assert supervised_turn(sample) == f"<answer>{sample.references[0]}</answer>"
    assert supervised_turn(sample, tags=False) == sample.references[0]
    assert supervised_turn(sample, thought="text").startswith("<think>")
    with pytest.raises(ValueError, match="no text in the field 'why'"):
        supervised_turn(sample, thought="why")
    with pytest.raises(ValueError, match="no reference to learn"):
        supervised_turn(replace(sample, references=()))


def test_ptx_rows_belong_to_a_phase_that_learns_from_them(tmp_path: Path) -> None:
    config, on = RecipeConfig(check_audio=False), RLConfig(ptx=PtxConfig(coef=0.1))
    with pytest.raises(ValueError, match=r"ptx.coef is set, but .*--ptx-data FILE"):
        ptx_examples(config, (), on)
    with pytest.raises(ValueError, match="--ptx-data: nothing learns from these rows"):
        ptx_examples(config, ("bundled",), RLConfig(), RLConfig())
    assert ptx_examples(config, (), RLConfig()) == []
    rows = [{"id": 1, "audio": SPEECH[0].clip.path, "text": "hello"}]
    (tmp_path / "asr.jsonl").write_text(json.dumps(rows[0]) + "\n")
    files = (str(manifest(tmp_path / "qa.jsonl", 2)), str(tmp_path / "asr.jsonl"))
    targets = [e.target for e in ptx_examples(config, files, RLConfig(), on)]
    assert targets == [*(f"<answer>{u.text}</answer>" for u in SPEECH[:2]), "hello"]


@pytest.mark.parametrize("kind", [WeightedSum, StandardisedSum])
def test_a_reward_file_is_one_more_part(tmp_path: Path, kind: Any) -> None:
    (tmp_path / "mine.py").write_text("def reward(rollout):\n    return 1.0\n")
    reward = kind.of(repetition=Repetition())
    assert with_user_reward(RewardOptions(), reward) is reward
    more = with_user_reward(RewardOptions(str(tmp_path / "mine.py"), 0.5), reward)
    assert type(more) is kind and [(t.name, t.weight) for t in more.terms] == [("repetition", 1.0), ("user", 0.5)]


@pytest.mark.parametrize(
    ("recipe", "phase"),
    [
        ("mmau_grpo", "grpo"),
        ("asr_grpo", "grpo"),
        ("ppo_audio_qa", "ppo"),
        ("simul_ppo", "stage2"),
        ("tts_grpo", "grpo"),
    ],
)
@pytest.mark.slow
def test_ptx_through_the_command_line(tmp_path: Path, recipe: str, phase: str) -> None:
    data, group = "bundled:en" if recipe == "tts_grpo" else "bundled", "stage2" if phase == "stage2" else "rl"
    options = ("--ptx-data", data, f"--{group}.ptx.coef", "0.5")
    command = ["train", recipe, "--tiny", *options, "--out", str(tmp_path / "run")]
    assert main(command) == 0
    *_, last = [m for m in read_metrics(tmp_path / "run" / "metrics.jsonl") if m["phase"] == phase]
    assert last["ptx/loss"] > 0


@pytest.mark.parametrize(("recipe", "words", "message"), [
    ("sound-sft", "--lora True", "model.lora: flows are trained whole; leave --lora out"),
    ("sound-grpo", "--lora True", "model.lora: flows are trained whole; leave --lora out"),
    ("sound-grpo", "--task enhance --tagger t", "--tagger, --parts, --weights: enhance is rewarded by --speech"),
    ("sound-grpo", "--task tts --weights clean 2", "--tagger, --parts, --weights: tts is rewarded by --speech"),
    ("sound-grpo", "--data ROWS", "--data: no row has audio, of which a new flow takes its codec and scales"),
    ("thought-grpo", "--control True --learn False", "--control: it goes on learning the rows' thoughts; give"),
])  # fmt: skip
def test_options_that_flows_cannot_follow_are_refused(
    recipe: str, words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(4 * '{"caption": "rain", "duration": 1}\n')
    options = words.replace("ROWS", str(tmp_path / "rows.jsonl")).split()
    assert main(["train", recipe, "--tiny", *options, "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_thoughts_of_rows_without_events_by_a_writer_of_another_type(tmp_path: Path) -> None:
    rows = [{"caption": u.text, "audio": str(u.clip.path), "thought": "x"} for u in SPEECH[:4]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--data", str(tmp_path / "rows.jsonl"), "--parts", "clean", "--model.dtype", "bfloat16"]
    assert main(["train", "thought-grpo", "--tiny", *words, "--out", str(tmp_path / "run")]) == 0
    assert "outside" not in json.loads((tmp_path / "run" / "eval.json").read_text())["after"]


@pytest.mark.slow
def test_a_reward_of_ones_own_for_interpretation(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(rollout):\n    return len(rollout.text) / 100\n")
    options = ("--max-steps", "1", "--reward-file", str(tmp_path / "mine.py"), "--reward-weight", "2")
    assert main(["train", "simul-ppo", "--tiny", *options, "--out", str(tmp_path / "run")]) == 0
    steps = [m for m in read_metrics(tmp_path / "run" / "metrics.jsonl") if m["phase"] in ("stage1", "stage2")]
    assert len(steps) == 2 and all("reward/user" in m for m in steps)
