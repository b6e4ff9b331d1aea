"""What a training step of align-speech costs in each phase: processor seconds on 32 bundled recordings.

    OMP_NUM_THREADS=1 python bench/align.py grafted

`grafted` is a folder that `audiorl graft` wrote. Forward passes run in bfloat16.
"""

from __future__ import annotations

import argparse
import time

import torch

from audiorl.audio import seconds
from audiorl.config import LoraConfig, ModelConfig, OptimConfig, SFTConfig
from audiorl.data.bundled import bundled_transcripts
from audiorl.models import load_policy
from audiorl.models.examples import Example
from audiorl.train.fit import Learner
from audiorl.train.sft import sft_loss
from corpora.models.ctc import CTCConfig, CTCModel, CTCWorker, fitting, target_ids

BATCH, WARM, TIMED = 32, 1, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder that audiorl graft wrote")
    args = parser.parse_args()
    torch.set_num_threads(1)
    samples = bundled_transcripts(max_seconds=5.0)[:: 1120 // BATCH][:BATCH]
    examples = [Example(s, s.references[0]) for s in samples]
    print(f"{len(examples)} clips, {sum(seconds(s.audio[0]) for s in samples):.0f} s of speech")
    optim = OptimConfig(lr=1e-4)
    for phase in ("ctc", "encoder", "sft"):
        lora = LoraConfig(rank=16 if phase == "sft" else 0)
        audio = {"ctc": "projector", "encoder": "full", "sft": "frozen"}[phase]
        config = ModelConfig(audio=audio, autocast=True, lora=lora)  # type: ignore[arg-type]
        policy = load_policy(args.model, config)
        if phase == "sft":
            worker: CTCWorker | Learner = Learner(sft_loss, policy, SFTConfig(), optim)
        else:
            examples = fitting(policy, examples, "skip")
            model = CTCModel(policy, [i for e in examples for i in target_ids(policy, e)])
            worker = CTCWorker(model, CTCConfig(), optim, seed=0)
        for step in range(WARM + TIMED):
            if step == WARM:
                start = time.process_time()
            worker.train(examples)
        print(f"{phase}: {(time.process_time() - start) / TIMED:.2f} processor seconds a step", flush=True)


if __name__ == "__main__":
    main()
