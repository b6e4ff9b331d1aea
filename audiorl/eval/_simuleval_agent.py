"""A policy as an agent of SimulEval 1.1.4, which then drives it chunk by chunk:

    simuleval --agent-class audiorl.eval._simuleval_agent.InterpreterAgent \\
        --model runs/simul/checkpoints/stage2/step_000040 --source-language en --target-language es \\
        --source-segment-size 960 --source wavs.txt --target references.txt --output results --quality-metrics BLEU

`--source-segment-size` is the chunk in ms that the policy was trained with; `--device` is where it lives.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

import numpy as np
from simuleval.agents import SpeechToTextAgent
from simuleval.agents.actions import Action, ReadAction, WriteAction

from audiorl.config import ModelConfig, SamplingConfig
from audiorl.models import load_policy
from audiorl.run.folder import newest_checkpoint
from audiorl.tasks.simul.live import Interpreter
from audiorl.tasks.simul.streams import ChunkConfig, settled


class InterpreterAgent(SpeechToTextAgent):  # type: ignore[misc]
    """Reads a segment, lets the policy listen on or write, until the source and the policy have finished.

    SimulEval takes every write for whole words. A word at which the policy was cut off is written together with what
    follows; one that the policy itself ends in the middle and goes on with in a later turn counts as two.
    """

    def __init__(self, args: Namespace):
        # Before SimulEval's own constructor, which calls reset().
        self._policy = load_policy(newest_checkpoint(args.model), ModelConfig(device=args.device))
        self._languages = args.source_language, args.target_language
        self._chunks = ChunkConfig(args.source_segment_size / 1000, args.context)
        self._history = args.history
        self._sampling = SamplingConfig(temperature=0.0, max_new_tokens=args.max_new_tokens)
        super().__init__(args)

    @staticmethod
    def add_args(parser: ArgumentParser) -> None:
        parser.add_argument("--model", required=True, help="folder or hub id of a speech language model")
        parser.add_argument("--source-language", required=True, help="ISO code")
        parser.add_argument("--target-language", required=True, help="ISO code")
        context = ChunkConfig().context
        parser.add_argument("--context", type=float, default=context, help="seconds encoded before a chunk")
        parser.add_argument("--history", type=float, help="most seconds of the past that are carried; default: all")
        parser.add_argument("--max-new-tokens", type=int, default=48, help="maximum number of tokens after one chunk")

    def reset(self) -> None:
        super().reset()
        self._interpreter: Interpreter | None = None  # until the first segment tells the sample rate
        self._observed = self._written = 0

    def policy(self, states: Any = None) -> Action:
        states = self.states if states is None else states
        self._observe(states)
        if self._interpreter is None:
            return WriteAction("", finished=True) if states.source_finished else ReadAction()
        if states.source_finished:
            self._interpreter.finish()
        interpreter = self._interpreter
        text = interpreter.text if states.source_finished else settled(interpreter.segments, self._languages[1])
        new, self._written = text[self._written :], max(self._written, len(text))
        return WriteAction(new, finished=states.source_finished) if new or states.source_finished else ReadAction()

    def _observe(self, states: Any) -> None:
        new = np.asarray(states.source[self._observed :], dtype=np.float32)
        self._observed = len(states.source)
        if not len(new):
            return
        if self._interpreter is None:
            given = (self._policy, *self._languages, self._chunks, self._sampling)
            self._interpreter = Interpreter(*given, rate=states.source_sample_rate, history=self._history)
        self._interpreter.observe(new if new.ndim == 1 else new.mean(axis=1, dtype=np.float32))
