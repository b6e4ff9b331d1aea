"""The commands `audiorl data …` (show, build, split, build-qa, build-sums, build-scenes, train-tagger), `annotate` and
`graft`.

    audiorl data show rows.jsonl                                       # what will be trained on
    audiorl data build corpus                                          # downloads the packages with apt-get
    audiorl data build corpus --sources asterisk --languages en es     # some of them
    audiorl data build corpus --packages FOLDER                        # from .deb files that are there already
    audiorl data build unseen --unseen                                 # the test set of unseen speakers
    audiorl data split corpus --out rows --unseen unseen               # rows to train on and to measure on
    audiorl data build-qa qa --speech corpus                           # questions about speech, sounds and music
    audiorl data build-sums sums --words fsdd/recordings               # spoken numbers to be added
    audiorl data build-scenes scenes                                   # scenes of sounds, for models that make sound
    audiorl data train-tagger scenes --out tagger                      # which sounds are heard in them
    audiorl annotate recordings --out annotated --asr whisper-base     # rows for recordings without labels
    audiorl graft --llm Qwen/Qwen2.5-0.5B-Instruct --encoder openai/whisper-base --family qwen2.5-omni --out grafted

`audiorl` finds `data`, `annotate` and `graft` as entry points of the group `audiorl.commands`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from audiorl.cli._show import ShowData, show
from audiorl.config import require_ranges
from audiorl.config.checks import require
from audiorl.languages import language_code
from audiorl.options import HELP, parse
from corpora.annotate.options import Annotate

SourceName = Literal["asterisk", "asterisk-es-co", "asterisk-fr-armelle", "tuxpaint", "synthetic"]
HUMAN: tuple[SourceName, ...] = ("asterisk", "asterisk-es-co", "asterisk-fr-armelle", "tuxpaint")

SoundSource = Literal["sonic-pi", "wesnoth", "tuxpaint"]


@dataclass(frozen=True)
class Data:
    """Show what is trained on (data show FILE), build a corpus of human speech (data build OUT), split it into
    rows to train on and to measure on (data split CORPUS --out ROWS), build questions about audio (data build-qa OUT),
    spoken numbers (data build-sums OUT) or scenes of sounds (data build-scenes OUT). Each lists its options with
    --help."""


@dataclass(frozen=True)
class BuildCorpus:
    """Write recordings of many speakers with their texts as one corpus, which audiorl.data.corpus reads.

    Run it again after an interruption, or with more sources or languages: voices that are complete stay as they are.
    """

    out: Positional[Path]
    """Folder of the corpus: new, empty, or built before."""
    sources: tuple[SourceName, ...] = HUMAN
    """Where the recordings come from; by default all recordings of people. asterisk: telephone prompts in en, es, fr,
    it and ru, the same in each. asterisk-es-co, asterisk-fr-armelle: such prompts by two other speakers. tuxpaint:
    spoken descriptions of drawn objects in eleven languages. synthetic: espeak-ng speaks the texts of the others."""
    languages: tuple[str, ...] | None = None
    """Codes of languages, such as en es; by default all that the sources have."""
    unseen: bool = False
    """Write the test set of unseen speakers, which is in the repository and not in the package, in place of sources."""
    packages: Path | None = None
    """Folder with the .deb files of the packages. By default they are downloaded with apt-get and kept in
    ~/.cache/audiorl/packages."""
    tree: Path | None = None
    """Folder below which the packages are installed or unpacked, such as /."""
    bitrate: int = 24_000
    """Bits per second of the Opus files, 6000 to 256000."""
    max_seconds: float = 30.0
    """Clips that last longer, in seconds, are left out."""
    texts: Path | None = None
    """Further texts for synthetic: lines of LANGUAGE, a tab, TEXT and, optionally, a tab and the English text."""
    texts_licence: str = ""
    """Licence of these texts, such as CC0-1.0, for the manifest; required with --texts."""
    synthetic_speakers: int = 16
    """Number of espeak-ng's voices for each language."""
    synthetic_clips: int = 1
    """Number of voices, of these, that speak each text."""

    def __post_init__(self) -> None:
        require_ranges(self, positive=("max_seconds", "synthetic_speakers", "synthetic_clips"))
        require(6000 <= self.bitrate <= 256_000, "bitrate", self.bitrate, "from 6000 to 256000")


