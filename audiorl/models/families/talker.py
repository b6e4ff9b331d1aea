"""The talkers of Qwen2.5-Omni and Qwen3-Omni: policies that say a given text in a voice of their checkpoint.

    policy = load_policy("Qwen/Qwen2.5-Omni-3B", talker=True)
    policy.set_codec(policy.own_decoder())

A talker reads a text beside its own frames. Row P - 1 + n of its sequence holds token n of the text and the codes that
were sampled after the row before; where the text has ended, it is `end_id`, then `pad_id`. So `ids` of prompt and
answer are the text that the frozen thinker has read, and what the thinker says of it follows from them. Frames have no
delay: a stop code in codebook 0 ends them (arXiv 2503.20215, arXiv 2509.17765).

    Qwen2.5-Omni   one codebook; a row reads the thinker's last hidden state plus its embedding of the token
    Qwen3-Omni     Q codebooks; a row reads the thinker's embedding. Codebook 0 is the talker's, the others are its code
                   predictor's: a small decoder over (hidden state, code 0, code 1, …) of one frame

Voices are names: of spk_dict.pt (Qwen2.5-Omni), of `speaker_id` in config.json (Qwen3-Omni). The decoder from codes to
sound is frozen. Its encoder is in neither checkpoint: supervised training takes another codec of the same codes.

Shapes: L rows, P of them a prompt, N sampled rows, F frames, Q codebooks, C codes of each, K tokens of a text and its
end, E thinker width, H talker width.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import conversion_mapping

from audiorl.algos.experience import PackedBatch
from audiorl.algos.logprobs import IGNORE, fused_logprobs
from audiorl.audio import AudioClip
from audiorl.config import LoraConfig, ModelConfig, torch_device
from audiorl.data.schema import FieldError
from audiorl.models.audio_encoder import ClipCache
from audiorl.models.backbone import Backbone
from audiorl.models.families import qwen_omni
from audiorl.models.families.talker_decoder import TalkerDecoder
from audiorl.models.policy import AudioPolicy
from audiorl.models.prompts import Prompt, PromptEncoder, chatml, wants_speech
from audiorl.models.speech import TalkerLayout, by_codebook
from audiorl.models.tiny import SPECIAL, seeded, tiny_decoder_sizes
from audiorl.models.weights import (
    BASE_KEY,
    SPEAKERS,
    ModelSource,
    load_model,
    load_tokenizer,
    model_file,
    read_tensors,
    silent_transformers,
    tensors_of,
    whole_folder,
)
from audiorl.pictures import Picture
from audiorl.types import Message, Sample

SYSTEM = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
    "visual inputs, as well as generating text and speech."
)
"""The system message with which Qwen2.5-Omni was trained to speak."""


class Talker(Backbone):
    """Backbone of both talkers: where their parts are, and how text, voice and codes become rows."""

    def __init__(self, whole: Mapping[str, Any], voices: Mapping[str, Any]):
        """`whole`: config.json of the whole checkpoint. voices: by name, as the checkpoint has them."""
        self.whole, self.voices = whole, voices
        self.layout = self._layout(whole["talker_config"])

    def _layout(self, config: Mapping[str, Any]) -> TalkerLayout:
        raise NotImplementedError

    def chat(self, messages: Sequence[Message]) -> Sequence[str | AudioClip | Picture]:
        return chatml(messages, self.system)

    system: str | None = None

    def head(self, model: Any) -> nn.Linear:
        return model.codec_head

    def predictor(self, model: Any) -> Any:
        """Return the decoder of codebooks 1 and up; None where there is one codebook."""
        return getattr(model, "code_predictor", None)

    def rows(self, read: Tensor, first: Tensor, voice: str) -> tuple[Tensor, list[int]]:
        """Return a prompt's ids [P] and the codes of codebook 0 in its last rows, for a text that begins with `first`
        [1] after what the thinker reads before it."""
        raise NotImplementedError

    def unread(self) -> tuple[int, ...]:
        """Return the ids that the thinker does not read: its embedding is all that it says of them."""
        return ()

    def input_rows(self, model: Any, states: Tensor, codes: Tensor) -> Tensor:
        """Return rows [..., H] of states [..., E] and codes [..., Q], -1 where there is none."""
        raise NotImplementedError

    def code_embeddings(self, model: Any) -> list[nn.Embedding]:
        """Return the embedding of each codebook's codes."""
        predictor = self.predictor(model)
        others = [] if predictor is None else list(predictor.model.codec_embedding)
        return [self.decoder(model).get_input_embeddings(), *others]

    def embed_codes(self, model: Any, codes: Tensor) -> Tensor:
        """[..., Q] -> [..., width], summed; -1 adds nothing."""
        tables = zip(self.code_embeddings(model), codes.unbind(-1), strict=True)
        parts = [table(c.clamp(min=0)) * (c >= 0)[..., None] for table, c in tables]
        return torch.stack(parts).sum(0)


