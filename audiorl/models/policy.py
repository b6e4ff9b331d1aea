"""The policy: one transformers speech LLM, its tokenizer and its ear, behind `audiorl.types.Policy`.

What differs between model families (where the decoder lives, how the audio tower is called, how a chat is written) is a
`Backbone`; everything here is the same for all of them.

A model that speaks has a `speech` part too, a `FrameLayout`: its decoder embeds and routes frames (`dual.py`), its
`audio_lm_head` writes their codes, and a codec turns clips into codes.

Shapes: T rows of a packed batch, N sampled rows, H decoder width, D audio tower width, Q codebooks, F codec frames.
"""

from __future__ import annotations

import copy
import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, WhisperFeatureExtractor
from transformers.utils.logging import disable_progress_bar

from audiorl.algos.logprobs import IGNORE, fused_codebook_logprobs, fused_logprobs
from audiorl.algos.packing import attention_mask
from audiorl.audio import AudioClip, seconds
from audiorl.audio import name as clip_name
from audiorl.config import LoraConfig, ModelConfig
from audiorl.models.attention import by_span, spans_of
from audiorl.models.dual_ffn import Routing
from audiorl.models.features import log_mel
from audiorl.models.speech import CODEC_KEY, FrameLayout, Prompt, wants_speech
from audiorl.types import Message, PackedBatch, PolicyOutput, Sample
from tokenizers_audio import AudioTokenizer, prepare

NON_LORA_WEIGHTS = "trained.safetensors"
"""In an adapter's folder: what was trained beside the adapter, such as the audio projector."""

Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Named tensors: all at once, or one after the other as they arrive."""

disable_progress_bar()  # of weight loading and saving, at every checkpoint


class Backbone(Protocol):
    """What a model family must answer. Its methods take the bare transformers model and keep no state."""

    audio_token: ClassVar[str | None]
    """The placeholder of audio in a text; None for a model that hears nothing."""

    def chat(self, messages: Sequence[Message]) -> list[str | AudioClip]:
        """The conversation as the model was trained to read it, ready for the assistant's turn."""
        ...

    def chunk(self, clip: AudioClip) -> list[str | AudioClip]:
        """A chunk of a stream between its delimiters, to be read inside of the assistant's turn."""
        ...

    def decoder(self, model: PreTrainedModel) -> Any:
        """The text model: takes inputs_embeds, position_ids [B, T], attention_mask; gives last_hidden_state."""
        ...

    def head(self, model: PreTrainedModel) -> nn.Linear: ...

    def audio_encoder(self, model: PreTrainedModel) -> Any: ...

    def projector(self, model: PreTrainedModel) -> Sequence[nn.Module]:
        """The modules between the audio tower's last norm and the decoder."""
        ...

    def tokens(self, model: PreTrainedModel, frames: int) -> int:
        """How many audio tokens a clip of so many mel frames becomes."""
        ...

    def encode_audio(self, model: PreTrainedModel, mels: Sequence[Tensor]) -> list[Tensor]:
        """One [tokens, D] per clip of [mel bins, frames]: the tower up to, not including, the projector."""
        ...

    def project(self, model: PreTrainedModel, heard: Tensor) -> Tensor:
        """[tokens, D] -> [tokens, H]."""
        ...


