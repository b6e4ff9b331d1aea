"""Audio LLMs of one shape: transformers' `get_audio_features`, a language model and a processor with an audio token.

A family is a class with what differs from `AudioLLM`, and most have nothing: model, encoder, projector, language model,
audio token, features, token counts and chat template are read from the checkpoint. A class of your own is given as
`--model.family FILE.py:NAME`.

Rows of audio are transformers' own: `get_audio_features` runs with the projector left out, which follows in `project`.
Clips go through it together only where no one is padded to another's length, so none depends on its batch.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from jinja2.exceptions import TemplateError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig
from audiorl.data.prompts import language_name, transcript_request
from audiorl.data.schema import FieldError
from audiorl.languages import language_code
from audiorl.models.backbone import Backbone
from audiorl.models.families import audio_llm
from audiorl.models.features import HOP, Features, log_mels
from audiorl.models.lora import merge_own_adapter
from audiorl.models.policy import AudioPolicy
from audiorl.models.prompts import chatml_template
from audiorl.models.speech import FrameLayout, branch_builder
from audiorl.models.tiny import seeded, tiny_decoder_sizes, tiny_extractor, tiny_tokenizer
from audiorl.models.weights import ModelSource, load_model, load_processor, load_tokenizer
from audiorl.pictures import Picture
from audiorl.types import Message
from audiorl.user_files import load_name


class AudioLLM(Backbone):
    """A family, from its checkpoint's processor and tokenizer. Class attributes and methods are what it may change."""

    model_class: ClassVar[str | None] = None
    """Its class in transformers; None: the one that transformers has for the config's model_type."""
    audio_encoder_at: ClassVar[str] = "model.audio_tower"
    projector_at: ClassVar[tuple[str, ...]] = ("model.multi_modal_projector",)
    """What the encoder's rows go through, one after the other, the last steps of `get_audio_features`."""
    decoder_at: ClassVar[str] = "model.language_model"
    head_at: ClassVar[str] = "lm_head"
    template: ClassVar[str | None] = None
    """A Jinja chat template for checkpoints without one that writes clips."""
    has_processor: ClassVar[bool] = True
    """Whether transformers' processor takes audio; without one override `features` and `tokens`."""
    extractor_class: ClassVar[Any] = AutoFeatureExtractor
    """What reads the feature extractor where there is no processor."""

    def __init__(self, name: str, tokenizer: Any = None, processor: Any = None, config: Any = None):
        """Without a tokenizer it knows a model's parts and how audio is encoded, but writes no prompts."""
        self.name, self.tokenizer, self.processor, self.config = name, tokenizer, processor, config
        self._counts: dict[int, int] = {}

    @classmethod
    def load_tokenizer(cls, path: str | Path) -> PreTrainedTokenizerBase:
        return load_tokenizer(path)

    # -- where the parts are ---------------------------------------------------------------------------------------

    def _part(self, model: Any, attribute: str, path: str) -> Any:
        part = model
        for name in path.split("."):
            part = getattr(part, name, None)
            if part is None:
                found = ", ".join(n for n, _ in getattr(model, "model", model).named_children())
                what = f"{self.name}: {type(model).__name__} has no {path} (its parts: {found})"
                raise ValueError(f"{what}; {_give(attribute)}")
        return part

    def check(self, model: Any) -> None:
        """Raise ValueError that names the fact of the family which this model does not show."""
        token = str(self.audio_token)
        if self.tokenizer.encode(token, add_special_tokens=False) != [self.tokenizer.convert_tokens_to_ids(token)]:
            what = f"no token {token!r} in the tokenizer; do config.json and tokenizer belong together?"
            raise ValueError(f"{self.name}: {what} {_give('audio_token')}")
        for path in self.projector_at:
            self._part(model, "projector_at", path)
        self.decoder(model), self.head(model), self.audio_encoder(model)
        if type(self).encode_audio is AudioLLM.encode_audio:
            self._get_audio_features(model)

    def decoder(self, model: Any) -> Any:
        return self._part(model, "decoder_at", self.decoder_at)

    def head(self, model: Any) -> nn.Linear:
        head: nn.Linear = self._part(model, "head_at", self.head_at)
        return head

    def audio_encoder(self, model: Any) -> Any:
        return self._part(model, "audio_encoder_at", self.audio_encoder_at)

    def projector(self, model: Any) -> Sequence[nn.Module]:
        return [self._part(model, "projector_at", path) for path in self.projector_at]

    def _get_audio_features(self, model: Any) -> Any:
        for owner in (getattr(model, "model", None), model):  # the inner one names its arguments
            method = getattr(owner, "get_audio_features", None)
            if method is not None:
                return method
        what = f"{self.name}: {type(model).__name__} has no get_audio_features"
        raise ValueError(f"{what}; {_give('encode_audio and project')}")

    # -- audio -----------------------------------------------------------------------------------------------------

    def max_seconds(self, model: Any, extractor: Any) -> float | None:
        longest = getattr(self.processor, "max_audio_len", None)
        window = getattr(extractor, "chunk_length", 1)
        return None if longest is None else float(longest // window * window)  # whole windows are read

    def frames(self, samples: int) -> int:
        """Return how many of the extractor's frames the mask of a clip counts."""
        return -(-samples // int(getattr(self.processor.feature_extractor, "hop_length", HOP)))

    def tokens(self, model: Any, samples: int) -> int:
        count = getattr(self.processor, "_get_audio_token_length", None)
        if count is not None:
            return int(count(torch.tensor(self.frames(samples))))
        if samples not in self._counts:  # the processor of a family that we know nothing of, on silence
            self._counts[samples] = self._count(self._processed(np.zeros(samples, np.float32)))
        return self._counts[samples]

    def _processed(self, wav: np.ndarray) -> Mapping[str, Tensor]:
        assert self.audio_token is not None
        rate = self.processor.feature_extractor.sampling_rate
        with torch.autocast("cpu", enabled=False):
            processed: Mapping[str, Tensor] = self.processor(
                text=[self.audio_token],
                audio=[wav],
                return_tensors="pt",
                text_kwargs={"add_special_tokens": False},
                audio_kwargs={"sampling_rate": rate},
            )
        return processed

    def _count(self, processed: Mapping[str, Tensor]) -> int:
        return int((processed["input_ids"] == self.tokenizer.convert_tokens_to_ids(self.audio_token)).sum())

    def features(self, model: Any, extractor: Any, wavs: Sequence[np.ndarray], device: torch.device) -> list[Features]:
        processed = [self._processed(wav) for wav in wavs]
        return [{**p, "rows": torch.tensor([self._count(p)])} for p in processed]

    def encode_audio(self, model: Any, features: Sequence[Features]) -> list[Tensor]:
        get_audio_features = self._get_audio_features(model)
        taken = inspect.signature(get_audio_features).parameters
        alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for i, clip in enumerate(features):
            alike[tuple((name, x.shape) for name, x in clip.items())].append(i)
        rows: list[Tensor] = [torch.empty(0)] * len(features)
        for places in alike.values():
            batch = [features[i] for i in places]
            arguments = {name: torch.cat([clip[name] for clip in batch]) for name in batch[0] if name in taken}
            with left_out(self.projector(model)):
                out = get_audio_features(**arguments)
            found = getattr(out, "pooler_output", None)
            found = out.last_hidden_state if found is None else found
            counts = [int(clip["rows"]) for clip in batch]
            if found.dim() != 2 or len(found) != sum(counts):
                what = f"{self.name}: get_audio_features gives {list(found.shape)} for {sum(counts)} audio tokens"
                raise ValueError(f"{what}; {_give('encode_audio')}")
            for i, part in zip(places, found.split(counts), strict=True):
                rows[i] = part
        return rows

    def project(self, model: Any, encoder_output: Tensor) -> Tensor:
        for module in self.projector(model):
            encoder_output = module(encoder_output)
        return encoder_output

    # -- prompts ---------------------------------------------------------------------------------------------------

    @cached_property
    def audio_token(self) -> str | None:  # type: ignore[override]
        token = getattr(self.processor, "audio_token", None)
        if token is None:
            places = (self.config, getattr(self.config, "audio_config", None))
            names = ("audio_token_id", "audio_token_index")
            ids = [id for place in places for name in names if (id := getattr(place, name, None)) is not None]
            token = self.tokenizer.convert_ids_to_tokens(ids[0]) if ids else None
        if token is None:
            raise ValueError(f"{self.name}: no audio token; {_give('audio_token')}")
        return str(token)

    @cached_property
    def _around(self) -> tuple[str, str]:
        """What the processor, and not the chat template, writes before and after a clip's tokens."""
        if not self.has_processor:
            return "", ""
        rate = self.processor.feature_extractor.sampling_rate
        text = self.tokenizer.decode(self._processed(np.zeros(rate, np.float32))["input_ids"][0])
        token = str(self.audio_token)
        return text.partition(token)[0], text.rpartition(token)[2]

    @property
    def _around_picture(self) -> tuple[str, str]:
        """What the processor writes before and after a picture's tokens."""
        return "", ""

    def chat_template(self) -> str | None:
        own = getattr(self.processor, "chat_template", None) or getattr(self.tokenizer, "chat_template", None)
        return own if own and (self.template is None or str(self.audio_token) in own) else self.template

    def chat(self, messages: Sequence[Message]) -> list[str | AudioClip | Picture]:
        template = self.chat_template()
        if template is None:
            raise ValueError(f"{self.name}: the checkpoint has no chat template; {_give('template')}")
        texts = [c.strip() for m in messages for c in m.content if isinstance(c, str)]
        tokens: dict[type, str] = {AudioClip: str(self.audio_token)}
        tokens |= {Picture: self.image_token} if self.image_token else {}
        things = {t: [c for m in messages for c in m.content if isinstance(c, kind)] for kind, t in tokens.items()}
        text = ""
        refused: Exception | None = None
        for form in ("parts", "whole", "written"):  # most templates take parts, some a text where a message has one
            turns = [{"role": m.role, "content": _parts(m.content, form, tokens)} for m in messages]
            try:
                text = str(
                    self.tokenizer.apply_chat_template(
                        turns, chat_template=template, tokenize=False, add_generation_prompt=True
                    )
                )
            except (TypeError, TemplateError) as error:  # it adds a list of parts to a text
                refused = error
                continue
            if all(t in text for t in texts) and "{'type'" not in text:
                break
        else:
            lost = next((t for t in texts if t not in text), "")
            if not lost and refused is not None:
                raise ValueError(f"the chat template of {self.name} cannot write this conversation: {refused}")
            raise ValueError(f"the chat template of {self.name} leaves out {lost[:60]!r}; leave that text out")
        for token, given in things.items():
            if text.count(token) != len(given):
                what = f"{self.name} writes {token} {text.count(token)} times for {len(given)} "
                what += "clips" if token == self.audio_token else "pictures"
                raise ValueError(f"the chat template of {what}; give `template`, in a class, with one {token} each")
        first, *rest = re.split(f"({'|'.join(map(re.escape, things))})", text)
        out: list[str | AudioClip | Picture] = [first]
        for token, piece in zip(rest[::2], rest[1::2], strict=True):
            before, after = self._around if token == self.audio_token else self._around_picture
            out[-1] = f"{out[-1]}{before}"
            out += [things[token].pop(0), f"{after}{piece}"]
        return out

    @cached_property
    def turn_end(self) -> str | None:  # type: ignore[override]
        """The token that the chat template writes after an answer: Gemma's <end_of_turn>, Phi-4's <|end|>."""
        template, mark = self.chat_template(), "Yes."
        for content in ([{"type": "text", "text": mark}], mark) if template is not None else ():
            turns = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
            with suppress(TypeError, TemplateError):
                text = str(self.tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False))
                behind = self.tokenizer.tokenize(text.rpartition(mark)[2])
                if mark in text and behind and behind[0] in self.tokenizer.get_added_vocab():
                    return str(behind[0])
        return None

    def chunk(self, clip: AudioClip) -> list[str | AudioClip]:
        begin, end = (getattr(self.processor, f"audio_{side}_token", None) or "" for side in ("bos", "eos"))
        return [begin, clip, end]

    # -- files -----------------------------------------------------------------------------------------------------

    @property
    def processor_files(self) -> Mapping[str, Mapping[str, Any]]:  # type: ignore[override]
        if self.processor is None:
            return {}
        values = {k: v for k, v in self.processor.to_dict().items() if isinstance(v, str | int | float)}
        return {"processor_config.json": {**values, "processor_class": type(self.processor).__name__}}

    def save_model(self, model: PreTrainedModel, folder: str, source: ModelSource) -> None:
        save_with_released_names(model, folder)


def save_with_released_names(model: PreTrainedModel, folder: str) -> None:
    """Write a model with the names that transformers' loading rules for it begin from.

    transformers 5.19 applies the rules backwards in the wrong order where one has a prefix of another, and writes
    language_model.model.model.*, which no other software reads.
    """
    rules = [
        (str(target), str(source).removeprefix("^"))
        for rule in get_checkpoint_conversion_mapping(model.config.model_type) or ()
        for target, source in zip(rule.target_patterns, rule.source_patterns, strict=False)
    ]
    if ("model.language_model", "language_model.model") not in rules:
        model.save_pretrained(folder)
        return
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    weights = {}
    for name, weight in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        target, source = next(((t, s) for t, s in rules if name.startswith(f"{t}.")), ("", ""))
        weights[source + name.removeprefix(target)] = weight
    model.save_pretrained(folder, state_dict=weights, save_original_format=False)


def _parts(content: Sequence[str | AudioClip | Picture], form: str, tokens: Mapping[type, str]) -> Any:
    """Return a message's content as chat templates take it: parts, or one text, which has clips and pictures where
    those are "written", as their token; "whole" texts have none."""
    if form == "written" or (form == "whole" and all(isinstance(c, str) for c in content)):
        return "".join(c if isinstance(c, str) else tokens[type(c)] for c in content)
    names = {str: "text", AudioClip: "audio", Picture: "image"}
    return [{"type": names[type(c)], names[type(c)]: c if isinstance(c, str) else ""} for c in content]


@contextmanager
def left_out(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let modules return their first argument inside of the block."""
    for module in modules:
        module.forward = lambda x, *_, **__: x  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _give(fact: str) -> str:
    return f"give {fact} in a class of your own: --model.family FILE.py:NAME (docs: Which models)"


# -- families ----------------------------------------------------------------------------------------------------------


class Voxtral(AudioLLM):
    """Its processor is Mistral's own: features of the whole recording in windows of 30 s, silence included."""

    has_processor = False
    template = (
        "{%- for message in messages -%}"
        "{%- set system = message.role == 'system' -%}{%- set user = message.role == 'user' -%}"
        "{{- '[SYSTEM_PROMPT]' if system else '[INST]' if user else '' }}"
        "{%- if message.content is string -%}{{- message.content }}{%- else -%}{%- for part in message.content -%}"
        "{{- part.text if part.type == 'text' else '[BEGIN_AUDIO][AUDIO]' }}{%- endfor -%}{%- endif -%}"
        "{{- '[/SYSTEM_PROMPT]' if system else '[/INST]' if user else eos_token }}{%- endfor -%}"
    )

    def chat(self, messages: Sequence[Message]) -> list[str | AudioClip | Picture]:
        first, *rest = super().chat(messages)
        return [f"{self.tokenizer.bos_token or ''}{first}", *rest]

    @classmethod
    def load_tokenizer(cls, path: str | Path) -> PreTrainedTokenizerBase:
        # Mistral's own tokenizer reads special tokens in a text as letters; transformers makes one that does not.
        tokenizer = load_tokenizer(path, mistral_format=False, fix_mistral_regex=True)
        if tokenizer.bos_token is None and "<s>" in tokenizer.get_vocab():
            tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
        return tokenizer

    def chunk(self, clip: AudioClip) -> list[str | AudioClip]:
        return ["[BEGIN_AUDIO]", clip]

    def tokens(self, model: Any, samples: int) -> int:
        positions = int(self.audio_encoder(model).config.max_source_positions)
        audio = model.config.audio_config
        return -(-samples // (2 * positions * HOP)) * positions * audio.hidden_size // audio.intermediate_size

    def features(self, model: Any, extractor: Any, wavs: Sequence[np.ndarray], device: torch.device) -> list[Features]:
        frames = 2 * int(self.audio_encoder(model).config.max_source_positions)
        out: list[Features] = []
        for wav in wavs:
            (mel,) = log_mels(extractor, [wav], device, -(-len(wav) // (frames * HOP)) * frames * HOP)
            windows = mel.unflatten(1, (-1, frames)).transpose(0, 1)
            out.append({"input_features": windows, "rows": torch.tensor([self.tokens(model, len(wav))])})
        return out


class Qwen3ASR(AudioLLM):
    """Its chat template has a place for a context, the system message, where hotwords stand, and none for a request.

    The request that `asr_prompt` writes is left out; a language in it is written as the beginning of the answer, as
    `apply_transcription_request` does. Without one the model begins its answer with the language that it hears.
    """

    def frames(self, samples: int) -> int:
        extractor = self.processor.feature_extractor
        return max(samples, int(extractor.min_length)) // int(extractor.hop_length)

    def chat(self, messages: Sequence[Message]) -> list[str | AudioClip | Picture]:
        context = [str(c) for m in messages if m.role == "system" for c in m.content]
        turns, language = [], None
        for m in messages:
            asked = transcript_request("".join(c for c in m.content if isinstance(c, str)).strip())
            if m.role == "user":
                language = asked.language
            if m.role == "user" and language is not None:
                context += [", ".join(asked.hotwords)] if asked.hotwords else []
                m = Message("user", tuple(c for c in m.content if isinstance(c, AudioClip)))
            turns += [m] if m.role != "system" else []
        pieces = super().chat([*([Message("system", ("\n".join(context),))] if context else []), *turns])
        return [*pieces, f"language {self.name_of(language)}<asr_text>"] if language else pieces

    def name_of(self, language: str) -> str:
        """Return what the model calls a language. Raises FieldError for one that it does not transcribe."""
        from transformers.models.qwen3_asr.processing_qwen3_asr import LANGUAGE_CODE_TO_NAME as NAMES

        code = language_code(language)
        code = "fil" if code == "tl" else code
        if code not in NAMES:
            what = f"{self.name} transcribes no {language_name(language)}, but {', '.join(sorted(NAMES))}"
            raise FieldError("language", f"{what}; leave the row or its language out")
        return str(NAMES[code])


_NAMES: Mapping[str, str] = {
    **modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
}
"""Classes of transformers by model_type."""
OTHERS = (
    *("qwen2_5_omni", "qwen3_omni_moe", "whisper", "cohere_asr", "canary", "moonshine", "higgs_audio_v2"),
    *("llama", "qwen2", "qwen3"),
)
"""The model_types that are no `AudioLLM`, or a part of a larger one."""


def user_family(given: str) -> type[AudioLLM]:
    """Return the class that `FILE.py:NAME` names. Raises ValueError for another value."""
    file, _, name = given.rpartition(":")
    if not file.endswith(".py"):
        raise ValueError(f"--model.family {given}: give auto, or FILE.py:NAME with a class of your own")
    family = load_name(file, name, "--model.family")
    if not isinstance(family, type) or not issubclass(family, AudioLLM):
        raise ValueError(f"--model.family {given}: {name} is no class derived from {AudioLLM.__module__}.AudioLLM")
    return family


def model_class(
    kind: str, family: type[AudioLLM], config_class: Any = None, architectures: Sequence[str] = (), where: str = ""
) -> Any:
    """Return transformers' class of a `model_type`: the family's, the checkpoint's, or the one in transformers' table.

    Raises ValueError where none of them generates and has the `config_class`.
    """
    for name in (family.model_class, *architectures, _NAMES.get(kind)):
        found = getattr(transformers, name, None) if name else None
        if hasattr(found, "generate") and config_class in (None, getattr(found, "config_class", None)):
            return found
    what = f"{where}: transformers {transformers.__version__} has no audio LLM of model_type {kind!r}"
    raise ValueError(f"{what} (nor is it one of {', '.join(OTHERS)}); {_give('model_class')}")


def load(
    path: str | Path, config: ModelConfig, kind: str, family: type[AudioLLM], speech: FrameLayout | None = None
) -> AudioPolicy:
    """Load an audio LLM of model_type `kind` from a local folder or a hub id, as `family`."""
    if kind in ("voxtral_realtime", "kyutai_speech_to_text"):
        raise ValueError(f"{path}: {kind} hears audio at every position of the text, not at placeholders; not trained")
    content, _ = PreTrainedConfig.get_config_dict(str(path))
    if "auto_map" in content and kind not in CONFIG_MAPPING_NAMES:
        what = f"{path}: model_type {kind!r} has code of its own (auto_map), and audiorl runs no code of a checkpoint"
        raise ValueError(f"{what}; read it, then {_give('model_class')}, which may import what you trust")
    model_config = load_processor(path, "configuration", AutoConfig)
    found = model_class(kind, family, type(model_config), model_config.architectures or (), str(path))
    tokenizer = family.load_tokenizer(path)
    processor = load_processor(path, "processor", AutoProcessor) if family.has_processor else None
    extractor = getattr(processor, "feature_extractor", None)
    if extractor is None:
        if processor is not None:
            what = f"{path}: its processor, a {type(processor).__name__}, reads no audio"
            raise ValueError(f"{what}; {_give('features and tokens')}")
        extractor = load_processor(path, "feature extractor", family.extractor_class)
    defaults = getattr(getattr(processor, "valid_processor_kwargs", None), "_defaults", {}).get("audio_kwargs", {})
    if (rate := defaults.get("sampling_rate", extractor.sampling_rate)) != extractor.sampling_rate:
        what = f"{path}: preprocessor_config.json gives features of {extractor.sampling_rate} Hz"
        raise ValueError(f"{what}, {type(processor).__name__} reads {rate} Hz; give {rate}")
    backbone = family(kind, tokenizer, processor, model_config)
    model = load_model(found, path, config, branch_builder(backbone, speech))
    merge_own_adapter(model)
    backbone.check(model)
    return AudioPolicy(model, tokenizer, extractor, backbone, config, speech)


def tiny(
    kind: str,
    texts: Iterable[str] = (),
    *,
    hidden: int = 32,
    layers: int = 2,
    vocab_size: int = 400,
    window: int = 2,
    seed: int = 0,
    config: ModelConfig | None = None,
) -> AudioPolicy:
    """Make a random model of a family, of the real class and small enough for tests. window: seconds."""
    tokenizer, family = tiny_tokenizer(texts, vocab_size), audio_llm(kind)
    named = {"voxtral": "[AUDIO]", "glmasr": "<|pad|>", "qwen3_asr": "<|audio_pad|>", "qwen2_audio": "<|AUDIO|>"}
    token = named.get(kind, "<sound>")
    around = {
        "voxtral": ["[BEGIN_AUDIO]", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"],
        "musicflamingo": ["<|sound_bos|>", "<|sound_eos|>"],
        "qwen3_asr": ["<|audio_start|>", "<|audio_end|>"],
    }.get(kind, [])
    tokenizer.add_tokens([token, *around], special_tokens=True)
    sizes: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_mel_bins=80)
    positions = "max_position_embeddings" if kind == "glmasr" else "max_source_positions"
    inner = 128 if kind in ("voxtral", "glmasr") else 64
    audio: dict[str, Any] = sizes | {"intermediate_size": inner, positions: 50 * window}
    if kind in ("qwen2_audio", "qwen3_asr"):
        audio = dict(d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, num_mel_bins=80)
        audio |= dict(output_dim=hidden, downsample_hidden_size=8) if kind == "qwen3_asr" else {positions: 50 * window}
    if kind == "musicflamingo":
        audio |= dict(model_type="audioflamingo3_encoder", hidden_size=40)
    found = getattr(transformers, _NAMES[kind])
    decoder = tiny_decoder_sizes(tokenizer, hidden, layers, 2048) | dict(head_dim=hidden // 4)
    text = decoder | dict(model_type={"voxtral": "llama", "glmasr": "llama", "qwen3_asr": "qwen3"}.get(kind, "qwen2"))
    ids = {"audio_token_id": int(tokenizer.convert_tokens_to_ids(token))}
    if kind == "musicflamingo":
        bos, eos = tokenizer.convert_tokens_to_ids(around)
        ids |= {"audio_bos_token_id": bos, "audio_eos_token_id": eos}
    whole = found.config_class(audio_config=audio, text_config=text, tie_word_embeddings=False, **ids)
    extractor: Any = tiny_extractor(window)
    if kind == "qwen3_asr":
        extractor = transformers.Qwen3ASRFeatureExtractor(feature_size=80)
        names = dict(audio_token=token, audio_bos_token=around[0], audio_eos_token=around[1])
        tokenizer.add_special_tokens(names)
    processor = None
    if family.has_processor:
        clip = around[0] + token + around[1] if kind == "qwen3_asr" else token
        template = None if kind == "qwen2_audio" else chatml_template(clip, default_system=None)
        processor_class = getattr(transformers, found.__name__.replace("ForConditionalGeneration", "Processor"))
        processor = processor_class(extractor, tokenizer, chat_template=template)
    backbone = family(kind, tokenizer, processor, whole)
    return AudioPolicy(seeded(found, whole, seed), tokenizer, extractor, backbone, config)