class Qwen25Talker(Talker):
    """The talker of Qwen2.5-Omni."""

    system = SYSTEM

    def _layout(self, config: Mapping[str, Any]) -> TalkerLayout:
        self.config = c = transformers.Qwen2_5OmniTalkerConfig(**config)
        dit = transformers.Qwen2_5OmniDiTConfig(**self.whole.get("token2wav_config", {}).get("dit_config", {}))
        ends = c.tts_codec_pad_token_id, c.tts_codec_end_token_id  # transformers stops at both
        size = min(*ends, c.tts_codec_start_token_id, c.tts_codec_mask_token_id, dit.num_embeds)
        end, pad = c.tts_text_end_token_id, c.tts_text_pad_token_id
        return TalkerLayout(1, size, -1, ends[-1], end, pad, pad, end, ends)

    def further_parts(self, model: Any) -> Sequence[nn.Module]:
        return [model.thinker_to_talker_proj]

    def rows(self, read: Tensor, first: Tensor, voice: str) -> tuple[Tensor, list[int]]:
        begin = torch.tensor([int(self.voices[voice]["bos_token"])])
        return torch.cat([read, begin, first]), [self.layout.stops[0], self.config.tts_codec_start_token_id]

    def unread(self) -> tuple[int, ...]:
        return self.layout.end_id, self.layout.frame_id, *(int(v["bos_token"]) for v in self.voices.values())

    def input_rows(self, model: Any, states: Tensor, codes: Tensor) -> Tensor:
        rows: Tensor = model.thinker_to_talker_proj(states + self.embed_codes(model, codes))
        return rows


class Qwen3Talker(Talker):
    """The talker of Qwen3-Omni: it reads the user's turns and the text, not the system message."""

    def _layout(self, config: Mapping[str, Any]) -> TalkerLayout:
        self.config = c = transformers.Qwen3OmniMoeTalkerConfig(**config)
        stop, end, pad = c.codec_eos_token_id, self._id("tts_eos"), self._id("tts_pad")
        size = c.code_predictor_config.vocab_size
        return TalkerLayout(c.num_code_groups, size, -1, stop, self._id("tts_bos"), pad, pad, end, (stop,))

    def _id(self, name: str) -> int:
        """Return a token of the whole checkpoint, such as tts_bos."""
        key = f"{name}_token_id"
        return int(self.whole.get(key, getattr(transformers.Qwen3OmniMoeConfig, key)))

    def further_parts(self, model: Any) -> Sequence[nn.Module]:
        return [model.text_projection, model.code_predictor]

    def rows(self, read: Tensor, first: Tensor, voice: str) -> tuple[Tensor, list[int]]:
        start, user, c = self._id("im_start"), self._id("user"), self.config
        turns = [*(read == start).nonzero()[:, 0].tolist(), len(read)]
        users = [read[a:b] for a, b in pairwise(turns) if int(read[a + 1]) == user]
        pads = torch.tensor([self._id("tts_pad")] * 4 + [self._id("tts_bos")])
        no_thoughts = [c.codec_nothink_id, c.codec_think_bos_id, c.codec_think_eos_id]
        codes = [*no_thoughts, int(self.voices[voice]), c.codec_pad_id, c.codec_bos_id]
        return torch.cat([*users, read[turns[-2] :][:3], pads, first]), codes

    def input_rows(self, model: Any, states: Tensor, codes: Tensor) -> Tensor:
        rows: Tensor = model.text_projection(states) + self.embed_codes(model, codes)
        return rows


# -- what the thinker says of a text -----------------------------------------------------------------------------------


