"""A run on the disk: its folder and how it continues, checkpoints, the metrics log, progress and trackers.

`folder.Run` is the writer; `records` and `metrics_log` read without torch. `checkpoint` says what a checkpoint holds,
`saving` how workers write it while training continues.
"""
