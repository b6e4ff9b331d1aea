"""A device that computes on the CPU and behaves like a GPU: for tests without one.

A tensor of this device wraps a tensor of the CPU. An operation on tensors of both devices raises RuntimeError, as CUDA
does. Host syncs and copies to the device are counted by the line of audiorl that causes them.

    with pretend_device() as counts:
        to_device(policy.model)
        HFEngine(policy).generate(requests)
    assert counts.syncs.total() < 20

A sync is whatever makes the host wait for the device: `item`, `tolist`, `cpu`, the truth of a tensor, `nonzero`, an
index by a mask, operations whose output shape depends on values, and a copy to the device without `non_blocking`.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"

SYNCS = {
    "aten._local_scalar_dense.default",
    "aten.bincount.default",
    "aten.equal.default",
    "aten.is_nonzero.default",
    "aten.masked_select.default",
    "aten.nonzero.default",
    "aten.repeat_interleave.Tensor",
    "aten.unique2.default",
}
COPIES = {"aten.copy_.default", "aten._to_copy.default"}
INDEXING = {"aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default", "aten._index_put_impl_.default"}


@dataclass
class Counts:
    """What happened inside `pretend_device`, by operation and line."""

    syncs: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    """Copies from the host to the device."""

    def clear(self) -> None:
        self.syncs.clear()
        self.copies.clear()

    def __str__(self) -> str:
        rows = [("syncs", self.syncs), ("copies to the device", self.copies)]
        return "\n".join(
            f"{counts.total()} {name}" + "".join(f"\n  {n:5} {line}" for line, n in counts.most_common())
            for name, counts in rows
        )


class DeviceTensor(Tensor):
    """A tensor of the pretended device; `inner` holds its values on the CPU."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> DeviceTensor:
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device(NAME, 0), requires_grad=inner.requires_grad,
        )  # fmt: skip
        wrapper.inner = inner.detach() if inner.requires_grad else inner
        return wrapper  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        _counts.syncs[f"tolist, {_line()}"] += 1
        return self.inner.tolist()

    def new_tensor(self, data: Any, **kwargs: Any) -> Tensor:
        return _tensor(data, **({"device": self.device, "dtype": self.dtype} | kwargs))

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert a tensor of a device to numpy: copy it to the host first")

    def __repr__(self, **kwargs: Any) -> str:
        return f"DeviceTensor({self.inner!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a tensor of a device is pickled: copy it to the host first")

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceTensor:
        if id(self) not in memo:
            memo[id(self)] = DeviceTensor(self.inner.clone()).requires_grad_(self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]


class _Mode(TorchDispatchMode):
    """Sends operations without a `DeviceTensor` here as well, such as `torch.zeros(3, device=...)`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


_counts = Counts()


@contextmanager
def pretend_device() -> Iterator[Counts]:
    """Inside the block torch has the device `NAME`. Gives the counts, which start at zero."""
    register()
    _counts.clear()
    with _Mode(), patch.object(torch, "tensor", _tensor):
        yield _counts


def to_device(module: nn.Module) -> None:
    """Move a module's parameters and buffers, in place. Tied parameters stay tied."""
    moved: dict[int, nn.Parameter] = {}
    for m in module.modules():
        for name, p in m._parameters.items():
            if p is not None:
                if id(p) not in moved:
                    moved[id(p)] = nn.Parameter(DeviceTensor(p.detach()), requires_grad=p.requires_grad)
                m._parameters[name] = moved[id(p)]
        for name, b in m._buffers.items():
            if b is not None:
                m._buffers[name] = DeviceTensor(b)


@cache
def register() -> None:
    """Make torch know the device; to be called before the first backward pass of a process."""
    _setup_privateuseone_for_python_backend(NAME)
    getattr(torch, NAME).get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]


_cpu_tensor: Callable[..., Tensor] = torch.tensor


def _tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """`torch.tensor`, which does not go through dispatch."""
    if not _is_pretended(device):
        return _cpu_tensor(data, *args, **kwargs, **({} if device is None else {"device": device}))
    _counts.copies[f"torch.tensor, {_line()}"] += 1
    _counts.syncs[f"torch.tensor, {_line()}"] += 1
    data = tree_map(lambda x: x.tolist() if isinstance(x, DeviceTensor) else x, data)
    return DeviceTensor(_cpu_tensor(data, *args, **kwargs))


