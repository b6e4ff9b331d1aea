"""audiorl data show FILE: what a recipe makes of data, before anything is trained."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from audiorl.config.checks import require_ranges

if TYPE_CHECKING:
    from audiorl.models import AudioPolicy
    from audiorl.types import Sample


@dataclass(frozen=True)
class ShowData:
    """Print what a recipe trains on: the first prompts as tokens, their audio and answers, and counts of all rows.

    Rows that cannot be used are counted by their reason. Clips are measured by their headers and not decoded.
    """

    data: Positional[tuple[str, ...]]
    """Files, folders and other sets, as `--data` of a recipe names them."""
    recipe: Literal["audio-qa", "sft-audio", "asr-grpo", "dpo-audio-qa"] = "audio-qa"
    """Whose reading is shown; asr-grpo's is that of sft-audio with `--task transcripts`, too."""
    path: str = "tiny"
    """The model whose tokens are shown: a folder, a hub id, or `tiny`, a small random one. Weights are not read."""
    think: bool = True
    """Ask for thoughts before the answer, as the recipe's `--think` does; sft-audio and asr-grpo never do."""
    rows: int = 3
    """Rows of each set that are shown."""
    limit: int | None = None
    """Read no more samples of each set."""
    audio_root: str | None = None
    """Folder from which relative audio paths start; by default the folder of each data file."""
    columns: tuple[str, ...] = ()
    """Columns of the data that have other names, as WANTED=NAME: `audio=wav question=prompt`."""

    def __post_init__(self) -> None:
        require_ranges(self, positive=("limit",), not_negative=("rows",))


def show(options: ShowData) -> None:
    """Print each set of the options. Raises ValueError for a file that cannot be read at all."""
    from rich.console import Console

    from audiorl.audio import AudioError, name, seconds
    from audiorl.config import ModelConfig
    from audiorl.data.bundled import bundled_pairs, bundled_set, bundled_transcripts
    from audiorl.data.manifest import Loaded, column_names, read_samples
    from audiorl.data.preferences import Judged, read_pairs_and_judged
    from audiorl.data.schema import FieldError
    from audiorl.data.sets import parse_set
    from audiorl.models import load_policy
    from audiorl.recipes._common import random_policy, supervised_turns

    if not options.data:
        raise ValueError("data show: name a data file first: audiorl data show FILE")
    pairs, learns, transcribes = (options.recipe == name for name in ("dpo-audio-qa", "sft-audio", "asr-grpo"))
    think = options.think and not (learns or transcribes)
    read: Any = read_pairs_and_judged if pairs else partial(read_samples, keep_conversations=learns or transcribes)
    bundled: Any = partial(bundled_pairs if pairs else bundled_set, think=think)
    if transcribes:
        bundled = lambda _: bundled_transcripts()  # noqa: E731
    columns = column_names(options.columns)
    tiny = options.path == "tiny"
    policy = (
        random_policy(ModelConfig(), whisper=False) if tiny else load_policy(options.path, ModelConfig(device="meta"))
    )
    print_line = partial(Console(highlight=False, soft_wrap=True).print, markup=False)

    for given in options.data:
        path = parse_set(given)[0]
        lengths: dict[str, list[float]] = {}

        def measure(item: Any, lengths: dict[str, list[float]] = lengths) -> None:
            sample = getattr(item, "sample", item)
            try:
                lengths[sample.id] = [seconds(clip) for clip in sample.audio]
            except AudioError as error:
                raise FieldError("audio", str(error)) from error
            policy.prompts.check(sample)

        if path.startswith("bundled"):
            loaded = Loaded[Any](tuple(bundled(path)), (), path)
        else:
            where = {"audio_root": options.audio_root, "limit": options.limit, "columns": columns or None}
            loaded = read(path, think=think, on_error="skip", **where)
        loaded = loaded.checked(measure, "skip")
        samples: list[Sample] = [getattr(item, "sample", item) for item in loaded.samples]
        print_line(loaded.summary())
        for number, (item, sample) in enumerate(zip(loaded.samples, samples, strict=True), 1):
            if number > options.rows:
                break
            row = f", row {loaded.rows[number - 1].number}" if loaded.rows else ""
            print_line(f"\n{number}. {sample.id}{row}, task {sample.task or 'not named'}")
            prompt = policy.prompt(sample)
            for clip, length in zip(sample.audio, lengths[sample.id], strict=True):
                print_line(f"   audio: {name(clip)}, {length:.2f} s, {policy.audio.expected_tokens(clip)} tokens")
            for picture in sample.images:
                width, height = picture.size()
                shown = f"{picture.path}, {width} × {height}, {policy.picture_tokens(picture)} tokens"
                print_line(f"   picture: {shown}")
            print_line(f"   prompt, {len(prompt)} tokens: {'│'.join(_tokens(policy, prompt.ids.tolist()))}")
            answers: list[tuple[str, Any]] = []
            if isinstance(item, Judged):
                answers = [("desirable" if item.desirable else "undesirable", item.answer)]
            elif pairs:
                answers = [("chosen", item.chosen), ("rejected", item.rejected)]
            if learns:
                answers += [("learned", example.target) for example in supervised_turns(sample)]
            answers += [("answer", text) for text in sample.references]
            for what, text in answers:
                print_line(f"   {what}: {text if isinstance(text, str) else name(text)}")
            if sample.choices:
                print_line(f"   choices: {', '.join(sample.choices)}")
        every = sorted(length for sample in samples for length in lengths[sample.id])
        turns = f", {sum(len(supervised_turns(sample)) for sample in samples)} turns learned" if learns else ""
        print_line(f"\nrows: {len(samples)} usable{turns}, {len(loaded.skipped)} skipped")
        if every:
            spread = f"{every[0]:.2f} to {every[-1]:.2f} s, median {every[len(every) // 2]:.2f} s"
            total = f"{sum(every) / 3600:.1f} h" if sum(every) >= 3600 else f"{sum(every) / 60:.1f} min"
            print_line(f"audio: {len(every)} clips, {total}; {spread}")
        languages = Counter(str(s.metadata.get("language") or s.metadata.get("lang") or "not named") for s in samples)
        reasons = Counter(
            re.sub(r"\[\d+\]", "", s.field) + ": " + s.message.rpartition("; ")[2] for s in loaded.skipped
        )
        tables = [("tasks", Counter(s.task or "not named" for s in samples)), ("languages", languages)]
        for what, counts in [*tables, ("skipped", reasons)]:
            if counts:
                print_line(f"{what}: " + ", ".join(f"{count} × {value}" for value, count in counts.most_common()))
        if loaded.skipped:
            print_line(loaded.listing())


def _tokens(policy: AudioPolicy, ids: list[int]) -> Iterator[str]:
    """Yield each token's text; the tokens of a clip or picture, and those that share a character, are one."""
    held: list[int] = []
    placeholders = (policy.audio_token_id, policy.image_token_id)
    for i, token in enumerate(ids):
        held.append(token)
        following = ids[i + 1] if i + 1 < len(ids) else -1
        text: str = policy.tokenizer.decode(held if token not in placeholders else held[:1])
        if token in placeholders and following == token:
            continue
        if "\ufffd" in text and len(held) < 4 and following >= 0:
            continue
        yield text.replace("\n", "⏎") + (f" × {len(held)}" if token in placeholders else "")
        held = []
