"""Text to speech: is it understood, and is it the right voice? Seed-TTS-eval's protocol, and conversations.

    audiorl eval tts --model runs/tts --meta seedtts_testset/en/meta.lst --asr openai/whisper-large-v3 \
        --speaker microsoft/wavlm-base-plus-sv --out results/tts
    audiorl eval tts --turns talks.jsonl --asr judges/whisper-base --speaker judges/speaker --out results/talks
    audiorl eval tts --cases emergent_tts_eval_data.jsonl --audio mine/ --against baseline_audios/ \
        --judge.model Qwen/Qwen3-Omni-30B-A3B-Instruct --judge.url http://127.0.0.1:8000/v1 --out results/win_rate

NAME.wav (or .flac, .ogg, .opus, .mp3) in --audio says the text NAME; with --model a checkpoint generates it, in the
voice of the prompt. --turns are conversations; with --model they are scripts of them. --against compares two systems.
A recording that is missing, or cannot be read, counts as nothing said. Writes to --out: results.jsonl, scores.json and
page.html (plays the worst); comparisons.jsonl and comparisons.html with --against. A second call continues where the
first stopped. docs/speech.md explains the scores.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import soundfile

from audiorl.audio import AudioClip, AudioError
from audiorl.config import SamplingConfig, to_json
from audiorl.config.checks import refuse
from audiorl.data.emergent import Case, read_cases
from audiorl.data.seedtts import TextToSay, read_conversations, read_meta
from audiorl.errors import install
from audiorl.eval._common import (
    JudgeOptions,
    Judges,
    Row,
    check_settings,
    complete_rows,
    print_table,
    recordings_digest,
    run_evaluation,
    summarize,
    with_interval,
    write_scores,
)
from audiorl.eval._conversation_generation import SAID, PieceConfig, generate_conversations
from audiorl.eval._speech import RATE, generate_speech, load_speaking, mean_prosody, prosody_columns, recording_of
from audiorl.eval._win_rate import ListeningJudge, compare
from audiorl.eval.metrics.prosody import MEASURES, slope_per_minute
from audiorl.eval.metrics.speech import cosine, voice_cosines
from audiorl.eval.metrics.text import CorpusErrors, ErrorCounts, compared, utterance_errors
from audiorl.languages import language_code
from audiorl.report.listening import Card, Take, listening_page
from audiorl.report.summary import metric_name
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.speech import CodecSpeechDecoder, StreamingEngine
from audiorl.tasks.tts.prompts import utterance_sample
from audiorl.tasks.tts.texts import read_utterances

WORST = 20
"""Recordings, or conversations, that a page plays."""


@dataclass(frozen=True, kw_only=True)
class TTSOptions(JudgeOptions):
    """Score generated speech, or generate it first."""

    meta: Path | None = None
    """Seed-TTS-eval's meta.lst."""
    texts: Path | None = None
    """Texts in another file, instead of --meta: one a line in a .txt, or a manifest (see audiorl.tasks.tts.texts)."""
    cases: Path | None = None
    """EmergentTTS-Eval's texts with their categories, instead of --meta: see audiorl.data.emergent."""
    audio: Path | None = None
    """The folder of the recordings that were generated for them."""
    against: Path | None = None
    """With --cases: the folder of another system's recordings of the same texts, to compare by --judge.model."""
    judge: ListeningJudge = ListeningJudge()
    """The chat model that listens to both recordings of a text and says whose is better."""
    turns: Path | None = None
    """Conversations, instead of texts and --audio; with --model scripts of them."""
    model: str | None = None
    """Generate with this checkpoint, run folder (its newest checkpoint) or hub id, into --audio or OUT/audio."""
    phase: str | None = None
    """The phase of a run folder whose newest checkpoint is taken; by default the one that the run is for."""
    codec: str | None = None
    """The audio tokenizer of its codes; by default the folder codec/ in or above the model's."""
    sampling: SamplingConfig = SamplingConfig(max_new_tokens=8, max_frames=750)
    """How it speaks: temperature, top-p, top-k, repetition-aware sampling, most frames."""
    seed: int = 0
    """Seed of sampling, and of the order in which two recordings are compared."""
    generation_batch_size: int = 8
    """Texts, or conversations, that are said together."""
    pieces: PieceConfig = PieceConfig()
    """How --model says conversations and long turns: piece by piece."""
    language: str = "en"
    """Language of the texts. Errors are counted in words, in scripts without spaces in characters."""


