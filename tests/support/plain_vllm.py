"""Answers of `vllm.LLM`, without a line of audiorl: python plain_vllm.py CHECKPOINT AUDIO.npy|- ANSWER.json"""

from __future__ import annotations

import json
import os
import sys

import numpy as np

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def main(folder: str, audio: str, out: str) -> None:
    from vllm import LLM, SamplingParams

    question: object = "What is said?"
    request: dict[str, object] = {}
    if audio != "-":
        question = [{"type": "audio"}, {"type": "text", "text": question}]
        request = {"multi_modal_data": {"audio": [(np.load(audio), 16_000)]}}
    llm = LLM(
        folder, dtype="float32", max_model_len=1024, logprobs_mode="processed_logprobs", enforce_eager=True,
        kv_cache_memory_bytes=64 << 20, block_size=32, distributed_executor_backend="uni",
        limit_mm_per_prompt={"audio": 1, "image": 0, "video": 0} if request else {},
    )  # fmt: skip
    chat = [{"role": "user", "content": question}]
    prompt = llm.get_tokenizer().apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0)
    (result,) = llm.generate([{"prompt": prompt} | request], params, use_tqdm=False)
    answer = result.outputs[0]
    logprobs = [step[id].logprob for id, step in zip(answer.token_ids, answer.logprobs, strict=True)]
    with open(out, "w") as file:
        json.dump(
            {"prompt_ids": list(result.prompt_token_ids), "ids": list(answer.token_ids), "logprobs": logprobs}, file
        )


if __name__ == "__main__":
    assert not any(name.split(".")[0] == "audiorl" for name in sys.modules)
    main(*sys.argv[1:])
