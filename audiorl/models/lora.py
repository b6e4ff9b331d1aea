"""Low-rank adapters on a policy's decoder (LoRA, arXiv 2106.09685), by peft."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from audiorl.config import LoraConfig
from audiorl.models.loading import check_finite_weights, naming_damage, read_tensors

if TYPE_CHECKING:
    from audiorl.models.policy import AudioPolicy

NON_LORA_WEIGHTS = "trained.safetensors"
"""In an adapter's folder: what was trained and is not in the adapter, such as the audio projector."""
_PEFT = "base_model.model."
"""Before every name in an adapter's file."""


def add_lora(model: PreTrainedModel, decoder: nn.Module, config: LoraConfig) -> Any:
    """Put an adapter on the decoder's linear layers only; the audio encoder shares some of their names."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    prefix = next(name for name, module in model.named_modules() if module is decoder)
    targets = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.startswith(prefix + ".")
        and name.rsplit(".", 1)[-1] in config.target_modules
    ]
    if not targets:
        raise ValueError(f"lora.target_modules {list(config.target_modules)}: the decoder has no linear of these names")
    return get_peft_model(
        model,
        PeftLoraConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=targets),
    )


def is_adapter(path: str | Path) -> bool:
    """Whether a folder holds an adapter and not a whole model."""
    return (Path(path) / "adapter_config.json").is_file()


def adapted_model(path: str | Path) -> str | None:
    """The folder or hub id of the model that an adapter folder belongs to; None where there is no adapter."""
    return str(adapter_config(Path(path)).base_model_name_or_path) if is_adapter(path) else None


def adapter_config(folder: Path) -> Any:
    """peft's configuration of a saved adapter. Raises ValueError where it names no base model."""
    from peft import PeftConfig

    with naming_damage(folder / "adapter_config.json"):
        config = PeftConfig.from_pretrained(str(folder))
    if not config.base_model_name_or_path:
        raise ValueError(f"{folder}/adapter_config.json: base_model_name_or_path is missing")
    return config


def save_adapter(policy: AudioPolicy, folder: Path) -> None:
    """The adapter, and in a file of its own what else was trained."""
    policy.adapter.save_pretrained(str(folder))
    others = {name: p.detach().contiguous() for name, p in policy.trainable().items() if ".lora_" not in name}
    if others:
        save_file(others, folder / NON_LORA_WEIGHTS)


def saved_adapter(folder: Path, policy: AudioPolicy) -> Iterator[tuple[str, Tensor]]:
    """The trained weights in an adapter's folder, on the CPU, by `weight_name`: matrices, then what else was trained.

    Raises ValueError where they are damaged.
    """
    for name, tensor in _saved_matrices(folder, "cpu").items():
        module, _, last = name.removeprefix(_PEFT).removesuffix(".weight").rpartition(".")
        yield f"{policy.backbone.weight_name(module)}.{last}.default.weight", tensor
    if (folder / NON_LORA_WEIGHTS).exists():
        yield from read_tensors(folder / NON_LORA_WEIGHTS).items()


def _saved_matrices(folder: Path, device: str) -> dict[str, Tensor]:
    """By peft's names."""
    from peft.utils import load_peft_weights

    with naming_damage(folder):
        weights: dict[str, Tensor] = load_peft_weights(str(folder), device=device)
    check_finite_weights(weights.items(), folder)
    return weights


def read_adapter(folder: Path, policy: AudioPolicy) -> None:
    """Copy a saved adapter into the policy's. Raises ValueError where it is damaged or of another shape."""
    from peft.utils import set_peft_model_state_dict

    weights = _saved_matrices(folder, str(policy.device))
    weight_name = policy.backbone.weight_name
    modules = {weight_name(name): name for name, _ in policy.model.named_modules()}
    renamed = {}  # peft saves the names in transformers' model, which may be of another release here
    for name, tensor in weights.items():
        module, _, last = name.removeprefix(_PEFT).rpartition(".")
        renamed[f"{_PEFT}{modules.get(weight_name(module), module)}.{last}"] = tensor
    try:
        unknown = set_peft_model_state_dict(policy.adapter, renamed).unexpected_keys
    except RuntimeError as error:
        raise ValueError(f"{folder}: the adapter has another shape than the model: {error}") from error
    if unknown:
        raise ValueError(f"{folder}: adapter weight {unknown[0]!r} is not in this model; was it saved by another one?")
    if (folder / NON_LORA_WEIGHTS).exists():
        policy.load_weights(read_tensors(folder / NON_LORA_WEIGHTS), str(folder / NON_LORA_WEIGHTS))
    policy.weights_changed()


def adapter_weights(policy: AudioPolicy) -> Iterator[tuple[str, Tensor]]:
    """The adapter's matrices, frozen ones too, and what else is trained, by `weight_name`."""
    for name, p in policy.parameters_by_name().items():
        if ".lora_" in name or p.requires_grad:
            yield name, p.detach()


def merged_weights(
    policy: AudioPolicy, wanted: Callable[[nn.Parameter], bool] = lambda p: True
) -> Iterator[tuple[str, Tensor]]:
    """The `wanted` weights of a policy with an adapter by the base model's `weight_name`s, merged one at a time."""
    modules = dict(policy.model.named_modules())
    for name, p in policy.model.named_parameters():
        if ".lora_" in name or not wanted(p):
            continue
        weight = p.detach()
        module = name.rpartition(".base_layer.")[0]
        if module and name.endswith(".weight"):
            with torch.no_grad():
                weight = weight + modules[module].get_delta_weight("default").to(p.dtype)
        yield policy.backbone.weight_name(name.replace(".base_layer.", ".")), weight
