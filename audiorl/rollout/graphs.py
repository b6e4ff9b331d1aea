"""Decoding steps as CUDA graphs: the host starts one token of every row by one call, and reads it while the next runs.

A graph holds everything between two tokens: the embedding of the last ones, the decoder, the head, the sampler, the
counts of columns. It works in place on `Slots`, which stay where they are while answers join and leave, so a call
captures one graph for each power of 2 of rows that it comes to. They share their memory, as one runs at a time.

Not captured: speech, whose sampler decides on the host what a row is given next, and which branch of every layer it
goes through; streams, which write a few tokens between two chunks and then change places; decoders with caches that
grow (Whisper, sliding windows, linear attention) or with layers of another build than `slots.FUSED`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from audiorl.distributed.local import gpu_work
from audiorl.models.policy import AudioPolicy
from audiorl.rollout.samplers import StepOutput, TextSampler
from audiorl.rollout.slots import Slots

logger = logging.getLogger(__name__)


class GraphRecorder:
    """Captures functions on a stream of its own. One graph runs at a time, so they share their memory."""

    def __init__(self, device: torch.device):
        self.failed = False
        """A capture failed, so steps run as they are from now on."""
        self._stream = torch.cuda.Stream(device)
        self._last: Any = None

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return what runs `run` again as it was captured; the capture itself only records its kernels.

        Raises RuntimeError for a function that waits for the device, or whose kernels cannot be captured.
        """
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # The last graph must be alive until this one has taken over its memory.
        pool = {} if self._last is None else {"pool": self._last.pool()}
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # thread_local: others, which score answers or copy weights, go on using the device meanwhile.
            graph.capture_begin(**pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # it would say that the capture is not valid, and hide why: Ctrl-C, too
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        self._last = graph
        return graph.replay


@dataclass(frozen=True, eq=False, kw_only=True)
class _LateOutput(StepOutput):
    """A step that may not have ended on the device: `rows` waits for it, and no longer."""

    on_host: Tensor
    """[2, B] float64 ids and log-probs, in memory that the device writes."""
    ready: Any = None

    def rows(self) -> list[tuple[Any, ...]]:
        if self.ready is not None:
            self.ready.synchronize()
        ids, logprobs = self.on_host.tolist()
        return [(int(i), x) for i, x in zip(ids, logprobs, strict=True)]


class SlotSteps:
    """The steps of answers in slots. Without a recorder they run as they are.

    The first step of so many rows always does: libraries load kernels and make their workspaces at a first call, which
    must not fall into a capture.
    """

    def __init__(self, recorder: GraphRecorder | None, policy: AudioPolicy, slots: Slots, sampler: TextSampler):
        self._recorder, self._policy, self._slots, self._sampler = recorder, policy, slots, sampler
        self._sampled = torch.zeros(2, len(slots.rollouts), dtype=torch.float64, device=slots.ids.device)
        self._warm: set[int] = set()
        self._graphs: dict[int, Callable[[], None]] = {}

    @gpu_work()
    def launch(self) -> StepOutput:
        """Start the next step; the device may still be at the one before."""
        rows, recorder = self._slots.rows, self._recorder
        self._slots.advance()
        if recorder is not None and not recorder.failed and rows in self._warm and rows not in self._graphs:
            try:
                self._graphs[rows] = recorder.capture(lambda: self._step(rows))
            except Exception as error:  # of torch, of a kernel's compiler or of a model that waits for the device
                recorder.failed = True
                reason = (str(error) or type(error).__name__).splitlines()[0]
                logger.warning("decoding goes on without CUDA graphs, several times as slowly: %s", reason)
        self._graphs.get(rows, lambda: self._step(rows))()
        self._warm.add(rows)
        sampled, ids = self._sampled[:, :rows], self._slots.ids[:rows]
        if ids.device.type != "cuda":
            return _LateOutput(ids=ids, logprobs=sampled[1], on_host=sampled.clone())
        on_host = torch.empty(sampled.shape, dtype=torch.float64, pin_memory=True)
        on_host.copy_(sampled, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return _LateOutput(ids=ids, logprobs=sampled[1], on_host=on_host, ready=ready)

    def _step(self, rows: int) -> None:
        """Read and write in place what the next step reads."""
        slots, ids = self._slots, self._slots.ids[:rows]
        self._sampler.select(slots.selected[:rows])
        output = self._sampler.step(slots.decoder(self._policy.embed_tokens(ids, None), slots, rows))
        ids.copy_(output.ids)
        self._sampled[0, :rows], self._sampled[1, :rows] = output.ids, output.logprobs
        # A row that has ended goes on until others join or it is left out: not beyond the last position.
        slots.written[:rows].add_(1).clamp_(max=slots.keys[0].shape[2])
