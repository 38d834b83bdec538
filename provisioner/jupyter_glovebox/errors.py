"""The errors a person sees, and the exit codes of the commands."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every `jupyter glovebox` command but `exec`."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    CANNOT_ISOLATE = 3


class ExecExit(IntEnum):
    """Exit codes of ours in `jupyter glovebox exec`; every other one is the command's."""

    DENIED = 121
    USAGE = 122
    CANNOT_ISOLATE = 123


class GloveboxError(Exception):
    """An error with a message for a person and, where there is one, what to do about it.

    Attributes:
        message: what is wrong, in one sentence.
        remedy: what the reader can do; empty when nothing can be done.
        exit_code: the code the command line ends with.
    """

    exit_code: Exit = Exit.ERROR

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message} {remedy}".strip())
        self.message = message
        self.remedy = remedy


class UsageError(GloveboxError):
    """The caller asked for something that cannot be asked for."""

    exit_code = Exit.USAGE


class RefusedError(GloveboxError):
    """A plan, policy or launch rule refuses what was asked."""


class CannotIsolateError(GloveboxError):
    """This machine cannot give the isolation that the plan demands; nothing was started."""

    exit_code = Exit.CANNOT_ISOLATE
