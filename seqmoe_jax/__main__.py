"""`python -m seqmoe_jax`, and the command `seqmoe`."""

import sys

from seqmoe_jax.errors import was_interrupt


def main() -> None:
    try:
        from seqmoe_jax.cli.main import run_process  # takes a while, in which somebody may interrupt it

        run_process()
    except (KeyboardInterrupt, Exception) as error:
        if not was_interrupt(error):
            raise
        print("seqmoe: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
