"""Rows of any format become samples.

manifest       read_samples; formats and containers: what it reads; rows: the files
rollout_rows   recorded rollouts; serialization: what reward servers get
preferences    pairs, judged answers, steps
corpus         parallel human speech: bundled_speech, corpus, split_by_key; bundled: tasks on it
prompts, views, sets, schedule, augment, synth, text, no_speech, recordings, seedtts, emergent
"""
