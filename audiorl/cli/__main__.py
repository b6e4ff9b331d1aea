"""`python -m audiorl.cli`, which torchrun starts in every process."""

import atexit
import os
import sys

from audiorl.cli import main

code = main()
# An interrupt that passed through code run from C marks the interpreter: it would end by SIGINT and not with 130.
if int(os.environ.get("WORLD_SIZE", "1")) > 1 or code == 130:
    # DeepSpeed holds on to groups that are destroyed, and a thread of Gloo in them can abort a process that Python
    # takes down (pytorch issue 190489). So what runs at exit runs, and Python ends there.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
sys.exit(code)
