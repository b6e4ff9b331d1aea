"""The policy: one transformers model with its tokenizer, and its forward pass over packed batches.

A `Backbone` holds the differences between model families. Clips go through `audio_encoder.py`, messages through
`prompts.py`.

A model that speaks also has a `FrameLayout`: its decoder embeds and routes frames (`speech.py`), its `audio_lm_head`
writes their codes, and a codec turns clips into codes.

Shapes: T tokens of a packed batch, N sampled tokens, H decoder width, Q codebooks.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from audiorl.algos.experience import PackedBatch, PolicyOutput
from audiorl.algos.fused import packed_pass
from audiorl.algos.logprobs import IGNORE, capped, fused_codebook_logprobs, fused_logprobs
from audiorl.algos.packing import attention_mask
from audiorl.algos.varlen import Spans
from audiorl.audio import AudioClip
from audiorl.config import ModelConfig
from audiorl.models.attention import (
    autocast,
    mask_argument,
    no_mask,
    packed_attention,
    set_attention,
    spans_of,
    takes_segments,
)
from audiorl.models.audio_encoder import AudioEncoder, ClipCodes
from audiorl.models.backbone import Backbone
from audiorl.models.cross_attention import CrossAttentionCache, CrossAttentionDecoder
from audiorl.models.layers import refresh_copies, replace_parts, use_working_copies, working_copy
from audiorl.models.lora import add_lora, save_adapter
from audiorl.models.prompts import Prompt, PromptEncoder, reserved_tokens
from audiorl.models.speech import (
    CODEC_KEY,
    FrameLayout,
    Routing,
    TalkerLayout,
    add_branch,
    add_speech_tokens,
    by_codebook,
    init_branch,
)
from audiorl.models.vision import PictureEncoder, mrope_positions
from audiorl.models.weights import ModelSource, Weights, copy_weights, remove_vision, save_processor
from audiorl.pictures import Picture
from audiorl.types import Message, Sample
from tokenizers_audio.protocol import AudioTokenizer

disable_progress_bar()  # of weight loading and saving, at every checkpoint


class AudioPolicy(nn.Module):
    """A speech LLM that acts: reads prompts and audio, and gives log-probs for packed batches."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        extractor: Any,
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
        self.beside_adapter: frozenset[str] = frozenset()
        """Names of weights that came with an adapter and are not its base model's: saved with it, also where frozen."""
        token = backbone.audio_token
        self.audio_token_id = -1 if token is None else int(tokenizer.convert_tokens_to_ids(token))
        token = backbone.image_token
        image_id = None if token is None else tokenizer.convert_tokens_to_ids(token)
        self.image_token_id = -1 if image_id is None else int(image_id)
        self.pictures = PictureEncoder(backbone, model.config, self.config.audio_cache_mb * 2**20)
        configured = model.generation_config.eos_token_id if model.generation_config else None
        listed = configured if isinstance(configured, list) else [configured]
        if not all(token is None or type(token) is int for token in listed):
            where = f"{model.name_or_path}: eos_token_id in generation_config.json"
            raise ValueError(f"{where} is {configured!r}; give token ids")
        ends = {*listed, tokenizer.eos_token_id, tokenizer.get_added_vocab().get(backbone.turn_end or "<|im_end|>")}
        self.stop_ids = tuple(sorted(i for i in ends if i is not None))
        """Every token that ends a turn: the tokenizer's, the generation config's, and ChatML's."""
        self.audio = AudioEncoder(model, extractor, backbone, self.config)
        set_attention(backbone.decoder(model), self.config.attention)
        self._clip_codes: ClipCodes | None = None
        self._reserved: tuple[int, re.Pattern[str]] | None = None
        self.layers_again: Callable[[Spans, int], int] | None = None
        """How many layers, the first ones, are computed again in the backward pass of a row with these spans and that
        number of predicted tokens; None: all, where the config asks for checkpointing."""
        self.source = ModelSource(copied=remove_vision(model))
        self._set_trainable()

    # -- trained weights -------------------------------------------------------------------------------------------

    def _set_trainable(self) -> None:
        """Freeze everything that no text-and-audio loss can reach, then what the config wants frozen."""
        self.model.requires_grad_(False)
        decoder, head = self.backbone.decoder(self.model), self.backbone.head(self.model)
        if self.config.lora.rank:
            if self.adapter is None:
                self.adapter = add_lora(self.model, decoder, self.config.lora)
        else:
            decoder.requires_grad_(True)
            for module in decoder.children():
                if any(isinstance(part, PreTrainedModel) for part in module.modules()):
                    module.requires_grad_(False)  # Phi-4's encoders are inside of its decoder
            head.requires_grad_(True)
            if self.speech is not None:
                self.code_head.requires_grad_(True)
            for module in self.backbone.further_parts(self.model):
                module.requires_grad_(True)
        for module in self.backbone.projector(self.model):  # Cohere ASR's is a part of its decoder
            module.requires_grad_(self.config.audio != "frozen")
        if self.config.audio == "full":
            self.backbone.audio_encoder(self.model).requires_grad_(True)
        if self.config.only:
            trained = self.trainable()
            for pattern in self.config.only:
                if not any(re.search(pattern, name) for name in trained):
                    example = f"such as {min(trained)!r}"
                    raise ValueError(f"model.only: {pattern!r} is in no name of a trained weight, {example}")
            for name, p in trained.items():
                p.requires_grad_(any(re.search(pattern, name) for pattern in self.config.only))
        self.model.eval()
        replace_parts(decoder, self.config.autocast)
        if self.config.autocast:
            use_working_copies(head)
        if self.config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            # transformers checkpoints a layer only in training mode. What is in it stays in eval mode, and so do all
            # others: BatchNorm's running statistics would move, and log-probs of the same tokens must agree.
            for module in self.model.modules():
                module.training = module in (self.model, decoder) or isinstance(module, GradientCheckpointingLayer)
                for name in [n for n, p in vars(module).items() if "drop" in n and isinstance(p, float)]:
                    setattr(module, name, 0.0)  # of dropout as a function

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Decode within the block: in training mode, gradient checkpointing would switch the cache off."""
        in_training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            yield
        finally:
            for module in in_training:
                module.training = True

    @property
    def device(self) -> torch.device:
        return self.backbone.head(self.model).weight.device

    def _here(self, x: Tensor) -> Tensor:
        """Copy a tensor of the host to the model's device; the host does not wait for the device."""
        return x.to(self.device, non_blocking=True)

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Return all parameters of the model; for the names see `Backbone.weight_name`."""
        return {self.backbone.weight_name(name): p for name, p in self.model.named_parameters()}

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.parameters_by_name().items() if p.requires_grad}

    def has_fresh_adapter(self) -> bool:
        """Tell if there is an adapter that does not change the model yet: all its B matrices are zero."""
        if self.adapter is None:
            return False
        return not any(bool(p.any()) for name, p in self.model.named_parameters() if ".lora_B." in name)

    def weights(self) -> Mapping[str, Tensor]:
        """Return the trained weights by name, by reference."""
        return {name: p.detach() for name, p in self.trainable().items()}

    def load_weights(self, weights: Weights, where: str = "weights") -> None:
        """Copy `weights` into the parameters of the same name, in place."""
        copy_weights(self.parameters_by_name(), weights, where)
        self.weights_changed()

    def weights_changed(self) -> None:
        """Drop or renew what was computed with the old weights; call after every update."""
        self.audio.weights_changed()
        refresh_copies(self.model)

    def copy(self) -> AudioPolicy:
        """Copy the policy as it is now: trained weights are copied, frozen ones shared."""
        shared: dict[int, Any] = {id(p): p for p in self.model.parameters() if not p.requires_grad}
        if self.config.audio != "full":
            shared[id(self.audio.cache)] = self.audio.cache  # the output of an encoder that both share
        return copy.deepcopy(self, shared | self._never_copied())

    def _never_copied(self) -> dict[int, Any]:
        shared = (
            self.tokenizer,
            self.extractor,
            self.backbone,
            self._clip_codes,
            self.audio.known_features,
            self.audio.loading,
        )
        return {id(x): x for x in (*shared, self.pictures)}

    def skeleton(self, hollow: Collection[nn.Parameter]) -> AudioPolicy:
        """Copy the policy, sharing all weights but the `hollow` ones: these are on meta, to be filled before saving."""
        weights: dict[int, Any] = {id(p): p for p in self.model.parameters()}
        for p in hollow:
            weights[id(p)] = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
        weights[id(self.audio.cache)] = self.audio.cache
        return copy.deepcopy(self, weights | self._never_copied())

    def reference(self) -> Reference:
        """Return a frozen copy of the policy as it is now, sharing every weight that is not trained."""
        return Reference(self)

    def save(self, folder: str | Path) -> None:
        """Write a Hugging Face model folder in safetensors; with LoRA, an adapter folder that names its base model.

        Of an Omni model: the whole model's layout without its talker, which `audiorl.models.export` puts back.
        """
        folder = Path(folder)
        if not torch.cuda.is_available():  # transformers imports DeepSpeed here if it can, which would warn of no GPU
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if self.adapter is None:
            self.backbone.save_model(self.model, str(folder), self.source)
        else:
            names = self.trainable().keys() | self.beside_adapter
            save_adapter(self.adapter, {n: p for n, p in self.parameters_by_name().items() if n in names}, folder)
        template, class_names = self.backbone.chat_template(), self.backbone.processor_files
        save_processor(folder, self.tokenizer, self.extractor, self.source.files, template, class_names)

    # -- prompts and audio -----------------------------------------------------------------------------------------

    @property
    def prompts(self) -> PromptEncoder:
        """Writes samples as prompts, and checks them."""
        decoder = self.backbone.decoder(self.model)
        most = [getattr(decoder.config, f"max_{name}", None) for name in ("target_positions", "position_embeddings")]
        limit, rope = most[0] or most[1], getattr(decoder.config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            # Beyond these, transformers turns all positions of a call by other factors: rows of a pack would change
            # each other, and the tokens of an answer their prompt.
            limit = rope.get("original_max_position_embeddings") or limit
        if self._reserved is None or self._reserved[0] != len(self.tokenizer):  # `dualize` adds tokens
            self._reserved = len(self.tokenizer), reserved_tokens(self.tokenizer, self._written())
        return PromptEncoder(
            self.tokenizer,
            self.backbone,
            self.audio,
            self.speech,
            self.codes,
            codec=lambda: self.clip_codes.codec,
            reserved=self._reserved[1],
            max_tokens=limit,
            picture_tokens=self.picture_tokens,
            counts_audio=not isinstance(decoder, CrossAttentionDecoder),
        )

    def _written(self) -> str:
        """Return what the family writes around a turn and a clip."""
        token = self.backbone.audio_token or ""
        clip = AudioClip(array=np.zeros(1, np.float32), sample_rate=16_000)
        try:
            pieces = self.backbone.chat([Message("user", (clip, "?") if token else ("?",))])
        except ValueError:  # Whisper wants a language; its tokens are special
            return token
        return "".join(piece for piece in pieces if isinstance(piece, str)) + token

    def picture_tokens(self, picture: Picture) -> int:
        """Return how many tokens a picture becomes, from its header."""
        return self.pictures.tokens(picture, self.source)

    def prompt(self, sample: Sample) -> Prompt:
        """Return the sample's messages as the model reads them; see `PromptEncoder.encode`."""
        return self.prompts.encode(sample)

    def chunk_ids(self, clip: AudioClip) -> Tensor:
        """Return [P] int64: a chunk of a stream with its delimiters."""
        return self.prompts.encode_chunk(clip)

    @property
    def end_id(self) -> int:
        """The token that ends a turn in supervised examples, and where a turn was cut off."""
        token = self.backbone.turn_end or "<|im_end|>"
        return int(self.tokenizer.get_added_vocab().get(token, self.tokenizer.eos_token_id))

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """Return text without special tokens and without the backbone's `answer_prefix`."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text.removeprefix(self.backbone.answer_prefix)

    def encode_audio(self, clips: Sequence[AudioClip], beside_picture: Sequence[bool] = ()) -> list[Tensor]:
        """Return one [tokens, H] per clip, as the decoder receives it; see `AudioEncoder.encode`."""
        return self.audio.encode(clips, beside_picture)

    def clips_of(self, samples: Iterable[Sample]) -> list[AudioClip]:
        """Return the clips of prompts that go through the audio encoder."""
        if self.extractor is None or self.backbone.audio_token is None:
            return []
        messages = (m for s in samples for m in s.messages if self.speech is None or m.role != "assistant")
        return [content for m in messages for content in m.content if isinstance(content, AudioClip)]

    def encode_ahead(self, samples: Iterable[Sample]) -> None:
        """On a GPU encode the clips of prompts together, before `prompt` asks for each; a CPU encodes them then."""
        clips = self.clips_of(samples) if self.device.type == "cuda" else []
        if clips and (self.config.audio != "full" or not torch.is_grad_enabled() or self.audio.in_update):
            self.audio.encoder_outputs(clips)

    # -- speech ----------------------------------------------------------------------------------------------------

    @property
    def code_head(self) -> nn.Linear:
        """The head of Q·size outputs, one codebook after the other, that writes frames."""
        return self.model.audio_lm_head

    @property
    def codec(self) -> AudioTokenizer | None:
        return None if self._clip_codes is None else self._clip_codes.codec

    def set_codec(self, codec: AudioTokenizer) -> None:
        """Set the codec of the model's codes, which moves to the model's device. The first is recorded in its config.

        A talker's is not: its codes have a decoder in the whole checkpoint, and a codec that encodes is another one.
        Raises ValueError for a model that writes text only, for another geometry and for a codec of another identity.
        """
        if self.speech is None:
            raise ValueError("the model writes text only; dualize it before it gets a codec")
        self.speech.check(codec)
        recorded = None if isinstance(self.speech, TalkerLayout) else getattr(self.model.config, CODEC_KEY, None)
        if recorded not in (None, codec.identity):
            raise ValueError(
                f"the model speaks in codes of {recorded}, not of {codec.identity}; to train it for another codec, "
                f'take "{CODEC_KEY}" out of its config.json'
            )
        if not isinstance(self.speech, TalkerLayout):
            setattr(self.model.config, CODEC_KEY, codec.identity)
        if isinstance(codec, nn.Module):
            codec.to(self.device)
        self._clip_codes = ClipCodes(codec, self.config.audio_cache_mb * 2**20)

    @property
    def clip_codes(self) -> ClipCodes:
        """The codes of clips. Raises ValueError for a policy without a codec."""
        if self._clip_codes is None:
            raise ValueError("the model reads and writes codes but has no codec yet: tokenizers_audio.load, set_codec")
        return self._clip_codes

    def codes(self, clip: AudioClip) -> Tensor:
        """Return [Q, F] int64: the clip in the codec's codes. Each clip is encoded once."""
        return self.clip_codes.codes(clip)

    # -- inputs of the decoder -------------------------------------------------------------------------------------

    def embed(
        self,
        ids: Tensor,
        clips: Sequence[AudioClip],
        sampled: Tensor | None = None,
        codes: Tensor | None = None,
        images: Sequence[Picture] = (),
        beside_picture: Sequence[bool] | None = None,
    ) -> Tensor:
        """Return [T, H] for ids [T]: token embeddings, at placeholders those of the clips and pictures.

        Where `sampled` [T] is true the policy wrote a placeholder itself: a token like any other. Positions with
        `codes` [T, Q] of 0 or more are frames. beside_picture: of each clip whether its prompt has pictures; None: this
        is one prompt. Raises ValueError where placeholders and clips do not match.
        """
        embeds = self.embed_tokens(ids, codes)
        if clips:
            beside = [bool(images)] * len(clips) if beside_picture is None else beside_picture
            embeds = self._filled(
                embeds, self.is_audio(ids, sampled), self.encode_audio(clips, beside), "audio", "clips"
            )
        if images:
            parts = [x[0] for x in self.pictures.encode(images, self.model, self.source, embeds)]
            embeds = self._filled(embeds, self.is_image(ids, sampled), parts, "image", "pictures")
        return embeds

    def _filled(self, embeds: Tensor, here: Tensor, parts: Sequence[Tensor], kind: str, things: str) -> Tensor:
        """Put encoded clips or pictures, one [tokens, H] each, where `here` [T] is true."""
        # Whole clips fill every run of placeholders: audio cannot slip into another prompt.
        last = here & ~torch.cat([here[1:], here.new_zeros(1)])
        runs, ends = here.cumsum(0)[last].tolist(), list(accumulate(map(len, parts)))
        if runs[-1:] != ends[-1:] or not set(runs) <= set(ends):
            after = f"runs of {kind} placeholders end after {runs} tokens, but {things} after {ends}"
            raise ValueError(f"{after}: {kind} and text do not match")
        return embeds.masked_scatter(self._here(here[:, None]), torch.cat(list(parts)).to(embeds.dtype))

    def embed_batch(self, batch: PackedBatch) -> Tensor:
        """Return the decoder's inputs [T, H] of a packed batch."""
        return self.embed(batch.ids, batch.audio, batch.loss_mask, batch.codes, batch.images, batch.beside_picture)

    def is_audio(self, ids: Tensor, sampled: Tensor | None = None) -> Tensor:
        """Return [...] bool: where ids [...] are audio placeholders that the policy did not sample itself."""
        is_audio = ids == self.audio_token_id
        return is_audio if sampled is None else is_audio & ~sampled.to(is_audio.device)

    def is_image(self, ids: Tensor, sampled: Tensor | None = None) -> Tensor:
        """Return [...] bool: where ids [...] are placeholders of pictures that the policy did not sample itself."""
        is_image = ids == self.image_token_id
        return is_image if sampled is None else is_image & ~sampled.to(is_image.device)

    def deep_pictures(self, is_image: Tensor, images: Sequence[Picture]) -> dict[str, Any]:
        """Return what the decoder takes to add pictures to the output of its first layers, at their tokens [B, T]
        (DeepStack, arXiv 2406.04334): nothing but for Qwen3-Omni."""
        parts = self.pictures.encode(images, self.model, self.source, self.backbone.head(self.model).weight)
        deep = list(torch.cat(parts, 1))[1:]
        return {"visual_pos_masks": self._here(is_image), "deepstack_visual_embeds": deep} if deep else {}

    def positions(
        self, ids: Tensor, sampled: Tensor | None, images: Sequence[Picture], spans: Spans | None = None
    ) -> Tensor:
        """Return positions [3, T] of tokens with pictures, in one sequence or in the spans of a packed batch."""
        is_image, grids = self.is_image(ids, sampled), [self.pictures.grid(p, self.source) for p in images]
        positions = torch.zeros(3, len(ids), dtype=torch.long)
        after: dict[int, int] = {}  # by the first token of a span: the position behind it
        for first, end, parent, has_parent in spans or [(0, len(ids), 0, 0)]:
            count, own = int(is_image[first:end].sum()), list[tuple[int, int]]()
            while count > 0:
                own.append(grids.pop(0))
                count -= own[-1][0] * own[-1][1]
            begin = after[parent] if has_parent else 0
            positions[:, first:end] = mrope_positions(is_image[first:end], own, begin)
            after[first] = int(positions[:, first:end].max()) + 1 if end > first else begin
        return positions

    def embed_tokens(self, ids: Tensor, codes: Tensor | None) -> Tensor:
        """Return [..., H]: embeddings of ids [...], or of codes [..., Q] where these are not -1."""
        decoder = self.backbone.decoder(self.model)
        embeds = self.backbone.embed_tokens(self.model, self._here(ids))
        if codes is None:
            return embeds
        flat = codes.flatten(0, -2)
        places = (flat[:, 0] >= 0).nonzero()[:, 0]
        frames = decoder.embed_audio_tokens(self._here(flat[places]))
        return embeds.flatten(0, -2).index_copy(0, self._here(places), frames.to(embeds.dtype)).view_as(embeds)

    def new_cache(self) -> DynamicCache:
        """Return an empty key-value cache for prompts and what is generated after them."""
        decoder = self.backbone.decoder(self.model)
        if isinstance(decoder, CrossAttentionDecoder):
            return CrossAttentionCache(len(decoder.layers))
        return DynamicCache(config=decoder.config)

    def cross_attention_kwargs(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Return arguments of an encoder-decoder for prompts padded on the left: which positions are audio."""
        if not isinstance(self.backbone.decoder(self.model), CrossAttentionDecoder):
            return {}
        masks = [self.is_audio(p.ids) for p in prompts]
        longest = max(map(len, masks))
        return {"is_audio": torch.stack([nn.functional.pad(m, (longest - len(m), 0)) for m in masks])}

    def decoder_arguments(self, ids: Tensor, codes: Tensor | None) -> dict[str, Any]:
        """Return what the decoder takes beside the embeddings of ids [...], codes [..., Q] (None: all text): what the
        family's layers read of ids, and of one that speaks which positions are frames."""
        arguments = self.backbone.decoder_arguments(self.model, self._here(ids))
        if self.speech is None:
            assert codes is None, "frames for a model that writes text only"
            return arguments
        return {
            **arguments,
            "routing": Routing.TEXT if codes is None else Routing.from_mask(codes[..., 0] >= 0, self.device),
        }

    # -- forward ---------------------------------------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[object]:
        return autocast(self.config, self.device)

    def forward(
        self,
        batch: PackedBatch,
        temperature: float = 1.0,
        value_head: nn.Module | None = None,
        audio_temperature: float | Sequence[float] | None = None,
    ) -> PolicyOutput:
        """Return log-probs and entropies of the sampled tokens [N]; with a `value_head` V of the state before each.

        `temperature` divides the logits, as in sampling; `audio_temperature` those of codes, or of each codebook, the
        last for those after it (None: the same).
        """
        with self.autocast():
            state_NH = self.predicting_hidden(batch)
            hidden_NH = self._with_bias(self._divided(state_NH))
            targets_N = batch.ids[batch.loss_mask]
            logprobs_NQ = None
            if batch.codes is None:
                logprobs_N, entropy_N = self._text_logprobs(hidden_NH, targets_N, temperature)
            else:
                logprobs_NQ, entropy_N = self._text_and_frames(
                    hidden_NH, targets_N, batch, temperature, audio_temperature or temperature
                )
                logprobs_N = logprobs_NQ.sum(1)
        values_N = None if value_head is None else value_head(state_NH)
        return PolicyOutput(logprobs_N, entropy_N, values_N, logprobs_NQ, hidden_NH)

    @property
    def softcap(self) -> float | None:
        """The bound of the text head's logits; see `Backbone.softcap`."""
        return self.backbone.softcap(self.model)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the text head's logits [..., V] of the decoder's hidden states [..., H]."""
        return capped(self.backbone.head(self.model)(self._divided(hidden)), self.softcap)

    def _divided(self, hidden: Tensor) -> Tensor:
        """Return hidden states whose products with the text head are divided by the family's divisor."""
        divisor = self.backbone.logit_divisor(self.model)
        return hidden if divisor == 1 else hidden / divisor

    def _with_bias(self, hidden: Tensor) -> Tensor:
        """Return hidden states [..., H] as `text_head` reads them: with a bias [..., H + 1], the last of which is 1."""
        if self.backbone.head(self.model).bias is None:
            return hidden
        return nn.functional.pad(hidden, (0, 1), value=1.0 / self.backbone.logit_divisor(self.model))

    @property
    def text_head(self) -> Tensor:
        """The text head's weight [V, H]; of one with a bias [V, H + 1], the bias in the last column."""
        head = self.backbone.head(self.model)
        return head.weight if head.bias is None else torch.cat([head.weight, head.bias[:, None]], 1)

    def _text_logprobs(self, hidden_NH: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        head, cap = self.backbone.head(self.model), self.softcap
        low = working_copy(head) if head.bias is None else None
        return fused_logprobs(hidden_NH, self.text_head, targets_N, temperature, low=low, softcap=cap)

    def _text_and_frames(
        self,
        hidden_NH: Tensor,
        targets_N: Tensor,
        batch: PackedBatch,
        temperature: float,
        audio_temperature: float | Sequence[float],
    ) -> tuple[Tensor, Tensor]:
        """Log-probs [N, Q] by code, a text token's in column 0, and entropies [N], summed over a frame's codes."""
        assert batch.codes is not None and batch.code_mask is not None and self.speech is not None
        codes_NQ, code_mask_NQ = batch.codes[batch.loss_mask], batch.code_mask[batch.loss_mask]
        is_frame = codes_NQ[:, 0] >= 0
        text, frames = (~is_frame).nonzero()[:, 0], is_frame.nonzero()[:, 0]
        # The head is used without BOS: codes above BOS move down by one.
        targets_FQ = codes_NQ[frames] - (codes_NQ[frames] > self.speech.bos).long()
        targets_FQ = torch.where(code_mask_NQ[frames], targets_FQ, IGNORE)
        targets_N = targets_N[text]
        text, frames = self._here(text), self._here(frames)
        logprobs_NQ = hidden_NH.new_zeros(codes_NQ.shape, dtype=torch.promote_types(hidden_NH.dtype, torch.float32))
        entropy_N = logprobs_NQ.new_zeros(len(codes_NQ))
        if len(text) or not len(frames):  # an empty batch must still give something to differentiate
            logprobs, entropy = self._text_logprobs(hidden_NH[text], targets_N, temperature)
            columns = nn.functional.pad(logprobs[:, None], (0, codes_NQ.shape[1] - 1))
            logprobs_NQ = logprobs_NQ.index_copy(0, text, columns)
            entropy_N = entropy_N.index_copy(0, text, entropy)
        if len(frames):
            weight = self.speech.head_without_bos(self.code_head.weight)
            first, *others = of_codebook = by_codebook(audio_temperature, self.speech.codebooks)
            if any(t != first for t in others):
                each = weight.new_tensor(of_codebook).repeat_interleave(self.speech.size - 1)
                weight, first = weight / each[:, None], 1.0
            logprobs, entropy = fused_codebook_logprobs(
                hidden_NH[frames], weight, targets_FQ, self.speech.codebooks, first
            )
            logprobs_NQ = logprobs_NQ.index_copy(0, frames, logprobs)
            entropy_N = entropy_N.index_copy(0, frames, entropy.sum(1))
        return logprobs_NQ, entropy_N

    def predicting_hidden(self, batch: PackedBatch) -> Tensor:
        """Return the hidden states [N, H] that predict the sampled tokens."""
        return self.hidden(batch)[self._here(batch.predecessor[batch.loss_mask])]

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Return the decoder's last hidden states [T, H] of a packed batch."""
        with packed_pass():
            return self._hidden(batch)

    def _hidden(self, batch: PackedBatch) -> Tensor:
        decoder = self.backbone.decoder(self.model)
        arguments = self.decoder_arguments(batch.ids[None], None if batch.codes is None else batch.codes[None])
        spans = spans_of(batch.span_ids, batch.span_parents)
        if self.layers_again is not None and torch.is_grad_enabled():
            again = self.layers_again(spans, int(batch.loss_mask.sum()))
            for i, layer in enumerate(decoder.layers):
                layer.gradient_checkpointing = i < again
        embeds_TH = self.embed_batch(batch)
        positions = batch.position_ids[None]
        if batch.images:
            arguments |= self.deep_pictures(self.is_image(batch.ids, batch.loss_mask)[None], batch.images)
            if self.backbone.mrope:
                positions = self.positions(batch.ids, batch.loss_mask, batch.images, spans)[:, None]
        if isinstance(decoder, CrossAttentionDecoder):
            return decoder(
                inputs_embeds=embeds_TH[None],
                is_audio=self.is_audio(batch.ids, batch.loss_mask),
                spans=spans,
                attention=self.config.attention,
                trained_audio=self.config.audio != "frozen",
            ).last_hidden_state[0]
        if takes_segments(decoder):
            packed = packed_attention(decoder, spans, self.config.attention, embeds_TH[None])
            attention = {"attention_mask": no_mask(self.device), "packed": packed}
        else:
            mask = self._here(attention_mask(batch.span_ids, batch.span_parents))
            attention = mask_argument(decoder, mask, self._here(batch.position_ids), embeds_TH.dtype)
        out = decoder(
            inputs_embeds=embeds_TH[None],
            position_ids=self._here(positions),
            use_cache=False,
            **arguments,
            **attention,
        )
        return out.last_hidden_state[0]


class Reference:
    """A frozen copy of a policy as it was when this was made, for the KL. Weights that are never trained are shared.

    Where it is the base model below the policy's adapter (`base`, or an adapter that changes nothing yet), the adapter
    is switched off for its forward passes instead.
    """

    def __init__(self, policy: AudioPolicy, base: bool = False):
        self.is_base = base or (policy.has_fresh_adapter() and policy.config.audio == "frozen")
        """The reference is the model below the policy's adapter."""
        self.runs_on = policy if self.is_base else policy.copy()
        """The frozen copy, or the policy whose adapter is switched off: with the reference's tokenizer and head."""
        if not self.is_base:
            self.runs_on.requires_grad_(False)

    @torch.no_grad()
    def forward(
        self, batch: PackedBatch, temperature: float = 1.0, audio_temperature: float | Sequence[float] | None = None
    ) -> PolicyOutput:
        """See `AudioPolicy.forward`."""
        with self.runs_on.adapter.disable_adapter() if self.is_base else nullcontext():
            return self.runs_on.forward(batch, temperature, audio_temperature=audio_temperature)


def dualize(policy: AudioPolicy, codebooks: int, codebook_size: int, seed: int = 0) -> AudioPolicy:
    """Teach `policy` to write `codebooks` of `codebook_size` codes (those of its codec), in place.

    Every layer gets norms and a feed-forward block for frames that begin as copies of the text's; embeddings and head
    of the codes begin random, fixed by `seed`. Speech begins, continues and ends with reserved tokens of the tokenizer,
    or with new ones. For a batch without frames results stay the same bit for bit.
    """
    if policy.speech is not None:
        raise ValueError("the model speaks already")
    if policy.adapter is not None:
        raise ValueError("the model has a low-rank adapter: dualize its base, save that, and load it with an adapter")
    begin, frame, end = add_speech_tokens(policy.model, policy.backbone, policy.tokenizer)
    size = codebook_size + 2
    layout = FrameLayout(codebooks, size, size - 2, size - 1, begin, frame, frame, end)
    decoder = policy.backbone.decoder(policy.model)
    add_branch(policy.model, decoder, layout)
    init_branch(policy.model, decoder, seed)
    policy.speech = layout
    policy._set_trainable()
    return policy
