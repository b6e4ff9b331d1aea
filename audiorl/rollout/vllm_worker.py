"""What runs inside vLLM: our model class and the loading of weights. Only vLLM imports this file.

vLLM's own audio models read prompts with processors of their own, and its Omni models want the whole model's
checkpoint, a vision encoder and a processor for video. `Listener` is the audio encoder and the decoder that
`AudioPolicy` uses, and takes features that were computed outside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder, Qwen2AudioMultiModalProjector
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.models.interfaces import SupportsLoRA, SupportsMRoPE, SupportsMultiModal
from vllm.model_executor.models.module_mapping import MultiModelKeys
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, init_vllm_registered_model, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo
from vllm.platforms import current_platform

from audiorl.models import Backbone
from audiorl.models.families.qwen2_audio import Qwen2Audio
from audiorl.models.families.qwen_omni import Qwen3Omni, QwenOmni
from audiorl.models.features import to_weights
from audiorl.models.weights import Weights
from audiorl.rollout.vllm_weights import load_checked
from audiorl.rollout.weight_transfer import SyncError, WeightReceiver

ARCHITECTURE = "AudiorlListener"
LORA_ID = 1
"""vLLM's number of the one adapter that it is sent."""
LONGEST_CLIP = 4096
"""Audio tokens of the longest clip that vLLM keeps room for, 163 s of Qwen2.5-Omni."""


@dataclass(frozen=True)
class Family:
    """The parts of a model: transformers' audio encoder, a projector where the encoder has none, and vLLM's decoder."""

    backbone: Backbone
    audio_encoder: Any
    decoder: str
    projector: Any = None


FAMILIES = {
    "qwen2_5_omni_thinker": Family(QwenOmni("qwen2_5_omni"), Qwen2_5OmniAudioEncoder, "Qwen2ForCausalLM"),
    "qwen3_omni_moe_thinker": Family(Qwen3Omni("qwen3_omni_moe"), Qwen3OmniMoeAudioEncoder, "Qwen3MoeForCausalLM"),
    "qwen2_audio": Family(
        Qwen2Audio("qwen2_audio"), Qwen2AudioEncoder, "Qwen2ForCausalLM", Qwen2AudioMultiModalProjector
    ),
}
"""By model_type."""


@dataclass(frozen=True)
class ListenerOnly:
    """Gives vLLM the config of what listens and writes: of an Omni model the thinker, whose checkpoint may be its own.

    tied: whether the head is the embedding; a config may leave that open.
    """

    tied: bool

    def __call__(self, config: Any) -> Any:
        listener = getattr(config, "thinker_config", config)
        if not hasattr(listener, "audio_config"):
            return config  # vLLM first asks with an empty one
        listener.text_config.tie_word_embeddings = listener.tie_word_embeddings = self.tied
        listener.architectures = [ARCHITECTURE]
        return listener


class ClipInfo(BaseProcessingInfo):
    """Prompts hold audio and nothing else."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"audio": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"audio": min(seq_len, LONGEST_CLIP)}


def _never(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError


class NoDummies(BaseDummyInputsBuilder):
    """vLLM would profile and warm up with made-up prompts; it is told not to."""

    get_dummy_text = get_dummy_mm_data = _never


class NoProcessor(BaseMultiModalProcessor):
    """Prompts come with their token ids, placeholders and features."""

    _get_mm_fields_config = _get_prompt_updates = _never


@MULTIMODAL_REGISTRY.register_processor(NoProcessor, info=ClipInfo, dummy_inputs=NoDummies)
class Listener(nn.Module, SupportsMultiModal, SupportsMRoPE, SupportsLoRA):
    """The audio encoder of transformers before vLLM's decoder.

    Features are encoded by the code of `AudioPolicy`; the first `skip` audio tokens are context.
    """

    # One after the other: names of files and names of transformers' parameters become ours.
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "talker.": None,
            "token2wav.": None,
            "code2wav.": None,
            "thinker.": "",
            "visual.": None,
            "language_model.model.model.": "language_model.model.",  # so transformers saves Qwen2-Audio
            "model.language_model.": "language_model.model.",
            "model.audio_tower.": "audio_tower.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            "model.": "language_model.model.",
            "lm_head.": "language_model.lm_head.",
        }
    )

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    audio_tower: Any
    language_model: Any

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__()
        config = self.config = vllm_config.model_config.hf_config
        family = FAMILIES[config.model_type]
        with self._mark_tower_model(vllm_config, "audio"):  # type: ignore[operator]
            self.audio_tower = family.audio_encoder(config.audio_config)
            if family.projector is not None:
                self.multi_modal_projector = family.projector(config)
        with self._mark_language_model(vllm_config):  # type: ignore[operator]
            self.language_model = init_vllm_registered_model(
                vllm_config=vllm_config,
                prefix=maybe_prefix(prefix, "language_model"),
                hf_config=config.text_config,
                architectures=[family.decoder],
            )
        self._backbone = family.backbone
        # It warns of every layer of the audio encoder that is named like one of the decoder with an adapter.
        logging.getLogger("vllm.lora.model_manager").setLevel(logging.ERROR)
        if current_platform.is_cpu():
            for module in self.modules():
                if isinstance(module, RoutedExperts):
                    _make_kernels_again(module.quant_method)

    def get_mm_mapping(self) -> MultiModelKeys:
        """Name the modules of the decoder: the adapter is put there only."""
        towers = ["audio_tower", "multi_modal_projector"]
        return MultiModelKeys.from_string_field(language_model="language_model", tower_model=towers)

    def embed_multimodal(self, *, skip: Sequence[Tensor], **features: Sequence[Tensor]) -> list[Tensor]:
        """Return one [tokens, H] for each clip. Clips are encoded one at a time: none depends on its batch."""
        # As backbones expect it: Omni models have the encoder at the top, Qwen2-Audio has its parts in `model`.
        model: Any = SimpleNamespace(audio_tower=self.audio_tower, model=self)
        embeddings = []
        weight = next(self.audio_tower.parameters())
        for i, context in enumerate(skip):
            clip = to_weights({name: of_clips[i] for name, of_clips in features.items()}, weight)
            (tokens,) = self._backbone.encode_audio(model, [clip])
            embeddings.append(self._backbone.project(model, tokens[int(context) :]))
        return embeddings

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: Any) -> tuple[Tensor, int]:
        """For text and audio the three rows of positions are equal: those of the tokens."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        return self.language_model.model(input_ids, positions, intermediate_tensors, inputs_embeds=inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.language_model.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