@dataclass(frozen=True)
class SplitCorpus:
    """Write rows to train on and to measure on from corpora: train.jsonl, held_out.jsonl and unseen.jsonl.

    Held-out texts are in no training row, in any language or voice. Neither the speakers nor the texts of --unseen are
    in the other sets. Synthetic voices are in train.jsonl only.
    """

    corpora: Positional[tuple[Path, ...]]
    """Folders that `audiorl data build` wrote."""
    out: Path
    """Folder of the rows."""
    unseen: tuple[Path, ...] = ()
    """Folders of speakers who are measured and never trained on, such as unseen_speakers of the repository."""
    held_out: float = 0.1
    """Fraction of the recordings whose texts are held out."""
    languages: tuple[str, ...] | None = None
    """Codes of languages, such as en es; by default all."""
    min_seconds: float = 0.4
    """Clips that are shorter, in seconds, are left out."""
    max_seconds: float = 8.0
    """Clips that are longer, in seconds, are left out."""
    min_words: int = 1
    """Clips with fewer words are left out."""
    seed: int = 0
    """Which texts are held out."""

    def __post_init__(self) -> None:
        require_ranges(self, positive=("max_seconds",))
        require(0 <= self.held_out < 1, "held_out", self.held_out, "at least 0 and below 1")


@dataclass(frozen=True)
class BuildQuestions:
    """Write four-choice questions about speech, sounds and music in the format of MMAU: a training and a held-out set.

    Speech comes from a corpus that `audiorl data build` wrote with all sources; sounds and the instruments of the music
    from Debian packages. Needs the program fluidsynth.
    """

    out: Positional[Path]
    """Folder of the benchmark: new, empty, or built before."""
    speech: Path
    """Folder of the speech corpus."""
    train: int = 3000
    """About so many training questions."""
    held_out: int = 600
    """About so many held-out questions."""
    seed: int = 0
    """Seed of every draw: splits, questions, choices and pieces of music."""
    packages: Path | None = None
    """Folder with the .deb files of the packages. By default they are downloaded with apt-get and kept in
    ~/.cache/audiorl/packages."""
    tree: Path | None = None
    """Folder below which the packages are installed or unpacked, such as /."""
    bitrate: int = 24_000
    """Bits per second of the Opus files, 6000 to 256000."""

    def __post_init__(self) -> None:
        require_ranges(self, positive=("train", "held_out"))
        require(6000 <= self.bitrate <= 256_000, "bitrate", self.bitrate, "from 6000 to 256000")


@dataclass(frozen=True)
class BuildSums:
    """Write questions about spoken sequences of numbers with exact thoughts: train.jsonl, held_out.jsonl, unseen.jsonl.

    The recordings of single number words are joined. No sequence of train.jsonl is in another file. Rows hold
    `numbers`, `thought`, `speaker` and `operation`.
    """

    out: Positional[Path]
    """Folder of the rows: new or empty."""
    words: tuple[str, ...] = ("bundled",)
    """Recordings of number words: `bundled`, `synthetic:VOICES`, folders of `audiorl data build`, or of the Free Spoken
    Digit Dataset."""
    operation: Literal["sum", "difference", "largest", "count", "twice"] = "sum"
    """What is asked about the numbers."""
    lengths: tuple[int, int] = (2, 3)
    """The shortest and the longest sequence."""
    largest: int = 9
    """The numbers are 1 to this."""
    languages: tuple[str, ...] = ("en",)
    """Codes of the languages in which the numbers are said."""
    unseen: tuple[str, ...] = ()
    """Speakers whose sequences are in unseen.jsonl and in no other file."""
    train: int = 600
    """Rows to train on."""
    held_out: int = 200
    """Rows to measure on, of the same speakers, and as many of the unseen ones."""
    seed: int = 0
    """Which sequences are drawn."""

    def __post_init__(self) -> None:
        require_ranges(self, positive=("train", "held_out", "largest"))


