"""How much GPU memory a run needs, by part and by phase of a step, from arithmetic alone (docs/scaling.md).

Model states follow ZeRO (Rajbhandari et al., arXiv 1910.02054) and AdamW (arXiv 1711.05101), an optimizer on the CPU
ZeRO-Offload (arXiv 2101.06840), the key-value cache vLLM (arXiv 2309.06180), activations Korthikanti et al. (arXiv
2205.05198) for the layers that audiorl trains: tests hold them against what `saved_tensors_hooks` sees. What cannot be
computed are fields of `Assumptions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from audiorl.config import LoraConfig, ModelConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.config.checks import pass_tokens
from audiorl.config.distributed import RuntimeConfig
from audiorl.models.audio_encoder import MIN_MS, PASS_SECONDS
from audiorl.plan.models import ModelSize, Shape, Tower, size_of
from audiorl.rollout.vllm import SERVED

GIB = 2**30
BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}
ROOM = 0.9
"""Of a GPU's free memory, what layers may keep that could be computed again."""
PHASES = ("generate", "score", "backward", "step", "sync")
"""Phases of a step: the engine generates; log-probs and values without gradients; backward passes; the optimizer;
weights on their way to the engine. The phase that needs most decides."""
_ZERO_BUCKET, _ZERO_LIVE = 500_000_000, 1_000_000_000
"""Gradients that ZeRO reduces at once, and weights that stage 3 keeps gathered (DeepSpeed's defaults), in numbers."""
LOGITS_CHUNK, LOGITS_KEEP = 2**26, 2**31
"""Logits worked on at once, and bytes kept for the backward pass (defaults of `fused_logprobs`)."""
ATTENTION = {"auto": "varlen", "varlen": "varlen", "flex": "varlen", "sdpa": "span", "eager": "mask"}
"""What the kernel of each `ModelConfig.attention` keeps of a packed row on a GPU."""


@dataclass(frozen=True)
class Assumptions:
    """Numbers that depend on drivers, libraries and settings, not on the model. Measure yours and set them."""

    context_gib: float = 0.6
    """CUDA context and libraries of one process."""
    nccl_gib: float = 0.5
    """Communication buffers, with more than one rank."""
    fragmentation: float = 0.05
    """Of what the trainer allocates, lost between allocations."""
    engine_workspace_gib: float = 2.0
    """An engine's activations and captured graphs."""
    engine_asleep_gib: float = 1.5
    """What a sleeping engine does not give back."""
    sync_bucket_mib: int = 512
    """Weights sent to an engine at a time, at least the largest tensor."""


