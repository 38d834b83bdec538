"""Runs one notebook, headless, in a sandbox. The library behind `jupyter glovebox run`."""

from __future__ import annotations

import contextlib
import sys
import uuid
from pathlib import Path
from typing import Any

import msgspec
import nbformat
from jupyter_client.kernelspec import NoSuchKernel
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from .. import grants
from ..errors import GloveboxError, UsageError
from ..ledger.events import Event, Usage, escape
from ..ledger.store import Ledger
from ..locations import state_dir
from ..manifest.compile import Resolution
from ..provisioner import GloveboxProvisioner
from ..supervisor.spec import Closed, Ended, Launched
from . import show


class RunResult(msgspec.Struct, kw_only=True):
    """The `run` result; field names are a contract."""

    notebook: str
    status: str
    reason: str
    plan: str
    isolation: str
    posture: dict[str, Any]
    blocked: list[Event]
    artifacts: list[dict[str, Any]]
    usage: Usage | None
    cleanup: dict[str, Any]
    closed_by: str | None = None
    kernel_id: str = ""
    notice: str = ""
    startup: dict[str, float] = {}


def read_notebook(path: Path) -> Any:
    """Read a notebook.

    Raises:
        UsageError: it is missing, is no regular file, or is not a notebook.
    """
    if not path.is_file():
        raise UsageError(f"There is no notebook at {escape(str(path))}.", "Name an existing .ipynb file.")
    try:
        return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    except (OSError, UnicodeDecodeError, ValueError, nbformat.ValidationError, AttributeError) as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"{escape(str(path))} is not a notebook: {escape(detail)[:200]}", "Open and save it in Jupyter."
        ) from error


class _Client(NotebookClient):
    """Says with each request which cell of the notebook it is, so that events can name it."""

    at = 0

    async def async_execute_cell(self, cell: Any, cell_index: int, *args: Any, **kwargs: Any) -> Any:
        self.at = cell_index
        if sys.stderr.isatty():
            print(
                f"\r\x1b[Kcell {cell_index + 1} of {len(self.nb.cells)}", end="", file=sys.stderr, flush=True
            )
        if self.kc is not None:
            self.kc.session.metadata = {
                "cellId": cell.get("id", ""),
                "jupyter_glovebox": {"cell_index": cell_index},
            }
        return await super().async_execute_cell(cell, cell_index, *args, **kwargs)


def _manager(kernel_name: str, kernel_id: str) -> AsyncKernelManager:
    manager = AsyncKernelManager(kernel_name=kernel_name, kernel_id=kernel_id)
    try:
        spec = manager.kernel_spec
    except NoSuchKernel as error:
        raise UsageError(
            f"The notebook asks for the kernel {escape(kernel_name)}, which is not installed here.",
            "See: jupyter kernelspec list; or name another one with --kernel.",
        ) from error
    # Named outright: whatever the kernelspec or the configuration says, this start is sandboxed.
    manager.provisioner = GloveboxProvisioner(kernel_id=kernel_id, kernel_spec=spec, parent=manager)
    return manager


def _unwritable(output: Path, error: OSError) -> UsageError:
    return UsageError(
        f"The executed notebook cannot be written to {escape(str(output))}: {error.strerror}.",
        "Choose another place with --output.",
    )


def _writable(output: Path) -> None:
    """Found out before the run, not after it; an existing file keeps its content until then."""
    new = not output.exists()
    try:
        output.open("ab").close()
        if new:
            output.unlink()
    except OSError as error:
        raise _unwritable(output, error) from error


