"""Parts that recipes of speaking models share: read texts and voices, load models, measure speech, tiny parts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file

from audiorl.audio import AudioClip, seconds
from audiorl.config import ModelConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.config.recipe import RecipeConfig
from audiorl.data.manifest import Loaded
from audiorl.data.seedtts import TextToSay
from audiorl.data.sets import weighted
from audiorl.eval._common import Judges
from audiorl.eval._speech import measure_speech, probe_speech
from audiorl.eval.metrics.corpus import UNSEEN
from audiorl.eval.metrics.text import Normalizer, normalize
from audiorl.models import AudioPolicy
from audiorl.models.families import higgs, talker
from audiorl.models.families.talker import TalkerPolicy
from audiorl.recipes._common import (
    RowCheck,
    check_ptx,
    check_unseen_speakers,
    policy_from,
    read_sets,
    read_split,
    with_voice,
)
from audiorl.rewards.answers import language_of
from audiorl.rewards.asr import references_of
from audiorl.run.folder import Run
from audiorl.speech_models.character_ctc import CharacterCTC, Head
from audiorl.speech_models.loading import GE2E
from audiorl.speech_models.speakers import GE2ENetwork
from audiorl.tasks.tts.prompts import utterance_example, utterance_sample
from audiorl.tasks.tts.rewards import SpeechRewards
from audiorl.tasks.tts.texts import bundled_utterances, read_utterances
from audiorl.train.rl.hooks import Evaluate
from audiorl.types import Sample
from tokenizers_audio import load as load_codec
from tokenizers_audio.unified import UnifiedConfig, UnifiedTokenizer

Speaking = TypeVar("Speaking", bound="SpeechConfig")
Value = TypeVar("Value", str, str | None)


@dataclass(frozen=True)
class SpeechConfig(RecipeConfig):
    """Options of recipes for models that speak."""

    path: str = "bosonai/higgs-audio-v2-generation-3B-base"
    """Higgs Audio V2, a decoder or Omni thinker that was dualized, or an Omni model whose talker is trained (`talker`):
    a folder, a hub id, or `tiny`."""
    talker: bool = False
    """Train the talker of an Omni checkpoint, which says texts in voices of its own."""
    codebooks: tuple[int, ...] = ()
    """Of a talker, the codebooks that learn; the others are replayed. None named: all."""
    codec: str | None = None
    """The audio tokenizer of its codes: a folder, a hub id, or `tiny`. None: that of Higgs, or of a talker the frozen
    decoder of its checkpoint, which cannot encode recordings."""
    data: tuple[str, ...] = ()
    """Texts: manifests (columns text, audio, prompt_audio, prompt_text, speaker, language), LibriSpeech folders,
    Seed-TTS-eval's meta.lst, .txt with one a line, `bundled` or `bundled:en`."""
    held_out: tuple[str, ...] = ()
    """Texts to measure on; without any, `held_out_count` of the training texts are held back."""
    unseen: tuple[str, ...] = ()
    """Texts of speakers that no phase trains on, measured like `held_out` before and after."""
    voice: str | None = None
    """A recording whose voice says all texts that bring none of their own (no prompt_audio); of a talker, the name of
    one of its voices."""
    voice_text: str = ""
    """Text that is said in `voice`."""
    clone: bool = False
    """Texts that bring no voice: take another recording of the same speaker for it, drawn once."""
    tags: bool = False
    """Begin each text with its speaker as a tag, such as [SPEAKER0], as models of conversations expect."""
    max_seconds: float = 30.0
    """Longer recordings are left out, and counted."""
    judge: str | None = "openai/whisper-large-v3"
    """A recogniser by path or hub id that transcribes spoken held-out texts before and after; None measures nothing."""
    judge_speaker: str | None = None
    """A speaker encoder that compares their voices, too."""
    language: str | None = None
    """Language for multilingual recognisers, such as en; None: they guess."""
    normalizer: Normalizer = "basic"
    """How the judge's text is normalised before it is compared."""
    sampling: SamplingConfig = SamplingConfig(max_new_tokens=8, max_frames=750)
    """How texts are said; 750 frames are 30 s of Higgs's codec."""


def texts_of(config: SpeechConfig, check: RowCheck | None = None) -> tuple[list[TextToSay], list[TextToSay]]:
    """Return texts (to train on, held out), each with its voice. Held-out texts are trained on in nobody's voice."""
    train, held_out = read_split(config, *_readers(config), check=check)
    measured = {normalize(u.text, "basic") for u in held_out}
    trained = [u for u in train if normalize(u.text, "basic") not in measured]
    if not trained:
        raise ValueError("nothing left to train on: every text is held out, too")
    if len(trained) < len(train):
        print(f"{len(train) - len(trained)} of {len(train)} texts are left out: they are held out", flush=True)
    return _with_voices(trained, trained, config), _with_voices(held_out, [*trained, *held_out], config)


