"""A tiny flow on a real codec of log-mels, with weights that say something."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from audiorl.audio import AudioClip
from audiorl.config.flow import FlowModelConfig
from audiorl.data.corpus import bundled_speech
from audiorl.models.flow import FlowPolicy, new_flow
from audiorl.tasks.sound.scenes import Event
from audiorl.types import Message, Sample
from corpora.scenes.build import Layout, video
from tokenizers_audio.unified import UnifiedConfig, UnifiedTokenizer

CODEC = UnifiedConfig(
    spectrum_hop=240, phases="peaks", strides=(2, 2), channels=(16, 16, 16), dilations=(1,), activation="elu",
    acoustic_dim=16, semantic="none", codebook_dim=8,
)  # fmt: skip


def clip(number: int = 0) -> AudioClip:
    return bundled_speech(("en",), max_seconds=1.0)[number].clip


def tiny_flow(channels: int = 1, video: int = 0) -> FlowPolicy:
    torch.manual_seed(0)
    codec = UnifiedTokenizer(CODEC)
    codec.begin(torch.from_numpy(clip().load(24_000)[:9600])[None], torch.Generator().manual_seed(0))
    size = FlowModelConfig(32, 2, 2, 1, 1, 64, video=video, channels=channels, max_seconds=2.0)
    policy = new_flow(size, codec)
    with torch.no_grad():  # what begins at zero
        for p in policy.model.parameters():
            if not p.any():
                p.normal_(std=0.2)
    policy.measure_latents([clip(0), clip(1)])
    return policy


def asked(id: str, text: str, duration: float, **metadata: Any) -> Sample:
    return Sample(id, (Message("user", (text,)),), task="sound", metadata={"duration": duration, **metadata})


def write_flow_run(folder: Path, sound: np.ndarray) -> Path:
    """A run of sound-sft with one checkpoint, and `sound` [T] at 16 kHz as what it has made."""
    policy, checkpoint = tiny_flow(), "checkpoints/sft/step_000001"
    policy.save(folder / checkpoint)
    policy.codec.save(folder / "codec")  # type: ignore[union-attr]
    (folder / "config.json").write_text('{"recipe": "somewhere/sound_sft.py"}')
    state = {"seq": 1, "finished": {}, "checkpoints": {"sft": checkpoint}, "seconds": {}}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / checkpoint / "trainer.json").write_text('{"phase": "sft", "step": 1, "seq": 1}')
    (folder / "eval/after").mkdir(parents=True)
    (folder / "eval/after.jsonl").write_text("")
    soundfile.write(folder / "eval/after/0000.wav", (sound * 2**15).astype(np.int16), 16_000)
    return folder


def add_scene(run: Path) -> Event:
    """Give what `write_flow_run` has made a silent video, half a second of a dog that bounces at the left."""
    dog = Event("dog", 0.1, 0.3, azimuth=-90.0)
    np.save(run / "scene.npy", video([dog], Layout(seconds=0.5, video_rate=48)))
    scene = {"video": str(run / "scene.npy"), "events": [asdict(dog)]}
    row = {"id": "a", "spoken_audio": {"path": "eval/after/0000.wav"}, "scene": scene}
    (run / "eval/after.jsonl").write_text(json.dumps(row) + "\n")
    return dog
