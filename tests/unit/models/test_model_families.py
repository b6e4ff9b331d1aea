"""The conformance suite: every family of `tests/support/families.py`, by its real class, saved and loaded.

A check is a test with the argument `family`; its docstring is what the page of models says about it.
"""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from safetensors.torch import load_file
from transformers import AutoProcessor

from audiorl.algos.experience import Experience
from audiorl.config import LoraConfig, ModelConfig, SamplingConfig
from audiorl.data.prompts import asr_prompt
from audiorl.data.schema import FieldError
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.families import fun_asr, granite
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.types import Message, Sample
from tests.support.families import FAMILIES, arguments, as_released, asked, clip_of, folder_of, noise, policy_of
from tests.support.packing import assert_same, experience, logprobs, with_gradients
from tests.support.pictures import noisy_pictures
from tests.support.rollouts import forced
from tests.support.rollouts import logprobs as logprobs_of

ROOT = Path(__file__).resolve().parents[3]
SECONDS = (0.4, 2.7321)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", list(FAMILIES))


@pytest.fixture(autouse=True)
def _made(request: pytest.FixtureRequest) -> None:
    family = request.node.callspec.params.get("family") if hasattr(request.node, "callspec") else None
    check = request.node.originalname.removeprefix("test_")
    if family and (reason := FAMILIES[family].why_not(check)):
        pytest.skip(reason)
    if family and check == "pictures" and (need := FAMILIES[family].eyes_need):
        pytest.importorskip(need)


def batch_of(family: str, policy: AudioPolicy, wavs: list[np.ndarray]) -> list[Experience]:
    """Two answers to a question about each recording."""
    return [
        experience(policy, asked(family, policy, wav, str(i)), length, seed=10 * i + length, group=str(i))
        for i, wav in enumerate(wavs)
        for length in (6, 3)
    ]


def stock(family: str, policy: AudioPolicy, batch: list[Experience], stock_model: Any = None) -> list[torch.Tensor]:
    """Log-probs of transformers' forward, one sample at a time, on its processor's features."""
    out = []
    for e in batch:
        given, answer = arguments(family, policy, e.ids, e.audio[0], e.loss_mask, e.images), e.ids[e.prompt_length :]
        with as_released(policy) as model:
            logits = (stock_model or model)(**given).logits[0]
        # transformers' own class of Granite Speech leaves the divisor out, GraniteForCausalLM and vLLM do not.
        logits = logits / policy.backbone.logit_divisor(policy.model)
        out.append(logits[-len(answer) - 1 : -1].log_softmax(-1).gather(-1, answer[:, None])[:, 0])
    return out


def test_forward(family: str) -> None:
    """Log-probs and gradients of packed rows, with shared prompts and without, are those of transformers' forward."""
    policy = load_policy(folder_of(family), ModelConfig(audio=FAMILIES[family].compared))
    batch = batch_of(family, policy, [noise(policy, s, i) for i, s in enumerate(SECONDS)])
    expected = with_gradients(policy, stock(family, policy, batch))
    for share in (False, True):
        assert_same(with_gradients(policy, logprobs(policy, batch, share)), expected)


def test_audio(family: str) -> None:
    """A changed recording moves the log-probs of its own prompt, and of no other."""
    policy = policy_of(family)
    one, two, other = (noise(policy, 0.9, i) for i in range(3))

    def moved(wavs: list[np.ndarray]) -> list[bool]:
        with torch.no_grad():
            before, after = (logprobs(policy, batch_of(family, policy, w)) for w in ([one, two], wavs))
        return [float((a - b).abs().max()) > 1e-5 for a, b in zip(before, after, strict=True)]

    assert moved([one, two]) == [False] * 4
    assert moved([one, other]) == [False, False, True, True]
    assert moved([two, one]) == [True] * 4


