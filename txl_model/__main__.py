"""The `txl` command; `python -m txl_model` is the same."""

import sys


def main() -> int:
    """Run the command line in sys.argv."""
    try:
        from txl_model import cli
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(("txl_", "torch")):
            raise
        print(f"txl: error: {error}: pip install 'txl-kernels[train]'", file=sys.stderr)
        return 1
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
