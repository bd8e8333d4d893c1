"""`python -m seqmoe_jax`, and the command `seqmoe`."""

import sys


def main() -> None:
    try:
        from seqmoe_jax.cli.main import run_process  # takes a while, in which somebody may interrupt it

        run_process()
    except KeyboardInterrupt:
        print("seqmoe: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
