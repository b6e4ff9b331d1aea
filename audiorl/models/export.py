"""A checkpoint as a model folder to serve or to share: weights, processor, chat template and a model card.

The model card says what was trained how and on what, what was measured, and what was not.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from audiorl.config import ModelConfig
from audiorl.data.sets import parse_set
from audiorl.errors import Interrupted
from audiorl.models.families import load_policy
from audiorl.models.flow.policy import MODEL_TYPE as FLOW
from audiorl.models.lora import NON_LORA_WEIGHTS, adapted_model, is_adapter
from audiorl.models.speech import TalkerLayout
from audiorl.models.value import HEAD_FILE
from audiorl.models.weights import BASE_KEY, SPEAKERS, SPEECH_OUTPUT, whole_folder
from tokenizers_audio.unified.model import MODEL_TYPE as CODEC

SPEECH_FILE = "speech-output.safetensors"
DATA_OPTIONS = {"data": "training", "ptx_data": "auxiliary loss", "held_out": "held out", "unseen": "unseen speakers"}
"""The options of recipes that name data sets, and what the sets are for."""
PIPELINES = {
    **dict.fromkeys(("whisper", "glmasr", "qwen3_asr"), "automatic-speech-recognition"),
    "higgs_audio_v2": "text-to-speech",
    **dict.fromkeys(("llama", "qwen2", "qwen3"), "text-generation"),
    CODEC: "audio-to-audio",
    FLOW: "text-to-audio",
}
"""The hub's names of what models do, by their type; others answer questions about audio."""
BUNDLED_LICENCE = "CC BY-SA 3.0"
NOT_STATED = "not stated"
RESULTS = (
    "Intervals are bootstrap intervals over the samples; an empty cell was not recorded. Changes are paired "
    "differences on the same samples. `before` is the policy that the training began with, `after` the policy at the "
    "run's end, `control` a policy trained on the same data without reinforcement learning. Names with a prefix "
    "measure other sets; `unseen` are speakers that no phase trained on. One training run, one seed."
)
_log = logging.getLogger(__name__)


