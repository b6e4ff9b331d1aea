"""What every rank of a test of ZeRO runs: `python zero_ranks.py CASE…`, under torchrun or alone.

Each case trains a tiny Qwen2.5-Omni on real speech with a ZeRO stage, and beside it in the same process, on all of the
batch, without.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.config import LoraConfig, ModelConfig, OptimConfig, SFTConfig
from audiorl.config.distributed import RuntimeConfig, set_current
from audiorl.data.corpus import bundled_speech
from audiorl.distributed.local import World
from audiorl.models import AudioPolicy, dualize
from audiorl.models.examples import Example
from audiorl.models.families import qwen_omni
from audiorl.run.checkpoint import Joined, StatePiece, share_of
from audiorl.train.batches import idle_batch
from audiorl.train.fit import Learner
from audiorl.train.optim import zero
from audiorl.train.optim.steps import backward, idle_passes, optimizer_for
from audiorl.train.sft import sft_loss
from audiorl.types import Message, Sample

OPTIM = OptimConfig(lr=1e-3, warmup_steps=2, max_grad_norm=0.5)
STEPS = 8
zero.BUCKET = 4096  # several sums in every pass; some weights are larger


def policy(config: ModelConfig) -> AudioPolicy:
    torch.manual_seed(0)  # of adapters
    made = qwen_omni.tiny(["a few words"], hidden=32, layers=3, vocab_size=300, whisper=False, config=config)
    if config.dtype != "auto":
        made.model.to(getattr(torch, config.dtype))
    return made


def examples() -> list[Example]:
    """Texts and speech in turns, so that some micro-batches hear nothing."""
    spoken = bundled_speech(min_seconds=0.8, max_seconds=2.0)[:7]
    out = []
    for i, u in enumerate(spoken):
        content = ("Say something.",) if i % 2 else (u.clip, "What is said?")
        out.append(Example(Sample(u.id, (Message("user", content),), task="qa"), u.text))
    return out


Stage = int | Literal["fsdp"]


def runtime(world: World, stage: Stage, offload: bool = False) -> RuntimeConfig:
    if stage == "fsdp":
        return RuntimeConfig(kind="torchrun", ranks=world.size, fsdp=True)
    return RuntimeConfig(kind="torchrun", ranks=world.size, zero=stage, offload=offload)  # type: ignore[arg-type]


def joined(states: Sequence[Mapping[str, Tensor | StatePiece]]) -> Joined:
    """The whole tensors of all ranks' states."""
    pieces: dict[str, list[StatePiece]] = {}
    for rank, state in enumerate(states):
        for name, tensor in state.items():
            if (piece := share_of(tensor, rank, len(states))) is not None:
                pieces.setdefault(name, []).append(piece)
    return Joined(pieces)


class Pair:
    """A trainer with ZeRO of this rank's part, and one without of everything."""

    def __init__(
        self, world: World, config: ModelConfig, stage: Stage, offload: bool = False, optim: OptimConfig = OPTIM
    ):
        self.world, self.config, self.optim = world, config, optim
        self.stage(0)
        self.plain = Learner(sft_loss, policy(config), self.sft(), optim, World())
        self.stage(stage, offload)
        self.zero = Learner(sft_loss, policy(config), self.sft(), optim, world)

    def sft(self) -> SFTConfig:
        return SFTConfig(steps=STEPS, micro_batch_tokens=60)

    def stage(self, stage: Stage, offload: bool = False) -> None:
        set_current(runtime(self.world, stage, offload))

    def train(self, steps: int) -> list[tuple[dict[str, float], dict[str, float]]]:
        # Ranks have different numbers of micro-batches; with an uneven cut the last rank has few.
        own = examples()[: 5 if self.world.size > 1 else None] if self.world.rank == 0 else examples()[5:]
        return [(self.plain.train(examples()), self.zero.train(own)) for _ in range(steps)]

    def check(self, rows: Sequence[tuple[dict[str, float], dict[str, float]]]) -> None:
        for plain, with_zero in rows:
            assert plain.keys() == with_zero.keys()
            for name, value in plain.items():
                assert abs(with_zero[name] - value) < 1e-5 * max(1, abs(value)), (name, value, with_zero[name])
        assert all(row["grad_norm"] > 0.5 for row, _ in rows), "nothing was clipped"
        same(self.plain.policy.weights(), self.zero.policy.weights())

    def move(self, stage: Stage) -> None:
        """Go on with another kind of sharding, as the next phase of a run or a resumed run does."""
        state = joined(self.world.gather(self.zero.state()["optimizer"]))
        same(self.plain.state()["optimizer"], state)
        before = {name: tensor.clone() for name, tensor in self.zero.policy.weights().items()}
        engine = getattr(self.zero.optimizer, "_engine", None)
        self.zero.close()
        same(before, self.zero.policy.weights())
        self.stage(stage)
        self.zero = Learner(sft_loss, self.zero.policy, self.sft(), self.optim, self.world)
        del engine  # freed while the next one has the weights
        gc.collect()
        self.zero.load({"optimizer": state}, "here")


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def stages(world: World) -> None:
    """Every stage, each going on from the one before; the last is none."""
    pair = Pair(world, ModelConfig(audio="full"), 3)
    for stage in (1, 2, "fsdp", 3, "fsdp", 0):
        pair.check(pair.train(2))
        pair.move(stage)
    pair.check(pair.train(2))


