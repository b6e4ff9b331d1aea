"""What all tests share: no hub, few threads, real speech, tiny models of the real classes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait by spinning starve each other on a busy machine
# Two processes that compile a function at once leave code in numba's cache whose names do not fit each other, and who
# loads it dies. So each worker has a cache of its own.
os.environ.setdefault(
    "NUMBA_CACHE_DIR",
    str(Path(__file__).parents[1] / ".pytest_cache" / "numba" / os.environ.get("PYTEST_XDIST_WORKER", "main")),
)

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings
from transformers import (
    PreTrainedConfig,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig
from audiorl.config.distributed import RuntimeConfig, set_current
from audiorl.data.corpus import Utterance, bundled_speech
from audiorl.distributed.ray_cluster import Cluster, connected
from audiorl.models import AudioPolicy, dualize
from audiorl.models.families import fast_conformer, moonshine, qwen2_audio, qwen_omni, whisper
from audiorl.models.families import text as text_decoder
from audiorl.models.families.qwen_omni import Qwen3Omni
from audiorl.models.tiny import tiny_tokenizer
from audiorl.types import Message, Sample

THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2  # there other files' tests run beside
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
torch.set_num_threads(THREADS)
# A config's validation tries each type that a field may have, and writes an error of each that it has not, with the
# config in it as JSON: half of the time in which a tiny model is saved or loaded.
PreTrainedConfig.__repr__ = object.__repr__  # type: ignore[method-assign, assignment]
# A job in the background ignores Ctrl-C, and so would the processes that its tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# No deadline: a busy machine is not a failure. `make test` tries the same cases every time, `make test-slow` new ones.
settings.register_profile("repeat", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


SLOW = (
    "attack",
    "cases/test_cases.py::test_case[B9 a .jsonl.gz",
    "cases/test_cases.py::test_case[B9 a tar.xz",
    "docs/test_commands.py::test_reward_files_of_the_text",
    "experiments",
    "faults",
    "packaging",
    "recipes/test_api.py::test_every_public_name_has_an_example_that_runs[TrainResult",
    "recipes/test_api.py::test_every_public_name_has_an_example_that_runs[train_dpo",
    "recipes/test_api.py::test_every_public_name_has_an_example_that_runs[train_grpo",
    "recipes/test_api.py::test_every_public_name_has_an_example_that_runs[train_ppo",
    "recipes/test_api.py::test_every_public_name_has_an_example_that_runs[train_sft",
    "recipes/test_api.py::test_a_temporary_folder",
    "recipes/test_recipe_codec",
    "recipes/test_recipes",
    "recipes/test_run_files.py::test_one_of_them_trains",
    "unit/algos/test_algos.py::test_importing_algos_needs_torch_only",
    "unit/cli/test_chat.py::test_spoken_answers",
    "unit/cli/test_say.py::test_a_file_has",
    "unit/cli/test_say.py::test_raw_samples",
    "unit/corpora/test_annotate_run",
    "unit/corpora/test_ctc.py::test_align_speech",
    "unit/corpora/test_scenes.py::test_a_seed",
    "unit/corpora/test_ctc.py::test_it_",
    "unit/corpora/test_simul_quickstart.py::test_no_prompt",
    "unit/corpora/test_simul_quickstart.py::test_quickstart_writes",
    "unit/corpora/test_simul_quickstart.py::test_recorded_streams",
    "unit/corpora/test_simul_quickstart.py::test_two_speakers",
    "unit/corpora/test_tts_quickstart",
    "unit/data/test_data_synth.py::test_an_interrupt_during_synthesis",
    "unit/distributed/test_cluster",
    "unit/distributed/test_critics",
    "unit/distributed/test_engines",
    "unit/distributed/test_pretend_device",
    "unit/distributed/test_ranks",
    "unit/distributed/test_sync",
    "unit/distributed/test_threads",
    "unit/distributed/test_zero",
    "unit/eval/test_eval_asr.py::test_scores_in_a_model_card",
    "unit/eval/test_eval_audit.py::test_the_short_form",
    "unit/eval/test_eval_passk.py::test_base_and_run",
    "unit/eval/test_eval_simul.py::test_a_model_on_bundled",
    "unit/eval/test_eval_simul.py::test_several_schedules",
    "unit/eval/test_eval_sound.py::test_what_is_wrong",
    "unit/eval/metrics/test_metric_choice.py::test_is_the_share",
    "unit/models/test_model_attention.py::test_a_pack_of_16k",
    "unit/models/test_model_export",
    "unit/models/test_model_value.py::test_what_is_saved_comes_back[qwen2.5-omni-whole",
    "unit/models/test_model_value.py::test_what_is_saved_comes_back[text-whole",
    "unit/models/test_model_vision",
    "unit/plan/test_plan.py::test_a_folder_is_read",
    "unit/plan/test_plan.py::test_a_step_takes_what_is_planned[bfloat16",
    "unit/plan/test_plan.py::test_activations",
    "unit/plan/test_plan.py::test_flows",
    "unit/plan/test_plan.py::test_released_models",
    "unit/report/test_report_page.py::test_audio_outside",
    "unit/rewards/test_reward_imports",
    "unit/rewards/test_reward_llm_judge.py::test_a_verdict_is_on_the_scale",
    "unit/rewards/test_reward_llm_judge.py::test_an_answer_that_is_no_verdict_is_skipped_and_counted[late",
    "unit/rewards/test_reward_remote.py::test_a_server_of_its_own",
    "unit/rewards/test_reward_remote.py::test_every_fault_is_a_failed_try[late",
    "unit/rewards/test_reward_thoughts.py::test_a_thought_about",
    "unit/rewards/test_reward_thoughts.py::test_an_answer_that_follows",
    "unit/rollout/test_conversation.py::test_spoken_answers",
    "unit/rollout/test_graphs.py::test_the_same_tokens",
    "unit/rollout/test_rollout_hf.py::test_layers_that_keep",
    "unit/rollout/test_rollout_speech.py::test_an_interpreter",
    "unit/rollout/test_rollout_batch.py::test_text_decoders[autocast",
    "unit/rollout/test_speech_stream.py::test_the_blocks_are_the_whole[1-",
    "unit/rollout/test_vllm",
    "unit/run/test_compute_time.py::test_training_ends",
    "unit/run/test_saving.py::test_a_copy_is_written_while_the_weights_change[adapter",
    "unit/run/test_saving.py::test_a_copy_is_written_while_the_weights_change[value",
    "unit/run/test_saving.py::test_a_kill_at_any_moment",
    "unit/speech_models/test_sound_taggers.py::test_clap",
    "unit/speech_models/test_speech_ctc",
    "unit/speech_models/test_speech_recognisers.py::test_whisper_transcribes_each",
    "unit/tasks/simul/test_simul_agent",
    "unit/tasks/simul/test_simul_bundled.py::test_streams_are_as_long",
    "unit/tasks/tts/test_tts_prosody.py::test_the_choice_is_the_best",
    "unit/tokenizers_audio/test_codec_parity.py::test_higgs",
    "unit/tokenizers_audio/test_codec_unified_train",
    "unit/train/rl/test_overlap.py::test_a_resumed_run",
    "unit/train/rl/test_overlap.py::test_ctrl_c",
    "unit/train/rl/test_overlap.py::test_it_learns",
    "unit/train/rl/test_partial.py::test_an_interrupted_run_resumes",
    "unit/train/rl/test_partial.py::test_files_of_removed",
    "unit/train/rl/test_train_distill.py::test_packed_is_single[forward",
    "unit/train/rl/test_train_rl.py::test_a_step_with_everything_in_it_does_not_depend_on_the_cut[own",
    "unit/train/rl/test_train_rl.py::test_a_toy_reward_rises[r",
    "unit/train/rl/test_train_rl.py::test_a_toy_reward_rises[gae",
    "unit/train/rl/test_train_rl.py::test_ppo_continues_bit_by_bit[own",
    "unit/train/rl/test_train_rl.py::test_the_controller_follows_the_kl_that_is_logged[reward",
    "unit/train/rl/test_train_separate_critic",
    "unit/train/rl/test_train_worker.py::test_the_gradient_does_not_depend_on_packing[sequence",
    "unit/train/test_train_preference.py::test_an_update_does_not_depend_on_budget_or_order[cdpo",
    "unit/train/test_train_preference.py::test_an_update_does_not_depend_on_budget_or_order[dpo-norm",
    "unit/train/test_train_preference.py::test_an_update_does_not_depend_on_budget_or_order[ipo",
    "unit/train/test_train_preference.py::test_an_update_does_not_depend_on_budget_or_order[r-dpo",
    "unit/train/test_train_reward_model.py::test_a_reward_model_comes_back[qwen2.5-omni-whole",
    "unit/train/test_training.py::test_master_weights",
    "unit/train/test_training.py::test_toy_reward_rises",
)
"""What `make test` leaves out and `make test-slow` runs: runtimes, kills, mutated inputs, experiments, whole recipes,
single tests of more than three seconds. A test there that is marked `smoke` runs in `make test` too. Others are marked
`slow` where they stand."""

OTHER_FAMILIES = re.compile(
    r"\[.*(qwen2-audio|qwen2_audio|qwen3|musicflamingo|glmasr|qwen2_5_omni|granite_speech|gemma3n|gemma4|phi4|fun_asr|vibevoice"
    r"|dual-omni|whisper|canary|cohere|flex-|encodec|xcodec|dac|unified-)"
)
"""What holds for every family, codec or kernel, `make test` tries with one or two, `make test-slow` with all."""

LONGEST = (
    "attack",
    "unit/distributed/test_zero",
    "faults/test_faults_interrupt",
    "unit/distributed/test_ranks",
    "unit/distributed/test_cluster",
    "faults/test_faults_async_save",
    "unit/corpora/test_annotate_run",
    "experiments/test_tool_measure",
    "unit/models/test_long_prompts",
    "unit/models/test_model_export",
)
"""Files that take minutes. They come first, so that no worker is left with one of them when the others are done."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test` does not even import files of which it runs nothing: some need seconds."""
    place = collection_path.relative_to(Path(__file__).parent).as_posix()
    if "not slow" not in config.option.markexpr or collection_path.suffix != ".py" or not place.startswith(SLOW):
        return None
    return True if not re.search(r"mark\.(smoke|large)", collection_path.read_text()) else None


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> str:
        return f"{item.path.relative_to(Path(__file__).parent).as_posix()}::{item.name}"

    for item in items:
        runs_anyway = item.get_closest_marker("smoke") or item.get_closest_marker("large")
        if (place(item).startswith(SLOW) or OTHER_FAMILIES.search(item.name)) and not runs_anyway:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not place(item).startswith(LONGEST))


