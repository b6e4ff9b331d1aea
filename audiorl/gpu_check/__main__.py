"""`python -m audiorl.gpu_check`."""

import sys

from audiorl.gpu_check.run import main

sys.exit(main(sys.argv[1:]))
