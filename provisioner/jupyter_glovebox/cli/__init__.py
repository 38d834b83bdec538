"""The command `jupyter glovebox`. One module per group of commands; each has `register(subparsers)`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import Exit, GloveboxError


def _parser() -> argparse.ArgumentParser:
    from . import artifacts, commands, machine, manifests, notebooks, records

    parser = argparse.ArgumentParser(
        prog="jupyter glovebox",
        description="Run notebooks and commands in a sandbox, under a manifest of what they may touch.",
        epilog="Exit codes: 0 done; 1 error, budget, or a file that may not leave; 2 wrong usage or manifest; "
        "3 this machine cannot isolate. `exec` ends with the command's own status; ours are 121 denied or "
        "budget, 122 usage, 123 cannot isolate.",
    )
    parser.add_argument("--version", action="version", version=f"jupyter-glovebox {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (machine, manifests, notebooks, commands, artifacts, records):
        module.register(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; default: this process's.

    Returns:
        The exit code (see `errors.Exit` and `errors.ExecExit`).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The `jupyter` command passes nothing special; a bare call is a question.
    args = _parser().parse_args(arguments or ["--help"])
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except GloveboxError as error:
        return _show_error(error, args)
    except BrokenPipeError:
        # The reader went away (`| head`): not our error, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return int(Exit.ERROR)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    return code


def _show_error(error: GloveboxError, args: argparse.Namespace) -> int:
    code = args.error_code(error) if hasattr(args, "error_code") else int(error.exit_code)
    if getattr(args, "json", False):
        problems = getattr(error, "problems", None)
        body: dict[str, object] = {"error": {"message": error.message, "remedy": error.remedy}}
        if problems is not None:
            body["problems"] = [{"line": p.line, "column": p.column, "message": p.message} for p in problems]
        if hasattr(args, "error_body"):
            body = args.error_body(error) | body
        print(json.dumps(body, indent=2))
    else:
        print(f"jupyter glovebox {args.command}: {error.message}", file=sys.stderr)
        if error.remedy:
            print(f"  {error.remedy}", file=sys.stderr)
    return code
