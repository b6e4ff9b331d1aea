"""Text to speech: is it understood, and is it the right voice? Seed-TTS-eval's protocol, and conversations.

    audiorl eval tts --model runs/tts/checkpoints/grpo/step_000060 --meta seedtts_testset/en/meta.lst \
        --asr openai/whisper-large-v3 --speaker microsoft/wavlm-base-plus-sv --out results/tts
    audiorl eval tts --model MODEL --codec CODEC --texts lines.txt --out results/lines
    audiorl eval tts --meta seedtts_testset/en/meta.lst --audio generated/ --asr openai/whisper-large-v3 \
        --speaker microsoft/wavlm-base-plus-sv --out results/tts
    audiorl eval tts --turns talks.jsonl --asr judges/whisper-base --speaker judges/speaker --out results/talks
    audiorl eval tts --turns scripts.jsonl --model MODEL --asr judges/whisper-base --speaker judges/speaker \
        --out results/dialogue
    audiorl eval tts --cases emergent_tts_eval_data.jsonl --audio mine/ --against baseline_audios/ \
        --judge.model Qwen/Qwen3-Omni-30B-A3B-Instruct --judge.url http://127.0.0.1:8000/v1 --out results/win_rate

--meta: a line name|prompt text|prompt wav|text an utterance; NAME.wav (or .flac, .ogg, .opus, .mp3) in --audio says
it. With --model a checkpoint generates it, in the voice of the prompt, into --audio or OUT/audio. The word
error rate is the mean of the utterances' rates, the similarity the mean cosine with the prompt.
--turns: conversations as `audiorl.data.seedtts` reads them, scored by their word errors and by
sqrt(intra · (1 - inter)) of the mean cosines between turns of one speaker and of two. With --model they are scripts,
each turn's speaker in the voice of the script; long turns are said in pieces. Where the voices are known, the scores
have the share of turns that are nearest to their own speaker's voice, and how that similarity changes per minute.
--cases with --against: EmergentTTS-Eval's win rate of the recordings in --audio (or of --model) over those of another
system in --against: a chat model that listens compares each pair, in an order drawn by --seed.

Where a recogniser counts errors, a recording that is missing, or cannot be read, counts as nothing said: all of its
words are wrong and its voice is nobody's. Writes to --out: results.jsonl (one line an utterance or turn), scores.json
and page.html (plays the worst); comparisons.jsonl and comparisons.html with --against; without both nothing but what
--model generates. A second call continues where the first stopped.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import soundfile

from audiorl.audio import AudioClip, AudioError
from audiorl.config import SamplingConfig, to_json
from audiorl.data.emergent import Case, read_cases
from audiorl.data.seedtts import TextToSay, read_conversations, read_meta
from audiorl.eval._common import (
    JudgeOptions,
    Judges,
    Row,
    check_settings,
    complete_rows,
    print_table,
    run_evaluation,
    summarize,
    with_interval,
    write_scores,
)
from audiorl.eval._conversation_generation import SAID, PieceConfig, generate_conversations
from audiorl.eval._speech import RATE, generate_speech, load_speaking, mean_prosody, prosody_columns, recording_of
from audiorl.eval._win_rate import ListeningJudge, compare, comparison_page, pairs_of, win_rate_table, win_rates
from audiorl.eval.metrics.prosody import MEASURES, slope_per_minute
from audiorl.eval.metrics.speech import cosine, voice_cosines
from audiorl.eval.metrics.text import CorpusErrors, ErrorCounts, compared, utterance_errors
from audiorl.report.listening import Card, Take, listening_page
from audiorl.report.summary import metric_name, show
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.speech import CodecSpeechDecoder, StreamingEngine
from audiorl.tasks.tts.prompts import utterance_sample
from audiorl.tasks.tts.texts import read_utterances


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
    """Language of the texts, an ISO code, for a multilingual recogniser and for the normalisation. Errors are counted
    in words, in scripts without spaces (zh, ja) in characters."""
    worst: int = 20
    """How many recordings, or conversations, the page plays."""


def main(options: TTSOptions) -> Row:
    """Do what the options say and return the scores; empty without a recogniser and another system."""
    check(options)
    joints: Row = {}
    if options.model is not None:
        options, joints = generate(options)
    compared_scores = compare_systems(options) if options.against is not None else {}
    if options.asr is None:
        if compared_scores:
            write_scores(options.out, compared_scores)
        return compared_scores
    items = items_of(options)
    for item in items:
        if options.speaker is not None and item.prompt is not None:
            item.prompt.load(RATE)  # a broken prompt is the list's fault, not the system's
    judging = {"language": options.language, "asr": options.asr, "speaker": options.speaker}
    check_settings(options.out / "settings.json", {"list": listed(options), **judging})
    rows = judge_items(items, options.judges(options.language), options.out, options.batch_size)
    judged = scored(items, rows, options.language)
    scores = judging | error_scores(judged)
    if options.speaker is not None:
        scores |= prompt_similarity(judged) if options.turns is None else conversation_voices(judged)
    scores |= joints | compared_scores
    for item, row, _ in judged:
        if "problem" in row:
            print(f"counted as wrong: {item.id}: {row['problem']}", file=sys.stderr)
    about = f"{listed(options)}, transcribed by {options.asr}"
    page = score_page(judged, scores, about, options.out, options.worst)
    write_scores(options.out, scores, {"page.html": page})
    print_table(["", ""], score_rows(scores), listed(options))
    return scores


def check(options: TTSOptions) -> None:
    """Raise ValueError for options that do not go together."""
    given = [name for name in ("meta", "texts", "cases", "turns") if getattr(options, name) is not None]
    if len(given) != 1:
        raise ValueError("give one of --meta, --texts and --cases, with --audio or --model, or --turns")
    if given == ["turns"] and options.audio:
        raise ValueError("--audio: belongs to a list of texts; conversations name their recordings themselves")
    if options.against is not None and given != ["cases"]:
        raise ValueError("--against: belongs to --cases, texts with categories; see audiorl.data.emergent")
    if options.against is not None and not options.judge.model:
        raise ValueError("--judge.model: name the chat model that compares with --against")
    if options.judge.model and options.against is None:
        raise ValueError("--judge.model: compares two systems; name the other one's recordings with --against")
    if options.against is not None and options.audio is None and options.model is None:
        raise ValueError("--audio: name the folder of the recordings to compare with --against, or --model")
    if options.codec is not None and options.model is None:
        raise ValueError("--codec: belongs to --model, the checkpoint that writes its codes")
    if options.asr is None and options.model is None and options.against is None:
        raise ValueError("--asr: name a recogniser, or with --model something to generate")


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

    @cached_property
    def fingerprint(self) -> str:
        """Return a digest of the recording as it is now: what was judged before must be the same."""
        assert self.clip is not None and self.clip.path is not None
        content = Path(self.clip.path).read_bytes()
        return hashlib.sha256(content + f"{self.clip.start} {self.clip.duration}".encode()).hexdigest()[:16]


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
    items = [SpokenText(u.name, u.text, recording_of(options.audio, u.name), u.prompt) for u in utterances_of(options)]
    if options.model is None and all(item.clip is None for item in items):
        raise ValueError(f"{options.audio}: none of the {len(items)} recordings is there, such as {items[0].id}.wav")
    return items


def utterances_of(options: TTSOptions) -> list[TextToSay]:
    """Read the texts of --meta, --texts or --cases."""
    if options.meta is not None:
        return read_meta(options.meta)[: options.limit]
    if options.cases is not None:
        return [TextToSay(case.name, case.text) for case in cases_of(options)]
    assert options.texts is not None
    return list(read_utterances(options.texts, limit=options.limit).samples)


def cases_of(options: TTSOptions) -> tuple[Case, ...]:
    """Read the texts of --cases, of the categories that the judge's rubrics know."""
    assert options.cases is not None
    return read_cases(options.cases, options.judge.read_rubrics(), options.limit)