def _run(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    name = str(func)
    if name == "aten._fused_sdp_choice.default":
        return 0  # the kernel written in plain operations
    tensors: list[Tensor] = []
    tree_map(lambda x: tensors.append(x) if isinstance(x, Tensor) else None, (args, kwargs))
    on_device = [x for x in tensors if isinstance(x, DeviceTensor)]
    on_host = [x for x in tensors if not isinstance(x, DeviceTensor)]
    if on_device:
        _check_devices(name, args, on_host)
        _count_sync(name, args)
    device = kwargs.get("device")
    to_device = bool(on_device) if device is None else _is_pretended(device)
    if name == "aten._to_copy.default":
        waits = not kwargs.get("non_blocking")
        _count_copy(on_device, device is not None and not to_device, to_device, waits)
    elif name == "aten.copy_.default":
        to_device = isinstance(args[0], DeviceTensor)
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        _count_copy([x for x in args[1:2] if isinstance(x, DeviceTensor)], not to_device, to_device, waits)
    inner_kwargs = {key: tree_map(_inner, value) for key, value in kwargs.items()}
    if device is not None:
        inner_kwargs["device"] = torch.device("cpu") if to_device else device
    inner_kwargs.pop("pin_memory", None)
    if name == "aten.histc.default" and not args[0].is_floating_point():  # a GPU counts integers, the CPU does not
        args = args[0].float(), *args[1:]
    out = func(*tree_map(_inner, args), **inner_kwargs)
    written = _written_argument(func, args, kwargs)
    if written is not None:
        return written
    return tree_map(_outer, out) if to_device else out


def _check_devices(name: str, args: Sequence[Any], on_host: Sequence[Tensor]) -> None:
    """Raise RuntimeError where CUDA would refuse to mix devices. Scalars and indices may lie on the host."""
    several = [x for x in on_host if x.dim()]
    if name in COPIES or name.startswith("prim"):
        return
    if name in INDEXING:
        values = args[2:3] if "put" in name else ()
        several = [x for x in (args[0], *values) if not isinstance(x, DeviceTensor) and x.dim()]
    if several:
        shapes = [list(x.shape) for x in several]
        raise RuntimeError(f"{name} mixes the device with tensors {shapes} of the host, {_line()}")


def _count_sync(name: str, args: Sequence[Any]) -> None:
    if name in SYNCS:
        _counts.syncs[f"{name.split('.')[1]}, {_line()}"] += 1
    if name in INDEXING:
        indices = [i for i in args[1] if i is not None]
        if any(isinstance(i, DeviceTensor) and i.dtype in (torch.bool, torch.uint8) for i in indices):
            _counts.syncs[f"index by a mask, {_line()}"] += 1
        if any(not isinstance(i, DeviceTensor) for i in indices):
            _counts.copies[f"index on the host, {_line()}"] += 1


def _count_copy(sources: Sequence[Tensor], to_host: bool, to_device: bool, waits: bool) -> None:
    if not sources and to_device and waits:
        _counts.syncs[f"copy to the device without non_blocking, {_line()}"] += 1
    if sources and to_host:
        _counts.syncs[f"copy to the host, {_line()}"] += 1
    if not sources and to_device:
        _counts.copies[f"copy, {_line()}"] += 1


def _written_argument(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The tensor that an operation writes to and returns; None for one that makes a new tensor."""
    if not any(returned.alias_info is not None for returned in func._schema.returns):
        return None
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            target = args[i] if i < len(args) else kwargs.get(argument.name)
            if isinstance(target, Tensor):
                return target
    return None


def _is_pretended(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, DeviceTensor) else x


def _outer(x: Any) -> Any:
    return DeviceTensor(x) if isinstance(x, Tensor) and not isinstance(x, DeviceTensor) else x


def _line() -> str:
    """The innermost line of audiorl on the stack, else of another package than torch."""
    frames = traceback.extract_stack()[:-1]
    for folder, excluded in (("/audiorl/", "/tests/"), ("/site-packages/", "/torch/")):
        for frame in reversed(frames):
            if folder in frame.filename and excluded not in frame.filename:
                return f"{frame.filename.rsplit(folder, 1)[1]}:{frame.lineno}"
    return "?"
