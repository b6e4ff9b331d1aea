"""The talkers of Qwen2.5-Omni and Qwen3-Omni against transformers' own passes, and what they refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.audio import AudioClip
from audiorl.config import LoraConfig, ModelConfig, OptimConfig, PreferenceConfig, SamplingConfig, SFTConfig
from audiorl.data.preferences import Pair
from audiorl.models import load_policy, load_weights
from audiorl.models.audio_encoder import ClipCodes
from audiorl.models.examples import Example, answer_logprobs, check_example, experience
from audiorl.models.export import export
from audiorl.models.families import talker
from audiorl.models.families.talker import TalkerPolicy
from audiorl.models.families.talker_decoder import TalkerDecoder
from audiorl.models.weights import silent_transformers
from audiorl.protocols import Request
from audiorl.recipes._speech import TINY_CODEC
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.speech import CodecSpeechDecoder, StreamingEngine, speech_blocks
from audiorl.run.folder import Run
from audiorl.tasks.tts.prompts import speech_sample
from audiorl.train.preference import prefer
from audiorl.train.sft import sft
from audiorl.types import Message, Sample
from tokenizers_audio.protocol import AudioTokenizer
from tokenizers_audio.unified import UnifiedTokenizer

Generation = Literal["qwen2.5", "qwen3"]
GENERATIONS: tuple[Generation, ...] = ("qwen2.5", "qwen3")
TEXT, VOICE = "good morning to all of you", "chelsie"
CODES = 16


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[Generation, Path]:
    root = tmp_path_factory.mktemp("talkers")
    for generation in GENERATIONS:
        talker.tiny(root / generation, [TEXT], generation=generation, codebooks=3, codebook_size=CODES)
    return {generation: root / generation for generation in GENERATIONS}


def load(folder: Path, codec: AudioTokenizer | None = None, **model: Any) -> TalkerPolicy:
    policy = load_policy(folder, ModelConfig(**model), codec, talker=True)
    assert isinstance(policy, TalkerPolicy)
    policy.speak_in(next(name for name in policy.backbone.voices if name.lower() == VOICE))
    if codec is None:
        policy.set_codec(policy.own_decoder())
    return policy


def by_code(policy: TalkerPolicy, experiences: Sequence[Experience], warm: Sequence[float] = (1.0,)) -> Tensor:
    logprobs = policy.forward(pack_experiences(experiences, True), audio_temperature=warm).code_logprobs
    assert logprobs is not None
    return logprobs


def whole_model(folder: Path, generation: Generation) -> Any:
    kind = "Qwen3OmniMoe" if generation == "qwen3" else "Qwen2_5Omni"
    with silent_transformers():
        return getattr(transformers, f"{kind}ForConditionalGeneration").from_pretrained(folder).eval()


def sample() -> Sample:
    return speech_sample("morning", TEXT)


def read_and_said(policy: TalkerPolicy) -> tuple[Tensor, Tensor]:
    """What the thinker reads before its answer, and the answer."""
    chat = "".join(map(str, policy.backbone.chat(sample().messages)))
    texts = (policy.tokenizer.encode(text, add_special_tokens=False) for text in (chat, TEXT))
    read, said = map(torch.tensor, texts)
    return read, said


def rollouts(policy: TalkerPolicy, n: int = 3, **sampling: Any) -> list[Any]:
    return HFEngine(policy, SamplingConfig(max_frames=12, **sampling)).generate([Request(sample(), n, seed=1)])


class Says(transformers.LogitsProcessor):  # type: ignore[misc]
    """The thinker answers these tokens."""

    def __init__(self, tokens: Tensor, after: int):
        self.tokens, self.after = tokens, after

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.tokens[input_ids.shape[1] - self.after]] = 0.0
        return forced


def generated(whole: Any, policy: TalkerPolicy, generation: Generation) -> tuple[Tensor, Tensor]:
    """Greedy codes [Q, F] and sound [T] that transformers' `generate` of the whole model gives for the same answer."""
    read, said = read_and_said(policy)
    end = int(policy.tokenizer.convert_tokens_to_ids("<|im_end|>"))
    options: dict[str, Any] = dict(
        speaker=policy.voice,
        thinker_max_new_tokens=len(said) + 1,
        thinker_eos_token_id=end,
        thinker_logits_processor=[Says(torch.tensor([*said.tolist(), end]), len(read))],
        talker_do_sample=False,
        talker_repetition_penalty=1.0,
        talker_max_new_tokens=13 if generation == "qwen3" else 12,  # Qwen3's last frame gets no other codebooks
    )
    if generation == "qwen2.5":
        options |= dict(talker_eos_token_id=list(policy.speech.stops), talker_top_k=None, talker_top_p=None)
        decoder: Any = whole.token2wav
    else:
        decoder = whole.code2wav
    heard: list[Tensor] = []
    hook = decoder.register_forward_pre_hook(lambda _, args: heard.append(args[0]))
    torch.manual_seed(0)
    with silent_transformers():
        _, wave = whole.generate(read[None], attention_mask=torch.ones(1, len(read), dtype=torch.long), **options)
    hook.remove()
    return heard[0].reshape(policy.speech.codebooks, -1), wave.reshape(-1)


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_trained_talker_put_back_generates_in_transformers_what_the_engine_does(
    generation: Generation, checkpoints: dict[Generation, Path], tmp_path: Path
) -> None:
    policy = load(checkpoints[generation])
    with torch.no_grad():
        for p in policy.trainable().values():
            if p.dim() > 1:
                p.add_(0.3 * p.std() * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        policy.code_head.weight[list(policy.speech.stops)] = 0.0  # it shall not stop at once
    policy.save(tmp_path / "step_000001")
    again = load(tmp_path / "step_000001")
    assert all(torch.equal(p, again.trainable()[name]) for name, p in policy.trainable().items())
    export(tmp_path / "step_000001", tmp_path / "whole")
    whole = whole_model(tmp_path / "whole", generation)
    before = whole_model(checkpoints[generation], generation).state_dict()
    trained = {f"talker.{name}": tensor for name, tensor in policy.model.state_dict().items()}
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, trained.get(name, before[name])), name
    codes, wave = generated(whole, policy, generation)
    (rollout,) = rollouts(again, 1, temperature=0.0)
    (own,) = again.speech.speeches(rollout.segments[0].codes)
    assert own.shape[1] == 12 and torch.equal(own, codes)
    decoded = CodecSpeechDecoder.of(again).waveform(rollout)
    assert decoded is not None
    torch.testing.assert_close(torch.from_numpy(decoded), wave, rtol=1e-4, atol=1e-5)


