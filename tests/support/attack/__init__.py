"""An attack on what reads files, requests and options: mutated inputs, and a judge of every input that is accepted.

mutation.py   changes bytes, JSON documents and safetensors headers by a `random.Random`
targets.py    what an attack consists of; data.py, checked.py, runs.py, servers.py, options.py:
              what is attacked
process.py    runs inputs in a process of their own with limits of memory and time

`tests/attack` runs it in tiers, `tools/attack.py` with a new seed and any number of inputs.
"""
