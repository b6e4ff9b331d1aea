"""The supervised start of measure_speech.py, and the samples of a policy from which RAFT chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from balance import balanced_choice
from safetensors.torch import save_file

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig, SamplingConfig
from audiorl.data.preferences import Pair
from audiorl.errors import Interrupted
from audiorl.eval.metrics.prosody import Prosody, prosody
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.examples import Example, answer_logprobs, experience
from audiorl.models.weights import read_tensors
from audiorl.protocols import Request, Reward
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.run.folder import Run
from audiorl.run.records import RunConfig, RunState, read_record
from audiorl.speech_models import Recogniser, load_recogniser
from audiorl.tasks.tts.listening import SpeechModels
from audiorl.tasks.tts.prosody import ProsodyBins, bins_of
from audiorl.tasks.tts.rewards import Intelligibility, SpeakerSimilarity
from audiorl.types import Rollout, Sample
from corpora.models.voices import VoiceLDA, fit_voices
from corpora.recipes import tts_quickstart as quick
from tokenizers_audio import load as load_codec
from tokenizers_audio.batches import decode_all

TEXTS = (
    *("seed", "corpus", "clone", "unseen_speakers"),
    *("words", "most_words", "train_texts", "voices_per_text", "practice_texts", "test_texts"),
)
"""Options of the start's run that its texts follow from."""
Choice = Literal["errors", "balanced", "alike"]
ALIKE = ("understood", "alike")
"""The scores that `alike` and pairs add up."""
LEAST_MARGIN = 0.05
"""How much better the best of the samples is than the worst where the two make a pair: 5 % of the characters."""
ENCODER_TEXTS = 100
"""Texts, said in each of the voices, from which `Start.encoder` is fitted."""
LOSS_TEXTS = 60
"""Texts of each split of which `Start.losses` is the mean."""
BLOCK, GPU_BLOCK = 64, 1024
"""Prompts that are sampled together."""