def export(
    checkpoint: str | Path, out: str | Path, merge: bool = False, push: str | None = None, sections: Sequence[str] = ()
) -> Path:
    """Write the model of `checkpoint` to the new folder `out`, and return it.

    merge: add a low-rank adapter to its base model's weights; otherwise the adapter is exported as one, and serving it
    needs the base model. push: the repository on the Hugging Face hub, such as "me/my-model", that the folder is
    uploaded to; it is made private if it does not exist, and `out` stays where the upload fails. sections: further
    parts of the model card, in Markdown.

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
    if push is not None:
        with _on_hub(push) as hub:  # before anything is written: a wrong name or token is noticed here
            hub.create_repo(push, private=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")  # the folder is there whole or not at all
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write(checkpoint, partial, merge, sections)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # the same command can be given again
        raise
    if push is not None:
        with _on_hub(push, f"written to {out}; go on with: hf upload {push} {shlex.quote(str(out))}") as hub:
            hub.upload_folder(repo_id=push, folder_path=str(out), commit_message="Upload a model trained with audiorl")
    return out


def _write(checkpoint: Path, out: Path, merge: bool, sections: Sequence[str]) -> None:
    """Write the model and its card to `out`."""
    if _model_type(checkpoint) in (CODEC, FLOW):
        trainer = shutil.ignore_patterns("manifest.json", "trainer*")
        shutil.copytree(checkpoint, out, ignore=trainer, dirs_exist_ok=True)
        of_flow = codec_of(checkpoint) if _model_type(checkpoint) == FLOW else None
        if of_flow is not None and Path(of_flow).is_dir() and not (out / "codec").exists():
            shutil.copytree(of_flow, out / "codec")
        model_card(checkpoint, False, sections=sections).save(out / "README.md")
        return
    policy = load_policy(checkpoint, ModelConfig(dtype="auto"))
    if merge:
        policy.adapter.merge_and_unload()
        policy.adapter = None
    if isinstance(policy.speech, TalkerLayout) and policy.adapter is None:
        from audiorl.models.families.talker import TalkerPolicy

        assert isinstance(policy, TalkerPolicy)
        policy.save_whole(out)
        model_card(checkpoint, False, policy.base, sections=sections).save(out / "README.md")
        return
    policy.save(out)
    codec = codec_of(checkpoint) if policy.speech is not None else None
    if codec is not None and Path(codec).is_dir():
        shutil.copytree(codec, out / "codec")
    if "omni" in _model_type(out) and find_spec("torchvision") is None:
        _log.warning("transformers' AutoProcessor and vLLM need torchvision for Omni models; it is not installed here")
    for name in (HEAD_FILE,) if merge else (HEAD_FILE, NON_LORA_WEIGHTS):
        if (checkpoint / name).is_file():
            shutil.copy(checkpoint / name, out)
    base = policy.source.config.get(BASE_KEY)
    notes = []
    if policy.adapter is None and base is not None:
        _edit_config(out, {BASE_KEY: None})  # a folder of this machine
        if not _copy_speech_output(str(base), out):
            notes = [
                f"The talker is left out: the model that training began with, {_public_name(str(base))}, was not "
                "there. transformers loads it as Qwen2_5OmniThinkerForConditionalGeneration, or its Qwen3 counterpart."
            ]
            _log.warning(
                "%s: exported without its talker, which is not at %s any more; it writes text", checkpoint, base
            )
    if policy.adapter is not None and (out / NON_LORA_WEIGHTS).is_file():
        notes = [
            f"`{NON_LORA_WEIGHTS}` holds weights that were trained besides the adapter, such as the audio projector. "
            "audiorl loads them; PEFT and vLLM do not, and answer differently. `audiorl export --merge` writes a whole "
            "model that they load."
        ]
        _log.warning(
            "%s: PEFT and vLLM do not read %s; use --merge for a model that they load", checkpoint, NON_LORA_WEIGHTS
        )
    model_card(checkpoint, policy.adapter is not None, base, notes, sections).save(out / "README.md")


@contextmanager
def _on_hub(repository: str, left: str = "nothing is left here") -> Iterator[Any]:
    """Yield the hub. Raises ValueError with one line for whatever it refuses, and where it is not reached; Interrupted
    for Ctrl-C. The line says what is left."""
    import httpx
    from huggingface_hub import HfApi

    try:
        yield HfApi()
    except KeyboardInterrupt:
        raise Interrupted(f"--push {repository}: not uploaded; {left}") from None
    except (httpx.HTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--push {repository}: not uploaded ({reason}); {left}") from error


# -- the talker ----------------------------------------------------------------------------------------------------


def _copy_speech_output(base: str, out: Path) -> bool:
    """Add the talker and its vocoder to the thinker in `out`; False where `base` does not have them any more."""
    folder = whole_folder(base)
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            weights |= {n: tensors.get_tensor(n) for n in tensors.keys() if n.startswith(SPEECH_OUTPUT)}  # noqa: SIM118
    if not weights:
        return False
    save_file(weights, out / SPEECH_FILE, metadata={"format": "pt"})
    # An index of all weights: without one, a single file is taken for the whole model.
    if (out / SAFE_WEIGHTS_NAME).is_file():
        (out / SAFE_WEIGHTS_NAME).rename(out / "thinker.safetensors")
    files: dict[str, str] = {}
    for file in sorted(out.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            files |= dict.fromkeys(tensors.keys(), file.name)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    content = {"metadata": {"total_size": size}, "weight_map": files}
    (out / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(content, indent=2) + "\n")
    _edit_config(out, {"enable_audio_output": True})
    if (folder / SPEAKERS).is_file():
        shutil.copy(folder / SPEAKERS, out)
    return True


def _edit_config(folder: Path, changes: Mapping[str, Any]) -> None:
    """Set keys of config.json; None takes a key out."""
    config = json.loads((folder / "config.json").read_text()) | dict(changes)
    remaining = {key: value for key, value in config.items() if value is not None or key not in changes}
    (folder / "config.json").write_text(json.dumps(remaining, indent=2, sort_keys=True) + "\n")


# -- the model card ------------------------------------------------------------------------------------------------


def model_card(
    checkpoint: Path, adapter: bool, base: str | None = None, notes: Sequence[str] = (), sections: Sequence[str] = ()
) -> ModelCard:
    """Return the card with the hub's metadata, and for a checkpoint in a run folder what the run recorded.

    base: the model that training began with, where the checkpoint does not name it. notes: paragraphs about the export.
    sections: further measurements. Data files that are still there are read for the `licence` of their rows.
    """
    run = run_of(checkpoint)
    recorded = {} if run is None else json.loads((run / "config.json").read_text())
    results = json.loads((run / "eval.json").read_text()) if run is not None and (run / "eval.json").is_file() else {}
    base = base or adapted_model(checkpoint)
    if base is None or (run is not None and Path(base).resolve().is_relative_to(run.resolve())):
        base = recorded.get("config", {}).get("path")  # a phase's start is no base to name
    sets = [
        (given, purpose)
        for option, purpose in DATA_OPTIONS.items()
        for given in _texts(recorded.get("config", {}).get(option))
    ]
    kind = _model_type(checkpoint)
    task = PIPELINES.get(kind, "audio-text-to-text")
    newest = {} if run is None else json.loads((run / "state.json").read_text()).get("checkpoints", {})
    phase, step = checkpoint.resolve().parts[-2:]
    measured = Path(newest.get(phase, "")).name == step  # the evaluations are of these weights, and not of earlier ones
    trained = [name for name in newest if not name.startswith("control")]
    when = "" if not measured else "after" if trained[-1:] == [phase] else "control" if phase not in trained else ""
    title = Path(_public_name(base)).name if base else "A model" if run is None else run.name
    data = ModelCardData(
        base_model=base if base is not None and _is_hub_id(base) else None,
        datasets=[name.removeprefix("hf://").partition(":")[0] for name, _ in sets if name.startswith("hf://")] or None,
        library_name="peft" if adapter else "audiorl" if kind in (CODEC, FLOW) else "transformers",
        pipeline_tag=task,
        tags=["audiorl"],
        model_name=title,
        eval_results=[
            # The hub groups results by the type of their data set alone, so each set needs one of its own.
            EvalResult(task, measured.replace(" ", "-"), measured, metric, round(value, 4))
            for name, metric, value, *_ in _rows(results)
            if when and name.endswith(when)
            for measured in [name.removesuffix(when).strip("_") or "held out"]
        ]
        or None,
    )
    lines = ["---", data.to_yaml(), "---", ""]
    lines += [f"# {title}, trained with audiorl", ""]
    lines += [f"- Base model: {_public_name(base) if base else 'none, or not recorded'}"]
    lines += [f"- Weights: {'a low-rank adapter; load it with the base model' if adapter else 'the whole model'}"]
    if run is not None:
        lines += [f"- Recipe: {Path(recorded['recipe']).name}, phase {phase}, {step.replace('_', ' ')}"]
        lines += ["- Trained with: " + ", ".join(f"{n} {v}" for n, v in recorded.get("versions", {}).items())]
    lines += ["", *(line for note in notes for line in (note, ""))]
    lines += [
        "The weights derive from those of the base model: its licence, and those of the training data, hold for them "
        "too. Add the licence to this card before you publish the model.",
        "",
    ]
    if results:
        columns = ("Evaluation", "Metric", "Value", "95% interval", "Change since before (95%)", "Samples")
        lines += ["## Held-out results", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines += [f"| {n} | {m} | {v:.4g} | {i} | {c} | {count} |" for n, m, v, i, c, count in _rows(results)]
        lines += ["", RESULTS, ""]
    lines += [line for section in sections for line in (section, "")]
    lines += ["## What was not measured", "", *(f"- {limit}" for limit in _limits(run, checkpoint, results)), ""]
    if run is not None:
        lines += ["## Data", "", "| Set | Used for | Licence |", "|---|---|---|"]
        for given, purpose in sets:
            name = given if "://" in given else Path(given).name
            lines.append(f"| {name} | {purpose} | {_licences(parse_set(given)[0])} |")
        if not recorded["config"].get("data"):
            lines.append(f"| the recipe's own data, see the recipe | training | {NOT_STATED} |")
        config = json.dumps(_without_paths(recorded["config"]), indent=1)
        lines += ["", "## Configuration", "", "```json", config, "```", ""]
    return ModelCard("\n".join(lines))


def _model_type(folder: Path) -> str:
    """Return what config.json calls the model, "" for an adapter."""
    return "" if is_adapter(folder) else str(json.loads((folder / "config.json").read_text()).get("model_type"))


def _texts(value: Any) -> list[str]:
    """Return the names of sets in the value of an option, which in some recipes is a share of the data."""
    return [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, str)]


def codec_of(model: str | Path) -> str | None:
    """Return the audio tokenizer of a model that speaks: codec/ in or above its folder, else what its run recorded."""
    folder = Path(model).resolve()
    if not folder.is_dir():
        return None
    for place in (folder, *folder.parents[:3]):
        if (place / "codec" / "config.json").is_file():
            return str(place / "codec")
    run = run_of(folder)
    config = {} if run is None else json.loads((run / "config.json").read_text())["config"]
    recorded = config.get("codec")
    if recorded is None and config.get("path") not in (None, "new", "tiny"):
        return codec_of(config["path"])  # a later stage of the same model
    if recorded == "tiny" and run is not None:
        recorded = str(run / "tiny" / "codec")
    return recorded if isinstance(recorded, str) and (Path(recorded).is_dir() or _is_hub_id(recorded)) else None


def run_of(checkpoint: Path) -> Path | None:
    """Return the run folder of RUN/checkpoints/PHASE/step_N; None for a checkpoint that lies elsewhere."""
    folder = checkpoint.resolve().parent.parent
    return folder.parent if folder.name == "checkpoints" and (folder.parent / "state.json").is_file() else None


def _public_name(name: str) -> str:
    """Return a hub id as it is, of a local folder its name alone."""
    return name if _is_hub_id(name) else Path(name).name


def _is_hub_id(name: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and not Path(name).exists()


def _rows(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, float, str, str, Any]]:
    """Yield each number of eval.json: evaluation, metric, value, interval, change with its interval, samples."""

    def interval(ends: Sequence[float] | None) -> str:
        return "" if ends is None else f"({ends[0]:.4g} to {ends[1]:.4g})"

    for name, result in results.items():
        numbers = {k: v for k, v in result.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        # `low` and `high` belong to the first metric of an entry, `outside` has the others' intervals.
        first = [numbers.pop("low", None), numbers.pop("high", None)]
        samples = numbers.pop("n", "")
        for k, (metric, value) in enumerate(numbers.items()):
            ends = result.get("outside", {}).get(metric, first if k == 0 and None not in first else None)
            change = result.get("changes", {}).get(metric)
            changed = "" if change is None else f"{change[0]:+.4g} {interval(change[1:])}"
            yield name, metric, value, interval(ends), changed, samples


def _limits(run: Path | None, checkpoint: Path, results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield what a reader could take for measured and is not."""
    ends = [name.rpartition("_") for name in results]
    whens = {when for _, _, when in ends}
    sets = {prefix for prefix, _, when in ends if when in ("before", "after", "control")}
    without = set(results) - {name for name, _, _, interval, _, _ in _rows(results) if interval}
    absent = {
        "The model after its training: no evaluation called `after` had finished.": "after" not in whens,
        "The model before its training: there is nothing to compare with.": "before" not in whens,
        "Unseen speakers: no set of speakers that no phase trained on (`unseen`) was measured.": "unseen" not in sets,
        "What supervised training on the same data gives: there is no `control`.": "control" not in results,
        f"Intervals of {', '.join(name for name in results if name in without)}.": bool(without),
    }
    if results:
        yield from (text for text, holds in absent.items() if holds)
    else:
        yield "No held-out result was recorded with this checkpoint."
    if run is not None and results:
        phase, step = checkpoint.resolve().parts[-2:]
        newest = json.loads((run / "state.json").read_text()).get("checkpoints", {})
        if phase in newest and Path(newest[phase]).name != step:
            last = Path(newest[phase]).name.replace("_", " ")
            yield f"This checkpoint: its phase was evaluated at its end, with the policy of {last}."
        if others := [name for name in newest if name != phase]:
            yield f"Perhaps this phase: the run also trained in {', '.join(others)}; its recipe says when it evaluates."
    yield "Other tasks, languages, accents, noise and speakers than those of the sets above; bias and safety."
    yield "The exported files: the results are those of the run, which the export did not repeat."


