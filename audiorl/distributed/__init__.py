"""The processes of a run: one, several under torchrun, or those of a Ray cluster, behind one protocol.

`local` has the protocol, `Group`, and the group in this process; `torchrun` and `ray_group` the others, `ray_cluster`
Ray's processes. `placement` makes the groups that the options `--runtime.…` ask for.
"""