def main(options: TTSOptions) -> Row:
    """Do what the options say and return the scores; empty without a recogniser and another system."""
    lists = {name: path for name in ("meta", "texts", "cases", "turns") if (path := getattr(options, name)) is not None}
    against, judge, model = options.against is not None, options.judge.model, options.model is not None
    refuse(
        (len(lists) != 1, "give one of --meta, --texts and --cases, with --audio or --model, or --turns"),
        (options.turns and options.audio, "--audio: belongs to texts; conversations name their recordings themselves"),
        (against and not options.cases, "--against: belongs to --cases, texts with categories"),
        (against and not judge, "--judge.model: name the chat model that compares with --against"),
        (judge and not against, "--judge.model: compares two systems; name the other's recordings with --against"),
        (against and not options.audio and not model, "--audio: name the folder to compare with --against, or --model"),
        (options.codec and not model, "--codec: belongs to --model, the checkpoint that writes its codes"),
        (not (options.asr or model or against), "--asr: name a recogniser, or with --model something to generate"),
    )
    listed = str(*lists.values())
    other_scores: Row = {}
    if model:
        options, other_scores = generate(options, listed)
    if options.against is not None:
        assert options.audio is not None
        cases, out, seed = _cases(options), options.out, options.seed
        systems = (options.audio, options.against)
        other_scores |= compare(cases, *systems, options.judge, out, listed=listed, seed=seed, most=WORST)
    if options.asr is None:
        if against:
            write_scores(options.out, other_scores)
        return other_scores if against else {}
    items = items_of(options)
    for item in items:
        if options.speaker is not None and item.prompt is not None:
            item.prompt.load(RATE)  # a broken prompt is the list's fault, not the system's
    judging = {"language": options.language, "asr": options.asr, "speaker": options.speaker}
    check_settings(options.out / "settings.json", {"list": listed, **judging})
    judges = Judges.load(options.asr, options.speaker, options.language, options.device)
    rows = judge_items(items, judges, options.out, options.batch_size)
    judged = [(item, rows[item.id], _errors(item, rows[item.id], options.language)) for item in items]
    groups: dict[str, list[Judged]] = {}  # conversations by their id; utterances stay alone
    for entry in judged:
        groups.setdefault(entry[0].group or entry[0].id, []).append(entry)
    rates = {name: sum((e for _, _, e in group), ErrorCounts()) for name, group in groups.items()}
    scores: Row = judging | error_scores(judged, CorpusErrors(tuple(rates.values())))
    if options.speaker is not None and options.turns is not None:
        scores |= conversation_voices(list(groups.values()))
    elif options.speaker is not None:
        values = [row.get("similarity", 0.0) for item, row, _ in judged if item.prompt is not None]
        scores |= {"similarity": summarize(values)} if values else {}
    scores |= other_scores
    for item, row, _ in judged:
        if "problem" in row:
            print(f"counted as wrong: {item.id}: {row['problem']}", file=sys.stderr)
    worst = sorted(groups, key=lambda name: -rates[name].rate)[:WORST]
    cards = [_card(name, groups[name], rates[name].rate, options.out) for name in worst]
    lead = f"{listed}, transcribed by {options.asr}. The worst {len(cards)} first."
    table = score_rows(scores)
    page = listening_page("Text to speech", lead, ["", ""], table, cards, options.out)
    write_scores(options.out, scores, {"page.html": page})
    print_table(["", ""], table, listed)
    return scores


# -- texts and their recordings ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpokenText:
    """A text and the recording that should say it, None where there is no file; `prompt` is the reference voice."""

    id: str
    text: str
    clip: AudioClip | None
    prompt: AudioClip | None = None
    group: str = ""
    """The conversation of a turn."""
    speaker: str = ""
    voices: Mapping[str, AudioClip] = field(default_factory=dict)
    """The voices of a turn's conversation by speaker, where they are known."""

    def fingerprint(self) -> str:
        """Return a digest of the recording and of the voices that it is compared with: what was judged before must be
        the same."""
        return recordings_digest(self.clip, self.prompt, *(self.voices[name] for name in sorted(self.voices)))


