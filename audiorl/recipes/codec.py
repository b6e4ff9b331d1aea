"""Train our own tokenizer: 24 kHz, 25 frames a second, 8 x 1024 codes, 2 kbit/s.

On the bundled recordings, a small one that two CPU cores train in a quarter of an hour:

    audiorl train codec --out runs/codec
    audiorl train codec --plain True --out runs/plain      # the ablation: product VQ without semantics

On data of your own and GPUs, the full-sized one. Recordings of any rate are resampled; --speech-model gives the
semantic branch the features of a HuBERT, WavLM or Wav2Vec2 instead of log-mel statistics:

    torchrun --nproc-per-node 8 -m audiorl.cli train codec --full --out runs/codec --device cuda \\
        --data LibriTTS/ own.jsonl --held-out LibriTTS-dev/ --speech-model facebook/hubert-base-ls960

The trained tokenizer is the folder codec/ of the run: `tokenizers_audio.load("runs/codec/codec")`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from audiorl.audio import AudioClip
from audiorl.audio import name as clip_name
from audiorl.data.corpus import bundled_speech, split_by_key
from audiorl.data.recordings import Recordings, read_recordings
from audiorl.data.sets import spread
from audiorl.distributed.torchrun import local_device
from audiorl.report import write_report
from audiorl.run.folder import Run
from audiorl.train.codec import CodecConfig, measure_codec, quick_training, small_tokenizer, train_codec
from tokenizers_audio.unified import UnifiedConfig, UnifiedTokenizer
from tokenizers_audio.unified import load as load_tokenizer
from tokenizers_audio.unified.semantic import load_speech_model
from tokenizers_audio.unified.train import TrainConfig

HELD_OUT = 0.1
"""Share of the bundled recordings that is measured and not trained on; audiorl/eval/codec.py measures on the same."""


@dataclass(frozen=True)
class CodecRecipeConfig:
    data: tuple[str, ...] = ("bundled",)
    """Audio files, folders of them, manifests (the field `audio` of a row), or `bundled` less its held-out tenth."""
    held_out: tuple[str, ...] = ()
    """Recordings to measure on, of `bundled` that tenth; without any, `held_out_count` of the data are held back."""
    held_out_count: int = 40
    """Most recordings that are measured, evenly spaced."""
    audio_root: str | None = None
    """Folder from which relative audio paths start; by default the folder of each data file."""
    on_error: Literal["raise", "skip"] = "raise"
    """`skip` counts and lists unusable recordings instead of stopping."""
    check_audio: bool = True
    """Decode everything before training, so that a damaged file does not stop a run in its third hour."""
    path: str | None = None
    """A tokenizer to continue with; None makes a new one."""
    speech_model: str | None = None
    """A HuBERT, WavLM or Wav2Vec2 for the semantic branch."""
    plain: bool = False
    """The ablation at the same bitrate: 8 parallel quantisers, no residuals, no semantic branch."""
    seed: int = 0
    """Seed of new weights and of the crops that are trained on."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one."""
    threads: int = 2
    """CPU threads of torch."""
    tokenizer: UnifiedConfig = small_tokenizer()
    """The new tokenizer's geometry; unused with `path`."""
    codec: CodecConfig = quick_training(5000)
    """Batches, losses and steps."""

    def __post_init__(self) -> None:
        for option, other in (("path", "plain"), ("path", "speech-model"), ("plain", "speech-model")):
            if getattr(self, option) and getattr(self, other.replace("-", "_")):
                raise ValueError(f"--{option}: leaves --{other} nothing to decide; leave one of the two out")


def tiny() -> CodecRecipeConfig:
    return CodecRecipeConfig(
        held_out_count=2,
        tokenizer=UnifiedConfig(
            codebook_size=32,
            spectrum_hop=240,
            strides=(2, 2),
            channels=(16, 16, 16),
            dilations=(1,),
            activation="elu",
            acoustic_dim=16,
            semantic_dim=16,
        ),
        codec=CodecConfig(
            batch_size=2,
            crop_seconds=0.4,
            save_every=2,
            train=TrainConfig(
                steps=4,
                mel_windows=(512,),
                mel_bands=(40,),
                start_vectors=20,
                adversarial_after=2,
                discriminator_windows=(512,),
                discriminator_channels=4,
            ),
        ),
    )


def full() -> CodecRecipeConfig:
    """Return the released geometry of Higgs Audio V2 with X-Codec's losses; 30 M parameters."""
    return CodecRecipeConfig(
        threads=8,
        tokenizer=UnifiedConfig(),
        codec=CodecConfig(batch_size=64, crop_seconds=2.0, eval_every=5000, train=TrainConfig(autocast=True)),
    )


def main(config: CodecRecipeConfig, run: Run) -> None:
    torch.set_num_threads(config.threads)
    recordings, held_out, texts = read(config)
    print(recordings.summary(), flush=True)
    for line in recordings.skipped[:20]:
        print(f"  left out {line}", flush=True)
    if config.path is not None:
        tokenizer = load_tokenizer(config.path)
    else:
        geometry, speech = config.tokenizer, None
        if config.plain:
            geometry = replace(geometry, quantizer="grouped", semantic="none")
        elif config.speech_model is not None:
            geometry, speech = replace(geometry, semantic="model"), load_speech_model(config.speech_model)
        torch.manual_seed(config.seed)
        tokenizer = UnifiedTokenizer(geometry, speech)
    tokenizer = tokenizer.to(local_device(config.device))
    measure_codec(run, "before", tokenizer, held_out, texts)
    trained = config.path is not None
    train_codec(tokenizer, recordings, run, config=config.codec, seed=config.seed, held_out=held_out, trained=trained)
    measure_codec(run, "after", tokenizer, held_out, texts)
    tokenizer.save(run.dir / "codec")
    print(write_report(run.dir))


def read(config: CodecRecipeConfig) -> tuple[Recordings, list[AudioClip], list[str]]:
    """Return (training recordings, held-out clips, their transcripts, "" where there is none)."""
    train, test = split_by_key(bundled_speech(), HELD_OUT, seed=0)

    def files(names: Sequence[str]) -> Recordings:
        return read_recordings(
            [name for name in names if name != "bundled"],
            config.tokenizer.sample_rate,
            audio_root=config.audio_root,
            on_error=config.on_error,
            check_audio=config.check_audio,
        )

    found = files(config.data)
    choice = [(clip, "") for clip in (files(config.held_out) if config.held_out else found).clips]
    if "bundled" in (config.held_out or config.data):
        choice = [(u.clip, u.text) for u in test if 0.5 <= u.duration <= 8] + choice
    held_out = spread(choice, config.held_out_count)
    keys = {clip.key for clip, _ in held_out}
    kept = [i for i, clip in enumerate(found.clips) if clip.key not in keys]
    if config.held_out and (twice := [clip_name(clip) for clip in found.clips if clip.key in keys]):
        raise ValueError(f"--held-out: {twice[0]} is in --data, too; leave it out of one of the two")
    if found.clips and not kept and "bundled" not in config.data:
        raise ValueError(f"{len(found.clips)} recordings, of which {config.held_out_count} are to be held out")
    clips, lengths = tuple(found.clips[i] for i in kept), tuple(found.lengths[i] for i in kept)
    recordings = replace(found, clips=clips, lengths=lengths)
    if "bundled" in config.data:
        recordings += Recordings(tuple(u.clip for u in train), tuple(u.duration for u in train))
    return recordings, [clip for clip, _ in held_out], [text for _, text in held_out]
