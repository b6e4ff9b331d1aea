"""simulstream drives a policy: its own reader of its log finds the words and delays that we log without it.

Left out where simulstream is not installed (`pip install simulstream==1.0.0`).
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from audiorl.audio import AudioClip
from audiorl.config import SamplingConfig
from audiorl.eval._streams import instance_of, interpret
from audiorl.models import load_policy
from audiorl.tasks.simul.bundled import bundled_streams
from audiorl.tasks.simul.streams import ChunkConfig
from tests.conftest import make_omni

pytest.importorskip("simulstream")

MODEL = "audiorl.eval._simulstream_processor.InterpreterProcessor"


def test_its_log_has_our_words_and_delays(tmp_path: Path) -> None:
    from simulstream.metrics.readers import LogReader
    from simulstream.server.message_processor import METRICS_LOGGER, MessageProcessor
    from simulstream.server.speech_processors import build_speech_processor

    make_omni().save(tmp_path / "model")
    config = SimpleNamespace(
        type=MODEL,
        model=str(tmp_path / "model"),
        source_language="en",
        target_language="es",
        speech_chunk_size=0.96,
        max_new_tokens=6,
        device="cpu",
    )
    processor = build_speech_processor(config)
    log = tmp_path / "metrics.jsonl"
    handler = logging.FileHandler(log)
    METRICS_LOGGER.addHandler(handler)
    METRICS_LOGGER.setLevel(logging.INFO)
    streams = bundled_streams("test", "es", count=2, seconds=(4, 6))
    said = []
    try:
        for i, stream in enumerate(streams):
            message = MessageProcessor(i, processor)
            message.process_metadata({"sample_rate": 16_000, "metrics_metadata": {"wav_name": f"{i}.wav"}})
            samples = np.round(stream.audio.load(16_000) * 2**15).clip(-(2**15), 2**15 - 1).astype(np.int16)
            streams[i] = SimpleNamespace(stream=stream, wav=samples.astype(np.float32) / 2**15)
            outputs = [
                message.process_speech(part.tobytes())
                for part in np.split(samples, range(15_360, len(samples), 15_360))
            ]
            said.append([o for o in (*outputs, message.end_of_stream()) if o is not None])
    finally:
        METRICS_LOGGER.removeHandler(handler)
        handler.close()

    ours = [replace(s.stream, audio=AudioClip(array=s.wav, sample_rate=16_000)) for s in streams]
    sampling = SamplingConfig(max_new_tokens=6, max_batch_tokens=1)
    rollouts = interpret(load_policy(tmp_path / "model"), ours, ChunkConfig(), sampling)
    reader = LogReader(SimpleNamespace(detokenizer_type="simuleval", latency_unit="word"), str(log))
    theirs = reader.final_outputs_and_latencies()
    for i, rollout in enumerate(rollouts):
        instance = instance_of(rollout, i)
        assert theirs[str(i)].final_text == instance.prediction and instance.prediction
        text = ""
        for output in said[i]:
            assert text.endswith(output.deleted_string)
            text = text.removesuffix(output.deleted_string) + output.new_string
        assert text.split() == instance.prediction.split()
        # A word is late until the chunk in which it was complete; the rest of the stream is a chunk of its own.
        assert 1000 * np.array(theirs[str(i)].ideal_delays) == pytest.approx(np.array(instance.delays), abs=1.0)
    assert all("computation_time" in json.loads(line) or "metadata" in json.loads(line) for line in log.open())


def test_a_configuration_without_languages(tmp_path: Path) -> None:
    from audiorl.eval._simulstream_processor import InterpreterProcessor

    with pytest.raises(ValueError, match="speech processor config: target_language: missing; give the code"):
        InterpreterProcessor(SimpleNamespace(source_language="en", speech_chunk_size=0.96))