@dataclass(frozen=True)
class BuildScenes:
    """Write scenes of recorded sounds, for models that make sound: which, when, where and how loud, with captions,
    exact thoughts, silent videos and edits. Three sets: to train on, of new sound files, of new combinations.
    """

    out: Positional[Path]
    """Folder of the corpus: new or empty."""
    sources: tuple[SoundSource, ...] = ("sonic-pi", "wesnoth", "tuxpaint")
    """Where the sounds come from: sonic-pi (22 MB to download): drums, bells, guitars, robots. wesnoth (146 MB): horns,
    animals, voices, weapons. tuxpaint (161 MB): animals."""
    train: int = 2000
    """Scenes to train on."""
    held_out: int = 200
    """Scenes of new sound files, and as many of new combinations."""
    edits: int = 25
    """Edits of each kind (add, remove, inpaint, extend) in each set."""
    seconds: float = 4.0
    """Length of a scene, 0.6 to 30."""
    rate: int = 16_000
    """Hz."""
    channels: Literal[1, 2] = 2
    """2: sounds have places, by delay and level between the ears. 1: they have none."""
    max_events: int = 3
    """Most events of a scene."""
    max_event_seconds: float = 1.5
    """Sounds that last longer are cut there."""
    video_rate: int = 16
    """Frames a second of the silent videos."""
    new_combinations: float = 0.2
    """Share of all pairs of classes that no training scene has."""
    seed: int = 0
    """Seed of every draw; the same seed gives the same bytes."""
    packages: Path | None = None
    """Folder with the .deb files of the packages. By default they are downloaded with apt-get and kept in
    ~/.cache/audiorl/packages."""
    tree: Path | None = None
    """Folder below which the packages are installed or unpacked, such as /."""

    def __post_init__(self) -> None:
        require_ranges(self, positive=("train", "held_out", "max_events", "max_event_seconds", "video_rate"))
        require(0.6 <= self.seconds <= 30, "seconds", self.seconds, "from 0.6 to 30")
        require(8000 <= self.rate <= 48_000, "rate", self.rate, "from 8000 to 48000")
        require(0 < self.new_combinations <= 0.5, "new_combinations", self.new_combinations, "above 0, at most 0.5")


@dataclass(frozen=True)
class TrainTagger:
    """Train a small tagger on scenes that `audiorl data build-scenes` wrote: which sounds are heard.

    Rewards and evaluations ask it. Train two, with other seeds and widths: one for the reward, one for the evaluation.
    """

    scenes: Positional[Path]
    """Folder of the scenes."""
    out: Path
    """Folder of the tagger: new or empty."""
    steps: int = 1500
    """Optimizer updates on 24 scenes each."""
    width: int = 16
    """Channels of the first convolution."""
    seed: int = 0
    """Seed of the weights and of the order of scenes."""

    def __post_init__(self) -> None:
        require_ranges(self, positive=("steps", "width"))


@dataclass(frozen=True)
class GraftOptions:
    """Join a text model and a Whisper encoder into a Qwen2.5-Omni or Qwen2-Audio checkpoint, to be trained on speech.

    Both models keep their weights: on text the result gives the text model's logits. Only the projector between them
    is new and random. transformers and vLLM load the folder.
    """

    llm: str
    """The text model: a folder or hub id of a Llama, Qwen2 or Qwen3 model that has a chat template, or a .gguf file
    (pip install gguf)."""
    encoder: str
    """The audio encoder: a folder or hub id of any Whisper model, such as openai/whisper-base."""
    family: Literal["qwen2.5-omni", "qwen2-audio"]
    """The class of the checkpoint. qwen2.5-omni: a clip costs as much as it is long; holds Llama and Qwen2
    models without scaled positions. qwen2-audio: every clip is encoded as 30 s, as Whisper does; holds Llama, Qwen2 and
    Qwen3 models."""
    out: Path
    """The new folder."""
    encoder_layers: int = 0
    """New transformer layers after Whisper's own, each the identity at first. The projector of both classes is one
    linear layer after pooling to 25 frames a second; such layers are how a deeper, nonlinear one stays loadable by
    transformers and vLLM. An MLP after the pooling or stacked frames would load nowhere else, and are not offered."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the saved weights; auto is the text model's."""
    seed: int = 0
    """Seed of the new weights."""

    def __post_init__(self) -> None:
        require_ranges(self, not_negative=("encoder_layers",))


