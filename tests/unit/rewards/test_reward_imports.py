import subprocess
import sys


def test_importing_rewards_loads_no_models() -> None:
    code = (
        "import sys, audiorl.rewards; "
        "print([m for m in ('transformers', 'math_verify', 'py3langid', 'vllm', 'ray') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
