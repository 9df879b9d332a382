"""`python -m mics_dtensor.cli`: the command `mics`, for torchrun and for checkouts."""

import sys

from mics_dtensor.cli import main

sys.exit(main())
