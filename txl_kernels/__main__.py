"""Prints what is installed, built and usable here. Please paste it into bug reports."""

import argparse
import json

from txl_kernels import _report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m txl_kernels", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    args = parser.parse_args()
    report = _report.collect()
    print(json.dumps(report, indent=2) if args.json else _report.render(report))


if __name__ == "__main__":
    main()