def run_notebook(
    path: Path,
    resolution: Resolution,
    *,
    kernel: str | None = None,
    output: Path | None = None,
    export_dir: Path | None = None,
    timeout: float | None = None,
    allow_errors: bool = False,
    promote: bool = True,
) -> RunResult:
    """Run every cell in a sandbox and see the sandbox destroyed.

    Args:
        path: the notebook.
        resolution: its plan (`manifest.compile.resolve`).
        kernel: kernelspec name; default: the notebook's own.
        output: where the executed notebook is written.
        export_dir: where verified outputs go; default: the notebook's folder + outputs.path.
        timeout: seconds per cell.
        allow_errors: go on after a cell that raised.
        promote: promote verified outputs.

    Raises:
        GloveboxError: nothing could be started.
        UsageError: `output` cannot be written.
        FileNotFoundError: the kernel's program does not exist.
    """
    notebook = read_notebook(path)
    if output is not None:
        _writable(output)
    kernel_id = str(uuid.uuid4())
    name = kernel or notebook.metadata.get("kernelspec", {}).get("name", "python3")
    manager = _manager(name, kernel_id)
    grant = grants.Grant(
        resolution, export_dir=None if export_dir is None else str(export_dir.absolute()), promote=promote
    )
    grants.bind(kernel_id, grant)
    client = _Client(
        notebook,
        km=manager,
        timeout=timeout,
        allow_errors=allow_errors,
        resources={"metadata": {"path": resolution.plan.workdir}},
        store_widget_state=False,
    )
    status, reason = "completed", ""
    try:
        # nbclient leaves a manager that it was given running unless it is told otherwise.
        client.execute(cleanup_kc=True)
    except CellExecutionError as error:
        count = notebook.cells[client.at].get("execution_count")
        status, reason = "error", f"cell [{count or '?'}]: {error.ename}: {error.evalue}"
    except (DeadKernelError, CellTimeoutError) as error:
        status, reason = "error", str(error).splitlines()[0]
    except RuntimeError as error:
        if "launched" not in grant.results:
            raise GloveboxError(str(error)) from error
        status, reason = "error", str(error)
    except Exception as error:  # the code inside writes messages, and can write any nonsense
        if "launched" not in grant.results:
            raise
        status, reason = (
            "error",
            f"the kernel sent what no client understands: {type(error).__name__}: {error}",
        )
    finally:
        grants.drop(kernel_id)
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if output is not None:
        with contextlib.suppress(KeyError):
            del notebook.metadata["widgets"]
        _write(notebook, output)
    return _result(path, resolution, grant, kernel_id, status, reason)


def _result(
    path: Path, resolution: Resolution, grant: grants.Grant, kernel_id: str, status: str, reason: str
) -> RunResult:
    launched: Launched | None = grant.results.get("launched")
    ended: Ended | None = grant.results.get("ended")
    closed: Closed | None = grant.results.get("closed")
    if launched is None:
        raise GloveboxError(f"The kernel did not start: {reason or 'no reason was given'}")
    if ended is not None and ended.budget:
        status, reason = "budget", ended.message
    elif status == "error" and ended is not None and ended.message and "died" in reason:
        reason = f"{reason}; it last printed: {ended.message}"
    ledger = Ledger(str(state_dir() / "ledger.sqlite3"))
    try:
        found, _ = ledger.events(kernel_id=kernel_id, limit=10_000)
    finally:
        ledger.close()
    return RunResult(
        notebook=str(path),
        status=status,
        reason=escape(reason),
        plan=resolution.plan.digest,
        isolation=launched.isolation,
        posture=msgspec.to_builtins(launched.posture),
        blocked=found,
        artifacts=list(closed.artifacts) if closed else [],
        usage=closed.record.usage if closed else None,
        cleanup=msgspec.to_builtins(closed.record.cleanup) if closed else {},
        closed_by=closed.record.closed_by if closed else None,
        kernel_id=kernel_id,
        notice=resolution.notice,
        startup=launched.startup,
    )


def _write(notebook: Any, output: Path) -> None:
    """Write the executed notebook.

    Raises:
        GloveboxError: it cannot be written.
    """
    try:
        # A lone surrogate, which a kernel can send, becomes the escape that JSON has for it.
        text = nbformat.writes(notebook).encode("utf-8", "backslashreplace")  # type: ignore[no-untyped-call]
        output.write_bytes(text + b"\n")
    except OSError as error:
        raise _unwritable(output, error) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise GloveboxError(
            f"The executed notebook cannot be written as JSON: {escape(str(error))[:200]}",
            "Run it without --output; the kernel put nonsense into its messages.",
        ) from error


def to_json(result: RunResult) -> str:
    """The result as indented JSON."""
    return show.json_text(result)