@dataclass(frozen=True)
class PlanOptions:
    """A run's options, with the defaults of the recipes, and what a plan must know besides."""

    runtime: RuntimeConfig = RuntimeConfig()
    model: ModelConfig = ModelConfig(dtype="auto", gradient_checkpointing="auto")
    """A dtype of auto counts as bfloat16, the type of the released checkpoints."""
    rl: RLConfig = RLConfig()
    optim: OptimConfig = OptimConfig()
    """`master_weights` counts."""
    sampling: SamplingConfig = SamplingConfig()
    """Every response is counted as `max_new_tokens` long."""

    gpu_gib: float = 80.0
    """Memory of one GPU, GiB."""
    gpus_per_node: int = 8
    """GPUs of one machine; counts where the run has more."""
    prompt_tokens: int = 600
    """Tokens of a prompt with its audio, of which a second has 12.5 or 25."""
    clip_seconds: float = 20.0
    """Length of a prompt's audio, seconds."""
    clips: int = 8
    """Clips that a rank encodes in an update: a trained audio encoder keeps all of them, one that is not as many as
    fit into a pass of 120 seconds."""
    speech_share: float = 0.0
    """Fraction of the sampled tokens that are codec frames, in [0, 1]."""
    assume: Assumptions = field(default_factory=Assumptions)

    def check(self, shape: Shape) -> None:
        """Raise ValueError for options that contradict each other or the model."""
        r, model, tp, per_node = self.runtime, self.model, self.tensor_parallel, self.gpus_per_node
        r.check()
        if r.critics:
            self.rl.check_separate_critic(r.critics)
        for name in ("gpu_gib", "gpus_per_node", "prompt_tokens", "clips"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name):g}; it must be above 0")
        tokens, row = self.prompt_tokens + self.sampling.max_new_tokens, pass_tokens(self.rl)
        how, vllm = "fsdp" if r.fsdp else f"zero {r.zero}", r.engine == "vllm"
        alone = r.sharded and r.ranks == 1 and not r.offload
        indivisible = shape.kv_heads % tp and tp % shape.kv_heads
        for wrong, message in (
            (not 0 <= self.speech_share <= 1, f"--speech-share is {self.speech_share}; it must be from 0 to 1"),
            (
                self.gpus > per_node and self.gpus % per_node,
                f"the run has {self.gpus} GPUs, which do not fill nodes of --gpus-per-node {per_node}",
            ),
            (alone, f"--runtime.{how} divides nothing on one trainer GPU; leave it out, or take more GPUs"),
            (
                model.autocast and model.dtype != "float32",
                f"--model.autocast is for float32 weights, not {model.dtype}; leave it out",
            ),
            (tp > per_node, f"--runtime.engine-gpus {tp}: an engine lies within a node"),
            (row < tokens, f"--rl.micro-batch-tokens {row} do not hold a prompt and response of {tokens}"),
            (
                vllm and shape.heads % tp,
                f"--runtime.engine-gpus {tp} does not divide the {shape.heads} attention heads",
            ),
            (
                vllm and indivisible,
                f"--runtime.engine-gpus {tp} and {shape.kv_heads} key-value heads: neither divides the other",
            ),
            (vllm and shape.codes, "vLLM does not serve models that write codes; use --runtime.engine hf"),
            (vllm and shape.kind not in SERVED, f"vLLM serves no policy of {shape.kind}; use --runtime.engine hf"),
            (self.speech_share and not shape.codes, "--speech-share is for a model that writes codes; leave it out"),
        ):
            if wrong:
                raise ValueError(message)

    @property
    def tensor_parallel(self) -> int:
        """GPUs of one engine."""
        return 1 if self.runtime.shares_gpus else self.runtime.engine_gpus

    @property
    def gpus(self) -> int:
        """GPUs of the whole run."""
        r = self.runtime
        return r.ranks + r.references + r.critics + (0 if r.shares_gpus else r.engines * r.engine_gpus)

    @property
    def reference(self) -> Literal["none", "separate", "lora", "copy"]:
        """lora: the model below the adapter. copy: a second copy of what is trained."""
        if not (self.rl.needs_reference or self.rl.distill.from_reference_process):
            return "none"
        if self.runtime.references:
            return "separate"
        return "lora" if self.model.lora.rank and self.model.audio == "frozen" else "copy"

    @property
    def critic(self) -> Literal["none", "separate", "shared", "own"]:
        """shared: a head on the policy. own: a model on every trainer."""
        if self.rl.advantage != "gae":
            return "none"
        return "separate" if self.runtime.critics else "shared" if self.rl.critic.shared else "own"

    def size(self, model: str) -> ModelSize:
        """Return the parameters of a released model or a model folder under these options."""
        return size_of(model, self.model)


# -- activations -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Precision:
    """Bytes of a number: `weights` as held, `compute` in matrix products, `adapter` of low-rank weights."""

    weights: int
    compute: int
    adapter: int


@dataclass(frozen=True)
class PackedRow:
    """One packed row: its tokens, those that are predicted, and what its responses see of their prompts.

    `copied`: the rows that a response sees, summed over responses. `pairs`: (its rows) x (those that it sees), summed.
    """

    tokens: int
    predicted: int
    copied: int = 0
    pairs: int = 0


def packed_row(budget: int, prompt: int, response: int, group: int, share_prompts: bool = True) -> PackedRow:
    """Fill a row of at most `budget` tokens with responses whose groups share a prompt (or repeat it)."""
    if not share_prompts:
        sequences = budget // (prompt + response)
        return PackedRow(sequences * (prompt + response), sequences * response)
    whole, rest = divmod(budget, prompt + group * response)
    more = max(rest - prompt, 0) // response
    sizes = [group] * whole + [more] * (more > 0)
    shared = sum(n for n in sizes if n > 1)  # a single response lies behind its prompt, in one span with it
    seen = shared * (prompt + response)
    return PackedRow(len(sizes) * prompt + sum(sizes) * response, sum(sizes) * response, seen, seen * response)


