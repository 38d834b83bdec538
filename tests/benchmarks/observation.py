"""What one watched call costs, and `import` of large packages: inside a sandbox with and without watching.

    python tests/benchmarks/observation.py [--runs 7]

Both arms run in the same sandbox; the second has a notify filter that watches nothing. Interleaved, medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

CODE = """
import json, os, socket, sys, time
def timed(work, times, unit):
    begin = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - begin) / times * unit
def connects():
    with socket.socket(socket.AF_UNIX) as s:
        s.connect('own')
    server.accept()[0].close()
def new_file():
    os.close(os.open('new', os.O_CREAT | os.O_WRONLY))
    os.unlink('new')
server = socket.socket(socket.AF_UNIX); server.bind('own'); server.listen()
print(json.dumps({
    'getppid (not watched), nanoseconds': timed(os.getppid, 200_000, 1e9),
    'open of an installed file, microseconds': timed(lambda: os.close(os.open('/usr/bin/env', 0)), 3000, 1e6),
    'open of an own file, microseconds': timed(lambda: os.close(os.open('own-file', os.O_RDWR | os.O_CREAT)), 1000, 1e6),
    'new file and unlink (two calls), microseconds': timed(new_file, 1000, 1e6),
    'connect to an own socket, microseconds': timed(connects, 500, 1e6),
    'import numpy, milliseconds': timed(lambda: __import__('numpy'), 1, 1e3),
    'import pandas after it, milliseconds': timed(lambda: __import__('pandas'), 1, 1e3),
}))
"""
DRIVER = """
import sys
from jupyter_glovebox.supervisor import process
process._BOOTSTRAP = sys.argv.pop(1) + process._BOOTSTRAP
from jupyter_glovebox.cli import main
sys.exit(main())
"""
ARMS = {
    "watched": "",
    "not watched": "import jupyter_glovebox.sandbox.seccomp as s, struct; "
    "s.notify_filter = lambda *a, **k: struct.pack('=HBBI', 6, 0, 0, 0x7FFF0000); ",
}


def main() -> None:
    """Run the arms in turn and print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    results: dict[str, dict[str, list[float]]] = {arm: {} for arm in ARMS}
    with tempfile.TemporaryDirectory() as state, tempfile.TemporaryDirectory() as folder:
        env = dict(os.environ, JUPYTER_GLOVEBOX_STATE_DIR=state)
        for number in range(runs + 1):
            for arm, patch in ARMS.items():
                command = [sys.executable, "-c", DRIVER, patch, "exec", "--", sys.executable, "-c", CODE]
                done = subprocess.run(
                    command, env=env, cwd=folder, capture_output=True, text=True, check=True
                )
                for what, value in json.loads(done.stdout).items():
                    if number:  # the first round warms the page cache
                        results[arm].setdefault(what, []).append(value)
    for what in results["watched"]:
        watched, plain = (statistics.median(results[arm][what]) for arm in ARMS)
        more, ratio = watched - plain, watched / plain
        print(f"{what}: watched {watched:.1f}, not watched {plain:.1f}, more {more:.1f}, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
