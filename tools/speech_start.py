"""The supervised start of measure_speech.py, and the samples of a policy from which RAFT chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig, SamplingConfig
from audiorl.judges import Recogniser, load_recogniser
from audiorl.metrics.prosody import Prosody, prosody
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.examples import Example
from audiorl.models.loading import read_tensors
from audiorl.recipes import tts_quickstart as quick
from audiorl.rewards.prosody import ProsodyBins, balanced_choice, bins_of
from audiorl.rewards.speech import Intelligibility, SpeechJudges
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.speech_decoder import CodecSpeechDecoder
from audiorl.run.records import RunConfig, RunState, read_record
from audiorl.types import Request, Rollout, Sample
from tokenizers_audio import load as load_codec

TEXTS = (
    *("seed", "corpus", "clone", "unseen_speakers"),
    *("words", "most_words", "train_texts", "voices_per_text", "practice_texts", "test_texts"),
)
"""Options of the start's run that its texts follow from."""


class Start:
    """The supervised model of a run of `tts-quickstart`, its texts, and the recogniser of its reward."""

    def __init__(self, folder: Path, validation: int, test: int):
        state = read_record(folder / "state.json", RunState)
        if "sft" not in state.finished:
            raise ValueError(f"{folder}: its phase sft is not finished; give a run of tts-quickstart that is")
        recorded = read_record(folder / "config.json", RunConfig).config
        self.config = replace(quick.Config(), **{name: recorded[name] for name in TEXTS if name in recorded})
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

    def judges(self, policy: AudioPolicy) -> SpeechJudges:
        return SpeechJudges(CodecSpeechDecoder.of(policy), self.recogniser)

    def supervised(self) -> list[Example]:
        """The training split with its recordings, as the start learned to say it."""
        return quick.supervised(self.train, self.voices, self.config.clone, self.config.voices_per_text)

    def raft_prompts(self, texts: int | None, voices: int) -> list[Sample]:
        """`texts` of the practice split and then of the training split (None: all of the practice split), each in so
        many of the voices to train on."""
        chosen = self.practice if texts is None else [*self.practice, *self.train][:texts]
        return quick.prompts(chosen, self.voices, self.config.clone, voices)

    def understood(self, policy: AudioPolicy, rollouts: Sequence[Rollout]) -> list[float]:
        """The share of characters of each that the reward's recogniser understands."""
        return [score.total for score in Intelligibility(self.judges(policy), "cer")(rollouts)]

    def samples(
        self, n: int, policy: AudioPolicy, prompts: Sequence[Sample], sampling: SamplingConfig, seed: int = 0
    ) -> tuple[list[Rollout], np.ndarray]:
        """n samples for each prompt, one prompt after the other, and how much of each is understood [prompts, n]."""
        rollouts = HFEngine(policy, sampling).generate([Request(s, n, seed=seed) for s in prompts])
        return rollouts, np.reshape(self.understood(policy, rollouts), (len(prompts), n))

    def best_of(
        self, n: int, policy: AudioPolicy, prompts: Sequence[Sample], sampling: SamplingConfig
    ) -> list[Rollout]:
        """Of n samples for each prompt the one of which the reward's recogniser understands most characters."""
        rollouts, understood = self.samples(n, policy, prompts, sampling)
        return [rollouts[i * n + k] for i, k in enumerate(understood.argmax(1))]


class StoredSamples:
    """`PER_PROMPT` samples of a policy for each prompt. They are stored in `file`, from which a later call goes on:
    {"ID/K": codes [codebooks, frames]}, {"ID/understood": [samples]}."""

    PER_PROMPT = 8

    def __init__(self, file: Path, start: Start, policy: AudioPolicy, sampling: SamplingConfig, seed: int):
        self.file, self.start, self.policy, self.sampling, self.seed = file, start, policy, sampling, seed

    def of(self, prompts: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """Everything stored, after what these prompts lack was sampled."""
        stored = read_tensors(self.file) if self.file.exists() else {}
        missing = [s for s in prompts if f"{s.id}/understood" not in stored]
        layout = self.policy.speech
        assert layout is not None
        for at in range(0, len(missing), 64):
            block = missing[at : at + 64]
            rollouts, understood = self.start.samples(self.PER_PROMPT, self.policy, block, self.sampling, self.seed)
            for i, r in enumerate(rollouts):
                spoken = [c for s in r.segments if s.codes is not None for c in layout.spoken(s.codes)]
                codes = torch.cat(spoken, 1) if spoken else torch.zeros(layout.codebooks, 0, dtype=torch.long)
                stored[f"{r.sample.id}/{i % self.PER_PROMPT}"] = codes
            stored |= {f"{s.id}/understood": torch.tensor(u) for s, u in zip(block, understood, strict=True)}
            save_file(stored, self.file)
            print(f"samples of {at + len(block)} of {len(missing)} prompts", flush=True)
        return stored

    def best(self, prompts: Sequence[Sample], balanced: bool = False) -> list[Example]:
        """Each prompt with the best of its samples, whose codes the policy is given to learn from.

        balanced: the best that together have the prosody of all samples.
        """
        stored = self.of(prompts)
        understood = np.stack([stored[f"{s.id}/understood"].numpy() for s in prompts])
        places = understood.argmax(1)
        if balanced:
            measured = self._prosody(stored, prompts)
            places = balanced_choice(understood, measured, bins_of(measured))
        codes = {s.id: stored[f"{s.id}/{k}"] for s, k in zip(prompts, places, strict=True)}
        rate = self.start.codec.sample_rate
        clips = {id: AudioClip(array=self._waveform(c), sample_rate=rate) for id, c in codes.items() if c.shape[1]}
        self.policy.keep_codes({clip.key: codes[id] for id, clip in clips.items()})
        return [Example(s, speech=(clips[s.id],)) for s in prompts if s.id in clips]

    def prosody_bins(self, prompts: Sequence[Sample]) -> ProsodyBins:
        return bins_of(self._prosody(self.of(prompts), prompts))

    @torch.no_grad()
    def _waveform(self, codes: torch.Tensor) -> np.ndarray:
        """[T] of codes [codebooks, frames]."""
        return self.start.codec.decode(codes[None])[0].numpy()

    def _prosody(self, stored: dict[str, torch.Tensor], prompts: Sequence[Sample]) -> list[Prosody | None]:
        """Of all stored samples of these prompts."""
        samples = [stored[f"{s.id}/{k}"] for s in prompts for k in range(self.PER_PROMPT)]
        rate = self.start.codec.sample_rate
        return [prosody(self._waveform(codes), rate) if codes.shape[1] else None for codes in samples]
