import subprocess
import sys

import pytest

METRICS = "audiorl.eval.metrics"


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("audiorl.rewards", ("transformers", "math_verify", "py3langid", "vllm", "ray")),
        (
            f"audiorl.speech_models, {METRICS}.speech, {METRICS}.prosody, {METRICS}.corpus",
            ("torch", "transformers", "scipy", "librosa", "pystoi", "pesq"),
        ),
    ],
)
def test_imports_load_no_models(modules: str, heavy: tuple[str, ...]) -> None:
    code = f"import sys, {modules}; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