Judged = tuple[SpokenText, Row, ErrorCounts]
"""A text with its recording, what the judges heard, and the errors."""


def items_of(options: TTSOptions) -> list[SpokenText]:
    """Return the texts with their recordings, in order."""
    if options.turns is not None:
        return [
            SpokenText(
                f"{talk.id}/{i}",
                turn.text,
                turn.audio if turn.audio and turn.audio.path and Path(turn.audio.path).is_file() else None,
                group=talk.id,
                speaker=turn.speaker,
                voices={name: clip for name, (_, clip) in talk.voices.items()},
            )
            for talk in read_conversations(options.turns)[: options.limit]
            for i, turn in enumerate(talk.turns)
        ]
    if options.audio is None or not options.audio.is_dir():
        raise ValueError(f"--audio: {options.audio} is no folder; name the one that holds what was generated")
    items = [SpokenText(u.name, u.text, recording_of(options.audio, u.name), u.prompt) for u in _texts(options)]
    if options.model is None and all(item.clip is None for item in items):
        raise ValueError(f"{options.audio}: none of the {len(items)} recordings is there, such as {items[0].id}.wav")
    return items


def _texts(options: TTSOptions) -> list[TextToSay]:
    if options.meta is not None:
        return read_meta(options.meta)[: options.limit]
    if options.texts is not None:
        return list(read_utterances(options.texts, limit=options.limit).samples)
    return [TextToSay(case.name, case.text) for case in _cases(options)]


def _cases(options: TTSOptions) -> tuple[Case, ...]:
    assert options.cases is not None
    return read_cases(options.cases, options.judge.read_rubrics(), options.limit)


def generate(options: TTSOptions, listed: str) -> tuple[TTSOptions, Row]:
    """Let the model say what is missing. Return the options with the folder of its recordings, and scores of joints."""
    assert options.model is not None
    folder = options.audio or options.out / "audio"
    policy = load_speaking(options.model, options.codec, options.device)
    assert policy.codec is not None
    settings = {"model": options.model, "codec": policy.codec.identity, "list": listed}
    settings["sampling"] = to_json(options.sampling)
    together, seed = options.generation_batch_size, options.seed
    if options.turns is not None:
        scripts = read_conversations(options.turns, script=True)[: options.limit]
        engine = StreamingEngine(policy, options.sampling)
        pieces = options.pieces
        joints = generate_conversations(engine, scripts, folder, settings, pieces, batch_size=together, seed=seed)
        for label, text in score_rows(joints):
            print(f"{label}: {text}")
        return replace(options, turns=folder / SAID), joints
    samples = [utterance_sample(u) for u in _texts(options)]
    greedy, voice = HFEngine(policy, options.sampling), CodecSpeechDecoder.of(policy)
    rows = generate_speech(greedy, voice, samples, folder, settings, batch_size=together, seed=seed)
    cut = sum(row["stop_reason"] == "length" for row in rows)
    print(f"{len(rows)} texts said in {folder}, {sum(row['seconds'] for row in rows):.1f} s, {cut} cut off")
    return replace(options, audio=folder), {}


# -- scores ------------------------------------------------------------------------------------------------------------


