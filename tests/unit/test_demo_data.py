"""The demo's workbook is what its maker makes, is as dirty as promised, and the notebook gets it clean."""

# ruff: noqa: RUF001 - look-alike characters are part of the dirt

from __future__ import annotations

import datetime
import importlib
import os
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import openpyxl
import pytest
from nbclient import NotebookClient

DEMO = Path(__file__).parents[2] / "manifests" / "demo"
WORKBOOK = DEMO / "data" / "clients.xlsx"
NOTEBOOK = DEMO / "spreadsheet.ipynb"

Sheets = dict[str, list[tuple[Any, ...]]]


@pytest.fixture(scope="module")
def demo() -> Iterator[dict[str, ModuleType]]:
    """The demo's scripts as modules."""
    sys.path.insert(0, str(DEMO))
    try:
        yield {name: importlib.import_module(name) for name in ("make_workbook", "summary")}
    finally:
        sys.path.remove(str(DEMO))


def cells(path: Path) -> tuple[Sheets, dict[str, list[str]]]:
    """Values of every sheet, and its merged ranges."""
    book = openpyxl.load_workbook(path)
    values = {sheet.title: list(sheet.iter_rows(values_only=True)) for sheet in book}
    return values, {sheet.title: sorted(str(r) for r in sheet.merged_cells.ranges) for sheet in book}


@pytest.fixture(scope="module")
def sheets() -> Sheets:
    return cells(WORKBOOK)[0]


def test_the_committed_workbook_is_the_one_that_is_made(demo: dict[str, ModuleType], tmp_path: Path) -> None:
    made = tmp_path / "made.xlsx"
    demo["make_workbook"].main([str(made)])
    assert cells(made) == cells(WORKBOOK)


def test_another_seed_makes_another_workbook(demo: dict[str, ModuleType], tmp_path: Path) -> None:
    demo["make_workbook"].build(7).save(tmp_path / "other.xlsx")
    assert cells(tmp_path / "other.xlsx")[0]["Clients"] != cells(WORKBOOK)[0]["Clients"]


def test_size_and_sheets(sheets: Sheets) -> None:
    assert list(sheets) == ["Summary", "Clients", "Invoices 2024", "Invoices 2025", "FX", "Lookups"]
    assert sum(len(rows) for rows in sheets.values()) > 3000
    assert WORKBOOK.stat().st_size < 500_000


def invoice_rows(sheets: Sheets) -> list[tuple[Any, ...]]:
    return [
        row
        for year in (2024, 2025)
        for row in sheets[f"Invoices {year}"][3:]
        if row[0] and str(row[0]).strip().upper().startswith("INV")
    ]


def test_dates_are_mixed(sheets: Sheets) -> None:
    def kind(value: Any) -> str:
        if isinstance(value, datetime.datetime):
            return "date"
        return "serial" if isinstance(value, int) else re.sub(r"[A-Za-zä]+", "M", re.sub(r"\d+", "9", value))

    kinds = Counter(kind(row[1]) for row in invoice_rows(sheets))
    assert set(kinds) == {"date", "serial", "9", "9.9.9", "9-9-9", "9. M 9", "9-M-9 "}
    assert min(kinds.values()) > 100


def test_amounts_are_mixed(sheets: Sheets) -> None:
    amounts = [row[7] for row in invoice_rows(sheets)]
    texts = [a for a in amounts if isinstance(a, str)]
    assert sum(isinstance(a, (int, float)) for a in amounts) > 300
    for pattern in (
        r"=E\d+\*F\d+", r"\d'\d{3}\.\d\d", r"\d’\d{3}\.\d\d", r"\d\.\d{3},\d\d", r"\$\d+,\d{3}\.\d\d",
        r"\(\d", "^[-−]", r"\.--$", r"Fr\. ", "€", "US\\$", "\u00a0",
    ):  # fmt: skip
        assert any(re.search(pattern, text) for text in texts), pattern


def test_currencies_are_mixed_and_sometimes_missing(sheets: Sheets) -> None:
    written = Counter(row[6] for row in invoice_rows(sheets))
    assert set(written) == {
        "CHF", "chf", "Fr.", "SFr.", "CHF ", "EUR", "€", "Euro", "eur ", "USD", "$", "US$", "usd", None,
    }  # fmt: skip


def test_copies_empty_rows_spaces_umlauts_and_formulas(sheets: Sheets, demo: dict[str, ModuleType]) -> None:
    truth = demo["make_workbook"].truth()
    rows = invoice_rows(sheets)
    numbers = Counter(re.sub(r"[ -]", "", row[0].strip().upper()) for row in rows)
    assert len(numbers) == sum(truth.invoices.values())
    assert len(rows) - len(numbers) > 100
    assert len({row[0] for row in rows}) > len(numbers), "no copy is written differently"
    for year in (2024, 2025):
        body = sheets[f"Invoices {year}"][3:]
        assert sum(all(cell is None or not str(cell).strip() for cell in row) for row in body) >= 18
    names = [row[1] for row in sheets["Clients"][4:-2]]
    assert len(names) - truth.clients > 40
    assert any(name != name.strip() for name in names)
    assert any(name.isupper() for name in names)
    assert any("ü" in name for name in names)
    formulas = [c for rows in sheets.values() for row in rows for c in row if str(c).startswith("=")]
    assert len(formulas) > 500
    assert any("'Invoices 2024'!" in formula for formula in formulas), "no formula reaches another sheet"
    merged = cells(WORKBOOK)[1]
    assert all(merged.values()), "a sheet without a merged title"
    assert {"C2:D2", "E2:I2"} <= set(merged["Invoices 2025"])


