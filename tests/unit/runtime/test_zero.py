"""DeepSpeed ZeRO on two ranks does what one process does without; states go from one stage or number of ranks to
another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from audiorl.cli import main
from audiorl.config import OptimConfig
from audiorl.models import qwen_omni
from audiorl.runtime.config import RuntimeConfig, current, set_current
from audiorl.runtime.world import World
from audiorl.train.optim import optimizer_for
from tests.support.data_recipe import PHASES
from tests.support.rank_runs import DATA, RECIPE, assert_equal_runs, audiorl, output, rewind, torchrun

pytest.importorskip("deepspeed")

STEPS = ("--steps", "10")
TWO = ("--runtime.kind", "torchrun", "--runtime.ranks", "2")
SCRIPT = Path(__file__).parents[2] / "support" / "zero_ranks.py"


def zero(*args: str, stage: int) -> None:
    output("-m", "audiorl.cli", *args, *TWO, "--runtime.zero", str(stage))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps of GRPO in this process."""
    out = tmp_path_factory.mktemp("plain") / "run"
    audiorl("train", str(RECIPE), "--out", str(out), *STEPS)
    return out


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.smoke), 3])
def test_a_stage_trains_as_one_process(stage: int, plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    zero("train", str(RECIPE), "--out", str(out), *STEPS, stage=stage)
    assert_equal_runs(plain, out)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_preferences_and_judgements_are_learned_as_in_one_process(stage: int, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    audiorl("train", str(DATA), "--out", str(one))
    zero("train", str(DATA), "--out", str(two), stage=stage)
    assert_equal_runs(one, two, PHASES)


@pytest.mark.slow
def test_a_critic_of_its_own_is_partitioned_beside_the_policy(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    audiorl("train", str(RECIPE), "--kind", "ppo", "--out", str(one))
    zero("train", str(RECIPE), "--kind", "ppo", "--out", str(two), stage=3)
    assert_equal_runs(one, two)


@pytest.mark.slow
def test_a_run_goes_on_at_another_stage_and_in_one_process(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    audiorl("train", str(RECIPE), "--out", str(one))
    zero("train", str(RECIPE), "--out", str(two), stage=3)
    assert_equal_runs(one, two)
    for stage in (1, 0, 2):
        rewind(two)
        if stage:
            zero("resume", str(two), "--trust", str(RECIPE), stage=stage)
        else:
            audiorl("resume", str(two), "--trust", str(RECIPE))
        assert_equal_runs(one, two)


def test_every_stage_goes_on_from_the_one_before() -> None:
    """Several sums in every pass, audio in some micro-batches only, an encoder that is trained after all passes."""
    torchrun(str(SCRIPT), "stages")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["variants", "bfloat16", "not_finite", "speaking"])
def test_adapters_checkpointing_offload_bfloat16_frames_and_what_is_not_finite(case: str) -> None:
    torchrun(str(SCRIPT), case)


@pytest.mark.slow
def test_one_process_alone_can_use_it() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(RECIPE.parents[2])}
    environment.pop("WORLD_SIZE", None)
    done = subprocess.run([sys.executable, str(SCRIPT), "stages"], capture_output=True, text=True, env=environment)
    assert "rank 0 of 1: stages" in done.stdout, done.stderr[-3000:]


@pytest.fixture
def stage_two() -> Iterator[None]:
    before = current()
    set_current(RuntimeConfig(zero=2))
    yield
    set_current(before)


def test_without_deepspeed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, stage_two: None) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    policy = qwen_omni.tiny(["a"], hidden=32, layers=1, vocab_size=300, whisper=False)
    with pytest.raises(ValueError, match=r'runtime.zero needs DeepSpeed: pip install "audiorl\[scale\]"'):
        optimizer_for(policy, OptimConfig(), 1, World())


@pytest.mark.usefixtures("own_runtime")
def test_training_that_does_not_use_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    codec = RECIPE.parents[2] / "recipes" / "codec.py"
    assert main(["train", str(codec), "--tiny", "--out", str(tmp_path / "run"), "--runtime.zero", "2"]) == 2
    said = capsys.readouterr().err
    assert "codec: this kind of training does not use DeepSpeed; start it without --runtime.zero" in said