def layer_bytes(shape: Shape, row: PackedRow, precision: Precision, attention: str) -> float:
    """Count what one decoder layer keeps of a packed row.

    With trained weights, per token, for width H, A = heads x head width, K the same of keys, feed-forward width I, c
    bytes in products and r in the residual stream: inputs of the two norms 2rH and their outputs 2cH; queries, keys,
    values and the output 2c(A + K); the softmax's logarithmic sum 4 x heads; the gated block 3cI (4cI of experts). A
    frozen weight keeps no input, its adapter does, cast to the adapter's dtype.
    """
    t, c, h, lora = row.tokens, precision.compute, shape.hidden, shape.rank > 0
    a, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # Under a mask keys are repeated for every query head. Otherwise a response has its own copy of the keys that it
    # sees, and span by span the pieces of the output are stored in addition to the whole.
    keys = 2 * t * a if attention == "mask" else 2 * (t + row.copied) * k
    masks = {"mask": t * t, "span": row.pairs, "varlen": 0}[attention]
    attended = c * ((3 if attention == "span" else 2) * t * a + keys + masks) + 4 * shape.heads * t
    stream, autocast = max(precision.weights, c), c != precision.weights
    norms = 2 * (stream * h + 4) + (c * (a + k) + 4 * (shape.heads + shape.kv_heads) if shape.qk_norm else 0)
    if lora:
        ranks = len(shape.adapted) * shape.rank
        inputs = c * (sum(shape.adapted) + ranks)
        if not autocast and precision.adapter != c:  # a copy for each adapter
            inputs = precision.adapter * (sum(shape.adapted) + ranks)
        elif not autocast:
            wide = shape.intermediate * (shape.intermediate in shape.adapted)
            inputs = c * (min(sum(w == h for w in shape.adapted), 2) * h + wide + ranks)
    else:
        inputs = 2 * c * h
    ffn = ((2 if lora else 3) + (shape.experts > 1)) * shape.intermediate
    ffn += (1 if lora else 2) * h * (shape.experts > 1)  # what is gathered for the experts, and weighed
    ffn += 2 * h * (shape.codes > 0)  # rows sorted by kind and put back
    return t * (norms + inputs + c * shape.experts * ffn) + attended


def decoder_bytes(shape: Shape, row: PackedRow, precision: Precision, attention: str, again: int) -> float:
    """Count what the decoder keeps of a row where `again` of its layers are computed again in the backward pass (Chen
    et al., arXiv 1604.06174) and keep their input only. The backward pass needs `again_bytes` besides."""
    stream = row.tokens * shape.hidden * max(precision.weights, precision.compute)
    return (shape.layers - again) * layer_bytes(shape, row, precision, attention) + (again + 1) * stream


def again_bytes(shape: Shape, row: PackedRow, precision: Precision, attention: str, again: int) -> float:
    """Count what the layer that is computed again keeps: nothing new where others, which come first, are freed."""
    return layer_bytes(shape, row, precision, attention) if again == shape.layers else 0.0


def work_bytes(shape: Shape, row: PackedRow, precision: Precision) -> float:
    """Estimate one layer's temporary memory."""
    wide = 3 * shape.experts * shape.intermediate + 2 * shape.hidden
    return row.tokens * (precision.compute * wide + 8 * shape.hidden)


def layers_again(shape: Shape, row: PackedRow, precision: Precision, attention: str, room: float) -> int:
    """Return how many layers must be computed again in the backward pass for it to fit into `room` bytes: the first of
    the decoder, whose turn is last. All, where not even that is enough."""
    logits = logits_bytes(row.predicted, shape.vocabulary, precision.compute, True, LOGITS_CHUNK, LOGITS_KEEP)
    for again in range(shape.layers):
        kept = decoder_bytes(shape, row, precision, attention, again)
        if kept + max(logits, work_bytes(shape, row, precision)) <= room:
            return again
    return shape.layers


def logits_bytes(predicted: int, vocabulary: int, c: int, gradient: bool, chunk: int, keep: int) -> float:
    """Count logits as `audiorl.algos.logprobs` treats them: tiles of `chunk` in float32 and, with a gradient, up to
    `keep` bytes of logits that wait for it."""
    logits = predicted * vocabulary
    return min(logits, chunk) * (c + 8) + (4 * predicted + min(logits * c, keep) if gradient else 0)


def clips_at_once(tower: Tower, seconds: float, clips: int) -> int:
    """Count the clips of a pass through an audio encoder, as `AudioEncoder` fills it on a GPU."""
    most = PASS_SECONDS / max(seconds, tower.window, MIN_MS / 1000)
    return min(clips, max(int(most), 1)) if tower.together else 1


