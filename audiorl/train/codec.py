"""Training our tokenizer on recordings, as a phase of a run, and measuring what it makes of held-out ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from audiorl.audio import AudioClip, seconds, write_wav
from audiorl.audio import name as clip_name
from audiorl.config.checks import require_counts, require_ranges
from audiorl.config.distributed import current
from audiorl.data.recordings import Crops, Place, Recordings
from audiorl.data.rows import write_json_lines
from audiorl.distributed import num_trainers, trainer_group
from audiorl.distributed.local import World, changes_worker
from audiorl.distributed.torchrun import local_device
from audiorl.eval.metrics.codes import bitrate, codebook_use, count_codes
from audiorl.eval.metrics.corpus import bootstrap_interval
from audiorl.eval.metrics.speech import mel_distance, stft_distance
from audiorl.run.checkpoint import TrainerState
from audiorl.run.folder import Run
from audiorl.run.saving import CheckpointedWorker, CheckpointWriter
from audiorl.train.fit import fit
from tokenizers_audio.audio import prepare
from tokenizers_audio.protocol import AudioTokenizer
from tokenizers_audio.unified import UnifiedConfig, UnifiedTokenizer
from tokenizers_audio.unified import load as load_tokenizer
from tokenizers_audio.unified.train import CodecTrainer, LossWeights, TrainConfig

LONGEST = 10.0  # seconds of a held-out recording that are measured
START_CROPS = 1000  # how many a tokenizer that has a beginning of its own begins with


@dataclass(frozen=True)
class CodecConfig:
    """A phase that trains the tokenizer. `batch_size` counts crops over all GPUs."""

    batch_size: int = 32
    """Crops per update, over all processes."""
    crop_seconds: float = 1.0
    """Duration of a crop in seconds."""
    save_every: int = 1000
    """Updates between checkpoints."""
    eval_every: int = 0
    """Held-out measurements during training, in steps; 0 only before and after."""
    cache_mb: int = 1024
    """Recordings are kept in memory when all of them fit into this."""
    threads: int = 4
    """That read audio."""
    train: TrainConfig = TrainConfig()

    def __post_init__(self) -> None:
        require_counts(self, ("batch_size", "save_every", "threads"))
        require_ranges(self, positive=("crop_seconds",))

    @property
    def steps(self) -> int:
        return self.train.steps


def small_tokenizer(num_codebooks: int = 8, codebook_size: int = 1024) -> UnifiedConfig:
    """Configure a tokenizer of 4 M parameters that says log-mels: two CPU cores train it in minutes."""
    return UnifiedConfig(
        num_codebooks=num_codebooks,
        codebook_size=codebook_size,
        spectrum_hop=240,
        phases="peaks",
        strides=(2, 2),
        channels=(192, 192, 192),
        dilations=(1, 3),
        activation="elu",
    )


def quick_training(steps: int, codebook_dropout: float = 0.25) -> CodecConfig:
    """Configure the training of `small_tokenizer`: small batches, many steps."""
    return CodecConfig(
        batch_size=4,
        save_every=500,
        train=TrainConfig(
            steps=steps,
            lr=1e-3,
            warmup_steps=20,
            schedule="cosine",
            max_grad_norm=100.0,
            start_vectors=16384,
            codebook_dropout=codebook_dropout,
            revive_below=0.1,
            adversarial_after=None,
            weights=LossWeights(semantic=10.0),
        ),
    )


class CodecWorker(CheckpointedWorker):
    """A trainer that reads its own crops."""

    def __init__(
        self, tokenizer: UnifiedTokenizer, recordings: Recordings, config: CodecConfig, seed: int, trained: bool = False
    ):
        self.tokenizer = tokenizer
        self.trainer = CodecTrainer(tokenizer, config.train, seed, trained)
        self._writer = CheckpointWriter(tokenizer, World.of_process_group())
        self.crops = _crops(tokenizer, recordings, config, seed)
        self.begins = tokenizer.config.phases == "peaks" and not trained

    @changes_worker
    def train(self, items: Sequence[Place]) -> dict[str, float]:
        if self.begins and not self.trainer.steps_done:
            places = range(0, len(self.crops), max(len(self.crops) // START_CROPS, 1))
            self.trainer.begin(torch.from_numpy(self.crops.read([self.crops[i] for i in places], 0)))
        return self.trainer.step(torch.from_numpy(self.crops.read(items, self.trainer.steps_done)))

    def weights(self) -> Mapping[str, Tensor]:
        return self.tokenizer.state_dict()

    def state(self) -> TrainerState:
        return self.trainer.state()

    def load(self, state: Mapping[str, Mapping[str, Tensor]], where: str) -> None:
        self.trainer.load(state, where)

    def close(self) -> None:
        """End after the last update; nothing is held."""


def _crops(tokenizer: UnifiedTokenizer, recordings: Recordings, config: CodecConfig, seed: int) -> Crops:
    samples = max(round(config.crop_seconds * tokenizer.frame_rate), 1) * tokenizer.config.hop
    return Crops(recordings, tokenizer.sample_rate, samples, seed, config.cache_mb, config.threads)


def train_codec(
    tokenizer: UnifiedTokenizer,
    recordings: Recordings,
    run: Run,
    *,
    config: CodecConfig,
    seed: int = 0,
    phase: str = "codec",
    held_out: Sequence[AudioClip] = (),
    trained: bool = False,
) -> None:
    """Train `tokenizer` in place, from the phase's last checkpoint on. `trained` keeps the codebooks it comes with,
    unless `quantize_after` asks for steps without codes.

    Under torchrun every rank trains on its part of each batch.
    """
    if run.finished(phase):
        run.load_result(phase, tokenizer)
        return
    if config.batch_size % num_trainers():
        raise ValueError(f"a batch of {config.batch_size} cannot be dealt out evenly to {num_trainers()} processes")
    if current().sharded:
        option = "--runtime.fsdp" if current().fsdp else "--runtime.zero"
        raise ValueError(f"{phase}: this kind of training divides no state among trainers; start it without {option}")
    others = (recordings, config, seed, trained)
    trainers = trainer_group(
        lambda world: CodecWorker(tokenizer, *others),
        lambda: (_worker, run.keep_model(phase, "start", tokenizer), tokenizer.device.type, *others),
    )
    evaluate = (lambda: measures(tokenizer, held_out)[0]) if held_out else None
    options: dict[str, Any] = {"evaluate": evaluate, "eval_every": config.eval_every}
    crops = _crops(tokenizer, recordings, config, seed)
    fit(trainers, tokenizer, crops, run, config, phase=phase, seed=seed, **options)


def _worker(folder: str, device: str, *others: Any) -> CodecWorker:
    return CodecWorker(load_tokenizer(folder).to(local_device(device)), *others)


@dataclass(frozen=True)
class HeldOutCopy:
    """A held-out recording and what the codec made of it, mono [T] at the codec's rate, and how far they are apart."""

    original: np.ndarray
    decoded: np.ndarray
    mel: float
    stft: float


