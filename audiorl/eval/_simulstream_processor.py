"""A policy as a speech processor of simulstream 1.0, which then drives it from WAV files or over a websocket:

    type: audiorl.eval._simulstream_processor.InterpreterProcessor
    model: runs/simul/checkpoints/stage2/step_000040
    source_language: en
    target_language: es
    speech_chunk_size: 0.96

in the YAML of `--speech-processor-config`. `speech_chunk_size` (s) is the chunk that the policy was trained with;
`context` (s), `history` (seconds of the past that are carried), `max_new_tokens` and `device` are optional. Tokens are
words, or characters of languages without spaces, as simulstream's detokenizer "simuleval" joins them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from simulstream.server.speech_processors import SpeechProcessor
from simulstream.server.speech_processors.incremental_output import IncrementalOutput

from audiorl.config import ModelConfig, SamplingConfig
from audiorl.eval.metrics.latency import cut_text, separator, split_words, tidy
from audiorl.models import AudioPolicy, load_policy
from audiorl.run.folder import newest_checkpoint
from audiorl.tasks.simul.live import Interpreter
from audiorl.tasks.simul.streams import ChunkConfig, settled


class InterpreterProcessor(SpeechProcessor):  # type: ignore[misc]
    """After each chunk it gives the words that are complete. A word that a later turn goes on with is taken back."""

    policy: ClassVar[AudioPolicy | None] = None
    """Loaded once for all clients."""

    def __init__(self, config: SimpleNamespace):
        super().__init__(config)
        for name in ("source_language", "target_language"):
            if not isinstance(getattr(config, name, None), str):
                raise ValueError(f"speech processor config: {name}: missing; give the code of the language, such as en")
        self._source, self._target = config.source_language, config.target_language
        self._chunks = ChunkConfig(config.speech_chunk_size, getattr(config, "context", ChunkConfig().context))
        self._sampling = SamplingConfig(temperature=0.0, max_new_tokens=getattr(config, "max_new_tokens", 48))
        self._history = getattr(config, "history", None)
        self.clear()

    @classmethod
    def load_model(cls, config: SimpleNamespace) -> None:
        cls.policy = load_policy(newest_checkpoint(config.model), ModelConfig(device=getattr(config, "device", "auto")))

    def set_source_language(self, language: str) -> None:
        self._source = language
        self.clear()

    def set_target_language(self, language: str) -> None:
        self._target = language
        self.clear()

    def process_chunk(self, waveform: Any) -> IncrementalOutput:
        self._interpreter.observe(np.asarray(waveform, np.float32))
        return self._output(settled(self._interpreter.segments, self._target))

    def end_of_stream(self) -> IncrementalOutput:
        self._interpreter.finish()
        return self._output(self._interpreter.text)

    def tokens_to_string(self, tokens: list[str]) -> str:
        """Join tokens to a text; the last outputs of a stream begin with the space that parts them from the rest."""
        space = separator(self._target)
        follow = 0 < len(tokens) < len(self._written) and tokens == self._written[-len(tokens) :]
        return space * follow + space.join(tokens)

    def clear(self) -> None:
        """Get ready for a new stream."""
        if self.policy is None:
            self.load_model(self.config)
        assert self.policy is not None
        self._interpreter = Interpreter(
            self.policy, self._source, self._target, self._chunks, self._sampling, history=self._history
        )
        self._written: list[str] = []

    def _output(self, text: str) -> IncrementalOutput:
        """Return what is new in `text`, everything that stands so far, and the words that it takes back."""
        text = tidy(text, self._target)
        before, self._written = self._written, split_words(text, self._target)
        if not separator(self._target):  # characters hold the spaces before them
            self._written = cut_text(text, [[unit] for unit in self._written])
        same = 0
        while same < min(len(before), len(self._written)) and before[same] == self._written[same]:
            same += 1
        new, deleted = self._written[same:], before[same:]
        space = separator(self._target)
        new_string, deleted_string = (space * (same > 0 and bool(x)) + space.join(x) for x in (new, deleted))
        return IncrementalOutput(new, new_string, deleted, deleted_string)