EXTRAS = {
    **dict.fromkeys(("vllm",), "rollout-cpu"),
    **dict.fromkeys(("ray", "deepspeed"), "scale"),
    **dict.fromkeys(("sacrebleu", "zhconv"), "metrics"),
    **dict.fromkeys(("fastapi", "uvicorn", "starlette"), "serve"),
    **dict.fromkeys(("tensorboard", "wandb", "trackio", "mlflow"), "loggers"),
    **dict.fromkeys(("simuleval", "textgrid", "pydub"), "simuleval"),
    **dict.fromkeys(
        ("pystoi", "pocketsphinx", "faster_whisper", "speechmos", "librosa", "requests", "scipy"), "speech"
    ),
    "pandas": "study",
    "gguf": "gguf",
    "sounddevice": "mic",
}
"""{optional package: extra of pyproject.toml}: a test that needs one which is not installed is skipped and says so."""


def missing_extra(error: BaseException | None) -> str | None:
    """Return why a test cannot run here if the error comes from an optional package that is not installed."""
    while error is not None:
        named = [(error.name or "").partition(".")[0]] if isinstance(error, ImportError) else []
        if isinstance(error, ValueError) and "pip install" in str(error):  # audiorl's own words for it
            named = [
                package for package in EXTRAS if package in re.findall(r"\w+", str(error).lower().replace("-", "_"))
            ]
        for package in named:
            if package in EXTRAS and find_spec(package) is None:
                return f"needs {package}: pip install -e '.[{EXTRAS[package]}]'"
        error = error.__cause__ or error.__context__
    return None