class AudioPolicy(nn.Module):
    """A speech LLM that acts: encodes prompts, hears audio, and gives log-probs for packed batches.

    A frozen tower hears each clip once and remembers it (up to `ModelConfig.audio_cache_mb`), for rollouts, log-probs
    and all epochs alike; a trained one hears it again after each update. Clips are heard one at a time, so that a
    result never depends on its batch.
    """

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
        self._reserved = _reserved(tokenizer)
        self._cache = _ClipCache(self.config.audio_cache_mb * 2**20)
        self._codec: tuple[AudioTokenizer, ...] = ()  # one or none; in a tuple, it is no part of this module
        self._codes = _ClipCache(self.config.audio_cache_mb * 2**20)
        self._kept_codes: Mapping[str, Tensor] = {}
        self._update: dict[str, tuple[Tensor, Tensor]] | None = None
        self._set_trainable()

    # -- what is trained -------------------------------------------------------------------------------------------

    def _set_trainable(self) -> None:
        """Freeze everything that no text-and-audio loss can reach, then what the config wants frozen."""
        lora = self.config.lora
        self.model.requires_grad_(False)
        decoder, head = self.backbone.decoder(self.model), self.backbone.head(self.model)
        if lora is not None:
            if self.adapter is None:
                self.adapter = _add_lora(self.model, decoder, lora)
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

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def has_fresh_adapter(self) -> bool:
        """Whether there is a low-rank adapter that does not change the model yet: all its B matrices are zero."""
        if self.adapter is None:
            return False
        return not any(bool(p.any()) for name, p in self.model.named_parameters() if ".lora_B." in name)

    def weights(self) -> Mapping[str, Tensor]:
        """The trained weights by name, by reference: what an engine needs to follow the trainer."""
        return {name: p.detach() for name, p in self.trainable().items()}

    def copy(self) -> AudioPolicy:
        """The policy as it is now, with trained weights of its own; what is never trained is shared."""
        shared: dict[int, Any] = {id(p): p for p in self.model.parameters() if not p.requires_grad}
        parts = (self.tokenizer, self.extractor, self.backbone, self._codes, self._kept_codes, *self._codec)
        shared |= {id(x): x for x in parts}
        if self.config.audio != "full":
            shared[id(self._cache)] = self._cache  # both hear the same; a trained tower soon hears otherwise
        return copy.deepcopy(self, shared)

    def reference(self) -> Reference:
        """A frozen copy of the policy as it is now, sharing every weight that is not trained."""
        return Reference(self)

    # -- audio -----------------------------------------------------------------------------------------------------

    def encode_audio(self, clips: Sequence[AudioClip]) -> list[Tensor]:
        """One [tokens, H] per clip, as the decoder receives it; differentiable where the config trains it."""
        out = []
        for clip in clips:
            heard = self._encode_clip(clip)
            trained = self.config.audio != "frozen" and torch.is_grad_enabled()
            with nullcontext() if trained else torch.no_grad():
                out.append(self.backbone.project(self.model, heard))
        return out

    def audio_tokens(self, clip: AudioClip) -> int:
        """How many tokens the clip becomes. It is heard at once, unless the model has no weights (device "meta")."""
        if self.device.type != "meta":
            return len(self._encode_clip(clip))
        if self.extractor is None:
            raise ValueError("the model hears no audio")
        mel, before = self.mel(clip)
        own = self.backbone.tokens(self.model, mel.shape[1]) - before
        if own < 1:
            raise ValueError(f"{clip_name(clip)}: the clip is too short to be heard")
        return own

    def mel(self, clip: AudioClip) -> tuple[Tensor, int]:
        """[mel bins, frames] of the clip with its context, on the CPU, and how many audio tokens are the context's."""
        assert self.extractor is not None
        mel = log_mel(self.extractor, clip.with_context().load(self.extractor.sampling_rate))
        return mel, self._tokens_of(clip.context) if clip.context else 0

    def _tokens_of(self, length: float) -> int:
        """Audio tokens of `length` seconds."""
        assert self.extractor is not None
        hop = self.extractor.hop_length / self.extractor.sampling_rate
        return self.backbone.tokens(self.model, ceil(length / hop - 1e-6))

    @contextmanager
    def encode_audio_once(self) -> Iterator[None]:
        """Around the passes of one update: a trained tower hears each clip once, and is trained once, at the end.

        The passes differentiate down to what was heard; their gradients are summed there and go through the tower
        together when the block ends. Nothing changes for a frozen tower, which hears each clip once anyway.
        """
        if self.config.audio != "full":
            yield
            return
        assert self._update is None, "one update at a time"
        self._update = {}
        try:
            yield
            reached = [(heard, leaf.grad) for heard, leaf in self._update.values() if leaf.grad is not None]
            if reached:
                torch.autograd.backward([heard for heard, _ in reached], [grad for _, grad in reached])
        finally:
            self._update = None

    def weights_changed(self) -> None:
        """Forget what a trained tower heard; call after every update of the weights."""
        if self.config.audio == "full":
            self._cache.clear()

    def _encode_clip(self, clip: AudioClip) -> Tensor:
        key = clip.key
        if self.config.audio == "full" and torch.is_grad_enabled():
            if self._update is None:
                return self._hear_anew(clip)
            if key not in self._update:
                heard = self._hear_anew(clip)
                self._update[key] = heard, heard.detach().requires_grad_()
            return self._update[key][1]
        known = self._cache.get(key)
        if known is None:
            with torch.no_grad():
                known = self._hear_anew(clip)
            self._cache.put(key, known.cpu())
        return known.to(self.device)

    def _hear_anew(self, clip: AudioClip) -> Tensor:
        """[tokens, D] of the clip itself; its context is heard with it and then left out."""
        mel, before = self.mel(clip)
        weight = next(self.backbone.audio_encoder(self.model).parameters())
        heard = self.backbone.encode_audio(self.model, [mel.to(device=weight.device, dtype=weight.dtype)])[0]
        if not clip.context:
            return heard
        own = self._tokens_of(seconds(clip))
        if before + own != len(heard):
            raise ValueError(
                f"{clip_name(clip)}: {own} audio tokens after {before} of context are {len(heard)} together; make the "
                f"context of {clip.context:g} s a multiple of the audio encoder's frame"
            )
        return heard[before:]

    # -- speech ----------------------------------------------------------------------------------------------------

    def speaks(self, layout: FrameLayout) -> None:
        """The model has become one that speaks: its weights and its tokenizer have changed."""
        self.speech = layout
        self._reserved = _reserved(self.tokenizer)
        self._set_trainable()

    @property
    def code_head(self) -> nn.Linear:
        """The head of Q·size rows, a codebook after the other, that writes frames."""
        return self.model.audio_lm_head

    @property
    def codec(self) -> AudioTokenizer | None:
        return self._codec[0] if self._codec else None

    def set_codec(self, codec: AudioTokenizer) -> None:
        """The codec behind the model's codes. Raises ValueError for one that it cannot belong to.

        The first one is remembered with the model; after that only its equals are taken.
        """
        if self.speech is None:
            raise ValueError("the model writes text only; dualize it before it gets a codec")
        self.speech.check(codec)
        known = getattr(self.model.config, CODEC_KEY, None)
        if known not in (None, codec.identity):
            raise ValueError(
                f"the model speaks in codes of {known}, not of {codec.identity}; to train it for another codec, take "
                f'"{CODEC_KEY}" out of its config.json'
            )
        setattr(self.model.config, CODEC_KEY, codec.identity)
        self._codec = (codec,)
        self._codes.clear()
        self._kept_codes = {}

    def keep_codes(self, known: Mapping[str, Tensor]) -> None:
        """Codes [Q, F] of this codec by `AudioClip.key`, such as `CodeShards`: these clips are not encoded again."""
        self._kept_codes = known

    def codes(self, clip: AudioClip) -> Tensor:
        """[Q, F] int64: the clip in the codec's codes, made once."""
        if self.codec is None:
            raise ValueError("the model reads and writes codes but has no codec yet: tokenizers_audio.load, set_codec")
        known = self._codes.get(clip.key)
        if known is None and clip.key in self._kept_codes:
            known = self._kept_codes[clip.key]
            self._codes.put(clip.key, known)
        if known is None:
            rate = self.codec.sample_rate
            try:
                known = self.codec.encode(prepare(clip.load(rate), rate, self.codec))[0].cpu()
            except ValueError as error:
                where = clip_name(clip)
                raise error if where in str(error) else ValueError(f"{where}: {error}") from error
            self._codes.put(clip.key, known)
        return known

    # -- text ------------------------------------------------------------------------------------------------------

    def prompt_ids(self, sample: Sample) -> Tensor:
        """[P] int64: `prompt` without its codes."""
        return self.prompt(sample).ids

    def prompt(self, sample: Sample) -> Prompt:
        """The sample's messages as the model reads them.

        A clip that the tower hears is its placeholder repeated once per audio token. Of a model that speaks, a clip of
        the assistant's is speech, in frames; so is every clip where there is no tower. Where the answer is to be spoken
        (see `wants_speech`), the prompt ends with the token that opens speech.
        """
        for message in sample.messages:
            for content in message.content:
                if isinstance(content, str) and any(token in content for token in self._reserved):
                    raise ValueError(
                        f"sample {sample.id!r}: a message contains a reserved token such as <|im_start|>; remove it"
                    )
        text = ""
        frames: list[Tensor] = []
        heard: list[AudioClip] = []
        try:
            for piece in self.backbone.chat([self._in_frames(m, frames) for m in sample.messages]):
                if isinstance(piece, AudioClip):
                    text += str(self.backbone.audio_token) * self.audio_tokens(piece)
                    heard.append(piece)
                else:
                    text += piece
        except ValueError as error:
            raise ValueError(f"sample {sample.id!r}: {error}") from error
        if wants_speech(sample):
            if self.speech is None:
                raise ValueError(f"sample {sample.id!r} asks for speech, but the model writes text only; dualize it")
            text += self._token(self.speech.begin_id)
        ids = torch.tensor(self.tokenizer.encode(text, add_special_tokens=False), dtype=torch.long)
        return Prompt(ids, self._placed(ids, frames), tuple(heard))

    def _in_frames(self, message: Message, frames: list[Tensor]) -> Message:
        """The message with its spoken clips written as tokens; their codes [N, Q] are added to `frames`."""
        layout = self.speech
        if layout is None or not (message.role == "assistant" or self.backbone.audio_token is None):
            return message
        content: list[str | AudioClip] = []
        for piece in message.content:
            if isinstance(piece, AudioClip):
                rows = layout.rows(self.codes(piece))
                frames.append(rows.codes[:-1])
                piece = "".join(self._token(i) for i in (layout.begin_id, *rows.ids.tolist()))
            content.append(piece)
        return replace(message, content=tuple(content))

    def _placed(self, ids: Tensor, frames: Sequence[Tensor]) -> Tensor | None:
        """Codes [P, Q] for ids [P]: `frames` in order where the ids say that there is one, -1 elsewhere."""
        if self.speech is None or not frames:
            return None
        codes = torch.full((len(ids), self.speech.codebooks), -1)
        codes[(ids == self.speech.frame_id) | (ids == self.speech.delay_id)] = torch.cat(list(frames))
        return codes

    def _token(self, id: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(id))

    def chunk_ids(self, clip: AudioClip) -> Tensor:
        """[P] int64: a chunk of a stream with its delimiters, ready for the policy's turn."""
        pieces = self.backbone.chunk(clip)
        text = "".join(
            str(self.backbone.audio_token) * self.audio_tokens(p) if isinstance(p, AudioClip) else p for p in pieces
        )
        return torch.tensor(self.tokenizer.encode(text, add_special_tokens=False), dtype=torch.long)

    @property
    def end_id(self) -> int:
        """The token that ends a turn in supervised examples, and where something must be put for it."""
        end = self.tokenizer.get_added_vocab().get("<|im_end|>", self.tokenizer.eos_token_id)
        return int(end)

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    # -- forward ---------------------------------------------------------------------------------------------------

    def embed(
        self, ids: Tensor, clips: Sequence[AudioClip], sampled: Tensor | None = None, codes: Tensor | None = None
    ) -> Tensor:
        """[T, H] for ids [T]: token embeddings with each audio placeholder replaced by what was heard there.

        Where `sampled` [T] is true a placeholder is one that the policy wrote itself: a token like any other. Rows with
        `codes` [T, Q] of 0 or more are frames.
        """
        embeds = self.embed_rows(ids, codes)
        ids = ids.to(self.device)
        rows = ids == self.audio_token_id
        if sampled is not None:
            rows &= ~sampled.to(self.device)
        if clips:
            audio = self.encode_audio(clips)
            _check_places(rows, [len(a) for a in audio])
            embeds = embeds.masked_scatter(rows[:, None], torch.cat(audio).to(embeds.dtype))
        return embeds

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
        """What the decoder must be told beside its inputs when their codes are [..., Q] (None: all text)."""
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
        """Log-probs and entropies of the sampled tokens; with a `value_head` also V of the state before each.

        `audio_temperature`: of codes, where it is not the same.
        """
        with self.autocast():
            before = self.before_sampled(batch)
            targets = batch.ids[batch.loss_mask].to(self.device)
            codes = None
            if batch.codes is None:
                head = self.backbone.head(self.model)
                logprobs, entropy = fused_logprobs(before, head.weight, targets, temperature)
            else:
                codes, entropy = self._of_rows(before, targets, batch, temperature, audio_temperature or temperature)
                logprobs = codes.sum(1)
        return PolicyOutput(logprobs, entropy, None if value_head is None else value_head(before), codes)

    def _of_rows(
        self, before: Tensor, targets: Tensor, batch: PackedBatch, temperature: float, audio_temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probs [N, Q] by code, a token's in column 0, and joint entropies [N], of text and frames together."""
        assert batch.codes is not None and batch.code_mask is not None and self.speech is not None
        codes, code_mask = batch.codes[batch.loss_mask], batch.code_mask[batch.loss_mask]
        is_frame = codes[:, 0] >= 0
        text, frames = (~is_frame).nonzero()[:, 0], is_frame.nonzero()[:, 0]
        # The head without BOS: a code behind it moves up by one.
        places = codes[frames] - (codes[frames] > self.speech.bos).long()
        wanted = torch.where(code_mask[frames], places, IGNORE).to(self.device)
        text, frames = text.to(self.device), frames.to(self.device)
        logprobs = before.new_zeros(codes.shape, dtype=torch.promote_types(before.dtype, torch.float32))
        entropy = logprobs.new_zeros(len(codes))
        if len(text) or not len(frames):  # an empty batch still has something to differentiate
            head = self.backbone.head(self.model)
            found, spread = fused_logprobs(before[text], head.weight, targets[text], temperature)
            logprobs = logprobs.index_copy(0, text, nn.functional.pad(found[:, None], (0, codes.shape[1] - 1)))
            entropy = entropy.index_copy(0, text, spread)
        if len(frames):
            weight = self.speech.offered_head(self.code_head.weight)
            found, spread = fused_codebook_logprobs(
                before[frames], weight, wanted, self.speech.codebooks, audio_temperature
            )
            logprobs = logprobs.index_copy(0, frames, found)
            entropy = entropy.index_copy(0, frames, spread.sum(1))
        return logprobs, entropy

    def before_sampled(self, batch: PackedBatch) -> Tensor:
        """The hidden states [N, H] that predict the sampled tokens."""
        return self.hidden(batch)[batch.predecessor[batch.loss_mask].to(self.device)]

    def hidden(self, batch: PackedBatch) -> Tensor:
        """The decoder's last hidden states [T, H] of a packed batch."""
        decoder, routed = self.backbone.decoder(self.model), self.routed(batch.codes)
        # Checkpointed layers run again in the backward pass, after this block.
        again = self.config.gradient_checkpointing and torch.is_grad_enabled()
        with nullcontext(False) if again else by_span(decoder) as possible:
            if possible:
                seen: dict[str, Any] = {"attention_mask": None, "spans": spans_of(batch.span_ids, batch.span_parents)}
            else:
                mask = attention_mask(batch.span_ids, batch.span_parents).to(self.device)
                seen = {"attention_mask": mask[None, None]}
            out = decoder(
                inputs_embeds=self.embed(batch.ids, batch.audio, batch.loss_mask, batch.codes)[None],
                position_ids=batch.position_ids[None].to(self.device),
                use_cache=False,
                **routed,
                **seen,
            )
        return out.last_hidden_state[0]

    def autocast(self) -> Any:
        if not self.config.autocast:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    # -- disk ------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """A Hugging Face model folder in safetensors; with LoRA, an adapter folder that names its base model."""
        if not torch.cuda.is_available():  # DeepSpeed, which transformers imports here if it can, would warn of that
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if self.adapter is None:
            self.model.save_pretrained(str(folder))
        else:
            self.adapter.save_pretrained(str(folder))
            beside = {n: p.detach().contiguous() for n, p in self.trainable().items() if ".lora_" not in n}
            if beside:
                save_file(beside, Path(folder) / NON_LORA_WEIGHTS)
        self.tokenizer.save_pretrained(str(folder))
        if self.extractor is not None:
            self.extractor.save_pretrained(str(folder))

    @torch.no_grad()
    def load_weights(self, weights: Weights, where: str = "weights") -> None:
        """Copy `weights` into the parameters of the same name, in place."""
        own = dict(self.model.named_parameters())
        if isinstance(weights, Mapping):  # a mistake in names that are known changes nothing yet
            for name, tensor in weights.items():
                check_weight(name, tensor, own, where)
        for name, tensor in named(weights):
            check_weight(name, tensor, own, where)
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)
        self.weights_changed()


