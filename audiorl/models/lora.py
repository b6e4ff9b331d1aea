"""Low-rank adapters on a policy's decoder (LoRA, arXiv 2106.09685), by peft.

Functions take the model, its adapter and `weight_name` (`Backbone.weight_name`), never the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from audiorl.config import LoraConfig
from audiorl.models.weights import naming_damage, read_tensors
from tokenizers_audio.loading import check_finite_weights

NON_LORA_WEIGHTS = "trained.safetensors"
"""In an adapter's folder: what was trained and is not in the adapter, such as the audio projector."""
_PEFT = "base_model.model."
"""Before every name in an adapter's file."""
_UNREAD = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
"""Fields of peft's configuration by which an adapter adds something else than alpha / rank times B A."""


def add_lora(model: PreTrainedModel, decoder: nn.Module, config: LoraConfig) -> Any:
    """Put an adapter on the decoder's linear layers only; the audio encoder shares some of their names."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    prefix = next(name for name, module in model.named_modules() if module is decoder)
    targets = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.startswith(prefix + ".layers.")
        and name.rsplit(".", 1)[-1] in config.target_modules
    ]
    if not targets:
        raise ValueError(f"lora.target_modules {list(config.target_modules)}: the decoder has no linear of these names")
    return get_peft_model(
        model, PeftLoraConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=targets)
    )


def merge_own_adapter(model: Any) -> None:
    """Put an adapter that transformers has loaded with a model into its weights: Granite Speech's, for audio."""
    if not getattr(model, "_hf_peft_config_loaded", False):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()  # type: ignore[operator]
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, module.get_base_layer())
    model._hf_peft_config_loaded = False
    model.config.has_lora_adapter = False
    del model.peft_config


def is_adapter(path: str | Path) -> bool:
    """Tell an adapter's folder from a whole model's, which may have an adapter beside it (Granite Speech)."""
    return (Path(path) / "adapter_config.json").is_file() and not (Path(path) / "config.json").is_file()


def adapted_model(path: str | Path) -> str | None:
    """Return the folder or hub id of an adapter folder's base model; None where there is no adapter."""
    return str(adapter_config(Path(path)).base_model_name_or_path) if is_adapter(path) else None


def adapter_config(folder: Path) -> Any:
    """Read peft's configuration of a saved adapter. Raises ValueError where it names no base model, and for fields that
    change what its matrices add and are not read here."""
    from peft import PeftConfig

    with naming_damage(folder / "adapter_config.json"):
        config = PeftConfig.from_pretrained(str(folder))
    if not config.base_model_name_or_path:
        raise ValueError(f"{folder}/adapter_config.json: base_model_name_or_path is missing")
    for field in _UNREAD:
        if getattr(config, field, None):  # only LoRA's have them
            raise ValueError(f"{folder}/adapter_config.json: {field} is not read; merge the adapter with peft first")
    return config


def adapted_modules(folder: Path) -> tuple[str, ...]:
    """Return the last names of the modules that a saved adapter has matrices for, whatever pattern named them."""
    modules = (name.partition(".lora_")[0] for name in _saved_matrices(folder, "cpu"))
    return tuple(sorted({module.rpartition(".")[2] for module in modules}))


def save_adapter(adapter: Any, trained: Mapping[str, Tensor], folder: Path) -> None:
    """Write the adapter, and in a file of its own what else of the `trained` weights is not part of it."""
    adapter.save_pretrained(str(folder))
    others = {name: p.detach().contiguous() for name, p in trained.items() if ".lora_" not in name}
    if others:
        save_file(others, folder / NON_LORA_WEIGHTS)


def saved_adapter(folder: Path, weight_name: Callable[[str], str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the trained weights in an adapter's folder, on the CPU: matrices, then what else was trained.

    Raises ValueError where they are damaged.
    """
    for name, tensor in _saved_matrices(folder, "cpu").items():
        module, _, last = name.removeprefix(_PEFT).removesuffix(".weight").rpartition(".")
        yield f"{weight_name(module)}.{last}.default.weight", tensor
    yield from other_weights(folder).items()


def other_weights(folder: Path) -> dict[str, Tensor]:
    """Read what was trained besides the adapter in this folder."""
    path = folder / NON_LORA_WEIGHTS
    return read_tensors(path) if path.exists() else {}


def _saved_matrices(folder: Path, device: str) -> dict[str, Tensor]:
    """Read an adapter's matrices by peft's names."""
    from peft.utils import load_peft_weights

    with naming_damage(folder):
        weights: dict[str, Tensor] = load_peft_weights(str(folder), device=device)
    check_finite_weights(weights.items(), folder)
    return weights


def read_adapter(folder: Path, model: nn.Module, adapter: Any, weight_name: Callable[[str], str]) -> None:
    """Copy the matrices of a saved adapter into the model's. Raises ValueError for damage and another shape."""
    from peft.utils import set_peft_model_state_dict

    weights = _saved_matrices(folder, str(next(model.parameters()).device))
    modules = {weight_name(name): name for name, _ in model.named_modules()}
    renamed = {}  # peft saves the names in transformers' model, which may be of another release here
    for name, tensor in weights.items():
        module, _, last = name.removeprefix(_PEFT).rpartition(".")
        renamed[f"{_PEFT}{modules.get(weight_name(module), module)}.{last}"] = tensor
    try:
        unknown = set_peft_model_state_dict(adapter, renamed).unexpected_keys
    except RuntimeError as error:
        raise ValueError(f"{folder}: the adapter has another shape than the model: {error}") from error
    if unknown:
        raise ValueError(f"{folder}: adapter weight {unknown[0]!r} is not in this model; was it saved by another one?")


def merged_weights(
    model: nn.Module, weight_name: Callable[[str], str], wanted: Callable[[nn.Parameter], bool]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the `wanted` weights of a model with an adapter by the base model's names, merged one at a time."""
    modules = dict(model.named_modules())
    for name, p in model.named_parameters():
        if ".lora_" in name or not wanted(p):
            continue
        weight = p.detach()
        module = name.rpartition(".base_layer.")[0]
        if module and name.endswith(".weight"):
            with torch.no_grad():
                weight = weight + modules[module].get_delta_weight("default").to(p.dtype)
        yield weight_name(name.replace(".base_layer.", ".")), weight
