"""Text to speech: is it understood, and is it the right voice? Seed-TTS-eval's protocol, and conversations.

    python -m eval.tts --model runs/tts/checkpoints/grpo/step_000060 --meta seedtts_testset/en/meta.lst \
        --asr openai/whisper-large-v3 --speaker microsoft/wavlm-base-plus-sv --out results/tts
    python -m eval.tts --model MODEL --codec CODEC --texts lines.txt --out results/lines
    python -m eval.tts --meta seedtts_testset/en/meta.lst --audio generated/ --asr openai/whisper-large-v3 \
        --speaker microsoft/wavlm-base-plus-sv --out results/tts
    python -m eval.tts --turns talks.jsonl --asr judges/whisper-base --speaker judges/speaker --out results/talks
    python -m eval.tts --turns scripts.jsonl --model MODEL --asr judges/whisper-base --speaker judges/speaker \
        --out results/dialogue
    python -m eval.tts --cases emergent_tts_eval_data.jsonl --audio mine/ --against baseline_audios/ \
        --judge.model Qwen/Qwen3-Omni-30B-A3B-Instruct --judge.url http://127.0.0.1:8000/v1 --out results/win_rate

--meta: a line name|prompt text|prompt wav|text an utterance; NAME.wav (or .flac, .ogg, .opus, .mp3) in --audio is what
was generated. With --model a checkpoint generates it, in the voice of the prompt, into --audio or OUT/audio. The word
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
--model generates. A second call goes on where the first stopped.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from audiorl.audio import AudioClip
from audiorl.config import SamplingConfig, to_json
from audiorl.data.emergent import Case, read_cases
from audiorl.data.seedtts import Utterance, read_conversations, read_meta
from audiorl.eval._conversation_generation import SAID, PieceConfig, generate_conversations
from audiorl.eval._generate import Row, check_settings
from audiorl.eval._options import JudgeOptions, run_script, write_scores
from audiorl.eval._seedtts import Item, conversation_voices, error_scores, judge_items, prompt_similarity, scored
from audiorl.eval._seedtts_page import joint_rows, score_page, score_table
from audiorl.eval._speech import RATE
from audiorl.eval._speech_generation import generate_speech, load_speaking, recording_of
from audiorl.eval._win_rate import ListeningJudge, compare, pairs_of, win_rates
from audiorl.eval._win_rate_page import WIN_RATE_HEAD, comparison_page, win_rate_table
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.speech import CodecSpeechDecoder, StreamingEngine
from audiorl.tasks.tts.prompts import utterance_sample
from audiorl.tasks.tts.texts import read_utterances


@dataclass(frozen=True, kw_only=True)
class Options(JudgeOptions):
    """Score generated speech, or generate it first."""

    meta: Path | None = None
    """Seed-TTS-eval's meta.lst."""
    texts: Path | None = None
    """Texts in another file, in place of --meta: one a line in a .txt, or a manifest (see audiorl.tasks.tts.texts)."""
    cases: Path | None = None
    """EmergentTTS-Eval's texts with their categories, in place of --meta: see audiorl.data.emergent."""
    audio: Path | None = None
    """The folder of what was generated for them."""
    against: Path | None = None
    """With --cases: the folder of another system's recordings of the same texts, to compare by --judge.model."""
    judge: ListeningJudge = ListeningJudge()
    """The chat model that listens to both recordings of a text and says whose is better."""
    turns: Path | None = None
    """Conversations, in place of texts and --audio; with --model scripts of them."""
    model: str | None = None
    """Generate with this checkpoint, run folder (its newest checkpoint) or hub id, into --audio or OUT/audio."""
    codec: str | None = None
    """The audio tokenizer of its codes; by default the folder codec/ in or above the model's."""
    sampling: SamplingConfig = SamplingConfig(max_new_tokens=8, max_frames=750)
    """How it speaks: temperature, top-p, top-k, repetition-aware sampling, most frames."""
    seed: int = 0
    """Of sampling; equal seeds give equal recordings. Also of the order in which two recordings are compared."""
    generation_batch_size: int = 8
    """Texts, or conversations, that are said at once."""
    pieces: PieceConfig = PieceConfig()
    """How --model says conversations and long turns: piece by piece."""
    language: str = "en"
    """Language of the texts, an ISO code: what a multilingual recogniser expects, and how texts are normalised. Errors
    are counted in words, in scripts without spaces (zh, ja) in characters."""
    worst: int = 20
    """How many recordings, or conversations, the page plays."""