def test_the_notebook_is_stored_without_results() -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    attempts = "\n".join(cell.source for cell in code)
    assert all(word in attempts for word in (".aws", "urlopen", "start_new_session"))


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """The folder after a run on plain Jupyter, as a user without credentials, and what the cells printed."""
    for name in ("JUPYTER_DEFAULT_PROVISIONER_NAME", "JUPYTER_GLOVEBOX_NOTEBOOK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    # No resolver is asked for a name outside: the proxy is a closed port of this machine.
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    (tmp_path / "home").mkdir()
    work = tmp_path / "work"
    shutil.copytree(DEMO / "data", work / "data")
    notebook = nbformat.read(NOTEBOOK, 4)
    NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(work)}}).execute()
    printed = "\n".join(
        output.text for cell in notebook.cells for output in cell.get("outputs", ()) if "text" in output
    )
    found = re.search(r"Watcher started, process (\d+)", printed)
    assert found, printed
    watcher = int(found[1])
    try:
        # Left behind for real: it outlived its kernel. That is what the sandbox has to end.
        assert Path(f"/proc/{watcher}/cmdline").read_bytes() == b"sleep\x00600\x00"
        yield work, printed
    finally:
        os.kill(watcher, signal.SIGKILL)


def test_the_notebook_cleans_the_workbook_on_plain_jupyter(
    executed: tuple[Path, str], demo: dict[str, ModuleType]
) -> None:
    work, printed = executed
    assert "No cloud credentials: FileNotFoundError" in printed
    assert "Not posted: URLError" in printed
    outputs = work / "outputs"
    assert sorted(p.name for p in outputs.iterdir()) == ["clean.csv", "clients_clean.xlsx", "revenue.png"]
    assert demo["summary"].check_figures(outputs / "clean.csv") == []
    values, _ = cells(outputs / "clients_clean.xlsx")
    truth = demo["make_workbook"].truth()
    assert list(values) == ["Clients", "Invoices", "Summary"]
    assert len(values["Clients"]) - 1 == truth.clients
    assert len(values["Invoices"]) - 1 == sum(truth.invoices.values())
    assert (outputs / "revenue.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_wrong_figures_are_noticed(demo: dict[str, ModuleType], tmp_path: Path) -> None:
    wrong = tmp_path / "clean.csv"
    wrong.write_text("date,status,currency,amount,total\n2024-01-01,paid,CHF,1.00,1.00\n")
    assert len(demo["summary"].check_figures(wrong)) == 4


def result_of(clean: Path) -> dict[str, Any]:
    """What a good run would say, in the shape of `jupyter glovebox run --json`."""
    files = {
        "clean.csv": str(clean),
        "clients_clean.xlsx": "/x/clients_clean.xlsx",
        "revenue.png": "/x/revenue.png",
    }
    return {
        "status": "completed",
        "reason": "",
        "posture": {"memory": {"state": "soft", "reason": "polled", "fix": ""}},
        "blocked": [
            {"class": "not-granted", "operation": "open", "target": "/h/.aws/credentials", "sensitive": True,
             "suggestion": "No manifest can.", "cell": {"execution_count": 12}},
            {"class": "network", "operation": "connect", "target": "192.0.2.1:443", "sensitive": False,
             "suggestion": None, "cell": None},
        ],
        "artifacts": [
            {"path": name, "verdict": "allow", "type": None, "bytes": 2048, "reasons": [], "exported_to": target}
            for name, target in files.items()
        ],
        "usage": {"cpu_seconds": None, "peak_memory_bytes": 5 << 20, "wall_seconds": 9.0},
        "cleanup": {"processes": {"verified": True, "detail": ""}},
    }  # fmt: skip


def test_the_summary_shows_a_run_and_finds_what_is_wrong(
    demo: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = tmp_path / "clean.csv"
    clean.write_text("date,status,currency,amount,total\n")
    show, figures = demo["summary"].show, demo["summary"].check_figures(clean)
    assert show(result_of(clean)) == figures
    printed = capsys.readouterr().out
    for text in (
        "not-granted: open /h/.aws/credentials  (sensitive)",
        "cell [12]",
        "-> /x/revenue.png",
        "5 MiB",
    ):
        assert text in printed
    bad = result_of(clean)
    bad["status"], bad["reason"] = "budget", "memory\x1b[2J"
    bad["blocked"][0]["sensitive"] = False
    bad["artifacts"][2]["exported_to"] = None
    bad["cleanup"]["processes"] = {"verified": False, "detail": "2 left"}
    found = [problem for problem in show(bad) if problem not in figures]
    assert found == [
        "the notebook: budget (memory\\x1b[2J)",
        "revenue.png did not come out",
        "no sensitive attempt was reported",
        "clean-up of processes: 2 left",
    ]


def test_the_summary_of_a_run_that_gave_nothing(
    demo: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none.json").touch()
    assert demo["summary"].main([str(tmp_path / "none.json")]) == 1
    assert "printed nothing" in capsys.readouterr().err
    (tmp_path / "refused.json").write_text(
        '{"status": "error", "error": {"message": "No.", "remedy": "Do."}}'
    )
    assert demo["summary"].main([str(tmp_path / "refused.json")]) == 1
    assert "No.\n  Do." in capsys.readouterr().err
