"""Benchmarks of models and of recorded results: qa, mmau, asr, simul, tts, codec, audit, passk, gap, text.

`main(options)` of a module does what `audiorl eval NAME` does; its options are a dataclass. What they share is in
`_common`, evaluations of training runs are in `_phases`, `_streams` and `_speech`, metrics in `audiorl.eval.metrics`.
Other programs load `_simuleval_agent` (SimulEval), `_simulstream_processor` (simulstream) and `_lmms_eval_model`
(lmms-eval, by its entry point).
"""
