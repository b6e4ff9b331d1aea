"""Models of speech: recognisers, speaker encoders, quality models, voice activity; taggers of sounds.

Importing this loads no model.

    recogniser = load_recogniser("whisper-base", language="en")
    recogniser.transcribe([wav], sample_rate=24_000)        # ["hello world"]

A model of your own is a Python file with `load(folder, device)`: `load_speaker_encoder("encoder.py:weights/encoder")`.
`tools/fetch_judges.py` fetches small ones where there is no model hub.
"""

from audiorl.speech_models.loading import (
    load_quality_model,
    load_recogniser,
    load_speaker_encoder,
    load_speech_detector,
    load_tagger,
)
from audiorl.speech_models.protocol import (
    AlignedWord,
    Aligner,
    LanguageIdentifier,
    QualityModel,
    Recogniser,
    SpeakerEncoder,
    SpeechDetector,
    Tagger,
    TextScorer,
)

__all__ = [
    "AlignedWord",
    "Aligner",
    "LanguageIdentifier",
    "QualityModel",
    "Recogniser",
    "SpeakerEncoder",
    "SpeechDetector",
    "Tagger",
    "TextScorer",
    "load_quality_model",
    "load_recogniser",
    "load_speaker_encoder",
    "load_speech_detector",
    "load_tagger",
]
