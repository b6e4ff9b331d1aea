"""Training: `sft.sft`, `preference.prefer` (DPO and its family), `reward_model.train_reward_model` and
`train_process_reward`, `codec.train_codec` on fixed data by the loop in `fit`; `rl` on rollouts.

`optim` holds the optimizers, `batches` and `checks` what updates of every kind share.
"""