def judge_items(items: Sequence[SpokenText], judges: Judges, out: Path, batch_size: int) -> dict[str, Row]:
    """Return a row an item by id: {id, file, seconds, hypothesis, voice?, similarity?}, or {id, problem}.

    Rows are kept in OUT/results.jsonl, from which a later call continues. The similarity is with the prompt; of a turn
    without prompt the voice is kept. `reference_prosody` is {} for a prompt that cannot be read.
    """
    clips = {clip.key: clip for i in items for clip in (i.prompt, *i.voices.values()) if clip is not None}

    @cache
    def voice_of(key: str) -> np.ndarray:
        assert judges.encoder is not None
        voice: np.ndarray = judges.encoder.embed([clips[key].load(RATE)], RATE)[0]
        return voice

    @cache
    def prompt_prosody(key: str) -> dict[str, float]:
        try:
            return prosody_columns(clips[key].load(RATE), RATE)
        except AudioError:
            return {}

    def judge(batch: Sequence[SpokenText]) -> list[Row]:
        rows: dict[str, Row] = {}
        waves: dict[str, np.ndarray] = {}
        for item in batch:
            try:
                assert item.clip is not None
                waves[item.id] = item.clip.load(RATE)
            except AudioError as error:
                rows[item.id] = {"id": item.id, "problem": str(error)}
        readable = [item for item in batch if item.id in waves]
        for item, heard in zip(readable, judges.judge(list(waves.values()), RATE) if readable else [], strict=True):
            voice, wav = heard.pop("voice", None), waves[item.id]
            row = {"id": item.id, "file": prints[item.id], "seconds": len(wav) / RATE, **heard}
            row |= prosody_columns(wav, RATE)
            if item.prompt is not None:
                row["reference_prosody"] = prompt_prosody(item.prompt.key)
            if voice is not None and item.prompt is not None:
                row["similarity"] = cosine(voice, voice_of(item.prompt.key))
            elif voice is not None and item.group:
                row["voice"] = [round(float(x), 6) for x in voice]
                row["start"] = 0.0 if item.clip is None else item.clip.start
                if item.voices:
                    row["cosines"] = {name: cosine(voice, voice_of(clip.key)) for name, clip in item.voices.items()}
            rows[item.id] = row
        return [rows[item.id] for item in batch]

    there = {item.id: item for item in items if item.clip is not None}
    missing: dict[str, Row] = {i.id: {"id": i.id, "problem": "missing"} for i in items if i.clip is None}
    prints = {id: item.fingerprint() for id, item in there.items()}
    return missing | complete_rows(
        out / "results.jsonl", there, judge, batch_size, is_current=lambda i, row: row.get("file") == prints[i.id]
    )


def _errors(item: SpokenText, row: Row, language: str) -> ErrorCounts:
    """Count the errors of an item; of a recording that cannot be read nothing is understood."""
    if not compared(item.text, language):
        raise ValueError(f"{item.id!r}: the text {item.text!r} is nothing but punctuation; no error rate exists")
    hypothesis = row.get("hypothesis", "")
    if language_code(language) == "zh" and hypothesis:  # in simplified characters, as the benchmark does
        try:
            from zhconv import convert
        except ImportError as error:
            raise ImportError(f"Chinese needs zhconv: {install('metrics')}") from error
        hypothesis = convert(hypothesis, "zh-cn")
    return utterance_errors(item.text, hypothesis, language)


def error_scores(judged: Sequence[Judged], corpus: CorpusErrors) -> Row:
    """Return error rates and prosody, whose means are over the recordings that have voice; its `n` counts them."""
    problems = [row["problem"] for _, row, _ in judged if "problem" in row]
    scores: Row = {
        "utterances": len(corpus.utterances),
        "recordings": len(judged),
        "missing": sum(problem == "missing" for problem in problems),
        "unreadable": sum(problem != "missing" for problem in problems),
        "mean_wer": summarize([u.rate for u in corpus.utterances]),
        "wer": corpus.rate,
        "above_half": sum(u.rate > 0.5 for u in corpus.utterances),
    }
    for name in MEASURES:
        if values := [row[name] for _, row, _ in judged if name in row]:
            scores[name] = summarize(values)
    if prompts := [p for _, row, _ in judged if (p := row.get("reference_prosody"))]:
        scores["reference_prosody"] = mean_prosody(prompts)
    return scores


