"""Vision towers are not loaded, and saved checkpoints have every tensor of them byte for byte."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2_5OmniThinkerForConditionalGeneration, Qwen3OmniMoeThinkerForConditionalGeneration
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniVisionEncoder
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from audiorl.models import AudioPolicy, load_policy, load_weights
from audiorl.models.weights import ModelSource, read_copied, remove_vision
from tests.conftest import make_omni, make_qwen3_omni

MAKES = {"qwen2.5": make_omni, "qwen3": make_qwen3_omni}
THINKERS = {"qwen2.5": Qwen2_5OmniThinkerForConditionalGeneration, "qwen3": Qwen3OmniMoeThinkerForConditionalGeneration}


@pytest.fixture(params=MAKES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> Path:
    """A model in float32 whose vision tower is in bfloat16, as a released one's is."""
    MAKES[kind]().save(tmp_path / "released")
    file = tmp_path / "released" / "model.safetensors"
    weights = {n: t.bfloat16() if n.startswith("thinker.visual.") else t for n, t in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    return tmp_path / "released"


def vision(folder: Path) -> dict[str, Tensor]:
    files = folder.glob("*.safetensors")
    return {n: t for file in files for n, t in load_file(file).items() if n.startswith("thinker.visual.")}


def assert_same_vision(one: Path, other: Path) -> None:
    before, after = vision(one), vision(other)
    assert len(before) > 10 and before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name


def has_vision(policy: AudioPolicy) -> bool:
    return any(name.startswith("visual.") for name in policy.parameters_by_name())


def resident(key: str) -> int:
    """Bytes of this process in memory: now (`VmRSS`), or the most since the peak was reset (`VmHWM`)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts a process's memory")
def test_a_large_tower_takes_no_memory(tmp_path: Path) -> None:
    policy = make_omni()
    config = policy.model.config.vision_config
    config.intermediate_size = 2_000_000
    with torch.device("meta"):
        tower = Qwen2_5OmniVisionEncoder._from_config(config)
    tower = tower.to_empty(device="cpu")
    size = sum(p.nbytes for p in tower.parameters())
    assert size > 350e6
    policy.model.visual = tower
    policy.source = ModelSource(copied=remove_vision(policy.model))
    policy.save(tmp_path)
    del policy, tower
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    loaded = load_policy(tmp_path)
    assert resident("VmHWM") - before < size / 3
    assert not has_vision(loaded) and len(loaded.source.copied) > 10


def test_what_is_saved_is_complete_in_transformers(folder: Path, kind: str, tmp_path: Path) -> None:
    policy = load_policy(folder)
    with torch.no_grad():
        for p in policy.trainable().values():
            p.mul_(1.5)
    policy.save(tmp_path / "step")
    assert_same_vision(folder, tmp_path / "step")
    load_policy(tmp_path / "step").save(tmp_path / "second")
    assert_same_vision(folder, tmp_path / "second")
    thinker, info = THINKERS[kind].from_pretrained(tmp_path / "second", dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    weights = {f"thinker.{policy.backbone.weight_name(n)}": p for n, p in thinker.named_parameters()}
    assert all(torch.equal(weights[name], tensor.float()) for name, tensor in vision(folder).items())
    for name, p in policy.parameters_by_name().items():
        assert torch.equal(weights[f"thinker.{name}"], p), name


def test_a_thinker_alone_and_weights_in_several_files(tmp_path: Path) -> None:
    make_omni().save(tmp_path / "whole")
    policy = make_omni()
    weights = {**policy.model.state_dict(), **read_copied(policy.source.copied)}
    policy.model.save_pretrained(tmp_path / "thinker", state_dict=weights, max_shard_size="100KB")
    for file in (tmp_path / "whole").glob("*token*"):
        shutil.copy(file, tmp_path / "thinker")
    shutil.copy(tmp_path / "whole" / "preprocessor_config.json", tmp_path / "thinker")
    assert (tmp_path / "thinker" / SAFE_WEIGHTS_INDEX_NAME).is_file()
    assert isinstance(policy.model, Qwen2_5OmniThinkerForConditionalGeneration)
    loaded = load_policy(tmp_path / "thinker")
    assert not has_vision(loaded)
    loaded.save(tmp_path / "step")
    assert_same_vision(tmp_path / "whole", tmp_path / "step")


@pytest.mark.parametrize("kind", MAKES, indirect=True)
def test_a_model_that_was_made_has_the_parameters_of_one_that_was_loaded(kind: str, tmp_path: Path) -> None:
    """DeepSpeed pairs the parameters of ranks by their order: the first rank has the made one, the others load it."""
    made = MAKES[kind]()
    made.copy().save(tmp_path / "one")
    loaded = load_policy(tmp_path / "one")
    assert not has_vision(made) and [n for n, _ in made.named_parameters()] == [n for n, _ in loaded.named_parameters()]
    load_weights(tmp_path / "one", made)
    made.save(tmp_path / "two")
    assert_same_vision(tmp_path / "one", tmp_path / "two")


def test_a_tower_of_another_size_than_the_config_says_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["thinker_config"]["vision_config"]["intermediate_size"] = 32
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"vision tower of the checkpoint has [\d,]+ numbers, that of config\.json"):
        load_policy(folder)