def generate(options: TTSOptions) -> tuple[TTSOptions, Row]:
    """Let the model say what is missing. Return the options with the folder of its recordings, and scores of joints."""
    assert options.model is not None
    folder = options.audio or options.out / "audio"
    scripts = [] if options.turns is None else read_conversations(options.turns, script=True)[: options.limit]
    samples = [utterance_sample(u) for u in utterances_of(options)] if options.turns is None else []
    policy = load_speaking(options.model, options.codec, options.device)
    assert policy.codec is not None
    settings = {
        "model": options.model,
        "codec": policy.codec.identity,
        "list": listed(options),
        "sampling": to_json(options.sampling),
    }
    if scripts:
        said = generate_conversations(
            StreamingEngine(policy, options.sampling),
            scripts,
            folder,
            settings,
            options.pieces,
            batch_size=options.generation_batch_size,
            seed=options.seed,
        )
        print(
            f"{len(scripts)} conversations said in {folder}: {said.pieces} pieces, {said.seconds:.1f} s, {said.cut} "
            f"cut off, {said.silent} silent; first audio after {said.first_audio:.2f} s, real-time factor "
            f"{said.real_time_factor:.2f} (medians, {options.generation_batch_size} together)"
        )
        for label, text in joint_rows(said.steps):
            print(f"{label}: {text}")
        return replace(options, turns=folder / SAID), said.steps
    engine, voice = HFEngine(policy, options.sampling), CodecSpeechDecoder.of(policy)
    rows = generate_speech(
        engine, voice, samples, folder, settings, batch_size=options.generation_batch_size, seed=options.seed
    )
    cut = sum(row["stop_reason"] == "length" for row in rows)
    print(f"{len(rows)} texts said in {folder}, {sum(row['seconds'] for row in rows):.1f} s, {cut} cut off")
    return replace(options, audio=folder), {}


