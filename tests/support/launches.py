"""Kernels that a computation would launch on a GPU: operators that are no views, and a fused function as one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from audiorl.algos.fused import Fused


class Launches(TorchDispatchMode):
    """`names`: how often each operator ran outside of fused functions; "fused" counts these. `casts`: inputs of
    operators that made a matrix of another type."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self.names: Counter[str] = Counter()
        self.casts: list[Tensor] = []
        self._inside = False

        def call(fused: Fused, *arguments: Any) -> Any:
            self.names["fused"] += 1
            self._inside = True
            try:
                return fused.plain(*arguments)
            finally:
                self._inside = False

        monkeypatch.setattr(Fused, "__call__", call)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        name = func._schema.name.removeprefix("aten::")
        if (
            not self._inside
            and not view
            and name not in ("detach", "empty", "empty_like", "_unsafe_view", "promote_types")
        ):
            self.names[name] += 1
            if name in ("_to_copy", "copy_") and isinstance(out, Tensor) and out.dim() == 2:
                self.casts += [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.dtype != torch.bfloat16]
        return out

    @property
    def total(self) -> int:
        return self.names.total()
