"""The policy: one transformers model with its tokenizer, and its forward pass over packed batches.

What differs between model families is a `Backbone`. Clips go through `audio_encoder.py`, messages through `prompts.py`;
adapters, files and the reference policy have modules of their own.

A model that speaks also has a `FrameLayout`: its decoder embeds and routes frames (`dual_ffn.py`), its `audio_lm_head`
writes their codes, and a codec turns clips into codes.

Shapes: T rows of a packed batch, N sampled rows, H decoder width, Q codebooks.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, WhisperFeatureExtractor
from transformers.utils.logging import disable_progress_bar

from audiorl.algos.experience import PackedBatch, PolicyOutput
from audiorl.algos.logprobs import IGNORE, fused_codebook_logprobs, fused_logprobs
from audiorl.algos.packing import attention_mask
from audiorl.audio import AudioClip
from audiorl.config import ModelConfig
from audiorl.models.attention import mask_argument, packed_arguments, set_attention, spans_of, takes_segments
from audiorl.models.audio_encoder import AudioEncoder
from audiorl.models.backbone import Backbone
from audiorl.models.clip_codes import ClipCodes
from audiorl.models.cross_attention import CrossAttentionCache, CrossAttentionDecoder
from audiorl.models.dual_ffn import Routing
from audiorl.models.lora import add_lora
from audiorl.models.precision import autocast
from audiorl.models.prompts import Prompt, encode_chunk, encode_prompt
from audiorl.models.reference import Reference
from audiorl.models.saving import Source, save_policy
from audiorl.models.speech import CODEC_KEY, FrameLayout
from audiorl.models.vision import remove_vision
from audiorl.models.weights import Weights, copy_weights
from audiorl.types import Sample
from tokenizers_audio.protocol import AudioTokenizer

disable_progress_bar()  # of weight loading and saving, at every checkpoint


class AudioPolicy(nn.Module):
    """A speech LLM that acts: reads prompts and audio, and gives log-probs for packed batches."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        extractor: WhisperFeatureExtractor | None,
        backbone: Backbone,
        config: ModelConfig | None = None,
        speech: FrameLayout | None = None,
    ):
        super().__init__()
        self.config = config or ModelConfig()
        self.model = model
        self.tokenizer = tokenizer
        self.extractor = extractor
        self.backbone = backbone
        self.speech = speech
        self.adapter: Any = None
        token = backbone.audio_token
        self.audio_token_id = -1 if token is None else int(tokenizer.convert_tokens_to_ids(token))
        self.stop_ids = _stop_ids(model, tokenizer)
        self.audio = AudioEncoder(model, extractor, backbone, self.config)
        set_attention(backbone.decoder(model), self.config.attention)
        self.clip_codes: ClipCodes | None = None
        self.source = Source(copied=remove_vision(model))
        self._set_trainable()

    # -- what is trained -------------------------------------------------------------------------------------------

    def _set_trainable(self) -> None:
        """Freeze everything that no text-and-audio loss can reach, then what the config wants frozen."""
        self.model.requires_grad_(False)
        decoder, head = self.backbone.decoder(self.model), self.backbone.head(self.model)
        if self.config.lora.rank:
            if self.adapter is None:
                self.adapter = add_lora(self.model, decoder, self.config.lora)
        else:
            decoder.requires_grad_(True)
            head.requires_grad_(True)
            if self.speech is not None:
                self.code_head.requires_grad_(True)
        if self.config.audio in ("projector", "full"):
            for module in self.backbone.projector(self.model):
                module.requires_grad_(True)
        if self.config.audio == "full":
            self.backbone.audio_encoder(self.model).requires_grad_(True)
        if self.config.only:
            self._freeze_all_but(self.config.only)
        if self.config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            self.model.train()  # transformers checkpoints only in training mode
            for module in self.model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0  # log-probs of the same tokens must agree between two passes
        else:
            self.model.eval()

    def _freeze_all_but(self, patterns: Sequence[str]) -> None:
        trained = self.trainable()
        for pattern in patterns:
            if not any(re.search(pattern, name) for name in trained):
                raise ValueError(f"model.only: {pattern!r} is in no name of a trained weight, such as {min(trained)!r}")
        for name, p in trained.items():
            p.requires_grad_(any(re.search(pattern, name) for pattern in patterns))

    @property
    def device(self) -> torch.device:
        return self.backbone.head(self.model).weight.device

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """All parameters of the model; for the names see `Backbone.weight_name`."""
        return {self.backbone.weight_name(name): p for name, p in self.model.named_parameters()}

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.parameters_by_name().items() if p.requires_grad}

    def has_fresh_adapter(self) -> bool:
        """Whether there is an adapter that does not change the model yet: all its B matrices are zero."""
        if self.adapter is None:
            return False
        return not any(bool(p.any()) for name, p in self.model.named_parameters() if ".lora_B." in name)

    def weights(self) -> Mapping[str, Tensor]:
        """The trained weights by name, by reference."""
        return {name: p.detach() for name, p in self.trainable().items()}

    def copy(self) -> AudioPolicy:
        """The policy as it is now. Trained weights are copied; what is never trained is shared."""
        shared: dict[int, Any] = {id(p): p for p in self.model.parameters() if not p.requires_grad}
        if self.config.audio != "full":
            shared[id(self.audio.cache)] = self.audio.cache  # the output of an encoder that both share
        return copy.deepcopy(self, shared | self._never_copied())

    def _never_copied(self) -> dict[int, Any]:
        return {id(x): x for x in (self.tokenizer, self.extractor, self.backbone, self.clip_codes, self.audio.mels)}

    def skeleton(self, hollow: Collection[nn.Parameter]) -> AudioPolicy:
        """A copy that shares all weights but the `hollow` ones: these are on meta, to be filled before it is saved."""
        weights: dict[int, Any] = {id(p): p for p in self.model.parameters()}
        for p in hollow:
            weights[id(p)] = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
        weights[id(self.audio.cache)] = self.audio.cache
        return copy.deepcopy(self, weights | self._never_copied())

    def reference(self) -> Reference:
        """A frozen copy of the policy as it is now, sharing every weight that is not trained."""
        return Reference(self)

    # -- what is read ----------------------------------------------------------------------------------------------

    def prompt(self, sample: Sample) -> Prompt:
        """The sample's messages as the model reads them; see `encode_prompt`."""
        return encode_prompt(self, sample)

    def prompt_ids(self, sample: Sample) -> Tensor:
        """[P] int64: `prompt` without its codes."""
        return self.prompt(sample).ids

    def chunk_ids(self, clip: AudioClip) -> Tensor:
        """[P] int64: a chunk of a stream with its delimiters; see `encode_chunk`."""
        return encode_chunk(self, clip)

    @property
    def end_id(self) -> int:
        """The token that ends a turn in supervised examples, and where a turn was cut off."""
        return int(self.tokenizer.get_added_vocab().get("<|im_end|>", self.tokenizer.eos_token_id))

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """Text without special tokens and without the backbone's `answer_prefix`."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text.removeprefix(self.backbone.answer_prefix)

    def encode_audio(self, clips: Sequence[AudioClip]) -> list[Tensor]:
        """One [tokens, H] per clip, as the decoder receives it; differentiable where the config trains it."""
        return self.audio.encode(clips)

    def encode_audio_once(self) -> AbstractContextManager[None]:
        """Around the passes of one update; see `AudioEncoder.once`."""
        return self.audio.once()

    def weights_changed(self) -> None:
        """Call after every update of the weights: drops what was computed with the old ones."""
        self.audio.weights_changed()

    # -- speech ----------------------------------------------------------------------------------------------------

    def set_speech(self, layout: FrameLayout) -> None:
        """The model has become one that speaks: its weights and its tokenizer have changed."""
        self.speech = layout
        self._set_trainable()

    @property
    def code_head(self) -> nn.Linear:
        """The head of Q·size rows, one codebook after the other, that writes frames."""
        return self.model.audio_lm_head

    @property
    def codec(self) -> AudioTokenizer | None:
        return None if self.clip_codes is None else self.clip_codes.codec

    def set_codec(self, codec: AudioTokenizer) -> None:
        """The codec of the model's codes, which moves to the model's device. The first one is recorded in its config.

        Raises ValueError for a model that writes text only, for another geometry and for a codec of another identity.
        """
        if self.speech is None:
            raise ValueError("the model writes text only; dualize it before it gets a codec")
        self.speech.check(codec)
        recorded = getattr(self.model.config, CODEC_KEY, None)
        if recorded not in (None, codec.identity):
            raise ValueError(
                f"the model speaks in codes of {recorded}, not of {codec.identity}; to train it for another codec, "
                f'take "{CODEC_KEY}" out of its config.json'
            )
        setattr(self.model.config, CODEC_KEY, codec.identity)
        if isinstance(codec, nn.Module):
            codec.to(self.device)
        self.clip_codes = ClipCodes(codec, self.config.audio_cache_mb * 2**20)

    def keep_codes(self, codes: Mapping[str, Tensor]) -> None:
        """Codes [Q, F] of this codec by `AudioClip.key`, such as `CodeShards`: these clips are not encoded again.

        They take the place of the codes that an earlier call gave.
        """
        assert self.clip_codes is not None, "set_codec first"
        self.clip_codes.precomputed = codes

    def codes(self, clip: AudioClip) -> Tensor:
        """[Q, F] int64: the clip in the codec's codes. Each clip is encoded once."""
        return self._clip_codes().codes(clip)

    def encode_clips(self, clips: Iterable[AudioClip]) -> None:
        """Encode clips that will be read often, those of equal length together, which is faster than one by one."""
        self._clip_codes().encode_all(clips)

    def _clip_codes(self) -> ClipCodes:
        if self.clip_codes is None:
            raise ValueError("the model reads and writes codes but has no codec yet: tokenizers_audio.load, set_codec")
        return self.clip_codes

    # -- forward ---------------------------------------------------------------------------------------------------

    def embed(
        self, ids: Tensor, clips: Sequence[AudioClip], sampled: Tensor | None = None, codes: Tensor | None = None
    ) -> Tensor:
        """[T, H] for ids [T]: token embeddings, at the audio placeholders those of the clips.

        Where `sampled` [T] is true the policy wrote a placeholder itself: a token like any other. Rows with `codes`
        [T, Q] of 0 or more are frames. Raises ValueError where placeholders and clips do not match.
        """
        embeds = self.embed_rows(ids, codes)
        if clips:
            audio = self.encode_audio(clips)
            rows = self.audio_rows(ids, sampled)
            _check_placeholders(rows, [len(a) for a in audio])
            embeds = embeds.masked_scatter(rows[:, None].to(self.device), torch.cat(audio).to(embeds.dtype))
        return embeds

    def audio_rows(self, ids: Tensor, sampled: Tensor | None = None) -> Tensor:
        """[...] bool: where ids [...] are audio placeholders that the policy did not sample itself."""
        rows = ids == self.audio_token_id
        return rows if sampled is None else rows & ~sampled.to(rows.device)

    def new_cache(self) -> DynamicCache:
        """An empty key-value cache for prompts and what is generated after them."""
        decoder = self.backbone.decoder(self.model)
        if isinstance(decoder, CrossAttentionDecoder):
            return CrossAttentionCache(len(decoder.layers))
        return DynamicCache(config=decoder.config)

    def read_by_decoder(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """The decoder's further arguments for prompts padded on the left: where they are audio, if it must know."""
        if not isinstance(self.backbone.decoder(self.model), CrossAttentionDecoder):
            return {}
        rows = [self.audio_rows(p.ids) for p in prompts]
        longest = max(map(len, rows))
        return {"audio_rows": torch.stack([nn.functional.pad(r, (longest - len(r), 0)) for r in rows])}

    def embed_rows(self, ids: Tensor, codes: Tensor | None) -> Tensor:
        """[..., H]: embeddings of ids [...], or of codes [..., Q] where these are not -1."""
        decoder = self.backbone.decoder(self.model)
        embeds = decoder.get_input_embeddings()(ids.to(self.device))
        if codes is None:
            return embeds
        flat = codes.flatten(0, -2)
        rows = (flat[:, 0] >= 0).nonzero()[:, 0]
        frames = decoder.embed_audio_tokens(flat[rows].to(self.device))
        return embeds.flatten(0, -2).index_copy(0, rows.to(self.device), frames.to(embeds.dtype)).view_as(embeds)

    def routed(self, codes: Tensor | None) -> dict[str, Any]:
        """The decoder's further arguments for inputs with codes [..., Q] (None: all text)."""
        if self.speech is None:
            if codes is not None:
                raise ValueError("there are frames among the tokens, but the model writes text only; dualize it")
            return {}
        return {"routing": Routing.TEXT if codes is None else Routing.of(codes[..., 0] >= 0, self.device)}

    def forward(
        self,
        batch: PackedBatch,
        temperature: float = 1.0,
        value_head: nn.Module | None = None,
        audio_temperature: float | None = None,
    ) -> PolicyOutput:
        """Log-probs and entropies of the sampled tokens [N]; with a `value_head` also V of the state before each.

        `temperature` divides the logits, as in sampling; `audio_temperature` those of codes (None: the same).
        """
        with self.autocast():
            hidden_NH = self.before_sampled(batch)
            targets_N = batch.ids[batch.loss_mask]
            logprobs_NQ = None
            if batch.codes is None:
                head = self.backbone.head(self.model)
                logprobs_N, entropy_N = fused_logprobs(hidden_NH, head.weight, targets_N, temperature)
            else:
                logprobs_NQ, entropy_N = self._text_and_frames(
                    hidden_NH, targets_N, batch, temperature, audio_temperature or temperature
                )
                logprobs_N = logprobs_NQ.sum(1)
        values_N = None if value_head is None else value_head(hidden_NH)
        return PolicyOutput(logprobs_N, entropy_N, values_N, logprobs_NQ, hidden_NH)

    def _text_and_frames(
        self, hidden_NH: Tensor, targets_N: Tensor, batch: PackedBatch, temperature: float, audio_temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probs [N, Q] by code, a text token's in column 0, and entropies [N], of a frame summed over its codes."""
        assert batch.codes is not None and batch.code_mask is not None and self.speech is not None
        codes_NQ, code_mask_NQ = batch.codes[batch.loss_mask], batch.code_mask[batch.loss_mask]
        is_frame = codes_NQ[:, 0] >= 0
        text, frames = (~is_frame).nonzero()[:, 0], is_frame.nonzero()[:, 0]
        # The head is used without BOS: codes above BOS move down by one.
        targets_FQ = codes_NQ[frames] - (codes_NQ[frames] > self.speech.bos).long()
        targets_FQ = torch.where(code_mask_NQ[frames], targets_FQ, IGNORE)
        targets_N = targets_N[text]
        text, frames = text.to(self.device), frames.to(self.device)
        logprobs_NQ = hidden_NH.new_zeros(codes_NQ.shape, dtype=torch.promote_types(hidden_NH.dtype, torch.float32))
        entropy_N = logprobs_NQ.new_zeros(len(codes_NQ))
        if len(text) or not len(frames):  # an empty batch must still give something to differentiate
            head = self.backbone.head(self.model)
            logprobs, entropy = fused_logprobs(hidden_NH[text], head.weight, targets_N, temperature)
            columns = nn.functional.pad(logprobs[:, None], (0, codes_NQ.shape[1] - 1))
            logprobs_NQ = logprobs_NQ.index_copy(0, text, columns)
            entropy_N = entropy_N.index_copy(0, text, entropy)
        if len(frames):
            weight = self.speech.offered_head(self.code_head.weight)
            logprobs, entropy = fused_codebook_logprobs(
                hidden_NH[frames], weight, targets_FQ, self.speech.codebooks, audio_temperature
            )
            logprobs_NQ = logprobs_NQ.index_copy(0, frames, logprobs)
            entropy_N = entropy_N.index_copy(0, frames, entropy.sum(1))
        return logprobs_NQ, entropy_N

    def before_sampled(self, batch: PackedBatch) -> Tensor:
        """The hidden states [N, H] that predict the sampled tokens."""
        return self.hidden(batch)[batch.predecessor[batch.loss_mask].to(self.device)]

    def hidden(self, batch: PackedBatch) -> Tensor:
        """The decoder's last hidden states [T, H] of a packed batch."""
        decoder, routed = self.backbone.decoder(self.model), self.routed(batch.codes)
        embeds_TH = self.embed(batch.ids, batch.audio, batch.loss_mask, batch.codes)
        if isinstance(decoder, CrossAttentionDecoder):
            spans = spans_of(batch.span_ids, batch.span_parents)
            rows = self.audio_rows(batch.ids, batch.loss_mask)
            return decoder(
                inputs_embeds=embeds_TH[None],
                audio_rows=rows,
                spans=spans,
                attention=self.config.attention,
                trained_audio=self.config.audio != "frozen",
            ).last_hidden_state[0]
        if takes_segments(decoder):
            spans = spans_of(batch.span_ids, batch.span_parents)
            attention = packed_arguments(decoder, spans, self.config.attention, embeds_TH[None])
        else:
            mask = attention_mask(batch.span_ids, batch.span_parents).to(self.device)
            attention = mask_argument(decoder, mask, batch.position_ids.to(self.device), embeds_TH.dtype)
        out = decoder(
            inputs_embeds=embeds_TH[None],
            position_ids=batch.position_ids[None].to(self.device),
            use_cache=False,
            **routed,
            **attention,
        )
        return out.last_hidden_state[0]

    def autocast(self) -> AbstractContextManager[object]:
        return autocast(self.config, self.device)

    # -- weights ---------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """A Hugging Face model folder, or with LoRA an adapter folder that names its base model; see `save_policy`."""
        save_policy(self, folder)

    def load_weights(self, weights: Weights, where: str = "weights") -> None:
        """Copy `weights` into the parameters of the same name, in place."""
        copy_weights(self.parameters_by_name(), weights, where)
        self.weights_changed()


def _check_placeholders(rows: Tensor, lengths: Sequence[int]) -> None:
    """Every run of placeholders in `rows` [T] bool is filled by whole clips: audio cannot slip into another prompt."""
    ends = rows & ~torch.cat([rows[1:], rows.new_zeros(1)])
    runs = rows.cumsum(0)[ends].tolist()
    clips = list(accumulate(lengths))
    if (runs[-1:] or [0]) != (clips[-1:] or [0]) or not set(runs) <= set(clips):
        raise ValueError(
            f"runs of audio placeholders end after {runs} tokens, but clips after {clips}: audio and text do not match"
        )


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a turn: the tokenizer's, the generation config's, and ChatML's <|im_end|>."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    listed = configured if isinstance(configured, list) else [configured]
    if not all(token is None or type(token) is int for token in listed):
        raise ValueError(
            f"{model.name_or_path}: eos_token_id in generation_config.json is {configured!r}; give token ids"
        )
    ids = set(listed)
    ids |= {tokenizer.eos_token_id, tokenizer.get_added_vocab().get("<|im_end|>")}
    return tuple(sorted(i for i in ids if i is not None))