def listed(options: TTSOptions) -> str:
    """Return the file with the texts."""
    return str(options.meta or options.texts or options.cases or options.turns)


# -- scores ------------------------------------------------------------------------------------------------------------


def judge_items(items: Sequence[SpokenText], judges: Judges, out: Path, batch_size: int) -> dict[str, Row]:
    """Return a row an item by id: {id, file, seconds, hypothesis, voice?, similarity?}, or {id, problem}.

    Rows are kept in OUT/results.jsonl, from which a later call continues. The similarity is with the prompt; of a turn
    without prompt the voice is kept. Speech with voice has f0_range, energy_range and pauses, too, and
    `reference_prosody` has those of the prompt.
    """
    embedded: dict[str, np.ndarray] = {}
    prosody_of: dict[str, dict[str, float]] = {}

    def voice_of(clip: AudioClip) -> np.ndarray:
        assert judges.encoder is not None
        if clip.key not in embedded:
            embedded[clip.key] = judges.encoder.embed([clip.load(RATE)], RATE)[0]
        return embedded[clip.key]

    def prompt_prosody(clip: AudioClip) -> dict[str, float]:
        """Return {} for a prompt that cannot be read, which is an error with --speaker only."""
        name = str((clip.path, clip.start, clip.duration))
        if name not in prosody_of:
            try:
                prosody_of[name] = prosody_columns(clip.load(RATE), RATE)
            except AudioError:
                prosody_of[name] = {}
        return prosody_of[name]

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
        for item, row in zip(readable, judges.judge(list(waves.values()), RATE) if readable else [], strict=True):
            voice = row.pop("voice", None)
            wav = waves[item.id]
            row = {"id": item.id, "file": item.fingerprint, "seconds": len(wav) / RATE, **row}
            row |= prosody_columns(wav, RATE)
            if item.prompt is not None:
                row["reference_prosody"] = prompt_prosody(item.prompt)
            if voice is not None and item.prompt is not None:
                row["similarity"] = cosine(voice, voice_of(item.prompt))
            elif voice is not None and item.group:
                row["voice"] = [round(float(x), 6) for x in voice]
                row["start"] = 0.0 if item.clip is None else item.clip.start
                if item.voices:
                    row["cosines"] = {name: cosine(voice, voice_of(clip)) for name, clip in item.voices.items()}
            rows[item.id] = row
        return [rows[item.id] for item in batch]

    there = {item.id: item for item in items if item.clip is not None}
    missing: dict[str, Row] = {i.id: {"id": i.id, "problem": "missing"} for i in items if i.clip is None}
    return missing | complete_rows(
        out / "results.jsonl",
        there,
        judge,
        batch_size,
        is_current=lambda item, row: row.get("file") == item.fingerprint,
    )


def scored(items: Sequence[SpokenText], rows: dict[str, Row], language: str) -> list[Judged]:
    """Return each item with its row and its errors; of a recording that cannot be read nothing is understood."""
    judged = []
    for item in items:
        if not compared(item.text, language):
            raise ValueError(f"{item.id!r}: the text {item.text!r} is nothing but punctuation; no error rate exists")
        hypothesis = rows[item.id].get("hypothesis", "")
        if language == "zh" and hypothesis:  # in simplified characters, as the benchmark does
            try:
                from zhconv import convert
            except ImportError as error:
                raise ImportError("Chinese needs zhconv: pip install 'audiorl[speech]'") from error
            hypothesis = convert(hypothesis, "zh-cn")
        judged.append((item, rows[item.id], utterance_errors(item.text, hypothesis, language)))
    return judged


