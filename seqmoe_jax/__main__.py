"""`python -m seqmoe_jax`."""

import sys

from seqmoe_jax.cli.main import main

sys.exit(main())
