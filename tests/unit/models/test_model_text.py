"""Text decoders: the same policy without an ear."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.config import LoraConfig, ModelConfig, OptimConfig, SamplingConfig
from audiorl.models import AudioPolicy, load_policy
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.train.optim.adamw import Optimizer
from audiorl.types import Message, Sample
from tests.conftest import make_text, readable
from tests.support.decoders import FAMILIES, of_class
from tests.support.packing import assert_same, groups_of_three, logprobs, with_gradients
from tests.support.rollouts import forced, requests
from tests.support.rollouts import logprobs as rollout_logprobs


@pytest.fixture(params=list(FAMILIES))
def decoder(request: pytest.FixtureRequest) -> AudioPolicy:
    return FAMILIES[request.param]()


def test_logits_equal_the_stock_model(decoder: AudioPolicy, samples: list[Sample]) -> None:
    ids = decoder.prompt(readable(decoder, samples)[1]).ids
    row = pack_experiences([Experience(ids, torch.zeros(len(ids), dtype=torch.bool), len(ids))])
    ours = decoder.backbone.head(decoder.model)(decoder.hidden(row))
    torch.testing.assert_close(ours, decoder.model(input_ids=ids[None]).logits[0], atol=1e-5, rtol=0)


def test_packed_and_shared_equal_one_by_one(decoder: AudioPolicy, samples: list[Sample]) -> None:
    batch = groups_of_three(decoder, samples)
    single = with_gradients(decoder, [logprobs(decoder, [e], share=False)[0] for e in batch])
    for share in (False, True):
        assert_same(with_gradients(decoder, logprobs(decoder, batch, share)), single)


def test_the_folder_gives_the_same_policy(decoder: AudioPolicy, samples: list[Sample], tmp_path: Path) -> None:
    decoder.save(tmp_path / "model")
    loaded = load_policy(tmp_path / "model")
    assert type(loaded.model) is type(decoder.model) and loaded.extractor is None
    assert loaded.trainable().keys() == decoder.trainable().keys()
    assert loaded.stop_ids == decoder.stop_ids
    batch = groups_of_three(decoder, samples)
    assert torch.equal(torch.cat(logprobs(loaded, batch)), torch.cat(logprobs(decoder, batch)))
    text = readable(decoder, samples)[0]
    assert torch.equal(loaded.prompt(text).ids, decoder.prompt(text).ids)


@pytest.mark.parametrize(
    "model_class, config",
    [
        (GraniteForCausalLM, partial(GraniteConfig, logits_scaling=8.0)),
        (Gemma2ForCausalLM, partial(Gemma2Config, final_logit_softcapping=0.5, attn_logit_softcapping=0.5)),
    ],
    ids=["granite", "gemma2"],
)
def test_divided_and_capped_logits(model_class: Any, config: Any, samples: list[Sample]) -> None:
    """Those of transformers' own class, in an update and in the engine."""
    policy = of_class(model_class, partial(config, sliding_window=4096), tied=True)
    torch.nn.init.normal_(policy.backbone.head(policy.model).weight, std=0.3)
    answers = groups_of_three(policy, samples)
    found = logprobs(policy, answers)
    for e, ours in zip(answers, found, strict=True):
        logits = policy.model(input_ids=e.ids[None]).logits[0, e.prompt_length - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, e.ids[e.loss_mask][:, None])[:, 0]
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
        as_they_are = policy.model.lm_head(policy.model.model(input_ids=e.ids[None]).last_hidden_state)[0]
        assert (as_they_are[e.prompt_length - 1 : -1] - logits).abs().max() > 0.5
    rollouts = HFEngine(policy, SamplingConfig(max_new_tokens=5)).generate(requests(readable(policy, samples), 2))
    torch.testing.assert_close(forced(policy, rollouts, 1.0), rollout_logprobs(rollouts), atol=1e-5, rtol=0)


def test_positions_beyond_which_rotations_change_are_refused(samples: list[Sample]) -> None:
    policy = make_text()
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 8}
    policy.model.config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    with pytest.raises(ValueError, match="the model reads at most 8"):
        policy.prompt(readable(policy, samples)[0])


def test_reserved_are_special_tokens_and_what_a_chat_is_written_with() -> None:
    policy = make_text()
    policy.tokenizer.add_tokens(["[INST]", "<start_of_turn>", "<table>", "\n\n"])
    policy.tokenizer.chat_template = "[INST]{{ messages[0].content }}<think>"
    found = {word for word in policy.tokenizer.get_added_vocab() if policy.prompts.reserved.search(word)}
    assert found >= {"[INST]", "<|im_end|>", "<|AUDIO|>"}
    assert not found & {"<start_of_turn>", "<table>", "\n\n", "<think>", "<answer>"}
    policy.tokenizer.add_tokens(["<start_of_turn>"], special_tokens=True)
    policy.tokenizer.add_tokens(["<more>"])  # the pattern is made again
    with pytest.raises(ValueError, match=r"reserved token such as <.im_start.>: <start_of_turn>"):
        policy.prompt(Sample("s", (Message("user", ("<start_of_turn>",)),)))