def taught(whole: Any, policy: TalkerPolicy, generation: Generation, codes: Tensor) -> Tensor:
    """Log-probs [F + 1, Q] of codes [F, Q] and of the stop after them, by transformers' modules alone."""
    read, said = read_and_said(policy)
    both = torch.cat([read, said])[None]
    with torch.no_grad():
        thought = whole.thinker(both, output_hidden_states=True)
    embeds, layout = whole.thinker.get_input_embeddings(), policy.speech
    ends = embeds(torch.tensor([layout.end_id] + [layout.frame_id] * 30))[None]
    tables = [whole.talker.get_input_embeddings()]
    if generation == "qwen2.5":
        begin = whole.speaker_map[policy.voice]["bos_token"]
        own = thought.hidden_states[0] + thought.hidden_states[-1]
        prompt = torch.cat([own[:, : len(read)], embeds(torch.tensor([[begin]])), own[:, len(read) : len(read) + 1]], 1)
        c = whole.config.talker_config
        prompt[:, -2:] += tables[0](torch.tensor([c.tts_codec_pad_token_id, c.tts_codec_start_token_id]))
        rest = torch.cat([own[:, len(read) + 1 :], ends], 1)
    else:
        project = whole.talker.text_projection
        three = [
            project(embeds(torch.tensor([[getattr(whole.config, f"tts_{n}_token_id")]]))) for n in ("pad", "bos", "eos")
        ]
        tables += list(whole.talker.code_predictor.get_input_embeddings())
        user = whole._get_talker_user_parts(
            0, both.shape[1], both < 0, thought.hidden_states[1], thought.hidden_states[0]
        )
        starts = [*(read == whole.config.im_start_token_id).nonzero()[:, 0].tolist()]
        speaker = whole.config.talker_config.speaker_id[policy.voice]
        answer, _, rest = whole._get_talker_assistant_parts(
            starts[-1], both.shape[1], speaker, thought.hidden_states[0], *three
        )
        begin = next(s for s in starts if read[s + 1] == whole.config.user_token_id)
        prompt = torch.cat([user[:, begin : starts[-1]], answer], 1)
        rest = torch.cat([rest, three[0].expand(-1, 30, -1)], 1)
    spoken = torch.stack([table(codes[:, k]) for k, table in enumerate(tables)]).sum(0)[None]
    inputs = torch.cat([prompt, spoken + rest[:, : len(codes)]], 1)
    if generation == "qwen2.5":
        inputs = whole.talker.thinker_to_talker_proj(inputs)
    hidden = whole.talker.model(inputs_embeds=inputs).last_hidden_state[0, -len(codes) - 1 :]
    stops = torch.full((1,), layout.stops[-1])
    allowed = [*range(CODES), *layout.stops]
    logits = torch.full((len(hidden), whole.talker.codec_head.out_features), -torch.inf)
    logits[:, allowed] = whole.talker.codec_head(hidden)[:, allowed]
    columns = [logits.log_softmax(-1).gather(1, torch.cat([codes[:, 0], stops])[:, None])[:, 0]]
    for k in range(1, layout.codebooks):
        frame = torch.stack([hidden[:-1], *(table(codes[:, j]) for j, table in enumerate(tables[:k]))], 1)
        out = whole.talker.code_predictor(inputs_embeds=frame).logits[:, -1].log_softmax(-1)
        column = out.gather(1, codes[:, k : k + 1])[:, 0]
        columns.append(torch.cat([column, column.new_zeros(1)]))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_log_probs_and_gradients_of_all_codebooks_are_those_of_transformers(
    generation: Generation, checkpoints: dict[Generation, Path]
) -> None:
    policy, whole = load(checkpoints[generation]), whole_model(checkpoints[generation], generation)
    layout = policy.speech
    generator = torch.Generator().manual_seed(3)
    speeches = [torch.randint(0, CODES, (layout.codebooks, frames), generator=generator) for frames in (3, 30, 9)]
    prompt = policy.prompt(sample())
    experiences = []
    for codes in speeches:
        rows = layout.tokens(codes, prompt.text)
        ids = torch.cat([prompt.ids, rows.ids])
        assert prompt.codes is not None
        all_codes = torch.cat([prompt.codes, rows.codes])
        mask = torch.cat([torch.zeros_like(prompt.codes, dtype=torch.bool), rows.code_mask])
        segment = torch.zeros(len(ids), dtype=torch.long)
        experiences.append(
            Experience(ids, mask.any(1), len(prompt), group_id="a", codes=all_codes, code_mask=mask, segment=segment)
        )
    expected = torch.cat([taught(whole, policy, generation, codes.T) for codes in speeches])
    weights = torch.randn(expected.shape, generator=generator)
    (expected * weights).sum().backward()
    wanted = dict(whole.talker.named_parameters())
    for packed in (experiences, *([e] for e in experiences)):
        got = [policy.forward(pack_experiences(packed, share)).code_logprobs for share in (False, True)]
        start = 0 if packed is experiences else sum(len(c[0]) + 1 for c in speeches[: experiences.index(packed[0])])
        for one in got:
            assert one is not None
            torch.testing.assert_close(one, expected[start : start + len(one)], rtol=1e-5, atol=1e-5)
    (by_code(policy, experiences) * weights).sum().backward()
    for name, p in policy.trainable().items():
        grad = wanted[name].grad
        assert p.grad is not None and grad is not None, name
        assert torch.allclose(p.grad, grad, rtol=1e-4, atol=1e-5), name
    assert policy.trainable().keys() == {n for n, p in wanted.items() if p.grad is not None}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_engine_samples_with_the_trainers_log_probs_and_codebooks_can_be_replayed(
    generation: Generation, checkpoints: dict[Generation, Path], tmp_path: Path
) -> None:
    policy = load(checkpoints[generation])
    warm = (1.3, 0.8)
    batch = rollouts(policy, 4, codebook_temperature=warm) + rollouts(policy, 1, codebook_temperature=warm)
    assert {r.segments[0].stop_reason for r in batch} <= {"length", "eos"}
    assert torch.equal(batch[0].segments[0].codes, batch[-1].segments[0].codes)  # whatever it is decoded with
    experiences = [Experience.from_rollout(r) for r in batch]
    sampled = torch.cat([e.rollout_logprobs[e.loss_mask] for e in experiences if e.rollout_logprobs is not None])
    torch.testing.assert_close(by_code(policy, experiences, warm), sampled, rtol=1e-5, atol=1e-5)
    policy.train_codebooks([0])
    replayed = rollouts(policy, 4, codebook_temperature=warm)
    for one, other in zip(replayed, batch, strict=False):
        assert torch.equal(one.segments[0].codes, other.segments[0].codes)
        assert not bool(one.segments[0].code_mask[:, 1:].any())
    part = [Experience.from_rollout(r) for r in replayed]
    first = by_code(policy, part, warm)
    torch.testing.assert_close(
        first[:, 0],
        torch.cat([e.rollout_logprobs[e.loss_mask, 0] for e in part if e.rollout_logprobs is not None]),
        atol=1e-5,
        rtol=0,
    )
    assert not bool(first[:, 1:].any())
    before = {name: p.clone() for name, p in policy.trainable().items()}
    policy.save(tmp_path)
    for p in policy.trainable().values():
        torch.nn.init.zeros_(p)
    load_weights(tmp_path, policy)  # as a resumed run does
    assert all(torch.equal(p, before[name]) for name, p in policy.trainable().items())
    with pytest.raises(ValueError, match="--codebooks 7: the talker has codebooks 0 to"):
        policy.train_codebooks([7])