class Start:
    """The supervised model of a run of `tts-quickstart`, its texts, and the recogniser of its reward."""

    def __init__(self, folder: Path, validation: int, test: int):
        state = read_record(folder / "state.json", RunState)
        if "sft" not in state.finished:
            raise ValueError(f"{folder}: its phase sft is not finished; give a run of tts-quickstart that is")
        recorded = read_record(folder / "config.json", RunConfig).config
        self.config = replace(
            quick.TTSQuickstartConfig(), **{name: recorded[name] for name in TEXTS if name in recorded}
        )
        self.checkpoint = folder / state.checkpoints["sft"]
        self.codec = load_codec(folder / "codec")
        self.recogniser: Recogniser = load_recogniser(folder / "recogniser")
        self.voices, self.test_voices = quick.voices_of(self.config)
        self.train, practice, test_texts = quick.splits(self.config)
        self.practice = practice[validation:]
        prompts = partial(quick.prompts, clone=self.config.clone)
        self.validation_prompts = prompts(practice[:validation], self.voices)
        self.practice_prompts = prompts(self.practice, self.voices)
        self.test_prompts = prompts(test_texts[:test], self.test_voices)

    def policy(self, only: tuple[str, ...] = (), checkpoint: Path | None = None) -> AudioPolicy:
        return load_policy(str(checkpoint or self.checkpoint), ModelConfig(only=only), self.codec)

    def judges(self, policy: AudioPolicy, encoder: VoiceLDA | None = None) -> SpeechModels:
        return SpeechModels(CodecSpeechDecoder.of(policy), self.recogniser, encoder)

    @cached_property
    def encoder(self) -> VoiceLDA:
        """What the rewards know of voices, from the recordings of the voices to train on."""
        texts = self.train[:: max(len(self.train) // ENCODER_TEXTS, 1)]
        pairs = [(speaker, words) for speaker in self.voices for words in texts]
        waves = [quick.joined(words, self.voices[speaker]) for speaker, words in pairs]
        return fit_voices(waves, [speaker for speaker, _ in pairs], quick.RATE)

    def supervised(self) -> list[Example]:
        """The training split with its recordings, as the start learned to say it."""
        return quick.supervised(self.train, self.voices, self.config.clone, self.config.voices_per_text)

    def losses(self, policy: AudioPolicy) -> dict[str, float]:
        """The supervised loss in nats a frame: of texts that the start has learned, of new ones, and of new ones in the
        test voices. How far they lie apart is how much the start knows by heart."""
        learned, new = self.train[-LOSS_TEXTS:], self.practice[:LOSS_TEXTS]
        splits = {
            "learned texts": (learned, self.voices),
            "new texts": (new, self.voices),
            "new texts, test voices": (new, self.test_voices),
        }
        losses = {}
        for name, (texts, voices) in splits.items():
            examples = quick.supervised(texts, voices, self.config.clone)
            policy.clip_codes.encode_all(clip for e in examples for clip in (*e.sample.audio, *e.speech))
            logprobs = answer_logprobs(policy, [experience(policy, e, e.sample.id) for e in examples])
            losses[name] = -float(torch.cat(logprobs).mean())
        return losses

    def reward_prompts(self, texts: int | None, voices: int) -> list[Sample]:
        """`texts` of the practice split and then of the training split (None: all of the practice split), each in so
        many of the voices to train on."""
        chosen = self.practice if texts is None else [*self.practice, *self.train][:texts]
        return quick.prompts(chosen, self.voices, self.config.clone, voices)

    def understood(self, policy: AudioPolicy, rollouts: Sequence[Rollout]) -> list[float]:
        """The share of characters of each that the reward's recogniser understands."""
        return totals(Intelligibility(self.judges(policy), "cer"), rollouts)

    def scores(self, policy: AudioPolicy, rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
        """understood, and with the voice in the prompt also alike: how like that voice it is."""
        judges = self.judges(policy, self.encoder if self.config.clone else None)
        rewards: dict[str, Reward] = {"understood": Intelligibility(judges, "cer")}
        if self.config.clone:
            rewards["alike"] = voice_likeness(judges)
        return {name: totals(reward, rollouts) for name, reward in rewards.items()}

    def samples(
        self, n: int, policy: AudioPolicy, prompts: Sequence[Sample], sampling: SamplingConfig, seed: int = 0
    ) -> list[Rollout]:
        """n samples for each prompt, one prompt after the other."""
        policy.clip_codes.encode_all(clip for s in prompts for clip in s.audio)
        return HFEngine(policy, sampling).generate([Request(s, n, seed=seed) for s in prompts])

    def best_of(
        self, n: int, policy: AudioPolicy, prompts: Sequence[Sample], sampling: SamplingConfig
    ) -> list[Rollout]:
        """Of n samples for each prompt the one of which the reward's recogniser understands most characters."""
        rollouts = self.samples(n, policy, prompts, sampling)
        understood = np.reshape(self.understood(policy, rollouts), (len(prompts), n))
        return [rollouts[i * n + k] for i, k in enumerate(understood.argmax(1))]


def _scores(stored: Mapping[str, torch.Tensor], prompts: Sequence[Sample], *names: str) -> np.ndarray:
    """The sum of these scores of each prompt's samples, [prompts, samples]."""
    return np.sum([[stored[f"{s.id}/{name}"].numpy() for s in prompts] for name in names], axis=0)


def voice_likeness(judges: SpeechModels) -> SpeakerSimilarity:
    """How like the voice in the prompt the speech is."""
    return SpeakerSimilarity(judges, reference=lambda sample: sample.audio[0])


def totals(reward: Reward, rollouts: Sequence[Rollout]) -> list[float]:
    return [score.total for score in reward(rollouts) if score]


class StoredSamples:
    """`count` samples of a policy for each prompt. They are stored in a file of the run, from which a later call goes
    on: {"ID/K": codes [codebooks, frames]}, {"ID/understood": [samples]}, {"ID/alike": [samples]}."""

    def __init__(
        self, run: Run, of: str, start: Start, policy: AudioPolicy, sampling: SamplingConfig, seed: int, count: int
    ):
        """of: the policy's name in the name of the file."""
        self.run, self.file = run, run.dir / f"samples_{of}.safetensors"
        self.start, self.policy, self.sampling, self.seed, self.count = start, policy, sampling, seed, count

    def of(self, prompts: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """Everything stored, after what these prompts lack was sampled. Raises ValueError for a file with another
        number of samples, and Interrupted between two blocks."""
        stored = read_tensors(self.file) if self.file.exists() else {}
        counts = {len(scores) for name, scores in stored.items() if name.endswith("/understood")}
        if counts - {self.count}:
            raise ValueError(f"{self.file} has {min(counts)} samples a prompt, not --raft-samples {self.count}")
        missing = [s for s in prompts if f"{s.id}/understood" not in stored]
        layout = self.policy.speech
        assert layout is not None
        size = BLOCK if self.policy.device.type == "cpu" else GPU_BLOCK
        for at in range(0, len(missing), size):
            block = missing[at : at + size]
            rollouts = self.start.samples(self.count, self.policy, block, self.sampling, self.seed)
            for i, r in enumerate(rollouts):
                spoken = [c for s in r.segments if s.codes is not None for c in layout.speeches(s.codes)]
                codes = torch.cat(spoken, 1) if spoken else torch.zeros(layout.codebooks, 0, dtype=torch.long)
                stored[f"{r.sample.id}/{i % self.count}"] = codes
            for name, values in self.start.scores(self.policy, rollouts).items():
                by_prompt = torch.tensor(values).reshape(len(block), self.count)
                stored |= {f"{s.id}/{name}": v.clone() for s, v in zip(block, by_prompt, strict=True)}
            save_file(stored, self.file)
            print(f"samples of {at + len(block)} of {len(missing)} prompts", flush=True)
            if self.run.asked_to_stop:
                raise Interrupted(f"stopped while sampling for {self.file.name}; the same command goes on")
        return stored

    def best(self, prompts: Sequence[Sample], by: Choice = "errors") -> list[Example]:
        """Each prompt with the best of its samples, whose codes the policy is given to learn from.

        by: errors; balanced: errors, while all that are chosen have the prosody of all samples; alike: errors and how
        like the voice of the prompt it is, added up.
        """
        stored = self.of(prompts)
        scores = _scores(stored, prompts, *(ALIKE if by == "alike" else ("understood",)))
        if by == "balanced":
            measured = self._prosody(stored, prompts)
            places = balanced_choice(scores, measured, bins_of(measured))
        else:
            places = scores.argmax(1)
        clips = self._clips({s.id: stored[f"{s.id}/{k}"] for s, k in zip(prompts, places, strict=True)})
        return [Example(s, speech=(clips[s.id],)) for s in prompts if s.id in clips]

    def pairs(self, prompts: Sequence[Sample]) -> list[Pair]:
        """The best and the worst sample of each prompt by errors, and with a voice in it likeness, added up, where
        LEAST_MARGIN lies between them and both have speech."""
        stored = self.of(prompts)
        names = ALIKE if self.start.config.clone else ALIKE[:1]
        rows = zip(prompts, _scores(stored, prompts, *names), strict=True)
        ranked = [
            (s, f"{s.id}/{of_prompt.argmax()}", f"{s.id}/{of_prompt.argmin()}", float(np.ptp(of_prompt)))
            for s, of_prompt in rows
            if np.ptp(of_prompt) >= LEAST_MARGIN
        ]
        clips = self._clips({name: stored[name] for _, best, worst, _ in ranked for name in (best, worst)})
        return [Pair(s, clips[b], clips[w], margin) for s, b, w, margin in ranked if b in clips and w in clips]

    def _clips(self, codes: dict[str, torch.Tensor]) -> dict[str, AudioClip]:
        """The speech of these codes where they are not empty. The policy keeps them, in place of those of before."""
        rate = self.start.codec.sample_rate
        codes = {id: c for id, c in codes.items() if c.shape[1]}
        waves = decode_all(self.start.codec, list(codes.values()))
        clips = {id: AudioClip(array=wav.numpy(), sample_rate=rate) for id, wav in zip(codes, waves, strict=True)}
        self.policy.clip_codes.precomputed = {clip.key: codes[id] for id, clip in clips.items()}
        return clips

    def prosody_bins(self, prompts: Sequence[Sample]) -> ProsodyBins:
        return bins_of(self._prosody(self.of(prompts), prompts))

    def _prosody(self, stored: dict[str, torch.Tensor], prompts: Sequence[Sample]) -> list[Prosody | None]:
        """Of all stored samples of these prompts."""
        samples = [stored[f"{s.id}/{k}"] for s in prompts for k in range(self.count)]
        rate = self.start.codec.sample_rate
        return [prosody(wav.numpy(), rate) for wav in decode_all(self.start.codec, samples)]