def tower_bytes(tower: Tower, seconds: float, clips: int, c: int, trained: bool, checkpointing: bool) -> float:
    """Count an audio encoder's activations. Frozen, it keeps nothing between passes of `clips_at_once`; trained, it
    keeps every clip of an update, because it is trained once at the end of it."""
    frames, at_once = max(seconds, tower.window) * tower.frame_rate, clips_at_once(tower, seconds, clips)
    layer, ends = frames * tower.kept, frames * tower.ends
    if not trained:
        return c * at_once * (layer + ends)
    if checkpointing:
        return c * (clips * (frames * tower.hidden * tower.layers + ends) + at_once * layer)
    return c * clips * (tower.layers * layer + ends)


def kv_bytes_per_token(shape: Shape, number: int, tensor_parallel: int = 1) -> int:
    """Return 2 x layers x heads of keys x head width x bytes of a number: keys and values of one token. Each of
    `tensor_parallel` ranks holds its share of the heads, at least one."""
    return 2 * shape.layers * -(-shape.kv_heads // tensor_parallel) * shape.head_dim * number


# -- parts of a GPU ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Bytes of one thing in each of the phases, and how they come about."""

    name: str
    how: str
    bytes: tuple[float, ...]


@dataclass(frozen=True)
class Cache:
    """An engine's key-value cache, of one GPU: bytes of a token there, tokens of a whole engine, and what they hold.

    `sequences` of prompt and response each; `shared` where the group's prompt is stored once (prefix caching).
    """

    token_bytes: int
    tokens: int
    sequences: int
    shared: int


@dataclass(frozen=True)
class GPU:
    """What lies on every GPU of one kind, each of `size` bytes."""

    name: str
    count: int
    size: float
    parts: tuple[Part, ...]
    cache: Cache | None = None

    @property
    def totals(self) -> tuple[float, ...]:
        """Bytes in each phase."""
        return _sums(self.parts)

    @property
    def peak(self) -> float:
        return max(self.totals)

    @property
    def fits(self) -> bool:
        return self.peak <= self.size and (self.cache is None or self.cache.sequences >= 1)


@dataclass(frozen=True)
class MemoryPlan:
    """What a run puts on its GPUs, and in the CPU memory of each node (bytes)."""

    size: ModelSize
    gpus: tuple[GPU, ...]
    host: float

    @property
    def fits(self) -> bool:
        return all(gpu.fits for gpu in self.gpus)


def _sums(parts: Sequence[Part]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*(p.bytes for p in parts), strict=True)))


def make_part(name: str, how: str, always: float = 0.0, **phases: float) -> Part:
    """Make a part of `always` bytes, but in `phases`."""
    return Part(name, how, tuple(phases.get(phase, always) for phase in PHASES))


