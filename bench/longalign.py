"""Seconds of a supervised epoch: LongAlign's sorted and packed batches against padded ones.

    OMP_WAIT_POLICY=passive python bench/longalign.py [--examples 128] [--rounds 3] [--threads 1]

Transcription of the bundled recordings by the tiny Qwen2.5-Omni. The padded form puts a batch into one rectangle, right
padded, and runs transformers' decoder with an attention mask; the packed form is `Learner`, which lays the batch's
examples end to end. Both take the same embedded prompts (the frozen audio encoder has run before), compute logits of
target tokens alone and step the same optimizer. "sorted" batches hold examples of similar length (`SFTConfig.sort`),
"random" ones any. The forms take turns within every round; the first round warms up and is left out. The script checks
that padded and packed give the same loss on every batch.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.utils.rnn import pad_sequence

from audiorl.algos.packing import sorted_batches
from audiorl.audio import seconds
from audiorl.config import ModelConfig, OptimConfig, SFTConfig
from audiorl.data.bundled import bundled_transcripts
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, experience
from audiorl.models.families.qwen_omni import tiny
from audiorl.train.fit import Learner
from audiorl.train.sft import sft_loss

MAX_SECONDS = 15.0
OPTIM = OptimConfig(lr=1e-9)
"""So small that every round computes the same losses."""


def padded_update(policy: AudioPolicy, worker: Learner, batch: Sequence[Example]) -> float:
    """The token-mean loss of a batch in one rectangle, one optimizer step."""
    experiences = [experience(policy, e) for e in batch]
    embeds = [policy.embed(e.ids, e.audio) for e in experiences]
    lengths = torch.tensor([len(e) for e in experiences])
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    decoder, head = policy.backbone.decoder(policy.model), policy.backbone.head(policy.model)
    worker.optimizer.zero_grad()
    out = decoder(
        inputs_embeds=pad_sequence(embeds, batch_first=True),
        attention_mask=mask.long(),
        position_ids=torch.arange(mask.shape[1])[None].expand(mask.shape),
        use_cache=False,
    ).last_hidden_state
    ids, targets = (pad_sequence([getattr(e, n) for e in experiences], batch_first=True) for n in ("ids", "loss_mask"))
    logits = head(out[:, :-1][targets[:, 1:]])
    loss = torch.nn.functional.cross_entropy(logits.float(), ids[targets])
    loss.backward()
    worker.optimizer.gather_gradients()
    worker.optimizer.step()
    worker.model.weights_changed()
    return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=128, help="recordings of an epoch")
    parser.add_argument("--batch", type=int, default=16, help="examples per update")
    parser.add_argument("--micro-batch-tokens", type=int, default=1024, help="tokens of a packed row")
    parser.add_argument("--rounds", type=int, default=3, help="measured epochs of every form")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    samples = bundled_transcripts(max_seconds=MAX_SECONDS)
    samples = random.Random(0).sample(samples, min(args.examples, len(samples)))
    examples = [Example(s, s.references[0]) for s in samples]
    policy = tiny([e.target for e in examples] * 20, config=ModelConfig(audio="frozen"))
    config = SFTConfig(batch_size=args.batch, micro_batch_tokens=args.micro_batch_tokens)
    worker = Learner(sft_loss, policy, config, OPTIM)
    lengths = [len(experience(policy, e)) for e in examples]
    rng = random.Random(1)
    order = rng.sample(range(len(examples)), len(examples))
    batches = {
        "random": [order[i : i + args.batch] for i in range(0, len(order), args.batch)],
        "sorted": sorted_batches(lengths, args.batch, rng),
    }

    def epoch(packed: bool, kind: str) -> tuple[float, float, list[float]]:
        """(wall seconds, CPU seconds, the loss of every batch)."""
        wall, cpu = time.perf_counter(), time.process_time()
        losses = []
        for indices in batches[kind]:
            batch = [examples[i] for i in indices]
            losses.append(worker.train(batch)["sft/loss"] if packed else padded_update(policy, worker, batch))
        return time.perf_counter() - wall, time.process_time() - cpu, losses

    forms = [(packed, kind) for packed in (False, True) for kind in batches]
    times: dict[tuple[bool, str], list[tuple[float, float]]] = {form: [] for form in forms}
    for repeat in range(1 + args.rounds):
        results = {form: epoch(*form) for form in forms}
        for kind in batches:
            torch.testing.assert_close(
                torch.tensor(results[True, kind][2]), torch.tensor(results[False, kind][2]), atol=1e-4, rtol=1e-4
            )
        if repeat:
            for form in forms:
                times[form].append(results[form][:2])

    tokens = sum(lengths)
    longest = max(seconds(s.audio[0]) for s in samples)
    title = f"{len(examples)} recordings of up to {longest:.1f} s, {min(lengths)} to {max(lengths)} tokens, batches of "
    table = Table(title=f"{title}{args.batch}")
    for column in ("", "tokens computed", "wall s", "CPU s", "wall", "CPU"):
        table.add_column(column, justify="left" if not column else "right")
    base = [statistics.median(values) for values in zip(*times[False, "random"], strict=True)]
    for packed, kind in forms:
        rectangles = sum(len(b) * max(lengths[i] for i in b) for b in batches[kind])
        wall, cpu = (statistics.median(values) for values in zip(*times[packed, kind], strict=True))
        table.add_row(
            f"{'packed' if packed else 'padded'}, {kind}", f"{(tokens if packed else rectangles) / tokens:.2f}x",
            f"{wall:.2f}", f"{cpu:.2f}", f"{wall / base[0]:.2f}x", f"{cpu / base[1]:.2f}x",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
