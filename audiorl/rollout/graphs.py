"""Decoding steps as CUDA graphs: the host starts one token of every row by one call, and reads it while the next runs.

A graph holds everything between two tokens: the embedding of the last ones, the decoder, the head, the sampler, the
counts of columns. It works in place on tensors that stay where they are until rows join or leave; then another graph is
captured, which takes about as long as one step that the host starts kernel by kernel. A graph reads a fixed number of
the cache's columns, so there is one for each power of 2 from `LEAST_COLUMNS` on.

Not captured: speech, whose sampler decides on the host what a row is given next; caches of other kinds (Whisper,
sliding windows, linear attention), which grow; streams, whose rows change at every chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from audiorl.rollout.batch import Batch
from audiorl.rollout.samplers import StepOutput, TextSampler

LEAST_COLUMNS = 256
"""Up to here reading columns that are masked costs less than another capture: 64 rows of a 3B model, 0.2 ms."""
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
            finally:
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


class CapturedSteps:
    """The steps of a batch while its rows stay the same, from the last ids [B] that were sampled for them.

    warm: a step of these rows was run before; otherwise the first is run as it is, since libraries load kernels and
    make their workspaces at a first call, which must not fall into a capture.
    """

    def __init__(self, recorder: GraphRecorder, batch: Batch, sampler: TextSampler, ids: Tensor, warm: bool):
        self._recorder, self._batch, self._sampler, self._warm = recorder, batch, sampler, warm
        self._ids = ids.clone()
        self._sampled = torch.zeros(2, len(ids), dtype=torch.float64, device=ids.device)
        self._graphs: dict[int, Callable[[], None]] = {}

    def launch(self) -> StepOutput:
        """Start the next step; the device may still be at the one before."""
        width, _ = self._batch.advance()
        columns = LEAST_COLUMNS
        while columns < width:
            columns *= 2
        run = partial(self._step, min(columns, self._batch.room))
        if self._warm and columns not in self._graphs and not self._recorder.failed:
            try:
                self._graphs[columns] = self._recorder.capture(run)
            except RuntimeError as error:
                self._recorder.failed = True
                reason = str(error).splitlines()[0]
                logger.warning("decoding goes on without CUDA graphs, several times as slowly: %s", reason)
        self._graphs.get(columns, run)()
        self._warm = True
        if self._ids.device.type != "cuda":
            return _LateOutput(ids=self._ids, logprobs=self._sampled[1], on_host=self._sampled.clone())
        on_host = torch.empty(self._sampled.shape, dtype=torch.float64, pin_memory=True)
        on_host.copy_(self._sampled, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return _LateOutput(ids=self._ids, logprobs=self._sampled[1], on_host=on_host, ready=ready)

    def _step(self, columns: int) -> None:
        """Read and write in place what the next step reads."""
        policy = self._batch.policy
        self._batch.run({"inputs_embeds": policy.embed_tokens(self._ids[:, None], None)}, columns, together=False)
        output = self._sampler.step(self._batch.hidden)
        self._ids.copy_(output.ids)
        self._sampled[0], self._sampled[1] = output.ids, output.logprobs