def grouped(judged: Sequence[Judged]) -> dict[str, list[Judged]]:
    """Group conversations by their id, turn by turn; utterances stay alone."""
    groups: dict[str, list[Judged]] = {}
    for entry in judged:
        groups.setdefault(entry[0].group or entry[0].id, []).append(entry)
    return groups


def error_scores(judged: Sequence[Judged]) -> Row:
    """Return error rates and prosody, whose means are over the recordings that have voice; its `n` counts them."""
    groups = grouped(judged)
    corpus = CorpusErrors(tuple(sum((e for _, _, e in group), ErrorCounts()) for group in groups.values()))
    problems = [row["problem"] for _, row, _ in judged if "problem" in row]
    scores: Row = {
        "utterances": len(groups),
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


def prompt_similarity(judged: Sequence[Judged]) -> Row:
    """Return {"similarity"} of each voice with its prompt, 0 without speech; {} where no text has a prompt."""
    values = [row.get("similarity", 0.0) for item, row, _ in judged if item.prompt is not None]
    return {"similarity": summarize(values)} if values else {}


def conversation_voices(judged: Sequence[Judged]) -> Row:
    """Return similarities between turns of one speaker ("intra") and of two ("inter"), and with known voices."""
    groups = grouped(judged)
    scores = _known_voices(groups)
    cosines = [
        voice_cosines(
            [np.array(row["voice"]) if "voice" in row else None for _, row, _ in group],
            [item.speaker for item, _, _ in group],
        )
        for group in groups.values()
    ]
    for name in ("intra", "inter"):
        defined = [value for c in cosines if not math.isnan(value := getattr(c, name))]
        if defined:
            scores[name] = summarize(defined)
    if "intra" in scores and "inter" in scores:
        alike, unlike = max(0.0, scores["intra"]["mean"]), min(1.0, 1.0 - scores["inter"]["mean"])
        scores["similarity"] = math.sqrt(alike * unlike)
    return scores


def _known_voices(groups: Mapping[str, Sequence[Judged]]) -> Row:
    """Return how near each turn is to its own speaker's voice, for conversations whose voices are known.

    "own_voice": the share of turns that are nearer to it than to every other voice of the conversation;
    "voice_similarity": the mean cosine with it, 0 for a turn without speech; "voice_drift": its change per minute of
    the conversation, the mean over conversations of three turns or more.
    """
    nearest: list[float] = []
    own: list[float] = []
    drifts: list[float] = []
    for group in groups.values():
        similar, starts = [], []
        for item, row, _ in group:
            if (cosines := row.get("cosines")) is not None:
                similar.append(cosines[item.speaker])
                starts.append(row["start"])
                nearest += [float(max(cosines, key=cosines.__getitem__) == item.speaker)] if len(cosines) > 1 else []
            elif item.voices:
                own.append(0.0)
                nearest += [0.0] if len(item.voices) > 1 else []
        own += similar
        drifts += [slope] if not math.isnan(slope := slope_per_minute(similar, starts)) else []
    named = {"own_voice": nearest, "voice_similarity": own, "voice_drift": drifts}
    return {name: summarize(values) for name, values in named.items() if values}


def compare_systems(options: TTSOptions) -> Row:
    """Return {"win_rates": …} of --audio over --against; write comparisons.html."""
    assert options.audio is not None and options.against is not None
    pairs = pairs_of(cases_of(options), options.audio, options.against)
    settings = {"list": listed(options), "audio": str(options.audio), "against": str(options.against)}
    rows = compare(pairs, options.judge, options.out, settings, seed=options.seed)
    for row in rows.values():
        if "problem" in row:
            print(f"not compared: {row['id']}: {row['problem']}", file=sys.stderr)
    rates = {"judge": options.judge.model, **win_rates(rows.values())}
    title = f"{options.audio} against {options.against}, by {options.judge.model}"
    print_table(*win_rate_table(rates), title)
    page = comparison_page(title, pairs, rows, rates, options.out, options.worst)
    (options.out / "comparisons.html").write_text(page, encoding="utf-8")
    return {"win_rates": rates}


# -- tables and the page -----------------------------------------------------------------------------------------------


def joint_rows(scores: Row) -> list[list[str]]:
    """Return [label, text] of the steps at joints between pieces, with the usual ones in the middle of pieces."""
    rows = []
    for name, unit in (("level", "dB"), ("pitch", "semitones")):
        if f"{name}_step" in scores:
            usual = scores.get(f"usual_{name}_step")
            elsewhere = "" if usual is None else f" ({usual:.1f} in the middle of pieces)"
            rows.append([f"{name} step at joints, {unit}", f"{scores[f'{name}_step']:.1f}{elsewhere}"])
    return rows


def _other_rows(scores: Row) -> list[list[str]]:
    """Return [label, text] of prosody with that of the prompts, of joints, and of counts."""
    rows = []
    prompts = scores.get("reference_prosody")
    for name in (name for name in MEASURES if name in scores):
        mean, low, high = (show(scores[name][key], name) for key in ("mean", "low", "high"))
        compared_with = "" if prompts is None else f", prompts {show(prompts[name], name)}"
        rows.append([metric_name(name), f"{mean} ({low} to {high}){compared_with}"])
    counts = [[key, str(scores[key])] for key in ("utterances", "recordings", "missing", "unreadable")]
    return [*rows, *joint_rows(scores), *counts]


def score_rows(scores: Row) -> list[list[str]]:
    """Return [label, text] of the scores, rates and similarities in percent."""
    labels = {
        "mean_wer": "WER % (mean over utterances)",
        "wer": "WER % (corpus)",
        "intra": "cosine × 100 between turns of one speaker",
        "inter": "cosine × 100 between turns of two speakers",
        "similarity": "SIM × 100",
        "own_voice": "turns nearest to their own voice, %",
        "voice_similarity": "cosine × 100 with their own voice",
        "voice_drift": "its change per minute, × 100",
    }
    rows = []
    for key, label in labels.items():
        if (value := scores.get(key)) is not None:
            percent = (
                with_interval(value, ".2f", scale=100, to="–") if isinstance(value, dict) else f"{100 * value:.2f}"
            )
            rows.append([label, percent])
    return rows + _other_rows(scores)


def score_page(judged: Sequence[Judged], scores: Row, about: str, out: Path, worst: int) -> str:
    """Return a page for the folder `out`: the scores, and the `worst` recordings, each with its prompt.

    Of conversations all turns are on it. `about`: which texts, and by which recogniser.
    """
    groups = grouped(judged)
    rates = {name: sum((e for _, _, e in group), ErrorCounts()).rate for name, group in groups.items()}
    cards = []
    for name in sorted(groups, key=lambda n: -rates[n])[:worst]:
        takes = []
        for item, row, errors in groups[name]:
            if item.prompt is not None:
                takes.append(Take("prompt", _playable(item.prompt, out)))
            values = {"WER %": 100 * errors.rate}
            values |= {"SIM": row["similarity"]} if "similarity" in row else {}
            values |= {metric_name(name): row[name] for name in MEASURES[:2] if name in row}
            values |= {"pauses %": 100 * row["pauses"]} if "pauses" in row else {}
            transcript = row.get("hypothesis") if "problem" not in row else f"({row['problem']})"
            said = f"{item.speaker}: {item.text}" if item.group else "generated"
            takes.append(Take(said, None if "problem" in row else _playable(item.clip, out), values, transcript))
        text = "" if groups[name][0][0].group else groups[name][0][0].text
        cards.append(Card(f"{name} · WER {100 * rates[name]:.1f}%", text, tuple(takes)))
    rows = [["WER % (mean over utterances)", f"{100 * scores['mean_wer']['mean']:.2f}"]]
    if "similarity" in scores:
        similarity = scores["similarity"]
        mean = similarity["mean"] if isinstance(similarity, dict) else similarity
        rows.append(["SIM × 100", f"{100 * mean:.2f}"])
    lead = f"{about}. The worst {len(cards)} first."
    return listening_page("Text to speech", lead, ["", ""], rows + _other_rows(scores), cards, out)


def _playable(clip: AudioClip | None, out: Path) -> str | None:
    """Return the path of a recording; a part of one is written as a file for the page."""
    if clip is None or clip.path is None:
        return None
    if clip.duration is None and not clip.start:
        return str(Path(clip.path).resolve())
    name = f"parts/{hashlib.sha256(clip.key.encode()).hexdigest()[:16]}.flac"
    (out / "parts").mkdir(exist_ok=True)
    soundfile.write(out / name, clip.load(RATE), RATE, format="FLAC", subtype="PCM_16")
    return name


if __name__ == "__main__":
    run_evaluation(sys.modules[__name__], sys.argv[1:])