def conversation_voices(conversations: Sequence[Sequence[Judged]]) -> Row:
    """Return similarities between turns of one speaker ("intra") and of two ("inter").

    Of conversations whose voices are known also "own_voice": the share of turns that are nearer to their own speaker's
    voice than to every other; "voice_similarity": the mean cosine with it, 0 for a turn without speech; "voice_drift":
    its change per minute of the conversation, the mean over conversations of three turns or more.
    """
    values: dict[str, list[float]] = {
        name: [] for name in ("own_voice", "voice_similarity", "voice_drift", "intra", "inter")
    }
    for group in conversations:
        similar, starts = [], []
        for item, row, _ in group:
            cosines = row.get("cosines")
            if cosines is not None:
                similar.append(cosines[item.speaker])
                starts.append(row["start"])
            elif item.voices:
                values["voice_similarity"].append(0.0)
            if len(item.voices) > 1:
                nearest = None if cosines is None else max(cosines, key=cosines.__getitem__)
                values["own_voice"].append(float(nearest == item.speaker))
        values["voice_similarity"] += similar
        voices = [np.array(row["voice"]) if "voice" in row else None for _, row, _ in group]
        intra, inter = voice_cosines(voices, [item.speaker for item, _, _ in group])
        drift = slope_per_minute(similar, starts)
        for name, value in (("voice_drift", drift), ("intra", intra), ("inter", inter)):
            values[name] += [] if math.isnan(value) else [value]
    scores: Row = {name: summarize(column) for name, column in values.items() if column}
    if "intra" in scores and "inter" in scores:
        alike, unlike = max(0.0, scores["intra"]["mean"]), min(1.0, 1.0 - scores["inter"]["mean"])
        scores["similarity"] = math.sqrt(alike * unlike)
    return scores


# -- tables and the page -----------------------------------------------------------------------------------------------

PERCENT = {
    "mean_wer": "WER % (mean over utterances)",
    "wer": "WER % (corpus)",
    "intra": "cosine × 100 between turns of one speaker",
    "inter": "cosine × 100 between turns of two speakers",
    "similarity": "SIM × 100",
    "own_voice": "turns nearest to their own voice, %",
    "voice_similarity": "cosine × 100 with their own voice",
    "voice_drift": "its change per minute, × 100",
}
STEPS = {
    "level_step": "level step at joints, dB",
    "usual_level_step": "level step in the middle of pieces, dB",
    "pitch_step": "pitch step at joints, semitones",
    "usual_pitch_step": "pitch step in the middle of pieces, semitones",
}


def score_rows(scores: Row) -> list[list[str]]:
    """Return [label, text] of the scores that are numbers, rates and similarities in percent."""
    rows = []
    for key, value in scores.items():
        label, scale = PERCENT.get(key) or STEPS.get(key) or metric_name(key), 100 if key in PERCENT else 1
        if key == "reference_prosody":
            rows += [[f"{metric_name(name)} of the prompts", f"{mean:.2f}"] for name, mean in value.items()]
        elif isinstance(value, dict) and "mean" in value:
            rows.append([label, with_interval(value, ".2f", scale=scale, to="–")])
        elif isinstance(value, int | float):
            rows.append([label, f"{scale * value:.2f}" if isinstance(value, float) else str(value)])
    return rows


def _card(name: str, group: Sequence[Judged], rate: float, out: Path) -> Card:
    """Return a card of an utterance with its prompt, or of all turns of a conversation."""
    takes = []
    for item, row, errors in group:
        if item.prompt is not None:
            takes.append(Take("prompt", _playable(item.prompt, out)))
        values = {"WER %": 100 * errors.rate}
        values |= {"SIM": row["similarity"]} if "similarity" in row else {}
        values |= {metric_name(measure): row[measure] for measure in MEASURES[:2] if measure in row}
        values |= {"pauses %": 100 * row["pauses"]} if "pauses" in row else {}
        transcript = row.get("hypothesis") if "problem" not in row else f"({row['problem']})"
        said = f"{item.speaker}: {item.text}" if item.group else "generated"
        takes.append(Take(said, None if "problem" in row else _playable(item.clip, out), values, transcript))
    text = "" if group[0][0].group else group[0][0].text
    return Card(f"{name} · WER {100 * rate:.1f}%", text, tuple(takes))


def _playable(clip: AudioClip | None, out: Path) -> str | None:
    """Return the path of a recording; a part of one is written as a file for the page."""
    if clip is None or clip.path is None:
        return None
    if not clip.part:
        return str(Path(clip.path).resolve())
    name = f"parts/{hashlib.sha256(clip.key.encode()).hexdigest()[:16]}.flac"
    (out / "parts").mkdir(exist_ok=True)
    soundfile.write(out / name, clip.load(RATE), RATE, format="FLAC", subtype="PCM_16")
    return name


if __name__ == "__main__":
    run_evaluation(sys.modules[__name__], sys.argv[1:])