def test_a_stream_of_blocks_has_every_sample_of_a_recording_of_300_frames(
    checkpoints: dict[Generation, Path],
) -> None:
    decoder = load(checkpoints["qwen3"]).own_decoder()
    codes = torch.randint(0, CODES, (decoder.num_codebooks, 30), generator=torch.Generator().manual_seed(0))
    whole, stream = decoder.decode(codes[None])[0], decoder.streaming()
    blocks = torch.cat([*map(stream.decode, codes.split(10, 1)), stream.flush()])
    exact, peak = 25 * decoder.hop, float(whole.abs().max())
    torch.testing.assert_close(blocks[:exact], whole[:exact], rtol=0, atol=peak / 1e5)
    torch.testing.assert_close(blocks, whole, rtol=0, atol=peak / 100)
    again = stream.decode(codes[:, :1])
    assert torch.equal(again, decoder.decode(codes[None, :, :1])[0])  # nothing of the speech before it

    codes = torch.randint(0, CODES, (decoder.num_codebooks, 580), generator=torch.Generator().manual_seed(1))
    small, large = (torch.cat([*map(decoder.streaming().decode, codes.split(n, 1))]) for n in (145, 290))
    assert len(small) == len(large)
    torch.testing.assert_close(large, small, rtol=0, atol=float(small.abs().max()) / 100)


