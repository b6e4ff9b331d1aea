"""Does this GPU compute what the CPU does, and how fast? `audiorl doctor --gpu`, or `python -m audiorl.gpu_check`.

The second form needs a checkout with torch, transformers, peft, numpy, pyarrow and msgspec only. It downloads nothing:
models are made on the spot, random and of two layers, at the widths of a 3B decoder.
"""