def test_engine(family: str) -> None:
    """The engine's log-probs are the trainer's, and its greedy answers those of `generate`."""
    policy = policy_of(family)
    samples = [asked(family, policy, noise(policy, s, i), str(i)) for i, s in enumerate(SECONDS)]
    engine = HFEngine(policy, SamplingConfig(max_new_tokens=6))
    rollouts = engine.generate([Request(s, 2, seed=1) for s in samples])
    batch = [
        Experience(
            torch.cat([policy.prompt(r.sample).ids, ids := r.segments[0].ids]),
            torch.arange(len(policy.prompt(r.sample).ids) + len(ids)) >= len(policy.prompt(r.sample).ids),
            len(policy.prompt(r.sample).ids),
            r.sample.audio,
            r.sample.id,
        )
        for r in rollouts
    ]
    with torch.no_grad():
        for found, r in zip(logprobs(policy, batch), rollouts, strict=True):
            torch.testing.assert_close(r.segments[0].logprobs, found, atol=2e-5, rtol=0)
        for r in engine.generate([Request(s, 1, greedy=True) for s in samples[:2]]):
            written = r.segments[0].ids
            given = arguments(family, policy, policy.prompt(r.sample).ids, r.sample.audio[0])
            options = dict(do_sample=False, max_new_tokens=6, eos_token_id=list(policy.stop_ids), pad_token_id=0)
            with as_released(policy) as model:
                assert model.generate(**given, **options)[0, -len(written) :].tolist() == written.tolist()