def test_speech_is_streamed_and_learned_from_a_codec_of_the_same_codes(
    checkpoints: dict[Generation, Path], tmp_path: Path
) -> None:
    policy = load(checkpoints["qwen3"])
    with torch.no_grad():
        policy.code_head.weight[list(policy.speech.stops)] = 0.0
    sampling = SamplingConfig(max_frames=12, temperature=0.0)
    stream = speech_blocks(policy, sample(), sampling)
    blocks = []
    while True:
        try:
            blocks.append(next(stream))
        except StopIteration as end:
            rollout, heard = end.value
            break
    (own,) = rollouts(policy, 1, temperature=0.0)
    assert torch.equal(rollout.segments[0].codes, own.segments[0].codes)
    whole = CodecSpeechDecoder.of(policy).waveform(own)
    assert whole is not None and len(blocks) >= 3 and heard.first_audio is not None
    torch.testing.assert_close(
        *map(torch.from_numpy, (np.concatenate(blocks), whole)), rtol=0, atol=abs(whole).max() / 1e3
    )
    engine = StreamingEngine(policy, sampling)
    assert len(engine.speech(engine.generate([Request(sample())])[0]).blocks) == len(blocks)

    codec = UnifiedTokenizer(replace(TINY_CODEC, num_codebooks=3))
    with pytest.raises(ValueError, match="they do not belong together"):
        policy.set_codec(UnifiedTokenizer(TINY_CODEC))
    load(checkpoints["qwen3"], codec).save(tmp_path / "taught")
    assert isinstance(load(tmp_path / "taught").codec, TalkerDecoder)  # that of the whole checkpoint again
    policy = load(checkpoints["qwen3"], codec)
    clip = AudioClip(array=torch.randn(8000).numpy() * 0.1, sample_rate=16000)
    learned = experience(policy, Example(sample(), speech=(clip,)))
    prompt, frames = policy.prompt(sample()), policy.codes(clip)
    assert learned.codes is not None and torch.equal(learned.codes[len(prompt) : -1], frames.T)
    assert learned.codes[-1].tolist() == [CODES, -1, -1] and int(learned.loss_mask.sum()) == frames.shape[1] + 1
    assert -answer_logprobs(policy, [learned])[0].mean() < 3 * 3.5  # three codebooks of 16


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_check_counts_the_rows_of_a_talker(generation: Generation, checkpoints: dict[Generation, Path]) -> None:
    policy = load(checkpoints[generation])
    codec = UnifiedTokenizer(replace(TINY_CODEC, num_codebooks=policy.speech.codebooks))
    policy._clip_codes = ClipCodes(codec, 0)
    example = Example(sample(), speech=(AudioClip(array=np.zeros(10_000, np.float32), sample_rate=24_000),))
    length, frames = len(experience(policy, example)), 11
    config = policy.backbone.decoder(policy.model).config
    for most in (length, length - 1):
        config.max_position_embeddings = most
        for use in (check_example, experience):
            with nullcontext() if most == length else pytest.raises(ValueError, match=f"reads at most {most}"):
                use(policy, example)
        with nullcontext() if most == length else pytest.raises(ValueError, match="12 may be written"):
            policy.prompts.check(sample(), frames)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_talker_learns_from_its_own_samples_without_a_codec_that_encodes(
    generation: Generation, checkpoints: dict[Generation, Path], tmp_path: Path
) -> None:
    policy = load(checkpoints[generation])
    with torch.no_grad():
        policy.code_head.weight[list(policy.speech.stops)] = 0.0
    codes = [policy.speech.frames(r.segments[0].codes) for r in rollouts(policy)]
    best, worst, other = (AudioClip(array=torch.full((9,), float(k)).numpy(), sample_rate=24_000) for k in range(3))
    policy.clip_codes.precomputed = {clip.key: c for clip, c in zip((best, worst, other), codes, strict=True)}
    learned = [Example(sample(), speech=(clip,)) for clip in (best, worst, other)]

    def probable() -> Tensor:
        logprobs = answer_logprobs(policy, [experience(policy, example) for example in learned])
        return torch.stack([each.sum() for each in logprobs])

    preference, supervised = PreferenceConfig(steps=3, batch_size=1), SFTConfig(steps=3, batch_size=1)
    optim = OptimConfig(lr=1e-3, warmup_steps=0)
    before = probable()
    with Run.create(tmp_path, "r.py", [], preference) as run:
        prefer(policy, [Pair(sample(), best, worst)], run, config=preference, optim=optim, phase="dpo")
        preferred = probable()
        sft(policy, learned[2:], run, config=supervised, optim=optim, phase="raft")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    margins = [row["preference/margin"] for row in rows if row["phase"] == "dpo"]
    gain = preferred - before
    assert margins[0] == pytest.approx(0, abs=1e-3) and 1 < margins[1] < margins[2] < float(gain[0] - gain[1])
    assert float(probable()[2] - preferred[2]) > 1