def items_of(options: Options) -> list[Item]:
    """What is to be judged, in order."""
    if options.turns is not None:
        return [
            Item(
                f"{talk.id}/{i}",
                turn.text,
                _present(turn.audio),
                group=talk.id,
                speaker=turn.speaker,
                voices={name: clip for name, (_, clip) in talk.voices.items()},
            )
            for talk in read_conversations(options.turns)[: options.limit]
            for i, turn in enumerate(talk.turns)
        ]
    if options.audio is None or not options.audio.is_dir():
        raise ValueError(f"--audio: {options.audio} is no folder; name the one that holds what was generated")
    items = [Item(u.name, u.text, recording_of(options.audio, u.name), u.prompt) for u in utterances_of(options)]
    if options.model is None and all(item.clip is None for item in items):
        raise ValueError(f"{options.audio}: none of the {len(items)} recordings is there, such as {items[0].id}.wav")
    return items


def utterances_of(options: Options) -> list[Utterance]:
    """The texts of --meta, --texts or --cases."""
    if options.meta is not None:
        return read_meta(options.meta)[: options.limit]
    if options.cases is not None:
        return [Utterance(case.name, case.text) for case in cases_of(options)]
    assert options.texts is not None
    return list(read_utterances(options.texts, limit=options.limit).samples)


def cases_of(options: Options) -> tuple[Case, ...]:
    """The texts of --cases, of the categories that the judge's rubrics know."""
    assert options.cases is not None
    return read_cases(options.cases, options.judge.read_rubrics(), options.limit)


def check(options: Options) -> None:
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


def generate(options: Options) -> tuple[Options, Row]:
    """Let the model say what is missing; the options with the folder of its recordings, and scores of the joints."""
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
            f"{said.real_time_factor:.2f} (medians, {options.generation_batch_size} at once)"
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


def listed(options: Options) -> str:
    """The file with the texts."""
    return str(options.meta or options.texts or options.cases or options.turns)


def _present(clip: AudioClip | None) -> AudioClip | None:
    return clip if clip is not None and clip.path is not None and Path(clip.path).is_file() else None


def win_rates_of(options: Options) -> Row:
    """{"win_rates": …} of --audio over --against; writes comparisons.html."""
    assert options.audio is not None and options.against is not None
    pairs = pairs_of(cases_of(options), options.audio, options.against)
    settings = {"list": listed(options), "audio": str(options.audio), "against": str(options.against)}
    rows = compare(pairs, options.judge, options.out, settings, seed=options.seed)
    for row in rows.values():
        if "problem" in row:
            print(f"not compared: {row['id']}: {row['problem']}", file=sys.stderr)
    rates = {"judge": options.judge.model, **win_rates(rows.values())}
    title = f"{options.audio} against {options.against}, by {options.judge.model}"
    out = Table(*WIN_RATE_HEAD, title=title)
    for line in win_rate_table(rates):
        out.add_row(*line)
    Console().print(out)
    page = comparison_page(title, pairs, rows, rates, options.out, options.worst)
    (options.out / "comparisons.html").write_text(page, encoding="utf-8")
    return {"win_rates": rates}


def run(options: Options) -> Row:
    """Do what the options say and return the scores; empty without a recogniser and another system."""
    check(options)
    joints: Row = {}
    if options.model is not None:
        options, joints = generate(options)
    compared_scores = win_rates_of(options) if options.against is not None else {}
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
    Console().print(score_table(scores, listed(options)))
    return scores


if __name__ == "__main__":
    run_script(run, Options, __doc__, "recordings")
