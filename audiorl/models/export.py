"""A checkpoint as a model folder to serve or to share: weights, processor, chat template and a model card."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from audiorl.config import ModelConfig
from audiorl.models.checkpoints import load_policy
from audiorl.models.loading import SPEECH_OUTPUT
from audiorl.models.lora import NON_LORA_WEIGHTS, adapted_model, is_adapter
from audiorl.models.saving import BASE_KEY
from audiorl.models.value import HEAD_FILE

SPEECH_FILE = "speech-output.safetensors"
SPEAKERS = "spk_dict.pt"
_log = logging.getLogger(__name__)


def export(checkpoint: str | Path, out: str | Path, merge: bool = False, push: str | None = None) -> Path:
    """Write the model of `checkpoint` to the new folder `out`, and return it.

    merge: add a low-rank adapter to its base model's weights; otherwise the adapter is exported as one, and serving it
    needs the base model. push: the repository on the Hugging Face hub, such as "me/my-model", that the folder is
    uploaded to; it is made private if it does not exist.

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
            notes = [f"The talker is left out: the model that training began with, {_public(base)}, was not there."]
            _log.warning("%s: exported without its talker, which is not at %s any more; it writes text", out, base)
    (out / "README.md").write_text(model_card(checkpoint, policy.adapter is not None, base, notes))
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


# -- the model card ------------------------------------------------------------------------------------------------


def model_card(checkpoint: Path, adapter: bool, base: str | None = None, notes: list[str] | None = None) -> str:
    """README.md in Markdown with the hub's metadata. Of a checkpoint in a run folder also what the run recorded."""
    run = _run_of(checkpoint)
    recorded = {} if run is None else json.loads((run / "config.json").read_text())
    base = base or adapted_model(checkpoint) or recorded.get("config", {}).get("path")
    front = {"library_name": "peft" if adapter else "transformers", "tags": ["audiorl"]}
    if base is not None and _is_hub_id(base):
        front["base_model"] = base
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", ""]
    lines += [f"# {Path(_public(base)).name if base else 'A model'}, trained with audiorl", ""]
    lines += [f"- Base model: {_public(base) if base else 'none, or not recorded'}"]
    lines += [f"- Weights: {'a low-rank adapter; load it with the base model' if adapter else 'the whole model'}"]
    if run is not None:
        phase, step = checkpoint.parent.name, checkpoint.name
        lines += [f"- Recipe: {Path(recorded['recipe']).name}, phase {phase}, {step.replace('_', ' ')}"]
        lines += ["- Trained with: " + ", ".join(f"{n} {v}" for n, v in recorded.get("versions", {}).items())]
    lines += ["", *(notes or []), ""] if notes else [""]
    lines += [
        "The weights derive from those of the base model: its licence, and those of the training data, hold for them "
        "too. Add the licence to this card before you publish the model.",
        "",
    ]
    if run is not None and (run / "eval.json").is_file():
        lines += ["## Evaluation", "", *_table(json.loads((run / "eval.json").read_text())), ""]
    if run is not None:
        config = json.dumps(_without_paths(recorded["config"]), indent=1)
        lines += ["## Configuration", "", "```json", config, "```", ""]
    return "\n".join(lines)


def _run_of(checkpoint: Path) -> Path | None:
    """The run folder of RUN/checkpoints/PHASE/step_N; None for a checkpoint that lies elsewhere."""
    folder = checkpoint.resolve().parent.parent
    return folder.parent if folder.name == "checkpoints" and (folder.parent / "state.json").is_file() else None


def _table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The numbers of eval.json: a row a metric, a column an evaluation."""
    numbers = {
        name: {m: v for m, v in result.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        for name, result in results.items()
    }
    rows = [f"| | {' | '.join(numbers)} |", f"|---|{'---|' * len(numbers)}"]
    for metric in dict.fromkeys(m for values in numbers.values() for m in values):
        cells = (f"{values[metric]:.4g}" if metric in values else "" for values in numbers.values())
        rows.append(f"| {metric} | {' | '.join(cells)} |")
    return rows


def _is_hub_id(name: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and not Path(name).exists()


def _public(name: str) -> str:
    """A hub id as it is, of a local folder its name alone."""
    return name if _is_hub_id(name) else Path(name).name


def _without_paths(value: Any) -> Any:
    """A config without the folders of the machine that it was written on."""
    if isinstance(value, Mapping):
        return {k: _without_paths(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_paths(v) for v in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