def fsdp(world: World) -> None:
    """FSDP, resumed by itself and by one process's optimizer."""
    pair = Pair(world, ModelConfig(audio="full"), "fsdp")
    for stage in ("fsdp", 0, "fsdp", 0):
        pair.check(pair.train(2))
        pair.move(stage)  # type: ignore[arg-type]


def variants(world: World) -> None:
    lora = LoraConfig(rank=4)
    for config, stage, offload in (
        (ModelConfig(audio="projector", lora=lora), 3, False),
        (ModelConfig(audio="frozen", lora=lora), 2, False),
        (ModelConfig(audio="full", gradient_checkpointing=True), 3, False),
        (ModelConfig(audio="projector"), 1, True),
        (ModelConfig(audio="projector"), 2, True),
        (ModelConfig(audio="projector"), 3, True),
        (ModelConfig(audio="projector", lora=lora), "fsdp", False),
        (ModelConfig(audio="full", gradient_checkpointing=True), "fsdp", False),
    ):
        pair = Pair(world, config, stage, offload)
        pair.check(pair.train(2))
        assert stage == "fsdp" or bool(pair.zero.optimizer._zero.optimizer.defaults["fused"]) == offload
        pair.move(stage)
        pair.check(pair.train(1))
        pair.zero.close()


def bfloat16(world: World) -> None:
    """With float32 master weights small steps add up, which they do not in bfloat16 itself."""
    for stage in (1, 2, 3, "fsdp"):
        config = replace(ModelConfig(audio="projector"), dtype="bfloat16")
        pair = Pair(world, config, stage, optim=replace(OPTIM, master_weights=True))
        rows = pair.train(6)
        assert abs(rows[0][0]["sft/loss"] - rows[0][1]["sft/loss"]) < 0.02
        assert rows[-1][1]["sft/loss"] < rows[0][1]["sft/loss"] - 0.02, rows
        state = joined(world.gather(pair.zero.state()["optimizer"]))
        masters = {n.removeprefix("master."): t for n, t in state.items() if n.startswith("master.")}
        for name, p in pair.zero.policy.weights().items():
            assert masters[name].dtype == torch.float32 and p.dtype == torch.bfloat16
            torch.testing.assert_close(masters[name].bfloat16(), p, atol=0, rtol=0)
        pair.zero.close()


def not_finite(world: World) -> None:
    """All ranks hear of it, whoever has it, and no weight changes."""
    for stage in (1, 2, 3, "fsdp"):
        pair = Pair(world, ModelConfig(audio="projector"), stage)
        pair.train(1)
        before = {name: tensor.clone() for name, tensor in pair.zero.policy.weights().items()}
        optimizer = pair.zero.optimizer
        optimizer.zero_grad()
        total = 0 * pair.zero.policy.forward(idle_batch(pair.zero.policy)).logprobs.sum()
        backward(total.abs().sqrt() if world.rank == 0 else total, optimizer)
        optimizer.gather_gradients()
        try:
            optimizer.step()
        except FloatingPointError as error:
            assert "not finite" in str(error)
        else:
            raise AssertionError("a step with NaN")
        for name, tensor in pair.zero.policy.weights().items():
            assert torch.equal(tensor, before[name]), name
        pair.zero.close()


def speaking(world: World) -> None:
    """A model of which one rank writes text and the other frames, through other weights of the same layers."""
    generator = torch.Generator().manual_seed(0)
    for stage in (2, 3, "fsdp"):
        models = [dualize(policy(ModelConfig(audio="projector")), 4, 64) for _ in range(2)]
        layout = models[0].speech
        assert layout is not None
        rows = layout.tokens(torch.randint(0, 64, (4, 5), generator=generator))
        opened = torch.tensor([models[0].end_id, layout.begin_id])
        spoken = Experience(
            torch.cat([opened, rows.ids]), torch.cat([torch.zeros(2, dtype=torch.bool), rows.code_mask.any(1)]), 2,
            codes=torch.cat([torch.full((2, 4), -1), rows.codes]),
            code_mask=torch.cat([torch.zeros(2, 4, dtype=torch.bool), rows.code_mask]),
        )  # fmt: skip
        written = Experience(torch.arange(20, 30), torch.arange(10) > 2, 3)
        batch = [written, spoken, written.replace(ids=torch.arange(40, 50))]
        set_current(RuntimeConfig())
        plain = optimizer_for(models[0], OPTIM, 3, World())
        set_current(runtime(world, stage))  # type: ignore[arg-type]
        other = optimizer_for(models[1], OPTIM, 3, world)
        norms = []
        for model, optimizer, part in (
            (models[0], plain, batch),
            (models[1], other, batch if world.size == 1 else batch[world.rank :: 2]),
        ):
            for _ in range(3):
                optimizer.zero_grad()
                idle = idle_passes(len(part), world, optimizer)
                for e in part:
                    backward(-model.forward(pack_experiences([e])).logprobs.sum() / 50, optimizer)
                for _ in range(idle):
                    backward(0 * model.forward(idle_batch(model)).logprobs.sum(), optimizer)
                optimizer.gather_gradients()
                norms.append(optimizer.step()["grad_norm"])
        torch.testing.assert_close(torch.tensor(norms[3:]), torch.tensor(norms[:3]), atol=1e-5, rtol=1e-5)
        same(models[0].weights(), models[1].weights())
        other.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    found = World.of_process_group()
    for case in sys.argv[1:]:
        globals()[case](found)
        print(f"rank {found.rank} of {found.size}: {case}", flush=True)
    dist.destroy_process_group()