def measures(tokenizer: AudioTokenizer, clips: Sequence[AudioClip]) -> tuple[dict[str, float], list[HeldOutCopy]]:
    """Measure mean mel and STFT distance, and how much of the codebooks recordings use. Returns the copies, too."""
    if not clips:
        raise ValueError("nothing to measure: no recording is held out")
    copies, codes = [], []
    for clip in clips:
        start = replace(clip, duration=LONGEST) if seconds(clip) > LONGEST else clip
        wav = prepare(start.load(tokenizer.sample_rate), tokenizer.sample_rate, tokenizer)
        encoded = tokenizer.encode(wav)
        codes.append(encoded[0].cpu().numpy())
        original, decoded = wav.numpy(), tokenizer.decode(encoded)[0, : len(wav)].cpu().numpy()
        mel, stft = mel_distance(original, decoded, tokenizer.sample_rate), stft_distance(original, decoded)
        copies.append(HeldOutCopy(original, decoded, mel, stft))
    use = codebook_use(count_codes(codes, tokenizer.num_codebooks, tokenizer.codebook_size))
    return {
        "mel_distance": float(np.mean([c.mel for c in copies])),
        "stft_distance": float(np.mean([c.stft for c in copies])),
        "codebook_entropy": float(np.mean([u.entropy for u in use])),
    }, copies


def measure_codec(
    run: Run, name: str, tokenizer: AudioTokenizer, clips: Sequence[AudioClip], texts: Sequence[str] = ()
) -> dict[str, Any]:
    """Measure once, as a phase of the run: the entry NAME of eval.json, and the first 8 copies as WAV files.

    Copies and originals are eval/NAME/*.wav, named by the lines of eval/NAME.jsonl.
    """
    if not run.finished(name):
        means, copies = measures(tokenizer, clips)
        rows = []
        for number, (clip, copy) in enumerate(zip(clips, copies, strict=True)):
            row: dict[str, Any] = {"id": f"{number:03d} {Path(clip_name(clip)).stem}"}
            row |= {"text": texts[number] if texts else "", "mel_distance": copy.mel, "stft_distance": copy.stft}
            for part, wav in (("original", copy.original), ("decoded", copy.decoded)) if number < 8 else ():
                path = Path("eval") / name / f"{number:03d}_{part}.wav"
                write_wav(run.dir / path, wav, tokenizer.sample_rate)
                row[part] = {"path": str(path)}
            rows.append(row)
        write_json_lines(run.dir / "eval" / f"{name}.jsonl", rows)
        low, high = bootstrap_interval([c.mel for c in copies])
        rate = bitrate(tokenizer.frame_rate, tokenizer.num_codebooks, tokenizer.codebook_size)
        results = {**means, "low": low, "high": high, "n": len(copies), "bitrate": rate}
        run.write_result(name, results)
        run.finish(name, results)
    result: dict[str, Any] = run.result(name)
    print(f"{name}: mel distance {result['mel_distance']:.3f} on {result['n']} held-out recordings", flush=True)
    return result
