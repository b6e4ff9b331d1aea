"""DeepSpeed ZeRO on two ranks does what one process does without; states go from one stage or number of ranks to
another."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from audiorl.cli import main
from audiorl.config import ModelConfig, OptimConfig
from audiorl.config.distributed import RuntimeConfig, current, set_current
from audiorl.distributed.local import World
from audiorl.models.families import qwen_omni
from audiorl.train.optim.steps import optimizer_for
from tests.support.forks import forked
from tests.support.rank_runs import RECIPE, assert_equal_runs, audiorl, rewind

pytest.importorskip("deepspeed")
from tests.support.zero_ranks import policy

SCRIPT = Path(__file__).parents[2] / "support" / "zero_ranks.py"


def zero(*args: str, stage: int | str) -> None:
    how = ("--runtime.fsdp", "--runtime.async-save", "on") if stage == "fsdp" else ("--runtime.zero", str(stage))
    audiorl(*args, *how, ranks=2)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GRPO in this process."""
    out = tmp_path_factory.mktemp("plain") / "run"
    audiorl("train", str(RECIPE), "--out", str(out))
    return out


@pytest.mark.parametrize("stage", [2, 3, "fsdp"])
def test_a_stage_trains_as_one_process(stage: int | str, plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    zero("train", str(RECIPE), "--out", str(out), stage=stage)
    assert_equal_runs(plain, out)


@pytest.mark.slow
def test_a_run_goes_on_at_another_stage_and_in_one_process(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    audiorl("train", str(RECIPE), "--out", str(one))
    zero("train", str(RECIPE), "--out", str(two), stage=3)
    assert_equal_runs(one, two)
    for stage in (1, "fsdp", 0):
        rewind(two)
        if stage:
            zero("resume", str(two), "--trust", str(RECIPE), stage=stage)
        else:
            audiorl("resume", str(two), "--trust", str(RECIPE))
        assert_equal_runs(one, two)


def test_every_stage_goes_on_from_the_one_before() -> None:
    """Several sums in every pass, audio in some micro-batches only, an encoder that is trained after all passes."""
    forked(str(SCRIPT), "stages", ranks=2)


@pytest.mark.slow
def test_adapters_checkpointing_offload_bfloat16_frames_and_what_is_not_finite() -> None:
    forked(str(SCRIPT), "variants", "bfloat16", "not_finite", "speaking", ranks=2)


def test_no_weight_and_no_state_goes_through_the_first_rank_when_a_run_is_saved_and_resumed(tmp_path: Path) -> None:
    said = forked(str(SCRIPT.with_name("driver_traffic.py")), str(tmp_path / "run"), ranks=2)
    in_updates, at_saves = (int(re.search(rf"in {what}: (\d+)", said)[1]) for what in ("updates", "save and resume"))  # type: ignore[index]
    assert in_updates > 100_000, "updates are seen"
    assert 0 < at_saves < 2_000, "commands, paths and checksums"
    files = json.loads(re.search(r"files: (.*)", said)[1].replace("'", '"'))  # type: ignore[index]
    assert set(files) == {"model.safetensors", *(f"trainer-0000{k}-of-00002.safetensors" for k in (1, 2))}
    # The weights as one process saves them; two moments of each trained one, half of them from each rank.
    whole = policy(ModelConfig(audio="full"))
    whole.save(tmp_path / "whole")
    weights = whole.parameters_by_name().values()
    saved = load_file(tmp_path / "whole" / "model.safetensors")
    assert files.pop("model.safetensors") == sum(tensor.nbytes for tensor in saved.values())
    moments = 8 * sum(p.numel() for p in weights if p.requires_grad)
    assert list(files.values()) == pytest.approx([moments / 2] * 2, rel=0.01)


@pytest.fixture
def stage_two() -> Iterator[None]:
    before = current()
    set_current(RuntimeConfig(zero=2))
    yield
    set_current(before)


def test_without_deepspeed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, stage_two: None) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    policy = qwen_omni.tiny(["a"], hidden=32, layers=1, vocab_size=300, whisper=False)
    with pytest.raises(ValueError, match=r"runtime.zero needs DeepSpeed: pip install .*\[scale\]"):
        optimizer_for(policy, OptimConfig(), 1, World())


@pytest.mark.usefixtures("own_runtime")
def test_training_that_does_not_use_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    codec = RECIPE.parents[2] / "audiorl" / "recipes" / "codec.py"
    assert main(["train", str(codec), "--tiny", "--out", str(tmp_path / "run"), "--runtime.zero", "2"]) == 2
    said = capsys.readouterr().err
    assert "codec: this kind of training divides no state among trainers; start it without --runtime.zero" in said
