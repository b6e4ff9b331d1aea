"""`python -m audiorl`: the command audiorl, also from a checkout that is not installed."""

import sys

from audiorl.cli import main

sys.exit(main())
