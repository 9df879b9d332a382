"""torchrun -m mics_dtensor.train --config-file X.toml [--section.key value ...]"""

from __future__ import annotations

import os
import sys

from mics_dtensor.train.program import main

sys.exit(main(sys.argv[1:], os.environ))