def named(weights: Weights) -> Iterable[tuple[str, Tensor]]:
    return weights.items() if isinstance(weights, Mapping) else weights


def check_weight(name: str, tensor: Tensor, own: Mapping[str, Tensor], where: str) -> None:
    """Raise ValueError unless a model of parameters `own` has this one."""
    if name not in own:
        raise ValueError(f"{where}: weight {name!r} is not in this model; was it saved by another one?")
    if own[name].shape != tensor.shape:
        shapes = f"{tuple(tensor.shape)} there, {tuple(own[name].shape)} here"
        raise ValueError(f"{where}: weight {name!r} has another shape ({shapes}): another architecture")


class Reference:
    """The policy it was made from, as it was then. Weights that are never trained are shared, not copied.

    `base`: the model below the policy's adapter, whatever the adapter is now.
    """

    def __init__(self, policy: AudioPolicy, base: bool = False):
        self._policy = policy
        if base or (policy.has_fresh_adapter() and policy.config.audio == "frozen"):
            self._frozen = policy  # the base model under a fresh adapter is the reference
            return
        self._frozen = policy.copy()
        self._frozen.requires_grad_(False)

    @property
    def is_base(self) -> bool:
        return self._frozen is self._policy

    @property
    def policy(self) -> AudioPolicy:
        """The frozen copy."""
        if self.is_base:
            raise ValueError("this reference is the model below an adapter, not a policy of its own")
        return self._frozen

    @torch.no_grad()
    def forward(
        self, batch: PackedBatch, temperature: float = 1.0, audio_temperature: float | None = None
    ) -> PolicyOutput:
        with self._base_weights():
            return self._frozen.forward(batch, temperature, audio_temperature=audio_temperature)

    @contextmanager
    def _base_weights(self) -> Iterator[None]:
        if self.is_base:
            with self._policy.adapter.disable_adapter():
                yield
        else:
            yield