class Thinker:
    """The frozen thinker as a talker needs it: states of the rows of a text, each text read once."""

    def __init__(self, embedding: Tensor, unread: Sequence[int], policy: AudioPolicy | None, max_bytes: int):
        """embedding [V, E]. policy: the thinker that reads texts; None where its embeddings are all that is read."""
        self._embedding, self._unread, self._policy = embedding, torch.tensor(unread), policy
        self._cache = ClipCache(max_bytes)
        """By the text up to its first token that is not read: what was read [L], and its states [L, E]."""

    @torch.no_grad()
    def states(self, ids: Tensor) -> Tensor:
        """Return [L, E] of the rows ids [L] of one prompt with its answer, or of a beginning of it."""
        ids = ids.cpu()
        states = self._embedding[ids.to(self._embedding.device)]
        if self._policy is None:
            return states
        places = (~torch.isin(ids, self._unread)).nonzero()[:, 0]
        read = ids[places]
        begin = read[: int((places == torch.arange(len(places))).sum())]
        key = hashlib.blake2b(begin.numpy().tobytes(), digest_size=16).hexdigest()
        known, hidden = self._cache.get(f"{key}/ids"), self._cache.get(key)
        if known is None or hidden is None or not torch.equal(known[: len(read)], read):
            decoder = self._policy.backbone.decoder(self._policy.model)
            hidden = decoder(inputs_embeds=states[places][None], use_cache=False).last_hidden_state[0]
            self._cache.put(f"{key}/ids", read)
            self._cache.put(key, hidden.cpu())
        hidden = hidden[: len(read)].to(states)
        return states.index_add(0, places.to(states.device), hidden)


# -- the policy --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TalkerPrompts(PromptEncoder):
    """Write a sample as a conversation whose answer, its first reference, is said in a voice.

    The voice is metadata["voice"], or the policy's.
    """

    talker: Talker
    voice: str

    def encode(self, sample: Sample) -> Prompt:
        try:
            *before, text = map(str, self._pieces(sample, lambda _: ""))
            prompt = self.of_ids(self._ids("".join(before)), self._ids(text), self._voice(sample))
            self.check_length(len(prompt))
        except ValueError as error:
            name = f"sample {sample.id!r}: "
            raise ValueError(f"{name}{str(error).removeprefix(name)}") from error
        return prompt

    def _count(self, texts: Sequence[str]) -> int:
        *before, text = texts
        return len(self.of_ids(self._ids("".join(before)), self._ids(text), self.voice))

    def of_ids(self, read: Tensor, text: Tensor, voice: str) -> Prompt:
        """Return the prompt of a conversation read [R], which ends where the assistant begins, and the text [1 + K]."""
        ids, begin = self.talker.rows(read, text[:1], voice)
        codes = torch.full((len(ids), self._layout.codebooks), -1)
        codes[-len(begin) :, 0] = torch.tensor(begin)
        ends = torch.tensor([self._layout.end_id, self._layout.frame_id])
        return Prompt(ids, codes, text=torch.cat([text[1:], ends]))

    def _voice(self, sample: Sample) -> str:
        voice = sample.metadata.get("voice", self.voice)
        if voice not in self.talker.voices:
            raise FieldError("voice", f"no voice {voice!r}; the checkpoint has {', '.join(self.talker.voices)}")
        return str(voice)

    def _pieces(self, sample: Sample, spoken: Any) -> Sequence[str | AudioClip | Picture]:
        self._voice(sample)
        if sample.turns or not wants_speech(sample):
            raise FieldError("prompt", 'a talker says a text: give metadata["respond"] = "speech", and no turns')
        if sample.images:
            raise FieldError("images", "a talker sees nothing; leave them out")
        if sample.audio:
            raise FieldError("audio", "a talker speaks in the voices of its checkpoint and hears nothing; leave it out")
        text = sample.references[0] if sample.references else ""
        if not text.strip():
            raise FieldError("answer", "the text to say is missing: a sample's first reference")
        for written in (text, *(c for m in sample.messages for c in m.content if isinstance(c, str))):
            if match := self.reserved.search(written):
                raise FieldError("prompt", f"a text contains the reserved token {match[0]}; remove it", match[0])
        return [*self.talker.chat(sample.messages), text]


