"""Prints what is installed, built and usable here. Please paste it into bug reports."""

import argparse
import json
import os
import sys

from txl_kernels import _report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m txl_kernels", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    args = parser.parse_args()
    report = _report.collect()
    try:
        print(json.dumps(report, indent=2) if args.json else _report.render(report), flush=True)
    except BrokenPipeError:  # whoever read the output (head, less) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the exit would flush, and fail


if __name__ == "__main__":
    main()