def test_tokens(family: str) -> None:
    """Clips of 90 lengths have as many audio tokens as the processor writes, and the encoder as many rows."""
    policy, case = policy_of(family), FAMILIES[family]
    rate = policy.extractor.sampling_rate
    generator = np.random.default_rng(0)
    lengths = [*range(rate // 2 - 161, rate // 2 + 162, 23), *generator.integers(rate // 15, 3 * rate, 74), rate]
    assert len(lengths) == 90
    for i, samples in enumerate(map(int, lengths)):
        wav = np.zeros(samples, np.float32)
        if case.tokens is None:
            processor = policy.backbone.processor  # type: ignore[attr-defined]
            ids = processor(text=[policy.backbone.audio_token], audio=[wav], audio_kwargs={"sampling_rate": rate})
            expected = int((ids["input_ids"] == policy.audio_token_id).sum())
        else:
            expected = case.tokens(policy, samples)
        assert policy.audio.expected_tokens(clip_of(wav, policy)) == expected, samples
        if i % 15 == 0:
            assert len(policy.audio.encoder_output(clip_of(wav, policy))) == expected, samples


def test_template(family: str) -> None:
    """Prompts are token for token those of `apply_chat_template` of the saved folder's processor; Voxtral's those of
    Mistral's tokenizer."""
    policy, case = policy_of(family), FAMILIES[family]
    sample = asked(family, policy, noise(policy, 0.7))
    turns = [*([] if case.written else [Message("system", ("Names: Ada.",))]), *sample.messages]
    turns += [Message("assistant", ("Yes.",)), Message("user", ("Why?",))] if case.request else []
    found = policy.prompt(Sample("a", tuple(turns))).ids.tolist()
    if case.written is not None:
        assert found == case.written(policy, turns)
        return
    conversation = [
        {
            "role": m.role,
            "content": [
                {"type": "text", "text": c} if isinstance(c, str) else {"type": "audio", "audio": np.asarray(c.array)}
                for c in m.content
            ],
        }
        for m in turns
    ]
    processor = AutoProcessor.from_pretrained(folder_of(family))
    expected = processor.apply_chat_template(
        conversation, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    assert found == expected["input_ids"][0].tolist()


@pytest.mark.parametrize(("audio", "encoder", "projector"), [("frozen", 0, 0), ("projector", 0, 1), ("full", 1, 1)])
def test_training(family: str, audio: Any, encoder: int, projector: int) -> None:
    """Gradients reach what `model.audio` says: nothing of the audio side, the projector, or the encoder too."""
    policy = load_policy(folder_of(family), ModelConfig(audio=audio))
    logprobs(policy, batch_of(family, policy, [noise(policy, 0.5)]))[0].sum().backward()
    side = {id(p) for m in policy.backbone.projector(policy.model) for p in m.parameters()}

    def reached(parameters: list[torch.nn.Parameter]) -> int:
        return int(any(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in parameters))

    of_encoder = [p for p in policy.backbone.audio_encoder(policy.model).parameters() if id(p) not in side]
    assert reached(of_encoder) == encoder
    assert reached([p for p in policy.model.parameters() if id(p) in side]) == (projector if side else 0)


def test_adapter(family: str, tmp_path: Path) -> None:
    """A trained adapter is saved and loaded, and merged, with the same log-probs; so is the whole model."""
    policy = load_policy(folder_of(family), ModelConfig(lora=LoraConfig(rank=2, alpha=8), audio="projector"))
    batch = batch_of(family, policy, [noise(policy, 0.5)])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        before = torch.cat(logprobs(policy, batch))
        for p in policy.trainable().values():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
        policy.weights_changed()
        expected = torch.cat(logprobs(policy, batch))
        assert float((expected - before).abs().max()) > 1e-3
        policy.save(tmp_path / "adapter")
        (tmp_path / "adapter" / "other.safetensors").unlink(missing_ok=True)
        policy.adapter.merge_and_unload()
        policy.adapter = None
        policy.save(tmp_path / "merged")
        merged = load_policy(tmp_path / "merged")
        torch.testing.assert_close(torch.cat(logprobs(merged, batch)), expected, atol=2e-5, rtol=0)


def test_files(family: str) -> None:
    """transformers and its processor read the saved folder; weights have the names that released checkpoints have."""
    policy = policy_of(family)
    model, info = type(policy.model).from_pretrained(folder_of(family), output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, p in model.state_dict().items():
        assert torch.equal(p, policy.model.state_dict()[name]), name
    names = load_file(folder_of(family) / "model.safetensors").keys()
    assert not any("model.model." in name.replace("language_model.model.", "", 1) for name in names)


def test_pictures(family: str, tmp_path: Path) -> None:
    """Rows with pictures and without, in one pack and in the engine, have the log-probs of transformers' forward."""
    policy, one, other = policy_of(family), *noisy_pictures(tmp_path)
    clips = [clip_of(noise(policy, s, i), policy) for i, s in enumerate((0.5, 0.9, 0.7))]
    contents = [(one, clips[0], "What?"), (clips[1], "Who?"), ("See", other, clips[2], "and", one, "Why?")]
    samples = [Sample(str(i), (Message("user", c),)) for i, c in enumerate(contents)]
    model = type(policy.model).from_pretrained(folder_of(family))
    for name, p in model.named_parameters():
        p.requires_grad_(policy.backbone.weight_name(name) in policy.trainable())
    batch = [
        experience(policy, s, length, seed=i + length, group=s.id).replace(images=s.images)
        for i, s in enumerate(samples)
        for length in (6, 3)
    ]
    answers = stock(family, policy, batch, model)
    sum((i + 1) * lp.sum() for i, lp in enumerate(answers)).backward()  # type: ignore[union-attr]
    expected = {policy.backbone.weight_name(n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    for share in (False, True):
        found, gradients = with_gradients(policy, logprobs(policy, batch, share))
        torch.testing.assert_close(found, torch.cat(answers).detach(), atol=1e-5, rtol=0)
        for name, gradient in gradients.items():  # sums over hundreds of tokens of pictures round more
            largest = max(float(expected[name].abs().max()), 1.0)
            torch.testing.assert_close(gradient / largest, expected[name] / largest, atol=1e-4, rtol=0, msg=name)
    engine = HFEngine(policy, SamplingConfig(max_new_tokens=6))
    rollouts = engine.generate([Request(s, n, seed=1) for n, s in enumerate(samples, 1)])
    torch.testing.assert_close(forced(policy, rollouts), logprobs_of(rollouts), atol=2e-5, rtol=0)
    assert {r.images for r in rollouts} == {s.images for s in samples}
    for r in engine.generate([Request(s, 1, greedy=True) for s in samples]):
        (segment,) = r.segments
        given = arguments(family, policy, segment.prompt_ids, segment.audio[0], pictures=segment.images)
        options = dict(do_sample=False, max_new_tokens=6, eos_token_id=list(policy.stop_ids), pad_token_id=0)
        answer = model.generate(**given, **options)
        assert answer[0, len(segment.prompt_ids) :].tolist() == segment.ids.tolist()


# -- families of one's own, and what cannot be read --------------------------------------------------------------------

OWN = '''
from audiorl.models.families.generic import AudioLLM


class Mine(AudioLLM):
    """Says where its encoder is."""

    audio_encoder_at = "model.audio_tower"


class Wrong(AudioLLM):
    audio_encoder_at = "model.ears"


class Other:
    pass
'''


def copied(family: str, folder: Path, **changes: Any) -> Path:
    """The family's checkpoint with other values in config.json; `preprocessor`: in preprocessor_config.json."""
    shutil.copytree(folder_of(family), folder)
    for name, values in (("preprocessor", changes.pop("preprocessor", {})), ("", changes)):
        file = folder / (f"{name}_config.json" if name else "config.json")
        content = json.loads(file.read_text()) | values
        file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
        if name:  # transformers reads the one in the other
            whole = json.loads((folder / "processor_config.json").read_text())
            whole.pop("feature_extractor", None)
            (folder / "processor_config.json").write_text(json.dumps(whole))
    return folder


def test_a_family_that_nobody_named(tmp_path: Path) -> None:
    """With the common shape it needs no class, nor with one of the user's own; otherwise the missing fact is named."""
    policy = policy_of("glmasr")
    batch = batch_of("glmasr", policy, [noise(policy, 0.5)])
    with torch.no_grad():
        expected = torch.cat(logprobs(policy, batch))
        file = tmp_path / "mine.py"
        file.write_text(OWN)
        for given in ("auto", f"{file}:Mine"):
            found = load_policy(folder_of("glmasr"), ModelConfig(family=given))
            assert torch.equal(torch.cat(logprobs(found, batch)), expected)
    facts = (
        r"GlmAsrForConditionalGeneration has no model.ears \(its parts: .*audio_tower.*\); give audio_encoder_at in a"
    )
    for given, said in (
        (f"{file}:Wrong", facts),
        (f"{file}:Other", "Other is no class derived from"),
        (f"{file}:None", "defines no module-level name"),
        ("granite", "give auto, or FILE.py:NAME"),
    ):
        with pytest.raises(ValueError, match=said):
            load_policy(folder_of("glmasr"), ModelConfig(family=given))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(model_type="bert", architectures=["BertModel"]), "has no audio LLM of model_type 'bert'.*--model.family"),
        (dict(model_type="voxtral_realtime"), "at every position of the text"),
        (dict(model_type="nobody", auto_map={"AutoConfig": "evil.Config"}), "runs no code of a checkpoint"),
        (dict(preprocessor=dict(sampling_rate=8000)), "features of 8000 Hz"),
        (dict(preprocessor=dict(feature_size=128)), "128 mel bins and the audio encoder takes 80"),
    ],
)
def test_checkpoints_that_cannot_be_read(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        load_policy(copied("audioflamingo3", tmp_path / "model", **changes))


def test_the_audio_token_is_missing(tmp_path: Path) -> None:
    folder = copied("audioflamingo3", tmp_path / "model")
    processor = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps(processor | {"audio_token": "<nothing>"}))
    with pytest.raises(ValueError, match=r"no token '<nothing>' in the tokenizer.*give audio_token"):
        load_policy(folder)


def test_prompts_that_a_family_cannot_write(tmp_path: Path) -> None:
    folder = copied("audioflamingo3", tmp_path / "flamingo")
    processor = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps(processor | {"max_audio_len": 5}))
    policy = load_policy(folder)  # of which two whole windows of 2 s are read
    assert policy.prompt(asked("audioflamingo3", policy, noise(policy, 4.0)))
    with pytest.raises(
        ValueError, match=r"audio of 4\.2 s is longer than the 4 s that audioflamingo3 encodes; cut the"
    ):
        policy.prompt(asked("audioflamingo3", policy, noise(policy, 4.2)))
    policy = policy_of("qwen3_asr")
    clip = clip_of(noise(policy, 0.5), policy)
    asked_for = policy.prompt(Sample("a", asr_prompt(clip, "en")))
    assert policy.tokenizer.decode(asked_for.ids).endswith("<|im_start|>assistant\nlanguage English<asr_text>")
    assert "Transcribe" not in policy.tokenizer.decode(asked_for.ids)
    own = {"fa": "Persian", "yue": "Cantonese", "mk": "Macedonian", "ms": "Malay", "tl": "Filipino", "fil": "Filipino"}
    for code, name in {**own, "Farsi": "Persian", "zh-CN": "Chinese"}.items():
        ids = policy.prompt(Sample("a", asr_prompt(clip, code))).ids
        assert policy.tokenizer.decode(ids).endswith(f"\nlanguage {name}<asr_text>")
    with pytest.raises(FieldError, match=r"sample 'a': qwen3_asr transcribes no Ukrainian, but ar, .*; leave") as info:
        policy.prompt(Sample("a", asr_prompt(clip, "uk")))
    assert info.value.field == "language"
    folder = copied("qwen3_asr", tmp_path / "model")
    (folder / "chat_template.jinja").write_text(CONTEXT_ONLY)
    policy = load_policy(folder)
    with pytest.raises(ValueError, match=r"the chat template of qwen3_asr leaves out 'Who\?'"):
        policy.prompt(Sample("a", (Message("user", (clip, "Who?")),)))
    (folder / "chat_template.jinja").write_text("{{ 'no audio, Who?' }}")
    with pytest.raises(ValueError, match=r"writes <\|audio_pad\|> 0 times for 1 clips"):
        load_policy(folder).prompt(Sample("a", (Message("user", (clip,)),)))


CONTEXT_ONLY = (
    "<|im_start|>user\n{% for m in messages %}{% if m.content is not string %}{% for part in m.content %}"
    "{% if part.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}<|im_end|>\n<|im_start|>assistant\n"
)


def test_the_page_of_models_is_of_today() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "docs_models.py"))
    assert tool["page"]() == (ROOT / "docs" / "models.md").read_text(), "run python tools/docs_models.py"