def data(args: list[str]) -> int:
    """Show data, build a corpus of human speech or questions about audio, or split a corpus into rows."""
    if args and args[0] in DATA_COMMANDS:
        options, run = DATA_COMMANDS[args[0]]
        run(parse(options, args[1:], prog=f"audiorl data {args[0]}"))
        return 0
    if args and args[0] not in HELP:
        raise ValueError(
            f"data: no command is called {args[0]!r}; they are {', '.join(f'data {name}' for name in DATA_COMMANDS)}"
        )
    parse(Data, ["--help"], prog="audiorl data")
    return 0


def annotate(args: list[str]) -> int:
    """Make a manifest of recordings without labels: segments, transcripts, speakers and quality."""
    if not args or (args[0].startswith("-") and args[0] not in HELP):
        raise ValueError(
            "annotate: name audio files or folders first: audiorl annotate FOLDER --out OUT --asr judges/whisper-base"
        )
    options: Annotate = parse(Annotate, args, prog="audiorl annotate")
    from corpora.annotate.run import run

    run(options)
    return 0


def graft(args: list[str]) -> int:
    """Make a speech model from a text model and a Whisper encoder, before any training."""
    options = parse(GraftOptions, args or ["--help"], prog="audiorl graft")
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise ValueError(f"--out {options.out}: exists already; give a new folder")
    from corpora.models.graft import graft as join
    from corpora.models.graft import vllm_problem

    new = {"encoder_layers": options.encoder_layers, "dtype": options.dtype, "seed": options.seed}
    policy = join(options.llm, options.encoder, options.family, **new)  # type: ignore[arg-type]
    policy.save(options.out)
    if problem := vllm_problem(policy):
        print(f"note: transformers loads {options.out}, vLLM does not: {problem}")
    print(options.out)
    return 0


def run_build(options: BuildCorpus) -> None:
    """Run `data build`. Raises ValueError for bad input."""
    from corpora.sources.build import Encoding, build, read_voices, select_voices, unseen_voices
    from corpora.sources.synthetic import SOURCE, read_texts, synthetic_voices, texts_of_rows

    encoding = Encoding(options.bitrate, options.max_seconds)
    if options.unseen:
        build(options.out, unseen_voices(), options.packages, options.tree, encoding)
        return
    human = [source for source in options.sources if source != SOURCE]
    if options.texts and (not options.texts_licence or SOURCE not in options.sources):
        raise ValueError("--texts: needs --texts-licence and the source synthetic")
    if human:
        voices = select_voices(human, options.languages)
        build(options.out, voices, options.packages, options.tree, encoding)
    if SOURCE in options.sources:
        rows = [row for voice in read_voices(options.out) if voice.source != SOURCE for row in voice.rows]
        texts = texts_of_rows(rows)
        if options.texts:
            texts += read_texts(options.texts, options.texts_licence)
        wanted = None if options.languages is None else set(map(language_code, options.languages))
        texts = [t for t in texts if wanted is None or language_code(t.language) in wanted]
        if not texts:
            raise ValueError(f"{options.out}: no texts to speak; add another source, or --texts FILE")
        voices = synthetic_voices(texts, options.synthetic_speakers, options.synthetic_clips)
        build(options.out, voices, options.packages, options.tree, encoding)


