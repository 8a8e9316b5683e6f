"""What every benchmark of the service says and how: rows of `target`, `value` and `met`, on the screen or as JSON."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from _environment import environment


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """A command line with `--json` and the module's text as its help."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def quick_parser_of(text: str | None) -> argparse.ArgumentParser:
    """The same for a benchmark with a quick form, which `make test` runs on a small bundle."""
    parser = parser_of(text)
    parser.add_argument("--quick", action="store_true", help="few requests, and nothing that depends on time")
    parser.add_argument("--bundle", type=Path, help="a registry to serve; left out: one with random weights is made")
    return parser


def row(name: str, value: Any, target: str | None = None, met: bool | None = None) -> dict[str, Any]:
    """One figure. Without a target it is told and not judged."""
    return {"name": name, "target": target, "value": value, "met": met}


def report(arguments: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Print what was found; with `--json` as one object with the environment and the settings."""
    if arguments.json:
        settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "bundle", "folder")}
        print(json.dumps({"environment": environment(), "settings": settings, "results": results}))
        return
    width = max(len(found["name"]) for found in results)
    for found in results:
        mark = {True: "met", False: "NOT MET", None: ""}[found["met"]]
        print(f"{found['name']:{width}}  {found['value']!s:>24}  {found['target'] or '':12} {mark}")


def note(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)