@pytest.mark.parametrize(
    ("kind", "shape", "some", "mean", "deviation"),
    [
        (granite.Granite, (16, 160), [1.1217, -0.4587, -0.4587, -0.0967, 0.131], -0.1109, 0.5688),
        (fun_asr.FunASR, (5, 560), [-10.7761, -11.2831, -12.3354, -10.0404, -12.3296], -10.4955, 2.8811),
    ],
)
def test_features_are_those_of_torchaudio(kind: Any, shape: Any, some: Any, mean: float, deviation: float) -> None:
    """Numbers of transformers' extractors with torchaudio 2.11."""
    t = np.arange(4960) / 16_000
    wav = (0.1 * np.sin(600 * np.pi * t) * (1 + t) + 0.02 * np.sin(5000 * t * t)).astype(np.float32)
    features = kind.features(None, None, None, [wav], torch.device("cpu"))[0]["input_features"][0]
    assert features.shape == shape
    assert features[[0, 1, 2, -2, -1], [3, 40, 79, 100, 150]].tolist() == pytest.approx(some, abs=2e-4)
    assert float(features.mean()) == pytest.approx(mean, abs=1e-3)
    assert float(features.std()) == pytest.approx(deviation, abs=1e-3)


@pytest.mark.slow
def test_an_adapter_beside_a_model_becomes_a_part_of_it(tmp_path: Path) -> None:
    """Granite Speech is released so."""
    shutil.copytree(folder_of("granite_speech"), tmp_path / "model")
    stock = policy_of("granite_speech").copy().model
    torch.manual_seed(0)
    stock.add_adapter(PeftLoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    ids = torch.arange(5, 30)[None]
    with torch.no_grad():
        expected = stock(input_ids=ids).logits
        stock.save_pretrained(str(tmp_path / "adapted"))
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(tmp_path / "adapted" / name, tmp_path / "model" / name)
        policy = load_policy(tmp_path / "model")
        torch.testing.assert_close(policy.model(input_ids=ids).logits, expected, atol=1e-5, rtol=0)
        assert float((policy_of("granite_speech").model(input_ids=ids).logits - expected).abs().max()) > 1e-3
    assert policy.adapter is None and not any(".lora_" in name for name in policy.parameters_by_name())


@pytest.mark.parametrize(("kind", "seconds"), [("gemma4", 30.2), ("fun_asr_nano", 123.0)])
def test_a_clip_that_would_be_cut_is_refused(kind: str, seconds: float) -> None:
    policy = policy_of(kind)
    with pytest.raises(ValueError, match=f"audio of {seconds:g} s is longer than the .* encodes; cut the clip"):
        policy.audio.expected_tokens(clip_of(np.zeros(int(seconds * 16_000), np.float32), policy))


def test_an_answer_ends_as_the_template_ends_it() -> None:
    policy = policy_of("phi4_multimodal")
    assert policy.end_id == policy.tokenizer.convert_tokens_to_ids("<|end|>") and policy.end_id in policy.stop_ids
    assert policy_of("glmasr").tokenizer.convert_ids_to_tokens(policy_of("glmasr").end_id) == "<|im_end|>"