def run_split(options: SplitCorpus) -> None:
    """Run `data split`. Raises ValueError for bad input."""
    from rich.console import Console
    from rich.table import Table

    from audiorl.data.corpus import corpus
    from corpora.split import Selection, split, summary, write_rows

    if not options.corpora:
        raise ValueError("data split: name the folder of a corpus first: audiorl data split CORPUS --out ROWS")
    said, unseen = ([u for path in paths for u in corpus(path)] for paths in (options.corpora, options.unseen))
    selection = Selection(options.languages, options.min_seconds, options.max_seconds, options.min_words)
    result = split(said, unseen, options.held_out, selection, options.seed)
    parts = {"train": result.train, "held_out": result.held_out} | ({"unseen": result.unseen} if unseen else {})
    table = Table(*("set", "language", "speakers", "clips", "minutes"))
    for name, language, speakers, clips, minutes in summary(parts):
        table.add_row(name, language, str(speakers), str(clips), f"{minutes:.1f}")
    for name, utterances in parts.items():
        write_rows(options.out / f"{name}.jsonl", utterances)
    Console().print(table)
    for reason, count in result.left_out.most_common():
        print(f"left out: {count} clips, {reason}")


def run_questions(options: BuildQuestions) -> None:
    """Run `data build-qa`. Raises ValueError for bad input."""
    from corpora.questions.build import build_questions

    build_questions(
        options.out,
        options.speech,
        (options.train, options.held_out),
        options.seed,
        packages=options.packages,
        tree=options.tree,
        bitrate=options.bitrate,
    )


def run_sums(options: BuildSums) -> None:
    """Run `data build-sums`. Raises ValueError for bad input."""
    from audiorl.data.sums import number_words, split_speakers, spoken_numbers, write_rows

    if options.out.exists() and any(options.out.iterdir()):
        raise ValueError(f"{options.out}: exists already; give a new folder")
    sources = [(source, language) for source in options.words for language in options.languages]
    words = [w for source, language in sources for w in number_words(source, language, options.largest)]
    known, unseen = split_speakers(words, options.unseen)
    sets = {
        "train": (known, options.train),
        "held_out": (known, options.held_out),
        "unseen": (unseen, options.held_out),
    }
    for part, (name, (spoken, count)) in enumerate(sets.items()):
        if spoken:
            seed = 3 * options.seed + part
            split: Literal["train", "test"] = "test" if part else "train"
            made = spoken_numbers(spoken, count, options.lengths, options.operation, seed, split=split)
            speakers = len({w.speaker for w in spoken})
            print(f"{write_rows(made, options.out, name)}: {count} rows, {speakers} speakers")


def run_scenes(options: BuildScenes) -> None:
    """Run `data build-scenes`. Raises ValueError for bad input."""
    from corpora.scenes.build import Layout, build_scenes

    layout = Layout(
        options.seconds,
        options.rate,
        options.channels,
        options.max_events,
        options.max_event_seconds,
        options.video_rate,
    )
    build_scenes(
        options.out,
        (options.train, options.held_out, options.held_out),
        options.edits,
        options.sources,
        layout,
        options.new_combinations,
        options.seed,
        options.packages,
        options.tree,
    )


def run_tagger(options: TrainTagger) -> None:
    """Run `data train-tagger`. Raises ValueError for bad input."""
    from corpora.scenes.tagger import run

    run(options.scenes, options.out, options.steps, options.width, options.seed)


DATA_COMMANDS: dict[str, tuple[type[Any], Callable[[Any], None]]] = {
    "show": (ShowData, show),
    "build": (BuildCorpus, run_build),
    "split": (SplitCorpus, run_split),
    "build-qa": (BuildQuestions, run_questions),
    "build-sums": (BuildSums, run_sums),
    "build-scenes": (BuildScenes, run_scenes),
    "train-tagger": (TrainTagger, run_tagger),
}
"""Options and function of each `audiorl data COMMAND`."""
