"""`python -m perdure.cli`: the console script without the script.

For interpreters whose scripts are not on the path. Nothing else may live here.
"""

from __future__ import annotations

import sys

from perdure.cli.app import main

sys.exit(main())
