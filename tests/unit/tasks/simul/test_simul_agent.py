"""SimulEval drives a policy: the same text, delays and scores as without it.

Left out where SimulEval is not installed; `make install` does it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr

from audiorl import cli
from audiorl.audio import AudioClip
from audiorl.tasks.simul.bundled import bundled_streams
from audiorl.tasks.simul.formats import write_streams
from audiorl.tasks.simul.logs import Instance, read_log
from tests.conftest import make_omni

pytest.importorskip("simuleval")

ROOT = Path(__file__).parents[4]
LATENCY = ["AL", "LAAL", "AP", "DAL", "ATD", "StartOffset", "EndOffset", "NumChunks"]
CHUNK, CAP = 960, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes garbage up to its cap, and six streams: at 44.1 kHz, in stereo, of whole chunks, with a rest
    too short to be heard."""
    folder = tmp_path_factory.mktemp("agent")
    make_omni().save(folder / "model")
    streams = []
    for i, stream in enumerate(bundled_streams("test", "es", count=6, seconds=(4, 6))):
        wav, rate = stream.audio.load(), 16_000
        if i == 1:
            wav, rate = soxr.resample(wav, rate, 44_100), 44_100
        elif i in (3, 4):  # exactly 11 chunks, and a little more
            wav = np.tile(wav, 4)[: 11 * 15_360 + (0 if i == 3 else 800)]
        audio = AudioClip(array=wav, sample_rate=rate)
        streams.append(replace(stream, id=f"stream {i}", audio=audio, seconds=len(wav) / rate))
    written = write_streams(folder, streams, ".wav")
    stereo = Path(str(written[2].audio.path))
    wav, rate = soundfile.read(stereo)
    soundfile.write(stereo, np.stack([wav, wav[::-1]], axis=1), rate, subtype="PCM_16")
    (folder / "wavs.txt").write_text("".join(f"{s.audio.path}\n" for s in written))
    (folder / "references.txt").write_text("".join(f"{s.reference}\n" for s in written))
    return folder


@pytest.fixture(scope="module")
def driven(folder: Path) -> Path:
    """SimulEval's own output."""
    out = folder / "simuleval"
    agent = "audiorl.eval._simuleval_agent.InterpreterAgent"
    command: list[object] = [sys.executable, "-m", "simuleval.cli", "--agent-class", agent]
    command += ["--model", folder / "model", "--source-language", "en", "--target-language", "es", "--output", out]
    command += ["--source-segment-size", str(CHUNK), "--max-new-tokens", str(CAP), "--no-progress-bar"]
    command += ["--source", folder / "wavs.txt", "--target", folder / "references.txt"]
    subprocess.run(list(map(str, command)), check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return out


def scored_by_simuleval(out: Path) -> dict[str, float]:
    """Not rounded, unlike its scores.tsv."""
    from simuleval.evaluator import SentenceLevelEvaluator

    options: dict[str, Any] = dict(output=out, score_only=True, no_scoring=False, no_progress_bar=True)
    options |= dict(source_type="speech", target_type="text", eval_latency_unit="word", sacrebleu_tokenizer="13a")
    options |= dict(latency_metrics=LATENCY, quality_metrics=["BLEU"], computation_aware=False, no_use_ref_len=False)
    evaluator = SentenceLevelEvaluator.from_args(Namespace(**options))
    return {**evaluator.quality, **evaluator.latency}


def test_the_same_text_and_delays_as_our_own_run(driven: Path, folder: Path) -> None:
    words: list[object] = ["--model", folder / "model", "--streams", folder / "streams.jsonl"]
    words += ["--out", folder / "own", "--max-new-tokens", str(CAP), "--device", "cpu"]
    assert cli.main(["eval", "simul", *map(str, words)]) == 0
    theirs, ours = read_log(driven), read_log(folder / "own")
    assert len(theirs) == 6
    for their, our in zip(theirs, ours, strict=True):
        assert their.prediction == our.prediction and len(our.delays) > 1
        # SimulEval does not know before a rest that is not heard that the source ends; here the last turn ends with it.
        end = our.source_length
        assert [end if d > end - 100 else d for d in their.delays] == pytest.approx(our.delays, abs=1e-6)
        assert their.source_length == pytest.approx(our.source_length, abs=1e-6)
        assert their.reference == our.reference
        assert _computing(their)[-1] >= 0 and _computing(our) == sorted(_computing(our))


def test_the_same_scores(driven: Path) -> None:
    expected = scored_by_simuleval(driven)
    assert cli.main(["eval", "simul", "--score", str(driven), "--language", "es"]) == 0
    found = json.loads((driven / "scores.json").read_text())
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def _computing(instance: Instance) -> list[float]:
    return [e - d for e, d in zip(instance.elapsed, instance.delays, strict=True)]
