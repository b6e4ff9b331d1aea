import subprocess
import sys


def test_importing_judges_and_metrics_of_speech_loads_no_library_of_models() -> None:
    metrics = "audiorl.eval.metrics"
    modules = f"audiorl.speech_models, {metrics}.speech, {metrics}.prosody, {metrics}.corpus"
    heavy = ("torch", "transformers", "scipy", "librosa", "pystoi", "pesq")
    code = f"import sys, {modules}; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