class TalkerPolicy(AudioPolicy):
    """A talker as a policy: its model is the talker alone, its answers are frames of all codebooks."""

    backbone: Talker
    speech: TalkerLayout

    def __init__(self, model: Any, tokenizer: Any, backbone: Talker, config: ModelConfig, thinker: Thinker, base: str):
        super().__init__(model, tokenizer, None, backbone, config, backbone.layout)
        self.thinker, self.base = thinker, base
        self.voice = next(iter(backbone.voices))
        """The voice of samples that name none."""

    def _never_copied(self) -> dict[int, Any]:
        return super()._never_copied() | {id(self.thinker): self.thinker}

    @property
    def code_head(self) -> nn.Linear:
        return self.backbone.head(self.model)

    @property
    def prompts(self) -> TalkerPrompts:
        encoder = super().prompts
        fields = {name: getattr(encoder, name) for name in encoder.__dataclass_fields__}
        return TalkerPrompts(**fields, talker=self.backbone, voice=self.voice)

    def speak_in(self, voice: str) -> None:
        """Take `voice` where a sample names none. Raises ValueError for one that the checkpoint does not have."""
        if voice not in self.backbone.voices:
            raise ValueError(f"--voice {voice}: {self.base} has the voices {', '.join(self.backbone.voices)}")
        self.voice = voice

    def train_codebooks(self, trained: Sequence[int]) -> None:
        """Learn these codebooks alone, and replay the others; (): all. Raises ValueError for one there is not."""
        self.speech = replace(self.speech, trained=tuple(trained))

    def read_by(self, base: str | Path) -> None:
        """Read texts by the thinker of another whole checkpoint, into which the talker now belongs."""
        self.base, self.thinker = str(base), thinker_of(str(base), self.backbone, self.config)

    def save(self, folder: str | Path) -> None:
        """Write the talker alone, in transformers' layout; `audiorl export` puts it back into the whole checkpoint."""
        setattr(self.model.config, BASE_KEY, self.base)
        super().save(folder)

    def save_whole(self, out: Path) -> None:
        """Write the whole checkpoint that training began with to `out`, with this talker in it."""
        base = whole_folder(self.base)
        if not base.is_dir():
            raise ValueError(
                f"{self.base}: not there any more; the talker belongs into it, so put it back and export again"
            )
        with tempfile.TemporaryDirectory(dir=out) as folder:
            self.model.save_pretrained(folder)
            files = Path(folder).glob("*.safetensors")
            trained = {f"talker.{name}": t for file in files for name, t in read_tensors(file).items()}
        for file in base.iterdir():
            if file.suffix == ".safetensors":
                tensors = read_tensors(file)
                tensors |= {name: trained.pop(name).to(t.dtype) for name, t in tensors.items() if name in trained}
                save_file(tensors, out / file.name, metadata={"format": "pt"})
            elif file.is_file() and file.suffix in (".json", ".jinja", ".txt", ".pt"):
                shutil.copy(file, out)
        if trained:
            raise ValueError(
                f"{self.base}: has no weight {min(trained)!r}, which the talker has; is it another checkpoint?"
            )

    # -- rows ----------------------------------------------------------------------------------------------------------

    def decoder_arguments(self, ids: Tensor, codes: Tensor | None) -> dict[str, Any]:
        return {}

    def embed(
        self,
        ids: Tensor,
        clips: Sequence[AudioClip],
        sampled: Tensor | None = None,
        codes: Tensor | None = None,
        images: Sequence[Picture] = (),
        beside_picture: Sequence[bool] | None = None,
    ) -> Tensor:
        """Return [L, H] for the rows ids [L], codes [L, Q] of one prompt, with what was sampled after it."""
        assert codes is not None
        return self.embed_states(self.thinker.states(ids), codes)

    def embed_states(self, states: Tensor, codes: Tensor) -> Tensor:
        """Return rows [..., H] of what the thinker says [..., E] and codes [..., Q]."""
        weight = self.code_head.weight
        return self.backbone.input_rows(self.model, states.to(weight.device, weight.dtype), self._here(codes))

    def embed_batch(self, batch: PackedBatch) -> Tensor:
        assert batch.codes is not None
        states: Tensor | None = None
        for rows in batch.source:
            own = self.thinker.states(batch.ids[rows])
            if states is None:
                states = own.new_zeros(len(batch.ids), own.shape[1])
            states[rows.to(own.device)] = own
        assert states is not None
        return self.embed_states(states, batch.codes)

    # -- codes ---------------------------------------------------------------------------------------------------------

    def first_codes(self) -> Tensor:
        """Return the rows of the head of codebook 0 that may be sampled: codes, then stops."""
        return torch.cat([torch.arange(self.speech.size), torch.tensor(self.speech.stops)])

    def predictor_inputs(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """Return [F, 1 + k, H]: the talker's states [F, H] that predict frames, and their first k codes [F, k]."""
        tables = self.backbone.code_embeddings(self.model)
        return torch.stack([hidden, *(t(c) for t, c in zip(tables, codes.unbind(1), strict=False))], 1)

    def _text_and_frames(
        self,
        hidden_NH: Tensor,
        targets_N: Tensor,
        batch: PackedBatch,
        temperature: float,
        audio_temperature: float | Sequence[float],
    ) -> tuple[Tensor, Tensor]:
        """Log-probs [N, Q] by code, and entropies [N], summed over a frame's codes."""
        assert batch.codes is not None and batch.code_mask is not None
        codes_NQ, mask_NQ = batch.codes[batch.loss_mask], batch.code_mask[batch.loss_mask]
        of_codebook = by_codebook(audio_temperature, self.speech.codebooks)
        head, first = self.code_head.weight, self.first_codes()
        places = torch.full((len(head),), IGNORE)
        places[first] = torch.arange(len(first))
        targets_N = torch.where(mask_NQ[:, 0], places[codes_NQ[:, 0]], IGNORE)
        logprobs_N, entropy_N = fused_logprobs(hidden_NH, head[self._here(first)], targets_N, of_codebook[0])
        columns = [logprobs_N]
        frames = mask_NQ[:, 1:].any(1).nonzero()[:, 0]
        predictor = self.backbone.predictor(self.model)
        if len(frames):
            inputs = self.predictor_inputs(hidden_NH[self._here(frames)], self._here(codes_NQ[frames, :-1]))
            states = predictor.model(inputs_embeds=inputs, use_cache=False).last_hidden_state
        for k in range(1, self.speech.codebooks):
            column = torch.zeros_like(logprobs_N)
            if len(frames):
                targets_F = torch.where(mask_NQ[frames, k], codes_NQ[frames, k], IGNORE)
                weight = predictor.lm_head[k - 1].weight
                logprobs_F, entropy_F = fused_logprobs(states[:, k], weight, targets_F, of_codebook[k])
                column = column.index_copy(0, self._here(frames), logprobs_F)
                entropy_N = entropy_N.index_add(0, self._here(frames), entropy_F)
            columns.append(column)
        return torch.stack(columns, 1), entropy_N

    # -- sound ---------------------------------------------------------------------------------------------------------

    def own_decoder(self) -> TalkerDecoder:
        """Return the frozen decoder of the checkpoint, on the policy's device."""
        b = self.backbone
        return TalkerDecoder.load(self.base, b.whole, b.layout, b.voices).to(self.device)


# -- files -------------------------------------------------------------------------------------------------------------


@silent_transformers()
def load(path: str | Path, content: Mapping[str, Any], config: ModelConfig) -> TalkerPolicy:
    """Load the talker of a whole Omni checkpoint, or one that was trained, whose thinker is in the checkpoint that it
    names. `content` is config.json of `path`.

    Raises ValueError for a checkpoint without talker, and for a thinker of another size.
    """
    base, whole = str(path), content
    if "talker_config" not in content and "thinker_config" not in content and BASE_KEY in content:
        from audiorl.models.families import read_config

        base = str(content.get(BASE_KEY))
        try:
            whole = read_config(base)
        except ValueError as error:
            raise ValueError(f"{path}: a talker, whose thinker was in {base}; put it back there ({error})") from error
    if "talker_config" not in whole or not whole.get("enable_audio_output", True):
        raise ValueError(f"{base}: holds no talker; give the whole checkpoint of a Qwen-Omni model that speaks")
    newer = str(whole.get("model_type")).startswith("qwen3")
    backbone = (Qwen3Talker if newer else Qwen25Talker)(whole, read_voices(base, whole))
    name = "thinker_hidden_size" if newer else "embedding_size"
    own_width = whole["talker_config"].get(name)
    width = whole["thinker_config"].get("text_config", {}).get("hidden_size")
    if None not in (own_width, width) and own_width != width:
        raise ValueError(
            f"{base}/config.json: the talker reads a thinker of width {own_width} ({name}), the thinker's is {width}; "
            "they do not belong together"
        )
    kind = f"{'Qwen3OmniMoe' if newer else 'Qwen2_5Omni'}TalkerForConditionalGeneration"
    if newer and conversion_mapping.get_checkpoint_conversion_mapping(kind) is None:
        # Checkpoints hold each expert by itself, which transformers knows of the whole model and of the thinker only.
        mapping = conversion_mapping.get_checkpoint_conversion_mapping("qwen3_omni_moe")
        conversion_mapping.register_checkpoint_conversion_mapping(kind, mapping)
    others = re.compile(r"^thinker\.")
    model = load_model(getattr(transformers, kind), path, config, ignored=others)
    tokenizer = load_tokenizer(path if (Path(path) / "tokenizer_config.json").exists() else base)
    policy = TalkerPolicy(model, tokenizer, backbone, config, thinker_of(base, backbone, config), base)
    policy.source = ModelSource()
    return policy


def thinker_of(base: str, backbone: Talker, config: ModelConfig) -> Thinker:
    """Load what a talker reads of the thinker of the whole checkpoint `base`. Raises ValueError where it is missing."""
    reader, embedding = None, torch.zeros(0, 0)
    if config.device != "meta" and isinstance(backbone, Qwen3Talker):
        tensors = tensors_of(base, "thinker.model.embed_tokens.")
        if "weight" not in tensors:
            raise ValueError(
                f"{base}: no thinker.model.embed_tokens.weight, by which a talker reads text; give the whole checkpoint"
            )
        embedding = tensors["weight"].to(torch_device(config.device))
    elif config.device != "meta":
        frozen = replace(config, audio="frozen", lora=LoraConfig(), only=(), gradient_checkpointing=False)
        reader = qwen_omni.load(base, frozen, "qwen2.5").requires_grad_(False)
        embedding = reader.backbone.decoder(reader.model).get_input_embeddings().weight
    return Thinker(embedding, backbone.unread(), reader, config.audio_cache_mb * 2**20)


def read_voices(base: str | Path, whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return the voices of a whole checkpoint by name. Raises ValueError where it has none."""
    if str(whole.get("model_type")).startswith("qwen3"):
        voices = dict(whole["talker_config"].get("speaker_id") or {})
    else:
        file = model_file(base, SPEAKERS)
        try:
            voices = {} if file is None else dict(torch.load(file, map_location="cpu", weights_only=True))
        except Exception as error:  # torch raises many kinds for a damaged file
            raise ValueError(f"{file}: cannot be read: {' '.join(str(error).split())}; copy it again") from error
    if not voices:
        where = f"{SPEAKERS}, or speaker_id in its config.json,"
        raise ValueError(f"{base}: the talker has no voice: {where} is missing; copy the whole checkpoint again")
    return voices


# -- a small one -------------------------------------------------------------------------------------------------------


@silent_transformers()
def tiny(
    folder: str | Path,
    texts: Iterable[str] = (),
    *,
    generation: Literal["qwen2.5", "qwen3"] = "qwen2.5",
    hidden: int = 64,
    layers: int = 2,
    vocab_size: int = 400,
    codebooks: int = 2,
    codebook_size: int = 16,
    seed: int = 0,
) -> None:
    """Write a random whole Omni checkpoint of the real classes to `folder`, with the voices Ethan and Chelsie.

    `codebooks` are those of a Qwen3-Omni; a Qwen2.5-Omni has one.
    """
    thinker = qwen_omni.tiny(texts, hidden=hidden, layers=layers, vocab_size=vocab_size, whisper=False, seed=seed)
    tokenizer, own = thinker.tokenizer, 3 * hidden // 4
    marks = (SPECIAL[f"{name}_token"] for name in ("vision_bos", "vision_eos", "image", "video"))
    begin, end, pad, other = (int(tokenizer.convert_tokens_to_ids(mark)) for mark in marks)
    sizes = dict(intermediate_size=2 * own, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2)
    width = own // 4
    sections = [width // 2 - 2 * (width // 6), *[width // 6] * 2]
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=sections)
    sizes |= dict(hidden_size=own, head_dim=width, max_position_embeddings=4096)
    c = codebook_size
    if generation == "qwen2.5":
        config: Any = transformers.Qwen2_5OmniConfig(
            thinker_config=thinker.model.config.to_dict(),
            talker_config=dict(
                **sizes, vocab_size=c + 4, embedding_size=hidden, rope_parameters=rope, tts_text_start_token_id=begin,
                tts_text_end_token_id=end, tts_text_pad_token_id=pad, tts_codec_pad_token_id=c,
                tts_codec_start_token_id=c + 1, tts_codec_end_token_id=c + 2, tts_codec_mask_token_id=c + 3,
            ),
            token2wav_config=dict(
                dit_config=dict(
                    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16, emb_dim=16, num_embeds=c,
                    enc_channels=[16, 16, 16, 16, 48], enc_kernel_sizes=[3, 3, 3, 3, 1], enc_dilations=[1, 1, 1, 1, 1],
                    enc_dim=8, enc_emb_dim=8, enc_attention_channels=8, enc_res2net_scale=2, enc_se_channels=8,
                ),
                bigvgan_config=dict(
                    upsample_initial_channel=64, resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 1, 1]]
                ),
            ),
        )  # fmt: skip
        model = seeded(transformers.Qwen2_5OmniForConditionalGeneration, config, seed)
    else:
        audio = dict(d_model=32, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=32, num_mel_bins=80)
        experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=own // 2)
        predictor = dict(**sizes, vocab_size=c, num_code_groups=codebooks)
        config = transformers.Qwen3OmniMoeConfig(
            thinker_config=dict(
                vision_start_token_id=begin, image_token_id=pad, video_token_id=other,
                audio_config=audio | dict(output_dim=hidden, downsample_hidden_size=8, max_source_positions=200),
                vision_config=dict(
                    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=hidden,
                    deepstack_visual_indexes=[0],
                ),
                text_config=dict(
                    tiny_decoder_sizes(tokenizer, hidden, layers, 4096),
                    **experts, head_dim=16, rope_parameters={**rope, "mrope_section": [4, 2, 2]},
                ),
            ),
            talker_config=dict(
                text_config=dict(
                    **sizes, **experts, vocab_size=c + 1024, shared_expert_intermediate_size=own, rope_parameters=rope
                ),
                code_predictor_config=predictor, num_code_groups=codebooks, thinker_hidden_size=hidden,
                accept_hidden_layer=1, spatial_merge_size=2, codec_eos_token_id=c, codec_pad_id=c + 1,
                codec_bos_id=c + 2, codec_nothink_id=c + 3, codec_think_bos_id=c + 4,
                codec_think_eos_id=c + 5, speaker_id={"ethan": c + 6, "chelsie": c + 7},
            ),
            code2wav_config=dict(
                codebook_size=c, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16,
                num_hidden_layers=1, num_quantizers=codebooks, upsample_rates=[8, 5, 4, 3],
                upsampling_ratios=[2, 2], decoder_dim=16,
            ),
            tts_bos_token_id=begin, tts_eos_token_id=end, tts_pad_token_id=pad,
            **{f"{n}_token_id": tokenizer.convert_tokens_to_ids(f"<|{n}|>") for n in ("im_start", "im_end")},
            **{f"{n}_token_id": tokenizer.convert_tokens_to_ids(n) for n in ("user", "assistant")},
        )  # fmt: skip
        model = seeded(transformers.Qwen3OmniMoeForConditionalGeneration, config, seed)
    noise = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if ".experts." in name:  # transformers leaves those of the talker as the memory was
            nn.init.normal_(p, std=0.02, generator=noise)
    model.generation_config = thinker.model.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert thinker.extractor is not None
    thinker.extractor.save_pretrained(folder)
    if generation == "qwen2.5":
        parts = dict(cond=(1, 8), ref_mel=(1, 12, 80))
        voices = {
            name: dict(bos_token=token, **{part: torch.randn(size, generator=noise) for part, size in parts.items()})
            for name, token in (("Ethan", begin), ("Chelsie", other))
        }
        torch.save(voices, Path(folder) / SPEAKERS)
