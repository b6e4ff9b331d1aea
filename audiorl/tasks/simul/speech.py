"""Spoken interpretation as one audio track, each turn's speech at its time, and SimulEval's log of it.

|chunk 1|chunk 2|chunk 3|chunk 4|        source
        |un momento…|  |adiós|    a turn's speech begins after its chunk and after the speech before it
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from audiorl.audio import write_wav
from audiorl.eval.metrics.latency import Interval, play
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.tasks.simul.logs import Instance, write_log
from audiorl.types import Rollout


def playback_track(rollout: Rollout, speech_decoder: CodecSpeechDecoder) -> tuple[np.ndarray, list[Interval]]:
    """The interpreter's track, float32 [T] from the source's beginning on, and the interval of each turn's speech (ms).

    A turn without speech has no interval; without any speech the track is empty.
    """
    waves = speech_decoder.by_segment(rollout)
    spoken = [(s.source_time or 0.0, wav) for s, wav in zip(rollout.segments, waves, strict=True) if len(wav)]
    rate = speech_decoder.sample_rate
    intervals = play([1000 * time for time, _ in spoken], [1000 * len(wav) / rate for _, wav in spoken])
    starts = [round(start / 1000 * rate) for start, _ in intervals]
    track = np.zeros(max((at + len(wav) for at, (_, wav) in zip(starts, spoken, strict=True)), default=0), np.float32)
    for at, (_, wav) in zip(starts, spoken, strict=True):
        track[at : at + len(wav)] += wav
    return track, intervals


def write_speech_log(
    folder: Path, rollouts: Sequence[Rollout], speech_decoder: CodecSpeechDecoder, sources: Sequence[str] = ()
) -> list[Path]:
    """folder/wavs/INDEX_pred.wav, the tracks, and SimulEval's log of speech output, its delays those of the chunks.

    A stream without speech is in the log without delays. `sources`: names of the recordings, by default the ids.
    Returns the paths of the tracks.
    """
    instances, paths = [], []
    for index, rollout in enumerate(rollouts):
        track, intervals = playback_track(rollout, speech_decoder)
        path = folder / "wavs" / f"{index}_pred.wav"
        write_wav(path, track, speech_decoder.sample_rate)
        paths.append(path)
        turns = [s for s, wav in zip(rollout.segments, speech_decoder.by_segment(rollout), strict=True) if len(wav)]
        sample = rollout.sample
        instances.append(
            Instance(
                index=index,
                prediction=str(path),
                delays=tuple(1000 * (s.source_time or 0.0) for s in turns),
                elapsed=(),
                prediction_length=len(track) / speech_decoder.sample_rate,
                reference=" ".join(sample.references) or None,
                source=sources[index] if sources else sample.id,
                source_length=1000 * float(sample.metadata.get("seconds", sample.turns[-1].end)),
                durations=tuple(duration for _, duration in intervals),
                prediction_offset=intervals[0][0] if intervals else 0.0,
                intervals=tuple(intervals),
            )
        )
    write_log(folder, instances, "speech", "speech")
    return paths