def _text(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def make_plan(size: ModelSize, options: PlanOptions) -> MemoryPlan:
    """Plan the memory of a run. Raises ValueError for options that contradict each other or the model."""
    options.check(size.shape)
    return _Planner(size, options).plan()


class _Planner:
    def __init__(self, size: ModelSize, options: PlanOptions):
        r = options.runtime
        self.size, self.options, self.runtime, self.assume = size, options, r, options.assume
        wide = BYTES[options.model.dtype]
        # peft holds adapters of a 16-bit model in float32; DeepSpeed casts everything to the model's dtype.
        self.precision = Precision(wide, 2 if options.model.autocast else wide, wide if r.zero else 4)
        self.held, self.copied = self._bytes(size.total - size.adapters), self._bytes(size.trained)
        self.all_weights = f"{_text(size.total)} x {wide} bytes"
        self.shards_weights = r.fsdp or r.zero == 3
        self.sends_adapter = size.shape.rank > 0 and r.engine == "vllm" and r.engine_lora != "merged"
        self.row = packed_row(
            pass_tokens(options.rl),
            options.prompt_tokens,
            options.sampling.max_new_tokens,
            options.rl.group_size,
            options.rl.share_prompts,
        )
        self.again = size.shape.layers if options.model.gradient_checkpointing else 0

    def _bytes(self, weights: int) -> float:
        return weights * self.precision.weights + self.size.adapters * self.precision.adapter

    def plan(self) -> MemoryPlan:
        """Count everything; with checkpointing of "auto", under which as few layers as fit are computed again."""
        alone = not self.runtime.sharded and self.options.critic not in ("own", "separate")
        if self.options.model.gradient_checkpointing == "auto" and alone:
            for again in range(self.size.shape.layers):
                self.again = again
                gpu = self._plan().gpus[0]
                if gpu.totals[PHASES.index("backward")] <= ROOM * gpu.size:
                    break
            else:
                self.again = self.size.shape.layers
        return self._plan()

    def _plan(self) -> MemoryPlan:
        r, o = self.runtime, self.options
        trainer, (engine, cache) = self.trainer(), self.engine()
        if r.shares_gpus:
            processes = 2 if r.engine == "vllm" else 1
            gpus = [self._gpu("trainer and engine", r.ranks, r.ranks, trainer, engine, cache, processes)]
        else:
            trainer += [part for part in engine if part.name == "weight sync"]  # one sends, the other receives
            gpus = [self._gpu("trainer", r.ranks, r.ranks, trainer)]
            gpus.append(self._gpu("engine", r.engines * r.engine_gpus, o.tensor_parallel, [], engine, cache))
        if o.reference == "separate":
            parts = [make_part("weights", self.all_weights, self.held), *self._autocast(1, "score"), *self._teacher()]
            gpus.append(self._gpu("reference", r.references, 1, [], [*parts, *self._activations(self.size, "score")]))
        if r.critics:
            learned = self._states("", self.size.trained - self.size.heads, r.critics, o.rl.critic.optim)
            parts = [self._weights("weights", self.all_weights, self.held, r.critics), *learned]
            work = self._activations(self.size, "score", "backward")
            parts += [*self._autocast(1, "score", "backward"), *(part for part in work if part.name != "logits")]
            gpus.append(self._gpu("critic", r.critics, r.critics, parts))
        return MemoryPlan(self.size, tuple(gpus), self.host())

    def _gpu(
        self,
        name: str,
        count: int,
        ranks: int,
        learning: Sequence[Part],
        other: Sequence[Part] = (),
        cache: Cache | None = None,
        processes: int = 1,
    ) -> GPU:
        """Add what `processes` take, NCCL between `ranks`, and what is lost between the allocations of `learning`."""
        a = self.assume
        fixed = GIB * (processes * a.context_gib + (a.nccl_gib if ranks > 1 else 0))
        parts = [*learning, make_part("CUDA and NCCL", f"{processes} process{'es' * (processes > 1)}, assumed", fixed)]
        if learning:
            lost = tuple(a.fragmentation * number for number in _sums(learning))
            parts.append(Part("fragmentation", f"{a.fragmentation:.0%} of the {name.split()[0]}'s, assumed", lost))
        shown = tuple(part for part in [*parts, *other] if any(part.bytes))
        return GPU(name, count, self.options.gpu_gib * GIB, shown, cache)

    # What learns and scores: trainers, a reference, critics.

    def trainer(self) -> list[Part]:
        """Count the parts where they are largest in a backward pass: in the head, where the logits wait, or in the
        layers, whose gradients are there then."""
        at_both = (self._trainer(in_head) for in_head in (True, False))
        return max(at_both, key=lambda parts: _sums(parts)[PHASES.index("backward")])

    def _trainer(self, in_head: bool) -> list[Part]:
        size, o, n = self.size, self.options, self.runtime.ranks
        parts = [self._weights("weights", self.all_weights, self.held, n)]
        parts += self._states("", size.trained, n, o.optim, in_head)
        if self.runtime.sharded:
            parts += self._autocast(2 if o.critic == "own" else 1, "score", "backward")
        else:
            parts += self._autocast(1 + (o.critic == "own") + (o.reference == "copy"), *PHASES)
        if o.rl.ema_decay is not None:
            parts.append(make_part("moving average", "float32 of what is trained", 4 * (size.trained + size.adapters)))
        if o.reference == "copy":
            parts.append(make_part("reference", "a copy of what is trained, on every rank", self.copied))
        if o.reference != "separate":
            parts += self._teacher()
        if o.critic == "own":
            # Weights that are divided have one owner: at stage 3 the critic copies the frozen ones, too.
            what, held = ("the model", self.held) if self.shards_weights else ("what is trained", self.copied)
            parts.append(self._weights("critic weights", f"a copy of {what}", held, n))
            parts += self._states("critic ", size.trained - size.heads, n, o.rl.critic.optim)
        return parts + self._activations(size, *PHASES, in_head=in_head)

    def _weights(self, name: str, how: str, held: float, n: int) -> Part:
        """At stage 3 and with FSDP each rank's part, plus all weights between updates; in a backward pass only those
        outside of the decoder's layers and the layers that are gathered (with FSDP one, and the next)."""
        if not self.shards_weights:
            return make_part(name, how, held)
        size, layers, wide = self.size, self.size.in_layers, self.precision.weights
        live = 2 * layers / size.shape.layers if self.runtime.fsdp else max(_ZERO_LIVE, size.largest)
        gathered = min((size.total - layers + min(layers, live)) * wide, held)
        spread = (layers * wide if self.runtime.fsdp else held) / n
        return make_part(name, f"{how}, / {n} and whole between updates", spread + held, backward=spread + gathered)

    def _autocast(self, models: int, *phases: str) -> list[Part]:
        head = 0 if self.runtime.sharded else self.size.shape.vocabulary * self.size.shape.hidden
        copies = 2 * (self.size.linears + head) * models * self.options.model.autocast
        return [make_part("autocast copies", "matrices in 2 bytes", **dict.fromkeys(phases, copies))]

    @property
    def one_pass(self) -> bool:
        """Tell if an update has one micro-batch, before which there are no gradients."""
        o, rl = self.options, self.options.rl
        groups = -(-rl.prompts_per_step // (rl.mini_batches * self.runtime.ranks))
        answers = rl.group_size * o.sampling.max_new_tokens
        tokens = groups * (answers + o.prompt_tokens * (1 if rl.share_prompts else rl.group_size))
        return tokens <= pass_tokens(rl) and not rl.ptx.coef and not rl.distill.coef

    def _states(self, name: str, trained: int, n: int, optim: OptimConfig, in_head: bool = False) -> list[Part]:
        """Count gradients, the optimizer's states and its temporary memory."""
        size, r, wide = self.size, self.runtime, self.precision.weights
        numbers, gradient = trained + size.adapters, self._bytes(trained)
        masters = (r.zero > 0 or optim.keeps_masters) and wide < 4
        if masters and not r.sharded:  # they add up in the float32 copies
            gradient += (4 - wide) * trained
        how, backward, step = f"{_text(numbers)} trained", gradient, gradient
        if in_head and not r.sharded:
            own = size.shape.vocabulary * size.shape.hidden * wide if size.heads else 0
            backward = own + (0 if self.one_pass else gradient)
            how += ", in the head" if self.one_pass else ", and the head's once more"
        if r.zero:
            if r.zero >= 2:
                step = 0 if r.offload else gradient / n
                how += ", a bucket of them" if r.offload else f" / {n} + a bucket"
            backward = step + min(numbers, _ZERO_BUCKET) * wide
        if r.fsdp:  # those outside of the layers are reduced after the last backward pass; a layer's in 4 bytes
            in_layers = numbers if size.shape.rank else min(trained, size.in_layers)
            outside, step = (numbers - in_layers) * wide, gradient / n
            backward = (gradient - outside) / n + outside + 2 * 4 * in_layers / size.shape.layers
            how += f" / {n}, whole outside of the layers until the step"
        parts = [make_part(f"{name}gradients", how, backward=backward, step=step)]
        if not r.offload:
            states, how = self._optimizer(trained, n, masters)
            parts.append(make_part(f"{name}optimizer", how, states))
            if r.sharded and (masters or r.zero):  # otherwise one kernel updates all weights in place
                parts.append(make_part(f"{name}step", "gradients in float32", step=4 * numbers / n))
        return parts

    def _optimizer(self, trained: int, n: int, masters: bool) -> tuple[float, str]:
        """AdamW's states on one rank (or in the nodes' memory, for one rank), and how they are counted."""
        numbers, zero = trained + self.size.adapters, self.runtime.zero
        if masters and (zero or trained):
            copied = numbers if zero else trained  # without ZeRO adapters are float32 and need no copy
            states, how = 12.0 * copied + 8.0 * (numbers - copied), "12 bytes (master weights, two moments)"
        elif zero:
            states, how = 8.0 * numbers, "8 bytes (two moments)"
        else:
            states, how = 2.0 * self._bytes(trained), "two moments"
        return (states / n, f"{how} / {n}") if self.runtime.sharded else (states, how)

    def _teacher(self) -> list[Part]:
        """Count a teacher that is another model: whole and frozen, it scores before or after the policy."""
        distill, model, wide = self.options.rl.distill, self.options.model, self.precision.weights
        if distill.coef == 0 or distill.teacher in ("reference", "policy"):
            return []
        teacher = size_of(distill.teacher, replace(model, lora=LoraConfig(rank=0), audio="frozen", only=()))
        theirs, ours = (sum(max(part.bytes) for part in self._activations(s, "score")) for s in (teacher, self.size))
        return [
            make_part("teacher", f"{_text(teacher.total)} x {wide} bytes, frozen", teacher.total * wide),
            make_part("teacher's activations", "what they take more than the policy's", score=max(theirs - ours, 0)),
        ]

    def _activations(self, size: ModelSize, *phases: str, in_head: bool = False) -> list[Part]:
        """Count what passes over a packed row take in these phases."""
        o, shape, p, row = self.options, size.shape, self.precision, self.row
        models = 2 if o.critic == "own" else 1  # both graphs wait for one backward pass
        arguments = (shape, row, p, ATTENTION[o.model.attention], min(self.again, shape.layers))
        saved = models * decoder_bytes(*arguments) + (0 if in_head else again_bytes(*arguments))
        if self.one_pass and not in_head and not self.runtime.sharded:
            saved = models * layer_bytes(*arguments[:-1])  # when all gradients are there, the other layers are freed
        work, frames = work_bytes(shape, row, p), round(row.predicted * o.speech_share)
        score, backward = (
            sum(
                logits_bytes(rows, width, p.compute, gradient, LOGITS_CHUNK, LOGITS_KEEP)
                for rows, width in ((row.predicted - frames, shape.vocabulary), (frames, shape.codes))
            )
            for gradient in (False, True)
        )
        how = f"a row of {row.tokens} tokens, {min(self.again, shape.layers)} of {shape.layers} layers computed again"
        of_logits = f"{row.predicted} predicted x {shape.vocabulary}"
        parts = [
            make_part("activations", how + " x 2 models" * (models == 2), backward=saved),
            make_part(
                "one layer's work", "estimate", score=work, backward=max(work - backward, 0) if in_head else work
            ),
            make_part("logits", of_logits, score=score, backward=backward if in_head else 0),
        ]
        if shape.tower is not None:
            trained = o.model.audio == "full"
            unkept = tower_bytes(shape.tower, o.clip_seconds, o.clips, p.compute, False, False)
            again = bool(o.model.gradient_checkpointing)
            encoder = tower_bytes(shape.tower, o.clip_seconds, o.clips, p.compute, trained, again)
            clips = o.clips if trained else clips_at_once(shape.tower, o.clip_seconds, o.clips)
            how = f"{clips} x {o.clip_seconds:g} s"
            parts.append(make_part("audio tower's activations", how, generate=unkept, score=unkept, backward=encoder))
        kept = [phase in phases for phase in PHASES]
        return [Part(q.name, q.how, tuple(b * k for b, k in zip(q.bytes, kept, strict=True))) for q in parts]

    # Engines and CPU memory.

    def engine(self) -> tuple[list[Part], Cache | None]:
        size, a, o, number = self.size, self.assume, self.options, self.precision.compute
        served, tp, asleep = size.total - size.adapters, o.tensor_parallel, self.runtime.shares_gpus
        each = kv_bytes_per_token(size.shape, number, tp)
        if self.runtime.engine == "hf":
            tokens = o.sampling.max_batch_tokens
            return [make_part("key-value cache", f"{tokens} tokens x {each} bytes", generate=tokens * each)], None
        whole = sum(size.parts.get(name, 0) for name in ("audio tower", "projector"))
        weights = number * (whole + (served - whole) / tp)
        adapter = 2.0 * number * size.adapters if self.sends_adapter else 0.0
        fraction, work = self.runtime.engine_gpu_fraction, a.engine_workspace_gib * GIB
        room = max(fraction * o.gpu_gib * GIB - weights - adapter - work, 0.0)
        bucket = a.sync_bucket_mib * 2**20
        sync = bucket if self.sends_adapter else max(bucket, size.largest * number)
        # On the trainers' GPUs it sleeps while they work.
        left, train = a.engine_asleep_gib * GIB * asleep, dict.fromkeys(("score", "backward", "step"), 0.0)
        loaded: dict[str, float] = train if asleep else {}
        running: dict[str, float] = {**train, "sync": 0.0} if asleep else {}
        split = f"{_text(served)} x {number} bytes" + (f", the decoder / {tp}" if tp > 1 else "")
        copies = f"2 x {_text(size.adapters)} x {number} bytes: as they came, and where they are used"
        parts = [
            make_part("engine's weights", split, weights, **loaded),
            make_part("engine's adapter", copies, adapter, **loaded),
            make_part("key-value cache", f"what {fraction:g} of the GPU leaves", room, **running),
            make_part("engine's workspace", "assumed", work, **running),
            make_part("weight sync", "a bucket" if self.sends_adapter else "a bucket or the largest tensor", sync=sync),
            make_part("engine asleep", "assumed", left, generate=0, sync=0),
        ]
        # Every GPU of an engine holds its share of each token, so it has room for as many as one of them.
        tokens, prompt, response = int(room // each), o.prompt_tokens, o.sampling.max_new_tokens
        groups, rest = divmod(tokens, prompt + o.rl.group_size * response)
        shared = groups * o.rl.group_size + max(rest - prompt, 0) // response
        return parts, Cache(each, tokens, tokens // (prompt + response), shared)

    def host(self) -> float:
        """Return the bytes of CPU memory that a node needs: offloaded optimizers, weights of sleeping engines."""
        size, o, r = self.size, self.options, self.runtime
        node, needed = min(o.gpus, o.gpus_per_node), 0.0
        learners = [(size.trained, r.ranks)]
        if o.critic in ("own", "separate"):
            learners.append((size.trained - size.heads, r.critics or r.ranks))
        masters = self.precision.weights < 4  # ZeRO's, the only one that offloads
        for trained, n in learners if r.offload else ():
            needed += min(node, n) * (self._optimizer(trained, n, masters)[0] + 4 * (trained + size.adapters) / n)
        if r.engine == "vllm" and r.shares_gpus:
            sent = 2 * size.adapters if self.sends_adapter else 0
            needed += self.precision.compute * (size.total - size.adapters + sent) * min(node, r.engines or r.ranks)
        return needed


PASSES = tuple(2**k * part // 4 for k in range(16, 11, -1) for part in (4, 3))
"""Tokens of a pass that `largest_pass` tries. Beyond 65,536 a GPU gains nothing."""
PASS_SHARE = 0.9
"""Of a GPU's memory, which a plan may fill."""


def largest_pass(size: ModelSize, options: PlanOptions) -> int:
    """Return the most tokens of a pass, of `PASSES`, whose scoring and update leave a tenth of the GPU free; the fewest
    where none do. Raises ValueError for options that contradict each other or the model."""
    least = options.prompt_tokens + options.sampling.max_new_tokens
    fitting = [tokens for tokens in PASSES if tokens >= least] or [least]
    for tokens in fitting:
        gpu = make_plan(size, replace(options, rl=replace(options.rl, micro_batch_tokens=tokens))).gpus[0]
        totals = dict(zip(PHASES, gpu.totals, strict=True))
        if max(totals[phase] for phase in ("score", "backward", "step")) <= PASS_SHARE * gpu.size:
            return tokens
    return fitting[-1]


# -- what takes less ---------------------------------------------------------------------------------------------------

Change = dict[str, Any]
"""New values by option name, such as {"runtime.zero": 2}."""


def changed(options: PlanOptions, change: Change) -> PlanOptions:
    """Return `options` with the values of `change`."""
    for name, value in change.items():
        group, _, attribute = name.partition(".")
        new = {attribute.replace("-", "_"): value}
        if attribute == "lora.rank":
            new = {"lora": LoraConfig(rank=value, alpha=2 * value)}
        options = replace(options, **{group: replace(getattr(options, group), **new)})
    return options


def suggestions(model: str, options: PlanOptions) -> list[tuple[Change, MemoryPlan]]:
    """Return the changes of one setting with which the run fits, and its plan then."""
    fitting = []
    for change in _changes(options):
        candidate = changed(options, change)
        try:
            plan = make_plan(candidate.size(model), candidate)
        except ValueError:
            continue  # these options do not go together
        if plan.fits:
            fitting.append((change, plan))
    return fitting


def _changes(options: PlanOptions) -> Iterator[Change]:
    r = options.runtime
    yield {"model.gradient-checkpointing": "auto"}
    yield from ({"rl.micro-batch-tokens": pass_tokens(options.rl) // part} for part in (2, 4))
    yield {"model.dtype": "bfloat16", "model.autocast": False}
    yield {"model.lora.rank": 16}
    if r.engine == "hf":
        yield {"sampling.max-batch-tokens": options.sampling.max_batch_tokens // 2}
    if r.ranks > 1:
        yield from ({"runtime.zero": stage} for stage in (1, 2, 3))
        yield {"runtime.fsdp": True}
    if not r.fsdp:
        yield {"runtime.zero": max(r.zero, 2), "runtime.offload": True}
    if r.kind == "ray" and options.reference in ("lora", "copy"):
        yield {"runtime.references": 1}
    if r.kind == "ray" and options.critic == "own":
        yield {"runtime.critics": 1}
    if r.engine == "vllm":
        yield from ({"runtime.gpu-fraction": tenths / 10} for tenths in range(9, 2, -1))
        if not r.shares_gpus:
            total = r.engines * r.engine_gpus
            yield from ({"runtime.engine-gpus": n, "runtime.engines": total // n} for n in (2, 4, 8) if total % n == 0)
