"""The `txl` command; `python -m txl_model` is the same."""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that in sys.argv."""
    try:
        from txl_model import cli
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(("txl_", "torch")):
            raise
        print(f"txl: error: {error}: pip install 'txl-kernels[train]'", file=sys.stderr)
        return 1
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main())
