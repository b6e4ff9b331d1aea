"""A policy as an agent of SimulEval (pip install simuleval), which then drives it chunk by chunk:

    simuleval --agent-class audiorl.simulst.agent.InterpreterAgent --model runs/simul/checkpoints/stage2/step_000040 \\
        --source-language en --target-language es --source-segment-size 960 \\
        --source wavs.txt --target references.txt --output results

`--source-segment-size` is the chunk in ms that the policy was trained with. Audio of another rate than 16 kHz is
resampled, several channels are averaged by SimulEval itself.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

import numpy as np
import soxr
from simuleval.agents import SpeechToTextAgent
from simuleval.agents.actions import Action, ReadAction, WriteAction

from audiorl.config import ModelConfig, SamplingConfig
from audiorl.models import load_policy
from audiorl.simulst.live import RATE, Interpreter
from audiorl.simulst.streams import ChunkConfig


class InterpreterAgent(SpeechToTextAgent):  # type: ignore[misc]
    """Reads a segment, lets the policy listen on or write, until the source and the policy have finished."""

    def __init__(self, args: Namespace):
        # Before SimulEval's own constructor, which calls reset().
        self._policy = load_policy(args.model, ModelConfig(device=args.device_name))
        self._languages = args.source_language, args.target_language
        self._chunks = ChunkConfig(args.source_segment_size / 1000, args.context)
        self._sampling = SamplingConfig(temperature=0.0, max_new_tokens=args.max_new_tokens)
        super().__init__(args)

    @staticmethod
    def add_args(parser: ArgumentParser) -> None:
        parser.add_argument("--model", required=True, help="folder or hub id of a speech language model")
        parser.add_argument("--source-language", required=True, help="ISO code")
        parser.add_argument("--target-language", required=True, help="ISO code")
        parser.add_argument("--context", type=float, default=ChunkConfig().context, help="seconds heard before a chunk")
        parser.add_argument("--max-new-tokens", type=int, default=48, help="most tokens after one chunk")
        parser.add_argument("--device-name", default="cpu", help="where the model lives")

    def reset(self) -> None:
        super().reset()
        self._interpreter = Interpreter(self._policy, *self._languages, self._chunks, self._sampling)
        self._taken = 0

    def policy(self, states: Any = None) -> Action:
        states = self.states if states is None else states
        new = np.asarray(states.source[self._taken :], dtype=np.float32)
        self._taken = len(states.source)
        if len(new) and states.source_sample_rate != RATE:
            new = soxr.resample(new, states.source_sample_rate, RATE)
        text = self._interpreter.hear(new) if len(new) else ""
        if states.source_finished:
            return WriteAction((text + self._interpreter.finish()).strip(), finished=True)
        return WriteAction(text.strip(), finished=False) if text.strip() else ReadAction()