def spoken_text(u: TextToSay, config: SpeechConfig, normalizer: Normalizer | None) -> Sample:
    """Return the prompt of a text, which with a `normalizer` is compared with what is understood: it needs words."""
    sample = utterance_sample(u, config.tags)
    if normalizer is not None:
        references_of(sample, normalizer, language_of(sample))
    return sample


def ptx_utterances(config: SpeechConfig, paths: Sequence[str], training: RLConfig, check: RowCheck) -> list[TextToSay]:
    """Return the texts of `ptx_data` with their recordings and voices; [] where `training` uses none."""
    check_ptx(paths, training)
    asked = replace(check, trained=lambda u: [utterance_example(u, config.tags)]).train
    utterances = weighted(read_sets(paths, config, *_readers(config), asked), config.data_seed)
    return _with_voices(utterances, utterances, config)


def _readers(config: SpeechConfig) -> tuple[Callable[[str], Sequence[TextToSay]], Callable[..., Loaded[TextToSay]]]:
    """Return readers of bundled sets and of files, without recordings that are too long, which are counted."""

    def read(path: str, **options: Any) -> Loaded[TextToSay]:
        loaded = read_utterances(path, **options)
        lengths = [0.0 if u.recording is None else seconds(u.recording) for u in loaded.samples]
        long = sum(length > config.max_seconds for length in lengths)
        if long:
            print(f"{path}: {long} longer than {config.max_seconds:g} s", flush=True)
        return loaded.kept(lambda index: lengths[index] <= config.max_seconds)

    return partial(bundled_utterances, max_seconds=config.max_seconds), read


def _with_voices(utterances: Sequence[TextToSay], others: Sequence[TextToSay], config: SpeechConfig) -> list[TextToSay]:
    """Return those without a voice with the one that the options name, or one of the same speaker's from `others`."""
    if config.talker:
        if config.clone or config.voice_text or config.tags:
            raise ValueError("--talker: it speaks in voices of its own; leave --clone, --voice-text and --tags out")
        return list(utterances)
    if config.codebooks:
        raise ValueError("--codebooks: for a talker; give --talker True with an Omni checkpoint, or leave it out")
    if config.voice is not None:
        if not config.voice_text.strip():
            raise ValueError("--voice: give what is said in it, too: --voice-text")
        if config.clone:
            raise ValueError("--clone: takes voices from the data; leave --voice out, or clone")
        prompt = AudioClip(path=config.voice)
        prompt.load()  # a broken recording stops the run here, not in training
        return [u if u.prompt else replace(u, prompt=prompt, prompt_text=config.voice_text) for u in utterances]
    if not config.clone:
        return list(utterances)
    by_speaker: dict[str, list[TextToSay]] = {}
    for u in others:
        if u.speaker and u.recording is not None:
            by_speaker.setdefault(u.speaker, []).append(u)
    cloned = []
    for u in utterances:
        same = [other for other in by_speaker.get(u.speaker, ()) if other.text != u.text]
        if u.prompt is None and not same:
            raise ValueError(
                f"{u.name!r}: no other recording of speaker {u.speaker!r} to take the voice from; name speakers in the "
                "data, give the row a prompt_audio, or leave --clone out"
            )
        if u.prompt is None:
            chosen = random.Random(f"{config.seed}/{u.name}").choice(same)
            u = replace(u, prompt=chosen.recording, prompt_text=chosen.text)
        cloned.append(u)
    return cloned


def speaking_policy(config: SpeechConfig, *, teach: bool = False) -> AudioPolicy:
    """Load the policy at `config.path` with its codec, both on the configured device.

    `teach`: a model that writes text only gets a branch for speech. Otherwise it is refused with a ValueError.
    """
    policy = policy_from(config)
    if isinstance(policy, TalkerPolicy):
        if not config.talker:
            raise ValueError(f"{config.path}: is a talker; give --talker True")
        if config.voice is not None:
            policy.speak_in(config.voice)
        policy.train_codebooks(config.codebooks)
        policy.set_codec(policy.own_decoder() if config.codec is None else load_codec(config.codec))
        return policy
    if policy.speech is None and not teach:
        raise ValueError(f"{config.path}: writes text only; teach it to speak first, with audiorl/recipes/tts_sft.py")
    voice = with_voice(policy, config.codec or "bosonai/higgs-audio-v2-tokenizer", config.seed)
    voice.codec.to(policy.device)  # type: ignore[attr-defined]
    return policy


