"""What is saved and exported, as other software reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoTokenizer, Qwen2_5OmniForConditionalGeneration

from audiorl.audio import AudioClip
from audiorl.config import LoraConfig, ModelConfig, SamplingConfig
from audiorl.errors import Interrupted
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.export import export, model_card
from audiorl.models.weights import BASE_KEY
from audiorl.rollout.hf import HFEngine
from audiorl.types import Message, Rollout, Sample
from tests.conftest import Make, make_omni, make_qwen2_audio, make_qwen3_omni, make_text, readable
from tests.support.released import save_released
from tests.support.rollouts import ids, logprobs, requests
from tests.support.vllm_engines import shake


def answers(policy: AudioPolicy, samples: list[Sample]) -> list[Rollout]:
    engine = HFEngine(policy, SamplingConfig(temperature=0, max_new_tokens=8))
    return engine.generate(requests(readable(policy, samples), 1))


def assert_same_answers(one: AudioPolicy, other: AudioPolicy, samples: list[Sample]) -> None:
    mine, theirs = answers(one, samples), answers(other, samples)
    assert ids(mine) == ids(theirs)
    torch.testing.assert_close(logprobs(mine), logprobs(theirs), atol=1e-5, rtol=0)


def adapted(make: Make, folder: Path) -> AudioPolicy:
    """A policy whose adapter changes what it writes, saved in folder/adapter; its base is in folder/base."""
    make().save(folder / "base")
    policy = load_policy(folder / "base", ModelConfig(lora=LoraConfig(rank=4), audio="projector"))
    shake(policy, 0, 0.1)
    policy.save(folder / "adapter")
    return policy


def test_a_merged_adapter_answers_as_the_adapter(make_any: Make, samples: list[Sample], tmp_path: Path) -> None:
    policy = adapted(make_any, tmp_path)
    base = load_policy(tmp_path / "base")
    assert ids(answers(policy, samples)) != ids(answers(base, samples))
    merged = load_policy(export(tmp_path / "adapter", tmp_path / "merged", merge=True))
    kept = load_policy(export(tmp_path / "adapter", tmp_path / "kept"))
    assert merged.adapter is None and kept.adapter is not None
    assert_same_answers(merged, policy, samples)
    assert_same_answers(kept, policy, samples)
    assert "low-rank adapter" in (tmp_path / "kept" / "README.md").read_text()
    assert "- Base model: base\n" in (tmp_path / "kept" / "README.md").read_text()


CHATS = (
    (("user", "a", "Hello."),),
    (("system", "Be brief."), ("user", "a", "Hello."), ("assistant", "Yes."), ("user", "One", "a", "two", "a")),
)


@pytest.mark.parametrize("make", [make_omni, make_qwen2_audio, make_qwen3_omni, make_text])
@pytest.mark.parametrize("turns", CHATS)
def test_the_saved_chat_template_is_how_the_policy_writes_chats(make: Make, turns: Any, tmp_path: Path) -> None:
    policy = make()
    hears = policy.backbone.audio_token is not None
    turns = [(role, *(p for p in parts if hears or p != "a")) for role, *parts in turns]
    clip = AudioClip(path="x.wav")
    messages = [Message(role, tuple(clip if p == "a" else p for p in parts)) for role, *parts in turns]
    pieces = policy.backbone.chat(messages)
    expected = "".join(p if isinstance(p, str) else str(policy.backbone.audio_token) for p in pieces)
    policy.save(tmp_path)
    chat = [
        {"role": role, "content": [{"type": "audio"} if p == "a" else {"type": "text", "text": p} for p in parts]}
        for role, *parts in turns
    ]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == expected
    again = load_policy(tmp_path).backbone.chat(messages)
    assert "".join(p if isinstance(p, str) else str(policy.backbone.audio_token) for p in again) == expected


def test_what_a_released_model_has_for_its_processor_is_saved_again(tmp_path: Path) -> None:
    """Also through a checkpoint, when the released folder is gone."""
    make_omni().save(tmp_path / "released")
    entries = json.loads((tmp_path / "released" / "preprocessor_config.json").read_text())
    (tmp_path / "released" / "preprocessor_config.json").write_text(json.dumps({**entries, "max_pixels": 12345}))
    (tmp_path / "released" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    load_policy(tmp_path / "released").save(tmp_path / "first")
    shutil.rmtree(tmp_path / "released")
    load_policy(tmp_path / "first").save(tmp_path / "second")
    assert entries["processor_class"] == "Qwen2_5OmniProcessor"
    assert json.loads((tmp_path / "second" / "preprocessor_config.json").read_text())["max_pixels"] == 12345
    assert (tmp_path / "second" / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


def trained_thinker(folder: Path) -> tuple[Qwen2_5OmniForConditionalGeneration, AudioPolicy]:
    """A released Omni model in folder/released, and its thinker with other weights as a checkpoint in folder/step."""
    released = save_released(make_omni(), folder / "released")
    policy = load_policy(folder / "released")
    with torch.no_grad():
        for p in policy.trainable().values():
            p.mul_(1.5)
    policy.save(folder / "first")
    load_policy(folder / "first").save(folder / "step")  # as after a resume
    return released, policy


def test_a_released_omni_model_comes_back_whole(tmp_path: Path) -> None:
    released, policy = trained_thinker(tmp_path)
    out = export(tmp_path / "step", tmp_path / "out")
    whole = Qwen2_5OmniForConditionalGeneration.from_pretrained(out, dtype=torch.float32)
    before, after = released.state_dict(), whole.state_dict()
    assert before.keys() == after.keys() and any(n.startswith("talker.") for n in after)
    trained = {f"thinker.{n}" for n, p in policy.model.named_parameters() if p.requires_grad}
    for name, weight in after.items():
        if name in trained:
            assert torch.equal(weight, policy.model.state_dict()[name.removeprefix("thinker.")])
        else:
            assert torch.equal(weight, before[name]), name
    config = json.loads((out / "config.json").read_text())
    assert BASE_KEY not in config and config["talker_config"]["vocab_size"] == 64
    assert str(tmp_path) not in (out / "README.md").read_text()


def test_without_the_released_model_the_loss_of_the_talker_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, policy = trained_thinker(tmp_path)
    shutil.rmtree(tmp_path / "released")
    out = export(tmp_path / "step", tmp_path / "out")
    assert "exported without its talker" in caplog.text and "The talker is left out" in (out / "README.md").read_text()
    config = json.loads((out / "config.json").read_text())
    assert config["enable_audio_output"] is False and BASE_KEY not in config
    thinker = load_policy(out).model.state_dict()
    assert all(torch.equal(w, thinker[n]) for n, w in policy.model.state_dict().items())


def recorded_run(run: Path, config: dict[str, Any], results: dict[str, Any]) -> Path:
    """A checkpoint in a run folder with this config and this eval.json."""
    checkpoint = run / "checkpoints" / "grpo" / "step_000007"
    make_text().save(checkpoint)
    (run / "state.json").write_text(
        json.dumps({"checkpoints": {"sft": "checkpoints/sft/step_000002", "grpo": "checkpoints/grpo/step_000009"}})
    )
    recorded = {"recipe": "/home/me/mmau_grpo.py", "argv": [], "config": config, "versions": {"torch": "2.13"}}
    (run / "config.json").write_text(json.dumps(recorded))
    (run / "eval.json").write_text(json.dumps(results))
    return checkpoint


def card_of(export_folder: Path) -> str:
    return (export_folder / "README.md").read_text()


def test_the_model_card_holds_what_the_run_recorded(tmp_path: Path) -> None:
    config = {"path": "Org/Model-3B", "rl": {"lr": 0.001, "steps": 9}, "data": ["/somewhere/private/train.jsonl"]}
    results = {
        "before": {"accuracy": 0.25, "n": 8, "low": 0.125, "high": 0.5, "by_task": {"a": 1}},
        "after": {
            "accuracy": 0.5, "n": 8, "low": 0.25, "high": 0.75, "wer": 0.125, "dnsmos": 3.0,
            "outside": {"dnsmos": [2.5, 3.5]}, "changes": {"accuracy": [0.25, 0.125, 0.375]},
        },
        "unseen_after": {"accuracy": 0.375, "n": 4, "low": 0.0, "high": 0.75},
    }  # fmt: skip
    checkpoint = recorded_run(tmp_path / "run", config, results)
    card = card_of(export(checkpoint, tmp_path / "out"))
    data = ModelCard(card).data
    assert data.library_name == "transformers" and data.base_model == "Org/Model-3B"
    assert data.pipeline_tag == "text-generation" and data.eval_results is None, "measured was a later step"
    state = (checkpoint.parents[2] / "state.json").read_text().replace("step_000009", "step_000007")
    (tmp_path / "run" / "state.json").write_text(state)
    results = model_card(checkpoint, False).data.eval_results
    assert [(r.dataset_name, r.metric_type, r.metric_value) for r in results] == [
        *(("held out", name, value) for name, value in (("accuracy", 0.5), ("wer", 0.125), ("dnsmos", 3.0))),
        ("unseen", "accuracy", 0.375),
    ]
    assert "- Recipe: mmau_grpo.py, phase grpo, step 000007\n" in card and "torch 2.13" in card
    assert "| before | accuracy | 0.25 | (0.125 to 0.5) |  | 8 |\n" in card
    assert "| after | accuracy | 0.5 | (0.25 to 0.75) | +0.25 (0.125 to 0.375) | 8 |\n" in card
    assert "| after | wer | 0.125 |  |  | 8 |\n" in card  # the interval of the entry is that of its first metric
    assert "| after | dnsmos | 3 | (2.5 to 3.5) |  | 8 |\n" in card
    assert "| unseen_after | accuracy | 0.375 | (0 to 0.75) |  | 4 |\n" in card
    assert "| train.jsonl | training | not stated (the file is not there any more) |\n" in card
    assert "with the policy of step 000009" in card and "the run also trained in sft" in card
    assert "there is no `control`" in card
    assert "Unseen speakers:" not in card and "there is nothing to compare with" not in card
    assert "licence" in card and '"train.jsonl"' in card and "private" not in card
    # The base is what the run began with, not a phase of it.
    aligned = str(tmp_path / "run" / "checkpoints" / "ctc" / "aligned")
    assert "- Base model: Org/Model-3B\n" in model_card(checkpoint, adapter=False, base=aligned).content
    assert "- Base model: other\n" in model_card(checkpoint, adapter=False, base=str(tmp_path / "other")).content


def test_the_model_card_says_what_is_not_there(tmp_path: Path) -> None:
    checkpoint = recorded_run(tmp_path / "run", {"data": []}, {"before": {"accuracy": 0.25, "n": 8}})
    card = card_of(export(checkpoint, tmp_path / "out"))
    for missing in ("no evaluation called `after`", "Unseen speakers:", "no `control`", "Intervals of before.", "bias"):
        assert missing in card
    assert "not recorded" in card
    make_text().save(tmp_path / "elsewhere")
    assert "No held-out result was recorded" in card_of(export(tmp_path / "elsewhere", tmp_path / "other"))


def test_the_model_card_counts_the_licences_of_rows(tmp_path: Path) -> None:
    rows = [{"id": str(i)} | ({"licence": "CC0-1.0"} if i < 3 else {}) for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rows.json").write_text(json.dumps([{"id": "a", "license": "MIT"}]))
    (tmp_path / "none.json").write_text(json.dumps([{"id": "a"}]))
    (tmp_path / "broken.jsonl").write_text("{")
    names = ("rows.jsonl:4", "none.json", "broken.jsonl")
    config = {"data": [f"{tmp_path}/{name}" for name in names], "unseen": [f"{tmp_path}/rows.json"]}
    config["held_out"] = ["bundled-french", "hf://org/set:test"]
    card = card_of(export(recorded_run(tmp_path / "run", config, {}), tmp_path / "out"))
    table = [line for line in card.splitlines() if line.startswith("| ") and line.count("|") == 4]
    assert table[:1] == ["| Set | Used for | Licence |"] and set(table[1:]) == {
        "| rows.jsonl:4 | training | CC0-1.0 (rows: 3), not stated (rows: 2) |",
        "| none.json | training | not stated |",
        "| broken.jsonl | training | not stated (the file cannot be read) |",
        "| bundled-french | held out | CC BY-SA 3.0 |",
        "| hf://org/set:test | held out | not stated |",
        "| rows.json | unseen speakers | MIT (rows: 1) |",
    }


def test_a_folder_is_uploaded_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    class Hub:
        def create_repo(self, repo_id: str, **options: Any) -> None:
            calls.append(("create", {"repo_id": repo_id, **options}))

        def upload_folder(self, **options: Any) -> None:
            assert (Path(options["folder_path"]) / "README.md").is_file()
            calls.append(("upload", options))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    make_text().save(tmp_path / "step")
    export(tmp_path / "step", tmp_path / "one")
    assert not calls
    export(tmp_path / "step", tmp_path / "two", push="me/model")
    assert [name for name, _ in calls] == ["create", "upload"]
    assert calls[0][1] == {"repo_id": "me/model", "private": True, "exist_ok": True}
    assert calls[1][1]["repo_id"] == "me/model" and calls[1][1]["folder_path"] == str(tmp_path / "two")
    for error, raised in ((httpx.ReadTimeout("no answer"), ValueError), (KeyboardInterrupt(), Interrupted)):
        out = tmp_path / type(error).__name__
        monkeypatch.setattr(Hub, "upload_folder", Mock(side_effect=error))
        with pytest.raises(raised, match=rf"not uploaded.*; written to {out}; go on with: hf upload me/model {out}"):
            export(tmp_path / "step", out, push="me/model")
        assert (out / "README.md").is_file()
        monkeypatch.setattr(Hub, "create_repo", Mock(side_effect=error))
        with pytest.raises(raised, match=r"not uploaded.*; nothing is left here"):
            export(tmp_path / "step", tmp_path / "none", push="me/model")
        monkeypatch.setattr(Hub, "create_repo", Mock())
    assert not (tmp_path / "none").exists()


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    make_text().save(tmp_path / "step")
    with pytest.raises(ValueError, match="nothing: no checkpoint there"):
        export(tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(ValueError, match="step: holds a whole model, there is no adapter to merge"):
        export(tmp_path / "step", tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="step: exists already"):
        export(tmp_path / "step", tmp_path / "step")