@pytest.mark.slow
def test_adapters_of_a_talker_come_back_and_are_merged_into_the_whole(
    checkpoints: dict[Generation, Path], tmp_path: Path
) -> None:
    policy = load(checkpoints["qwen2.5"], lora=LoraConfig(rank=2))
    for name, p in policy.trainable().items():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.2, generator=torch.Generator().manual_seed(1))
    policy.save(tmp_path / "adapter")
    again = load_policy(tmp_path / "adapter")
    assert isinstance(again, TalkerPolicy) and again.adapter is not None
    export(tmp_path / "adapter", tmp_path / "whole", merge=True)
    again = load(tmp_path / "whole")
    assert torch.equal(*(rollouts(p, 1)[0].segments[0].codes for p in (policy, again)))


def test_what_a_talker_refuses(checkpoints: dict[Generation, Path], tmp_path: Path) -> None:
    policy = load(checkpoints["qwen2.5"])
    clip = AudioClip(array=torch.zeros(1600).numpy(), sample_rate=16000)
    for wrong, message in (
        (
            replace(sample(), metadata={"respond": "speech", "voice": "Anna"}),
            "no voice 'Anna'; the checkpoint has Ethan",
        ),
        (replace(sample(), metadata={}), "a talker says a text"),
        (replace(sample(), references=()), "the text to say is missing"),
        (replace(sample(), references=("well <|im_end|>",)), "reserved token <|im_end|>"),
        (replace(sample(), messages=(Message("user", (clip,)),)), "hears nothing"),
    ):
        with pytest.raises(ValueError, match=message.replace("|", "[|]")):
            policy.prompt(wrong)
    with pytest.raises(ValueError, match=r"--voice Anna: .* has the voices Ethan, Chelsie"):
        policy.speak_in("Anna")
    with pytest.raises(ValueError, match=r"turns codes into sound.*--codec"):
        policy.codes(clip)
    with pytest.raises(ValueError, match="ras_window"):
        rollouts(policy, 1, ras_window=3)

    def broken(generation: Generation, change: Any) -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(checkpoints[generation], folder)
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    broken_ones: tuple[tuple[Generation, Any, str], ...] = (
        (
            "qwen2.5",
            lambda c: c["talker_config"].update(embedding_size=48),
            "a thinker of width 48 .*, the thinker's is 64",
        ),
        ("qwen3", lambda c: c["talker_config"].update(thinker_hidden_size=48), "a thinker of width 48"),
        ("qwen2.5", lambda c: c.update(enable_audio_output=False), "holds no talker"),
        ("qwen3", lambda c: c.pop("talker_config"), "holds no talker"),
        ("qwen3", lambda c: c["talker_config"].update(speaker_id=None), "the talker has no voice"),
    )
    for generation, change, message in broken_ones:
        with pytest.raises(ValueError, match=message):
            load_policy(broken(generation, change), talker=True)
    voiceless = broken("qwen2.5", lambda c: None)
    (voiceless / "spk_dict.pt").unlink()
    with pytest.raises(ValueError, match=r"the talker has no voice: spk_dict.pt"):
        load_policy(voiceless, talker=True)
    torch.save({"Ethan": AudioClip}, voiceless / "spk_dict.pt")  # a pickle of code
    with pytest.raises(ValueError, match=r"spk_dict.pt: cannot be read"):
        load_policy(voiceless, talker=True)
    mute = broken("qwen3", lambda c: None)
    (file,) = mute.glob("*.safetensors")
    save_file({k: v for k, v in load_file(file).items() if "thinker.model.embed" not in k}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"no thinker.model.embed_tokens.weight"):
        load_policy(mute, talker=True)
    moved = tmp_path / "moved"
    shutil.copytree(checkpoints["qwen3"], moved)
    load(moved).save(tmp_path / "trained")
    shutil.rmtree(moved)
    with pytest.raises(ValueError, match=r"a talker, whose thinker was in .*moved; put it back"):
        load_policy(tmp_path / "trained")