class Measurement:
    """Measures how a policy says held-out texts and those of unseen speakers; without a recogniser it does nothing.

    Raises ValueError for an unseen speaker who is in `train`.
    """

    def __init__(
        self,
        config: SpeechConfig,
        run: Run,
        policy: AudioPolicy,
        train: Sequence[TextToSay],
        held_out: Sequence[TextToSay],
    ):
        check = RowCheck(lambda: policy, measured=lambda u: [spoken_text(u, config, config.normalizer)])
        unseen = [u for _, items in read_sets(config.unseen, config, *_readers(config), check.held_out) for u in items]
        if unseen:
            check_unseen_speakers([(u.name, u.speaker) for u in train], [(u.name, u.speaker) for u in unseen])
        self.run, self.policy = run, policy
        self.held_out = [utterance_sample(u, config.tags) for u in held_out]
        self.unseen = [utterance_sample(u, config.tags) for u in _with_voices(unseen, unseen, config)]
        judges = Judges.load(config.judge, config.judge_speaker, config.language)
        self.how = (config.sampling, judges, config.normalizer) if judges.recogniser is not None else None

    def __call__(self, name: str) -> None:
        """Measure as a phase of the run, see `measure_speech`; unseen speakers as unseen_NAME."""
        for prefix, samples in ((f"{UNSEEN}_", self.unseen), ("", self.held_out)):
            if self.how and samples:
                baseline = f"{prefix}before"
                measure_speech(self.run, prefix + name, self.policy, samples, *self.how, baseline=baseline)

    def probe(self) -> Evaluate | None:
        """Return the evaluation for the training loop."""
        return probe_speech(self.policy, self.held_out, *self.how) if self.how else None


# -- small random parts of the real classes ---------------------------------------------------------------------------

TINY_CODEC = UnifiedConfig(
    num_codebooks=2,
    codebook_size=16,
    codebook_dim=8,
    spectrum_hop=240,
    strides=(2, 2),
    channels=(16, 16, 16),
    dilations=(1,),
    acoustic_dim=16,
    semantic_dim=16,
)
"""25 frames a second."""


TINY: dict[str, Any] = dict(
    path="tiny", codec="tiny", data=("bundled:en",), held_out_count=2, clone=True, max_seconds=0.8, max_steps=2,
    judge="tiny", model=ModelConfig(), optim=OptimConfig(lr=1e-3),
)  # fmt: skip
"""Options of tiny() of recipes for models that speak."""


def with_tiny_parts(config: Speaking, folder: Path) -> Speaking:
    """Return `config` with small random parts for a model, a codec and judges that are called `tiny`."""
    return replace(
        config,
        path=tiny_part(folder, "talker" if config.talker else "model", config.path),
        codec=tiny_part(folder, "codec", config.codec),
        judge=tiny_part(folder, "judge", config.judge),
        judge_speaker=tiny_part(folder, "speaker", config.judge_speaker),
    )


def check_judge(judge: str | None, rewards: SpeechRewards) -> None:
    """Raise ValueError for a judge that the reward asks, too."""
    if judge is not None and judge == rewards.asr and rewards.asks_asr:
        raise ValueError(f"--judge {judge}: the reward asks it, too; measure with another, or with none")


def tiny_part(folder: Path, name: str, value: Value) -> Value:
    """Return the path `value`; for `tiny` that of a random part, folder/NAME, which is written where it is missing."""
    if value != "tiny":
        return value
    path = folder / name
    if not path.exists():
        partial = folder / f"{name}.partial"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            write_tiny_part(name, partial)
        partial.rename(path)
    return str(path)


def write_tiny_part(name: str, folder: Path) -> None:
    if name == "model":
        higgs.tiny(codebooks=TINY_CODEC.num_codebooks, codebook_size=TINY_CODEC.codebook_size).save(folder)
    elif name == "talker":
        talker.tiny(
            folder, generation="qwen3", codebooks=TINY_CODEC.num_codebooks, codebook_size=TINY_CODEC.codebook_size
        )
    elif name == "omni":
        talker.tiny(folder)
    elif name == "codec":
        UnifiedTokenizer(TINY_CODEC).save(folder)
    elif name == "speaker":
        folder.mkdir(parents=True)
        save_file(GE2ENetwork().state_dict(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": GE2E}) + "\n", encoding="utf-8")
    else:
        CharacterCTC(Head()).save(folder)