def _without_paths(value: Any) -> Any:
    """Return a config without the folders of the machine that it was written on."""
    if isinstance(value, Mapping):
        return {k: _without_paths(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_paths(v) for v in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _licences(source: str) -> str:
    """Return the licences of a data set's rows and their number; rows of JSON and JSON lines can have a `licence`."""
    if source.startswith("bundled"):
        return BUNDLED_LICENCE
    path = Path(source)
    if not path.exists() and "://" not in source:
        return f"{NOT_STATED} (the file is not there any more)"
    if not path.is_file() or path.suffix not in (".json", ".jsonl"):
        return NOT_STATED
    try:
        text = path.read_text(encoding="utf-8")
        lines = [json.loads(x) for x in text.splitlines() if x.strip()] if path.suffix == ".jsonl" else json.loads(text)
    except ValueError:
        return f"{NOT_STATED} (the file cannot be read)"
    stated = [
        row.get("licence") or row.get("license") if isinstance(row, Mapping) else None
        for row in (lines if isinstance(lines, list) else [])
    ]
    if not any(stated):
        return NOT_STATED
    licences = Counter(" ".join(str(x).replace("|", "/").split()) if x else NOT_STATED for x in stated)
    return ", ".join(f"{name} (rows: {count})" for name, count in licences.most_common())
