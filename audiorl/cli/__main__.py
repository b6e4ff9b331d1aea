"""`python -m audiorl.cli`, which torchrun starts in every process."""

import sys

from audiorl.cli import main

sys.exit(main())