def _skip(report: pytest.CollectReport | pytest.TestReport, call: pytest.CallInfo, place: tuple[str, int]) -> None:
    reason = missing_extra(call.excinfo.value if call.excinfo else None)
    if report.failed and reason:
        report.outcome, report.longrepr = "skipped", (*place, f"Skipped: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    _skip(report, report.call, (str(collector.path), 0))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    _skip(report, call, (str(item.path), item.location[1] or 0))
    return report


@pytest.fixture(scope="session", autouse=True)
def audio_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Recordings from tables and archives are stored for the session only."""
    os.environ["AUDIORL_CACHE"] = str(tmp_path_factory.mktemp("audio"))


@pytest.fixture(scope="session")
def speech() -> list[Utterance]:
    """Human recordings of 0.8 to 2.5 s."""
    return bundled_speech(min_seconds=0.8, max_seconds=2.5)


def ask(clip: AudioClip, text: str = "What is said?", name: str = "q") -> Sample:
    return Sample(id=name, messages=(Message("user", (clip, text)),), references=("yes",), task="qa")


@pytest.fixture(scope="session")
def samples(speech: list[Utterance]) -> list[Sample]:
    """Three questions of different length about different recordings."""
    texts = ("What is said?", "Which language is it, and who speaks?", "Why?")
    return [ask(speech[40 * i].clip, text, f"sample-{i}") for i, text in enumerate(texts)]


Make = Callable[..., AudioPolicy]


def make_omni(config: ModelConfig | None = None, **kw: object) -> AudioPolicy:
    return qwen_omni.tiny(TEXTS, hidden=64, layers=2, vocab_size=400, whisper=False, config=config, **kw)  # type: ignore[arg-type]


def make_qwen2_audio(config: ModelConfig | None = None, **kw: object) -> AudioPolicy:
    return qwen2_audio.tiny(TEXTS, hidden=64, layers=2, vocab_size=400, config=config, **kw)  # type: ignore[arg-type]


def make_qwen3_omni(
    config: ModelConfig | None = None, *, hidden: int = 64, head_dim: int = 16, seed: int = 0
) -> AudioPolicy:
    """A tiny mixture-of-experts thinker: four experts, of which two write each token."""
    tokenizer = tiny_tokenizer(TEXTS, 400)
    backbone = Qwen3Omni("qwen3_omni_moe", tokenizer)
    eyes = [backbone.image_token, "<|vision_start|>", "<|vision_end|>"]
    tokenizer.add_tokens([backbone.audio_token, *backbone.ends, *eyes], special_tokens=True)
    image, begin, _ = tokenizer.convert_tokens_to_ids(eyes)
    size = Qwen3OmniMoeThinkerConfig(
        audio_config=dict(
            d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, num_mel_bins=80,
            output_dim=hidden, downsample_hidden_size=16, n_window=50, n_window_infer=400, max_source_positions=1500,
        ),
        vision_config=dict(
            depth=3, deepstack_visual_indexes=[0, 1], hidden_size=16, intermediate_size=16, num_heads=2,
            out_hidden_size=hidden,
        ),
        text_config=dict(
            hidden_size=hidden, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=head_dim, vocab_size=len(tokenizer), num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=48, max_position_embeddings=4096,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [head_dim // 4, head_dim // 8, head_dim // 8],
            },
        ),
        audio_token_id=tokenizer.convert_tokens_to_ids(backbone.audio_token),
        audio_start_token_id=tokenizer.convert_tokens_to_ids(backbone.ends[0]),
        image_token_id=image,
        video_token_id=tokenizer.convert_tokens_to_ids("<|VIDEO|>"),
        vision_start_token_id=begin,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3OmniMoeThinkerForConditionalGeneration(size)
    extractor = WhisperFeatureExtractor(feature_size=80, n_fft=400, hop_length=160, chunk_length=30)
    return AudioPolicy(model, tokenizer, extractor, backbone, config)


def make_dual_omni(config: ModelConfig | None = None, **kw: object) -> AudioPolicy:
    """An Omni thinker that has learned to speak in four codebooks of 64 codes."""
    return dualize(make_omni(config, **kw), 4, 64)


def make_text(config: ModelConfig | None = None, **kw: object) -> AudioPolicy:
    return text_decoder.tiny(TEXTS, hidden=64, layers=2, vocab_size=400, config=config, **kw)  # type: ignore[arg-type]


def make_whisper(config: ModelConfig | None = None, **kw: object) -> AudioPolicy:
    return whisper.tiny(TEXTS, hidden=64, layers=2, vocab_size=400, config=config, **kw)  # type: ignore[arg-type]


def make_fast_conformer(kind: str, config: ModelConfig | None = None) -> AudioPolicy:
    return fast_conformer.tiny(TEXTS, kind, config=config)


def make_moonshine(config: ModelConfig | None = None) -> AudioPolicy:
    return moonshine.tiny(TEXTS, config=config)


TEXTS = ["What is said? Which language is it, and who speaks? yes no why English Spanish French"] * 20
BACKBONES = {"qwen2.5-omni": make_omni, "qwen2-audio": make_qwen2_audio}
LISTENERS = {**BACKBONES, "whisper": make_whisper}
"""Every family that reads audio; `BACKBONES` does so in its text."""
RECOGNISERS = {
    "whisper": make_whisper,
    "canary": partial(make_fast_conformer, "canary"),
    "cohere-asr": partial(make_fast_conformer, "cohere_asr"),
    "moonshine": make_moonshine,
}
DECODERS = {**BACKBONES, "text": make_text, "dual-omni": make_dual_omni}


def readable(policy: AudioPolicy, samples: list[Sample]) -> list[Sample]:
    """The samples as the policy can take them: without their clips where it does not hear."""
    if policy.backbone.audio_token is not None:
        return samples
    return [
        replace(s, messages=tuple(replace(m, content=tuple(filter(is_text, m.content))) for m in s.messages))
        for s in samples
    ]


def is_text(content: str | AudioClip) -> bool:
    return isinstance(content, str)


every_listener = pytest.mark.parametrize("make_policy", list(LISTENERS), indirect=True)


@pytest.fixture(params=list(BACKBONES))
def make_policy(request: pytest.FixtureRequest) -> Make:
    """A function that makes a tiny random policy of one family; run once per family of `BACKBONES`, and of `LISTENERS`
    in tests marked `every_listener`."""
    return LISTENERS[request.param]


@pytest.fixture(params=list(DECODERS))
def make_any(request: pytest.FixtureRequest) -> Make:
    """The same with the text decoder, for what does not depend on hearing; ask it what `readable` gives."""
    return DECODERS[request.param]


@pytest.fixture
def policy(make_policy: Make) -> AudioPolicy:
    return make_policy()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Ray with two trainers and two engines, whose processes all tests of a file use."""
    with connected(RuntimeConfig(kind="ray", ranks=2, engines=2)) as found:
        yield found


@pytest.fixture
def own_runtime() -> Iterator[None]:
    """What a run sets in this process is as before when the test is over."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    set_current(RuntimeConfig())
