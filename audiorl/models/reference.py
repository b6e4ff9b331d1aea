"""The reference policy, from which the KL is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from audiorl.algos.experience import PackedBatch, PolicyOutput

if TYPE_CHECKING:
    from audiorl.models.policy import AudioPolicy


class Reference:
    """A frozen copy of the policy as it was when this was made. Weights that are never trained are shared.

    No copy is made where the reference is the base model below the policy's adapter: with `base`, or when the adapter
    does not change the model yet. The adapter is then switched off for the forward pass.
    """

    def __init__(self, policy: AudioPolicy, base: bool = False):
        self._policy = policy
        if base or (policy.has_fresh_adapter() and policy.config.audio == "frozen"):
            self._frozen = policy
            return
        self._frozen = policy.copy()
        self._frozen.requires_grad_(False)

    @property
    def is_base(self) -> bool:
        """Whether the reference is the model below the policy's adapter."""
        return self._frozen is self._policy

    @property
    def policy(self) -> AudioPolicy:
        """The frozen copy. Raises ValueError where there is none."""
        if self.is_base:
            raise ValueError("this reference is the model below an adapter, not a policy of its own")
        return self._frozen

    @property
    def runs_on(self) -> AudioPolicy:
        """The frozen copy, or the policy whose adapter is switched off: with the reference's tokenizer and head."""
        return self._frozen

    @torch.no_grad()
    def forward(
        self, batch: PackedBatch, temperature: float = 1.0, audio_temperature: float | None = None
    ) -> PolicyOutput:
        """See `AudioPolicy.forward`."""
        with self._adapter_off():
            return self._frozen.forward(batch, temperature, audio_temperature=audio_temperature)

    @contextmanager
    def _adapter_off(self) -> Iterator[None]:
        if self.is_base:
            with self._policy.adapter.disable_adapter():
                yield
        else:
            yield
