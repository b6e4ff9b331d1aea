"""CTC through the text model's embeddings: its loss by enumeration, what it trains, what fits, and resuming."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from audiorl.cli import main
from audiorl.config import LoraConfig, ModelConfig, OptimConfig, SFTConfig
from audiorl.data.corpus import Utterance, bundled_speech
from audiorl.data.prompts import TRANSLATE
from audiorl.errors import Interrupted
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.examples import Example
from audiorl.recipes._loader import load_recipe
from audiorl.run.folder import Run
from audiorl.run.metrics_log import read_metrics
from audiorl.train.fit import Learner
from audiorl.train.sft import sft_loss
from corpora.models.ctc import (
    BLANK,
    SCALE,
    CTCConfig,
    CTCModel,
    CTCWorker,
    by_seconds,
    encode_all,
    fits,
    fitting,
    target_ids,
    token_errors,
    train_ctc,
)
from tests.conftest import Make, ask, make_omni

OPTIM = OptimConfig(lr=3e-3)


def transcripts(speech: Sequence[Utterance], count: int = 6) -> list[Example]:
    return [Example(ask(u.clip, name=u.id), u.text) for u in speech[:count]]


def collapsed(path: Sequence[int]) -> list[int]:
    return [k for k, _ in itertools.groupby(path) if k > 0]


def test_the_loss_sums_over_all_paths() -> None:
    """-log of the probability of every path that reads as the text, enumerated, per token."""
    policy = make_omni()
    model = CTCModel(policy, [5, 7, 9, 11])
    generator = torch.Generator().manual_seed(0)
    frames = [torch.randn(n, 64, generator=generator) * model.size / 8 for n in (4, 3)]
    targets = [torch.tensor([7, 7]), torch.tensor([11])]
    losses = model.losses(frames, targets, torch.tensor([5, 9, 9]))
    symbols = torch.tensor([5, 7, 9, 11])
    embeddings = policy.backbone.decoder(policy.model).embed_tokens.weight[symbols]
    table = torch.cat([model.blank[None], embeddings]).double() / model.size
    for loss, h, target in zip(losses, frames, targets, strict=True):
        logprobs = (SCALE * (h.double() / model.size) @ table.T).log_softmax(-1)
        wanted = [int((symbols == t).nonzero()) + 1 for t in target]
        paths = [p for p in itertools.product(range(5), repeat=len(h)) if collapsed(p) == wanted]
        total = torch.stack([logprobs[torch.arange(len(h)), torch.tensor(p)].sum() for p in paths]).logsumexp(0)
        assert float(loss.detach()) == pytest.approx(-float(total.detach()) / len(target), rel=1e-5)


def test_what_fits() -> None:
    assert fits([1, 2, 3], 3) and not fits([1, 2, 3], 2)
    assert fits([1, 1], 3) and not fits([1, 1], 2), "equal neighbours need a blank between them"


@pytest.mark.parametrize("audio", ["projector", "full"])
def test_it_learns_the_audio_side_alone(audio: str, make_policy: Make, speech: list[Utterance]) -> None:
    policy = make_policy(ModelConfig(audio=audio))  # type: ignore[arg-type]
    examples = fitting(policy, transcripts(speech))
    before = {name: p.detach().clone() for name, p in policy.parameters_by_name().items()}
    model = CTCModel(policy, [i for e in examples for i in target_ids(policy, e)])
    worker = CTCWorker(model, CTCConfig(steps=60, negatives=50), OPTIM, seed=0)
    losses = [worker.train(examples)["ctc/loss"] for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]
    changed = {name for name, p in policy.parameters_by_name().items() if not torch.equal(p, before[name])}
    trained = {name for name in model.trainable() if name != BLANK}
    assert changed and changed <= trained
    projector = {id(p) for m in policy.backbone.projector(policy.model) for p in m.parameters()}
    inside = {name for name, p in policy.parameters_by_name().items() if id(p) in projector}
    assert (changed == inside) == (audio == "projector")


def test_it_reads_what_it_has_learned(speech: list[Utterance]) -> None:
    policy = make_omni(ModelConfig(audio="full"))
    examples = fitting(policy, transcripts(speech, 2))
    model = CTCModel(policy, [i for e in examples for i in target_ids(policy, e)])
    worker = CTCWorker(model, CTCConfig(steps=1), OPTIM, seed=0)
    assert token_errors(model, examples)["ctc_token_errors"] > 0.5
    for _ in range(250):
        worker.train(examples)
    assert token_errors(model, examples) == {"ctc_token_errors": 0.0}
    assert model.read([examples[0].sample.audio[0]]) == [target_ids(policy, examples[0])]


def test_micro_batches_give_the_same_update(speech: list[Utterance]) -> None:
    metrics = []
    for most in (0.1, 1000.0):
        policy = make_omni(ModelConfig(audio="full"))
        examples = fitting(policy, transcripts(speech))
        model = CTCModel(policy, [i for e in examples for i in target_ids(policy, e)])
        worker = CTCWorker(model, CTCConfig(steps=1, micro_batch_seconds=most), OPTIM, seed=0)
        metrics.append(worker.train(examples))
    assert metrics[0]["ctc/loss"] == pytest.approx(metrics[1]["ctc/loss"], rel=1e-4)
    assert metrics[0]["grad_norm"] == pytest.approx(metrics[1]["grad_norm"], rel=1e-3)
    assert [len(part) for part in by_seconds(examples, 0.1)] == [1] * 6


def test_texts_that_no_path_fits(speech: list[Utterance], capsys: pytest.CaptureFixture[str]) -> None:
    policy = make_omni()
    good, *_ = transcripts(speech)
    long = replace(good, target=good.target * 50, sample=replace(good.sample, id="long"))
    with pytest.raises(ValueError, match=r"sample 'long': its text of .* fits no CTC path over .* audio frames"):
        fitting(policy, [good, long])
    assert fitting(policy, [long, good], "skip") == [good]
    assert "ctc: 1 of 2 transcripts left out (first: sample 'long'" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no transcript left"):
        fitting(policy, [long], "skip")


def test_what_the_second_phase_learns_of_a_row(speech: list[Utterance]) -> None:
    recipe = load_recipe("align_speech")
    english, spanish = (replace(ask(u.clip, name=u.id), references=(u.text,)) for u in speech[:2])
    rows = [
        replace(english, metadata={"language": "en", "translation": "the same"}),
        replace(spanish, metadata={"language": "es", "translation": "hello"}),
        replace(spanish, metadata={"language": "es", "translation": ""}),
    ]
    learned = [[(e.sample.id, e.target) for e in recipe.spoken_examples(row)] for row in rows]
    said = [(s.id, s.references[0]) for s in (english, spanish)]
    assert learned == [said[:1], [said[1], (f"{spanish.id}/en", "hello")], said[1:]]
    _, translation = recipe.spoken_examples(rows[1])
    assert translation.sample.audio == spanish.audio and TRANSLATE in translation.sample.messages[0].content


def run_ctc(folder: Path, examples: list[Example], steps: int = 4, stop_at: int | None = None) -> AudioPolicy:
    policy = make_omni(ModelConfig(audio="full"))
    with Run.open(folder) if folder.exists() else Run.create(folder, "ctc", [], {}) as run:
        if stop_at is not None:
            log = run.log

            def interrupt(phase: str, step: int, metrics: object) -> None:
                log(phase, step, metrics)  # type: ignore[arg-type]
                if step == stop_at:
                    os.kill(os.getpid(), signal.SIGINT)

            run.log = interrupt  # type: ignore[method-assign, assignment]
        config = CTCConfig(steps=steps, batch_size=2, save_every=100, eval_every=2)
        train_ctc(policy, examples, run, config=config, optim=OPTIM, seed=3, held_out=examples[:2])
    return policy


def test_an_interrupted_run_goes_on_with_the_same_bits(speech: list[Utterance], tmp_path: Path) -> None:
    examples = fitting(make_omni(), transcripts(speech))
    whole = run_ctc(tmp_path / "whole", examples)
    with pytest.raises(Interrupted, match="stopped after ctc step 2"):
        run_ctc(tmp_path / "parts", examples, stop_at=2)
    resumed = run_ctc(tmp_path / "parts", examples)
    finished = run_ctc(tmp_path / "parts", examples)  # a finished phase is loaded, not trained
    for name, p in whole.parameters_by_name().items():
        assert torch.equal(p, resumed.parameters_by_name()[name]), name
        assert torch.equal(p, finished.parameters_by_name()[name]), name


def test_a_frozen_encoder_runs_once(speech: list[Utterance], tmp_path: Path) -> None:
    policy = make_omni(ModelConfig(audio="projector"))
    clips = [u.clip for u in speech[:5]]
    singles = [policy.audio.encoder_output(clip) for clip in clips]
    policy.audio.cache.clear()
    encode_all(policy, clips, Run.create(tmp_path / "run", "ctc", [], {}), "ctc", batch=2)
    for clip, expected in zip(clips, singles, strict=True):
        cached = policy.audio.cache.get(clip.key)
        assert cached is not None
        torch.testing.assert_close(cached, expected, atol=1e-5, rtol=0)


def test_a_second_phase_starts_from_the_first(speech: list[Utterance], tmp_path: Path) -> None:
    policy, other = make_omni(ModelConfig(audio="projector")), make_omni(ModelConfig(audio="full"), seed=1)
    examples = fitting(policy, transcripts(speech))
    run = Run.create(tmp_path / "run", "ctc", [], {})
    config = CTCConfig(steps=2, batch_size=2)
    first = train_ctc(policy, examples, run, config=config, optim=OPTIM)
    start = {name: w.clone() for name, w in first.weights().items()}
    still = OptimConfig(lr=1e-30)
    second = train_ctc(other, examples, run, config=config, optim=still, phase="encoder", start=first)
    assert start.keys() < second.weights().keys()
    for name, weight in start.items():
        torch.testing.assert_close(second.weights()[name], weight)


def test_a_trained_encoder_under_autocast(speech: list[Utterance]) -> None:
    """The features are computed in float32; the pass was refused with "Got unsupported ScalarType BFloat16"."""
    policy = make_omni(ModelConfig(audio="full", autocast=True))
    metrics = Learner(sft_loss, policy, SFTConfig(), OPTIM).train(transcripts(speech, 2))
    assert metrics["sft/loss"] > 0


def test_align_speech(tmp_path: Path) -> None:
    """Transcripts, translations and questions; the adapters' base is the model after the first phase."""
    speech = bundled_speech(("en", "es"), min_seconds=1.0, max_seconds=1.6)[::12]
    rows = [
        {"id": u.id, "audio": u.clip.path, "text": u.text, "language": u.language, "speaker": u.language}
        | ({"translation": "hello"} if u.language == "es" else {})
        for u in speech
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = tmp_path / "run"
    options = ("--lora", "--model.lora.rank", "4", "--data", str(data), "--out", str(run))
    assert main(["train", "align_speech", "--tiny", *options]) == 0
    assert set(json.loads((run / "eval.json").read_text())) == {"before", "after"}
    ctc = [m for m in read_metrics(run / "metrics.jsonl") if m["phase"] == "ctc"]
    assert [m["step"] for m in ctc] == [1, 2, 3] and "eval/ctc_token_errors" in ctc[1]
    assert [m["step"] for m in read_metrics(run / "metrics.jsonl") if m["phase"] == "encoder"] == [1, 2]
    (last,) = sorted((run / "checkpoints" / "sft").glob("step_*"))[-1:]
    policy = load_policy(last)
    aligned = load_policy(run / "checkpoints" / "ctc" / "aligned")
    assert policy.adapter is not None and policy.has_fresh_adapter() is False
    ranks = {p.shape[0] for name, p in policy.trainable().items() if ".lora_A." in name}
    assert ranks == {4} and policy.config.lora.rank == 4
    torch.manual_seed(0)
    fresh = load_policy(run / "checkpoints" / "ctc" / "aligned", ModelConfig(lora=LoraConfig(rank=4))).trainable()
    for name in [n for n in fresh if ".lora_A." in n]:  # two small steps away from where the seed put them
        torch.testing.assert_close(policy.trainable()[name], fresh[name], atol=2e-3, rtol=0)
    projector, same = (p.backbone.projector(p.model)[0].weight for p in (policy, aligned))
    assert torch.equal(projector, same)
    assert main(["export", str(last), "--merge", "--out", str(tmp_path / "merged")]) == 0
    assert load_policy(tmp_path / "merged").adapter is None
