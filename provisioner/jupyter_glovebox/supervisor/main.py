"""The supervisor process: reads one launch spec from its control socket, lives until the sandbox is gone."""

from __future__ import annotations

import os
import select
import signal
import sys

import msgspec

from .channel import CONTROL_FD, Channel
from .spec import Failed, LaunchSpec


def _read_spec() -> tuple[LaunchSpec | None, bytes]:
    """The spec, and what came after its line. None when the manager went away first."""
    data = b""
    while b"\n" not in data:
        select.select([CONTROL_FD], [], [])
        chunk = os.read(CONTROL_FD, 1 << 16)
        if not chunk:
            return None, b""
        data += chunk
    line, _, rest = data.partition(b"\n")
    return msgspec.json.decode(line, type=LaunchSpec), rest


def main() -> None:
    """Entry point; never returns normally before the sandbox is gone."""
    for name in ("SIGINT", "SIGHUP", "SIGPIPE"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    # Whatever else this process inherited could reach the sandbox: only the control socket and the
    # command's own streams stay.
    os.set_inheritable(CONTROL_FD, False)
    os.set_blocking(CONTROL_FD, False)
    spec, rest = _read_spec()
    if spec is None:
        return
    kept = spec.stdio or ()
    os.closerange(max((CONTROL_FD, *kept)) + 1, 1 << 16)
    for fd in kept:
        os.set_inheritable(fd, False)
    os.umask(0o077)
    channel = Channel(CONTROL_FD)
    try:
        from .lifecycle import Supervisor

        supervisor = Supervisor(spec, channel, rest)
    except Exception as error:  # noqa: BLE001 - the manager must hear of it, whatever it is
        import traceback

        traceback.print_exc(file=sys.stderr)
        channel.send(Failed(kind="error", stage="supervisor", message=f"The supervisor failed: {error!r}"))
        channel.flush(2.0)
        return
    supervisor.run()
    channel.flush(5.0)