def _make_kernels_again(method: Any) -> None:
    """Make a kernel of experts at each loading: vLLM for CPUs arranges their weights when it makes one."""
    process = method.process_weights_after_loading

    def process_again(layer: Any) -> None:
        method.moe_kernel = None
        process(layer)

    method.process_weights_after_loading = process_again


class Loading:
    """Methods added to a vLLM worker: new weights in place, a bucket at a time. An adapter is replaced as a whole."""

    _audiorl_receiver: WeightReceiver | None = None
    _audiorl_lora: PEFTHelper | None = None
    _audiorl_adapter: dict[str, Tensor]
    _audiorl_reloading = False

    def audiorl_set_lora(self, rank: int, alpha: int, layers: Sequence[str]) -> None:
        """Set the configuration of the adapters that will come."""
        self._audiorl_lora = PEFTHelper(r=rank, lora_alpha=alpha, target_modules=list(layers))

    def audiorl_connect(self, address: str, first: int, receivers: int, options: Mapping[str, Any]) -> str | None:
        """Connect to a sender of weights; of an engine of several workers the first is receiver `first`. Returns None,
        or why there is no connection."""
        self.audiorl_disconnect("another connection was made")
        try:
            self._audiorl_receiver = WeightReceiver(address, first + self.rank, receivers, **options)  # type: ignore[attr-defined]
        except SyncError as error:
            return str(error)
        return None

    def audiorl_disconnect(self, reason: str) -> None:
        if self._audiorl_receiver is not None:
            self._audiorl_receiver.close(reason)
        self._audiorl_receiver = None

    def audiorl_receive(self, version: int, shapes: Mapping[str, Sequence[int]]) -> str | None:
        """Load what the sender sends next; each worker keeps its part of a tensor. Returns None, or why it did not
        arrive. Weights that are not in `shapes`, the model's, are an error at the sender too."""
        if self._audiorl_receiver is None:
            return "a worker of vLLM has no connection for weights"
        parameters = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        own = (self.audiorl_begin, self.audiorl_load, self.audiorl_replace_adapter, self.audiorl_end)
        methods: dict[str, Callable[..., object]] = {method.__name__: method for method in own}

        def load(weights: Weights, version: int) -> None:
            load_checked(weights, parameters, lambda method, *args: methods[method](*args))

        try:
            self._audiorl_receiver.update(load, version)
        except SyncError as error:
            self.audiorl_disconnect(str(error))
            return str(error)
        return None

    def audiorl_begin(self) -> None:
        self._audiorl_adapter, self._audiorl_reloading = {}, False

    def audiorl_load(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Load weights in place. An adapter's matrices are collected for `audiorl_replace_adapter`."""
        runner, device = self.model_runner, self.device  # type: ignore[attr-defined]
        base = [(name, tensor) for name, tensor in weights if ".lora_" not in name]
        for name, tensor in weights:
            if ".lora_" in name:
                # A copy: vLLM multiplies B by alpha / rank in place. In one process these are the trainer's matrices.
                self._audiorl_adapter[name.replace(".default.", ".")] = tensor.to(device, copy=True)
        if not base:
            return
        if not self._audiorl_reloading:
            # It warns of every layer that an update leaves as it is.
            logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
            initialize_layerwise_reload(runner.get_model())
            self._audiorl_reloading = True
        with torch.device(device):
            runner.get_model().load_weights((n, t.to(device, runner.model_config.dtype)) for n, t in base)

    def audiorl_replace_adapter(self) -> None:
        """Put the collected matrices in the place of the last adapter, if any came.

        Raises ValueError for a matrix of a layer that vLLM runs without an adapter.
        """
        if not self._audiorl_adapter:
            return
        assert self._audiorl_lora is not None, "audiorl_set_lora first"
        runner, device = self.model_runner, self.device  # type: ignore[attr-defined]
        manager = runner.lora_manager._adapter_manager
        mapper = getattr(runner.get_model(), "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            LORA_ID,
            self._audiorl_adapter,
            self._audiorl_lora,
            device=device,
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        layers = {*manager.modules, *(child for several in manager.packed_modules.values() for child in several)}
        if strange := sorted(set(adapter.loras) - layers):
            raise ValueError(f"weights for vLLM: it runs {strange[0]!r} without an adapter; send merged weights")
        manager.remove_adapter(LORA_ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(LORA_ID)

    def audiorl_end(self) -> None:
        runner = self.model_runner  # type: ignore[attr-defined]
        self._audiorl_adapter = {}
        if self._audiorl_reloading:
            with torch.device(self.device):  # type: ignore[attr-defined]
                finalize_layerwise_reload(runner.get_model(), runner.model_config)
        runner.reset_encoder_cache()


ModelRegistry.register_model(ARCHITECTURE, Listener)