def _check_places(rows: Tensor, lengths: Sequence[int]) -> None:
    """Every run of placeholders in `rows` [T] bool is filled by whole clips: audio cannot slip into another prompt."""
    ends = rows & ~torch.cat([rows[1:], rows.new_zeros(1)])
    runs = rows.cumsum(0)[ends].tolist()
    clips = list(accumulate(lengths))
    if (runs[-1:] or [0]) != (clips[-1:] or [0]) or not set(runs) <= set(clips):
        raise ValueError(
            f"runs of audio placeholders end after {runs} tokens, but clips after {clips}: audio and text do not match"
        )


class _ClipCache:
    """Heard clips, least recently used dropped first, bounded in bytes."""

    def __init__(self, max_bytes: int):
        self._max_bytes, self._bytes = max_bytes, 0
        self._clips: OrderedDict[str, Tensor] = OrderedDict()

    def get(self, key: str) -> Tensor | None:
        if key in self._clips:
            self._clips.move_to_end(key)
            return self._clips[key]
        return None

    def clear(self) -> None:
        self._clips.clear()
        self._bytes = 0

    def put(self, key: str, heard: Tensor) -> None:
        self._clips[key] = heard
        self._bytes += heard.nbytes
        while self._bytes > self._max_bytes and len(self._clips) > 1:
            _, dropped = self._clips.popitem(last=False)
            self._bytes -= dropped.nbytes


def _reserved(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Special tokens, which no message may contain."""
    return tuple(t for t in tokenizer.get_added_vocab() if t.startswith("<|"))


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a turn: the tokenizer's, the generation config's, and ChatML's <|im_end|>."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = set(configured if isinstance(configured, list) else [configured])
    ids |= {tokenizer.eos_token_id, tokenizer.get_added_vocab().get("<|im_end|>")}
    return tuple(sorted(i for i in ids if i is not None))


def _add_lora(model: PreTrainedModel, decoder: nn.Module, config: LoraConfig) -> Any:
    """Put adapters on the decoder's linear layers only; the audio tower shares some of their names."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    prefix = next(name for name, module in model.named_modules() if module is decoder)
    targets = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.startswith(prefix + ".")
        and name.rsplit(".", 1)[-1] in config.target_modules
    ]
    if not targets:
        raise ValueError(f"lora.target_modules {list(config.target_modules)}: the decoder has no linear of these names")
    return get_peft_model(
        model,
        PeftLoraConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=targets),
    )
