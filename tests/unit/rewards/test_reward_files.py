import asyncio
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from audiorl.errors import RewardError
from audiorl.rewards import StandardisedSum, WeightedSum, as_reward, load_reward
from audiorl.types import Score


def write(folder: Path, source: str, name: str = "mine.py") -> Path:
    file = folder / name
    file.write_text(dedent(source))
    return file


@pytest.mark.parametrize(
    ("source", "score"),
    [
        ("def reward(rollout): return len(rollout.text)", Score(5.0)),
        ("def reward(rollouts): return [Score(1 / len(rollouts), {'n': 2}) for _ in rollouts]", Score(0.5, {"n": 2})),
        (
            "class Mine:\n    def __call__(self, rollouts): return [Score(3.0) for _ in rollouts]\nreward = Mine()",
            Score(3.0),
        ),
        ("async def reward(rollouts): return [Score(len(rollouts)) for _ in rollouts]", Score(2)),
    ],
)
def test_every_form_of_a_reward(tmp_path, make_rollout, source: str, score: Score) -> None:
    reward = load_reward(write(tmp_path, f"from audiorl.types import Score\n{source}\n"))
    rollouts = [make_rollout("hello"), make_rollout("world")]
    assert reward(rollouts) == [score] * 2 and "mine.py" in repr(reward)

    async def in_a_notebook():
        return reward(rollouts)

    assert asyncio.run(in_a_notebook()) == [score] * 2


def test_the_signature_of_trl(make_rollout) -> None:
    seen = {}

    def by_columns(prompts, completions, gold, **columns):
        seen.update(columns, prompts=prompts, gold=gold)
        return np.array([len(text) / 2 for text in completions])

    async def by_name(completions, completion_ids, missing=None):
        return [None if text == "hi" else len(ids) for text, ids in zip(completions, completion_ids, strict=True)]

    rollouts = [make_rollout("hello", gold="x", references=("a",)), make_rollout("hi")]
    assert as_reward(by_columns)(rollouts) == [Score(2.5), Score(1.0)]
    assert seen["gold"] == ["x", None] and seen["references"] == [("a",), ()] and "completion_ids" in seen
    assert seen["answer"] == ["a", None]
    assert seen["prompts"] == ["", ""]
    assert as_reward(by_name)(rollouts) == [Score(float(rollouts[0].num_sampled)), None]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("rewards = 1", "no module-level name 'reward'"),
        ("reward = 0.5", "'reward' is a float, expected a callable"),
        ("class reward: pass", "'reward' is the class reward"),
        ("def reward(): return 1", "must take one argument"),
        ("def reward(rollout, reference): return 1", "must take one argument"),
    ],
)
def test_files_without_a_usable_reward(tmp_path, source: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"mine\.py'.*{message}"):
        load_reward(write(tmp_path, source))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def reward(rollout): return 'good'", "sample 'clip-7' .*: returned str 'good'"),
        ("def reward(rollout): return float('nan')", "sample 'clip-7' .*: returned nan"),
        ("def reward(rollouts): return 1.0", "function 'reward': returned float 1.0, expected a list of floats"),
        ("def reward(rollouts): return []", "returned 0 scores for 1 rollouts"),
        ("def reward(rollouts): return ['a']", "sample 'clip-7' .*: returned str 'a', expected a float"),
        ("def reward(completions): return ['a']", "function 'reward', sample 'clip-7' .*: returned str 'a'"),
        ("def reward(completions, gold): return [1]", "function 'reward': no column is called 'gold'; there are"),
    ],
)
def test_wrong_returns(tmp_path, make_rollout, source: str, message: str) -> None:
    reward = load_reward(write(tmp_path, source))
    with pytest.raises(ValueError, match=rf"mine\.py'.*{message}"):
        reward([make_rollout("hi")])


def test_none_skips_a_rollout(tmp_path, make_rollout) -> None:
    reward = load_reward(write(tmp_path, "def reward(rollout): return 1.0 if rollout.text else None"))
    rollouts = [make_rollout("a"), make_rollout(""), make_rollout("b")]
    assert reward(rollouts) == [Score(1.0), None, Score(1.0)]
    length = WeightedSum.of(mine=reward, length=lambda rollouts: [Score(2.0) for _ in rollouts])
    assert [s and s.total for s in length(rollouts)] == [3.0, None, 3.0]
    lengths = iter((1.0, 100.0, 3.0))
    fused = StandardisedSum.of(mine=reward, other=lambda rollouts: [Score(next(lengths)) for _ in rollouts])
    assert [s and s.total for s in fused(rollouts)] == [-1.0, None, 1.0]  # 100 takes no part in mean and deviation


@pytest.mark.parametrize(
    "source",
    ["def reward(rollouts):\n    ", "class Mine:\n    def __call__(self, rollouts): "],
)
def test_a_segment_may_have_no_value(tmp_path, make_rollout, source: str) -> None:
    returned = "return [Score(1.0, per_segment=(float('nan'), len(r.text))) for r in rollouts]\n"
    made = "reward = Mine()\n" if "Mine" in source else ""
    reward = load_reward(write(tmp_path, f"from audiorl.types import Score\n{source}{returned}{made}"))
    rollouts = [make_rollout("a", "b"), make_rollout("a", "bcd")]
    assert [s.per_segment for s in StandardisedSum.of(mine=reward)(rollouts)] == [(0.0, -1.0), (0.0, 1.0)]
    with pytest.raises(ValueError, match="reward 'mine', sample 'clip-7': per_segment holds"):
        WeightedSum.of(mine=reward)(rollouts)


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        (
            "def reward(rollout): return {}['x']",
            RewardError,
            r"function 'reward', sample 'clip-7' .*: KeyError: 'x' \(.*\.py:1: def reward\(rollout\): return {}\['x'\]",
        ),
        ("def reward(rollout): raise ValueError('no')", ValueError, "function 'reward', sample 'clip-7' .*: no"),
        ("def reward(rollouts): raise OSError('full')", RewardError, "function 'reward': OSError: full"),
        ("def reward(rollouts): raise ValueError('no')", ValueError, "function 'reward': no"),
    ],
)
def test_an_error_names_file_function_and_sample(tmp_path, make_rollout, source: str, kind, message: str) -> None:
    with pytest.raises(kind, match=rf"reward file '.*mine\.py'.*{message}"):
        load_reward(write(tmp_path, source))([make_rollout("hi")])


def test_missing_file_wrong_suffix_and_broken_import(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.py': no such file"):
        load_reward(tmp_path / "nowhere.py")
    with pytest.raises(ValueError, match="not a Python file"):
        load_reward(write(tmp_path, "", name="mine.txt"))
    with pytest.raises(ZeroDivisionError):
        load_reward(write(tmp_path, "1 / 0"))


def test_an_asynchronous_function_runs_for_many_rollouts_at_a_time(tmp_path, make_rollout) -> None:
    source = """
        import asyncio
        from audiorl.types import Score

        running = most = 0

        async def reward(rollout):
            global running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1
            if rollout.text == "bad":
                raise KeyError("grade")
            return None if not rollout.text else Score(len(rollout.text), {"most": most})
        """
    reward = load_reward(write(tmp_path, source))
    scores = reward([make_rollout("x" * i) for i in range(40)])
    assert [s and s.total for s in scores] == [None, *range(1, 40)]
    assert max(s.parts["most"] for s in scores if s) == 32
    with pytest.raises(RewardError, match=r"mine\.py', function 'reward', sample 'clip-7' .*KeyError: 'grade'"):
        reward([make_rollout("bad"), make_rollout("good")])
