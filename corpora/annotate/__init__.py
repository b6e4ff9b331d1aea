"""Recordings without labels to a manifest that training reads: `audiorl annotate FOLDER --out OUT`.

Each recording passes through stages, in this order; `run.stages` lists those of a set of options:

    segments     where somebody speaks: voice activity, cut at pauses
    language     which language each segment is in
    transcripts  what several recognisers write for it
    voice        a speaker embedding
    quality      predicted MOS, and what the waveform itself tells
    caption      what a policy says about the sound

The results of a recording are stored in one file, stage by stage (`store`). What needs all recordings is computed from
the stored results on every run: the choice of a transcript (`vote`), speakers (`speakers`), filters and rows (`rows`).
"""
