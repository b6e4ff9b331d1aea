"""The options of `audiorl annotate`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from audiorl.errors import install
from audiorl.languages import language_code

CAPTION = "Describe the sounds of this recording in one sentence."


@dataclass(frozen=True)
class Annotate:
    """Find the speech in recordings, transcribe it, tell speakers from each other, measure quality: a manifest to train
    on. Run the same command again after an interruption, or with other options: what still holds is not done again.
    """

    inputs: Positional[tuple[str, ...]]
    """Audio files, folders of them, or manifests of any format that training reads. Texts in them are not used."""
    out: Path
    """Folder of manifest.jsonl, left_out.jsonl and the results of the stages. New, or written by this command."""
    asr: tuple[str, ...] = ()
    """Recognisers, the one to trust most first: folders of Whisper (transformers or CTranslate2) or of a CTC model,
    pocketsphinx, FILE.py:FOLDER, or a speech model that audiorl trained. PATH=en,es limits one to these languages.
    Required. From two on, the transcript is the one that the others agree with most."""
    speeds: tuple[float, ...] = (1.0,)
    """Each recogniser also transcribes the audio at these speeds, such as 1.0 0.9, 0.5 to 2: agreement needs two
    transcripts, and this gives them with a single recogniser."""
    language: str | None = None
    """Code of the language of all recordings. By default the first multilingual Whisper of asr identifies it, or
    py3langid from the text of the first recogniser, among the languages that it transcribes, where there is none."""
    one_language: bool = False
    """Each recording is in one language: the probabilities of its segments are averaged, weighted by their length."""
    threshold: float = 0.5
    """Probability of speech, 0 to 1, from which a frame of 32 ms begins a segment. It ends 0.15 below."""
    pause: float = 0.3
    """Seconds without speech that end a segment."""
    max_seconds: float = 30.0
    """Longer segments are cut where speech is least probable, at most 30 s for Whisper."""
    padding: float = 0.1
    """Seconds before and after the speech that belong to a segment."""
    sounds: bool = False
    """Also write sounds.jsonl: parts without speech that are not silent, with an empty text and the task no_speech."""
    speaker: str | None = None
    """Speaker encoder, such as the folder that tools/fetch_judges.py writes. By default rows have no speaker."""
    speaker_threshold: float = 0.35
    """Cosine distance, 0 to 2, up to which two clusters of segments are one speaker. It depends on the encoder."""
    quality: Literal["dnsmos", "none"] = "dnsmos"
    """What predicts the mean opinion score. none: only what the waveform tells (level, SNR, clipping, bandwidth)."""
    caption: str | None = None
    """A speech model, as for audiorl chat, that describes each segment and, with sounds, each sound."""
    caption_prompt: str = CAPTION
    """What it is asked."""
    min_agreement: float = 0.0
    """Leave out transcripts with a lower agreement of the recognisers, 0 to 1."""
    min_mos: float = 1.0
    """Leave out segments with a lower predicted mean opinion score, 1 to 5."""
    languages: tuple[str, ...] = ()
    """Leave out segments in other languages; by default none."""
    min_seconds: float = 0.3
    """Leave out segments with less speech, in seconds."""
    min_speaker_seconds: float = 0.0
    """Leave out speakers with less speech in all recordings together, in seconds."""
    licence: str | None = None
    """Licence of the recordings, such as CC0-1.0, for each row. With it audiorl.data.corpus reads the folder."""
    cut: bool = False
    """Write each segment to a FLAC file in OUT/audio at the rate of its recording, in place of a reference to a part
    of the recording."""
    workers: int = 1
    """Number of processes, each with its own copy of the models."""
    runtime: Literal["local", "ray"] = "local"
    """local: processes of this machine. ray: workers of a Ray cluster, which all see the recordings and out."""
    address: str | None = None
    """HOST:PORT of a running Ray cluster; by default one is started on this machine."""
    device: str = "auto"
    """cpu, cuda or cuda:N for the models; auto is a GPU where there is one."""

    def check(self) -> None:
        """Raise ValueError for options that have no meaning, alone or together."""
        if not self.inputs:
            raise ValueError("annotate: name audio files, folders or manifests: audiorl annotate FOLDER --out OUT")
        if not self.asr:
            raise ValueError(
                "annotate: no recogniser; give --asr a folder of Whisper (tools/fetch_judges.py writes one), or "
                f"pocketsphinx for English ({install('corpora')})"
            )
        for name, low, high in (
            ("threshold", 0.16, 0.99),
            ("pause", 0.0, 60.0),
            ("max_seconds", 1.0, 30.0),
            ("padding", 0.0, 5.0),
            ("speaker_threshold", 0.0, 2.0),
            ("min_agreement", 0.0, 1.0),
            ("min_mos", 1.0, 5.0),
            ("min_seconds", 0.0, 30.0),
            ("min_speaker_seconds", 0.0, math.inf),
            ("workers", 1, 4096),
        ):
            if not low <= getattr(self, name) <= high:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"annotate: {option} is {getattr(self, name)}; give {low:g} to {high:g}")
        if not self.speeds or not all(0.5 <= speed <= 2 for speed in self.speeds):
            raise ValueError(f"annotate: --speeds {self.speeds}; give numbers from 0.5 to 2, with 1.0 first")
        if len(set(self.speeds)) < len(self.speeds) or len(set(self.asr)) < len(self.asr):
            raise ValueError("annotate: --asr and --speeds: give each recogniser and each speed once")
        if self.min_agreement > 0 and len(self.asr) * len(self.speeds) < 2:
            raise ValueError(
                "annotate: --min-agreement needs two transcripts: give --asr a second recogniser, or --speeds 1.0 0.9"
            )
        if self.min_mos > 1 and self.quality == "none":
            raise ValueError("annotate: --min-mos needs --quality dnsmos")
        if self.min_speaker_seconds > 0 and self.speaker is None:
            raise ValueError("annotate: --min-speaker-seconds needs --speaker ENCODER")
        codes = {language_code(language) for language in self.languages}
        if self.language and codes and language_code(self.language) not in codes:
            raise ValueError(f"annotate: --language {self.language} is not among --languages; no row would be left")
        if self.address and self.runtime != "ray":
            raise ValueError("annotate: --address is that of a Ray cluster; add --runtime ray")
