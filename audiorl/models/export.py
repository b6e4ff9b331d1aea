"""A checkpoint as a model folder to serve or to share: weights, processor, chat template and a model card."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from audiorl.config import ModelConfig
from audiorl.models.checkpoints import load_policy
from audiorl.models.lora import NON_LORA_WEIGHTS, is_adapter
from audiorl.models.model_card import model_card, public_name
from audiorl.models.saving import BASE_KEY
from audiorl.models.value import HEAD_FILE
from audiorl.models.weights import SPEECH_OUTPUT

SPEECH_FILE = "speech-output.safetensors"
SPEAKERS = "spk_dict.pt"
_log = logging.getLogger(__name__)


def export(
    checkpoint: str | Path,
    out: str | Path,
    merge: bool = False,
    push: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    sections: Sequence[str] = (),
) -> Path:
    """Write the model of `checkpoint` to the new folder `out`, and return it.

    merge: add a low-rank adapter to its base model's weights; otherwise the adapter is exported as one, and serving it
    needs the base model. push: the repository on the Hugging Face hub, such as "me/my-model", that the folder is
    uploaded to; it is made private if it does not exist. defaults: the default config of the run's recipe, from which
    the model card says which options differ (`audiorl.recipes._loader.recorded_defaults`). sections: further parts
    of the
    model card, in Markdown.

    The talker of a released Omni model, which no checkpoint holds, is copied from the model that training began with.
    Where that is gone, a warning and the model card say so. Raises ValueError for a folder that is no checkpoint, for
    an `out` that exists, and for `merge` without an adapter.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    adapter = is_adapter(checkpoint)
    if not adapter and not (checkpoint / "config.json").is_file():
        raise ValueError(f"{checkpoint}: no checkpoint there; give a folder such as RUN/checkpoints/PHASE/step_000100")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out}: exists already; give a new folder")
    if merge and not adapter:
        raise ValueError(f"{checkpoint}: holds a whole model, there is no adapter to merge; leave --merge out")
    policy = load_policy(checkpoint, ModelConfig(dtype="auto"))
    if merge:
        policy.adapter.merge_and_unload()
        policy.adapter = None
    out.mkdir(parents=True, exist_ok=True)
    policy.save(out)
    for name in (HEAD_FILE,) if merge else (HEAD_FILE, NON_LORA_WEIGHTS):
        if (checkpoint / name).is_file():
            shutil.copy(checkpoint / name, out)
    base = policy.source.config.get(BASE_KEY)
    notes = []
    if policy.adapter is None and base is not None:
        _edit_config(out, {BASE_KEY: None})  # a folder of this machine
        if not _copy_speech_output(str(base), out):
            notes = [
                f"The talker is left out: the model that training began with, {public_name(str(base))}, was not there. "
                "transformers loads it as Qwen2_5OmniThinkerForConditionalGeneration, or its Qwen3 counterpart."
            ]
            _log.warning("%s: exported without its talker, which is not at %s any more; it writes text", out, base)
    if policy.adapter is not None and (out / NON_LORA_WEIGHTS).is_file():
        notes = [
            f"`{NON_LORA_WEIGHTS}` holds weights that were trained besides the adapter, such as the audio projector. "
            "audiorl loads them; PEFT and vLLM do not, and answer differently. `audiorl export --merge` writes a whole "
            "model that they load."
        ]
        _log.warning("%s: PEFT and vLLM do not read %s; use --merge for a model that they load", out, NON_LORA_WEIGHTS)
    (out / "README.md").write_text(model_card(checkpoint, policy.adapter is not None, base, notes, defaults, sections))
    if push is not None:
        from huggingface_hub import HfApi

        hub = HfApi()
        hub.create_repo(push, private=True, exist_ok=True)
        hub.upload_folder(repo_id=push, folder_path=str(out), commit_message="Upload a model trained with audiorl")
    return out


# -- the talker ----------------------------------------------------------------------------------------------------


def _copy_speech_output(base: str, out: Path) -> bool:
    """Add the talker and its vocoder to the thinker in `out`. Says whether `base` still has them."""
    folder = _local(base)
    weights = {} if folder is None else _speech_weights(folder)
    if folder is None or not weights:
        return False
    save_file(weights, out / SPEECH_FILE, metadata={"format": "pt"})
    _index(out)
    _edit_config(out, {"enable_audio_output": True})
    if (folder / SPEAKERS).is_file():
        shutil.copy(folder / SPEAKERS, out)
    return True


def _edit_config(folder: Path, changes: Mapping[str, Any]) -> None:
    """Set keys of config.json; None takes a key out."""
    config = json.loads((folder / "config.json").read_text()) | dict(changes)
    remaining = {key: value for key, value in config.items() if value is not None or key not in changes}
    (folder / "config.json").write_text(json.dumps(remaining, indent=2, sort_keys=True) + "\n")


def _local(base: str) -> Path | None:
    """The folder of a model folder or hub id; None where it is not there."""
    if Path(base).is_dir():
        return Path(base)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(base, allow_patterns=["*.safetensors", "*.json", SPEAKERS]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError):
        return None


def _speech_weights(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            weights |= {n: tensors.get_tensor(n) for n in tensors.keys() if n.startswith(SPEECH_OUTPUT)}  # noqa: SIM118
    return weights


def _index(folder: Path) -> None:
    """An index of all weights; without one, a single file is taken for the whole model."""
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        (folder / SAFE_WEIGHTS_NAME).rename(folder / "thinker.safetensors")
    files: dict[str, str] = {}
    size = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                files[name] = file.name
        size += file.stat().st_size
    content = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(content, indent=2) + "\n")