def test_audio_in_a_prompt_is_refused_by_name(samples: list[Sample]) -> None:
    policy = make_text()
    with pytest.raises(ValueError, match="sample 'sample-1': a text decoder reads no audio"):
        policy.prompt(samples[1])
    with pytest.raises(ValueError, match="sample 'sample-0': a text decoder reads no audio"):
        HFEngine(policy).generate([Request(samples[0])])


def test_a_template_of_its_own_writes_the_chat() -> None:
    policy = make_text()
    asked = Sample("s", (Message("system", ("yes",)), Message("user", ("What is", " said?"))))
    chatml = "<|im_start|>system\nyes<|im_end|>\n<|im_start|>user\nWhat is said?<|im_end|>\n<|im_start|>assistant\n"
    assert policy.tokenizer.decode(policy.prompt(asked).ids) == chatml
    policy.tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}assistant:"
    assert policy.tokenizer.decode(policy.prompt(asked).ids) == "system: yes;user: What is said?;assistant:"


def test_only_the_weights_that_are_named_learn(samples: list[Sample], tmp_path: Path) -> None:
    make_text().save(tmp_path / "base")
    with pytest.raises(ValueError, match=r"model\.only: 'q_prj' is in no name of a trained weight, such as '"):
        load_policy(tmp_path / "base", ModelConfig(only=("norm", "q_prj")))
    policy = load_policy(tmp_path / "base", ModelConfig(only=(r"layers\.1\.self_attn", r"^model\.norm\.")))
    assert {n.split(".")[1] for n in policy.trainable()} == {"layers", "norm"}
    batch = groups_of_three(policy, samples)
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    optimizer = Optimizer(policy.trainable(), OptimConfig(lr=1e-2), 1)
    torch.cat(logprobs(policy, batch)).sum().backward()
    optimizer.step()
    changed = {n for n, p in policy.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == set(policy.trainable()) and "model.norm.weight" in changed
    policy.save(tmp_path / "trained")
    assert torch.equal(
        torch.cat(logprobs(load_policy(tmp_path / "trained"), batch)), torch.cat(logprobs(policy, batch))
    )


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("config", {"num_hidden_layers": "two"}, "the tokenizer cannot be read: .*num_hidden_layers"),
        ("tokenizer_config", {"extra_special_tokens": 3}, "the tokenizer cannot be read"),
        ("generation_config", {"eos_token_id": "x"}, "eos_token_id in generation_config.json is 'x'"),
        ("generation_config", {"pad_token_id": [[]]}, "the (model|tokenizer) cannot be read"),
    ],
)
def test_a_damaged_file_of_a_model_is_one_error(file: str, values: Any, message: str, tmp_path: Path) -> None:
    make_text().save(tmp_path / "model")
    path = tmp_path / "model" / f"{file}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(ValueError, match=f"^{tmp_path / 'model'}: {message}"):
        load_policy(tmp_path / "model")


def test_weights_that_are_not_finite_are_not_loaded(tmp_path: Path) -> None:
    make_text().save(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["lm_head.weight"][3, 5] = float("-inf")
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"weight 'lm_head\.weight' holds values that are not finite"):
        load_policy(tmp_path / "model")


def test_json_that_is_damaged_is_named(tmp_path: Path) -> None:
    make_text(ModelConfig(lora=LoraConfig(rank=2))).save(tmp_path)
    for name, contents in (
        ("adapter_config.json", ("[" * 100_000, "{", '{"peft_type": 3}', '{"peft_type": "LORA", "r": [1]}')),
        ("config.json", ('{"a":' * 100_000, "[]")),
    ):
        for content in contents:
            (tmp_path / name).write_text(content)
            with pytest.raises(ValueError, match=rf"{name}: "):
                load_policy(tmp_path)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], r".*\.(q|down)_proj", "all-linear"])
def test_an_adapter_of_peft_gives_its_logits(targets: Any, tmp_path: Path) -> None:
    make_text().save(tmp_path / "model")
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    lora = PeftLoraConfig(r=2, lora_alpha=8, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(stock, lora).eval()
    adapted.save_pretrained(str(tmp_path / "adapter"))
    ids = torch.arange(5, 30)[None]
    with torch.no_grad():
        expected = adapted(input_ids=ids).logits
        ours = load_policy(tmp_path / "adapter").model(input_ids=ids).logits
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("use_rslora", True), ("use_dora", True), ("rank_pattern", {"q_proj": 4}), ("alpha_pattern", {"q_proj": 4})],
)
def test_an_adapter_that_adds_something_else_is_refused(field: str, value: Any, tmp_path: Path) -> None:
    make_text(ModelConfig(lora=LoraConfig(rank=2))).save(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": "m", field: value}))
    with pytest.raises(ValueError, match=rf"adapter_config\.json: {field} is not read; merge the adapter with peft"):
        load_policy(tmp_path)
