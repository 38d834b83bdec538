"""Makes `data/clients.xlsx`: an invented client workbook with the dirt that real ones have.

    python manifests/demo/make_workbook.py [FILE]

The same seed gives the same cells on every Python version (only `Random.random` is used, whose sequence
Python promises to keep). `truth()` gives the figures that a correct clean-up must arrive at. No person,
company, address or amount in it is real.
"""

# ruff: noqa: RUF001 - look-alike characters are part of the dirt

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from openpyxl import Workbook
from openpyxl.styles import Alignment, Font, PatternFill
from openpyxl.worksheet.worksheet import Worksheet

SEED = 20251
CLIENTS = 420
CLIENT_COPIES = 46
INVOICES = {2024: 1350, 2025: 1420}
INVOICE_COPIES = {2024: 64, 2025: 71}
CARRIED_OVER = 24  # invoices of 2024 that stand in the sheet of 2025 as well
EMPTY_ROWS = 18  # per invoice sheet

T = TypeVar("T")

_FAMILIES = (
    "Müller", "Zürcher", "Bäriswyl", "Keller", "Brändli", "Graf", "Hösli", "Kälin", "Lüthi",
    "Meier", "Nüssli", "Oertle", "Pfäffli", "Rüegg", "Schär", "Stähli", "Tschümperlin", "Vögeli",
    "Wüthrich", "Zbinden", "Aebi", "Böhm", "Caduff", "Dürr", "Egli", "Fässler", "Göldi",
    "Häfliger", "Imhof", "Jäggi",
)  # fmt: skip
_TRADES = (
    "Käserei", "Treuhand", "Möbel", "Bäckerei", "Architekten", "Gartenbau", "Optik", "Logistik",
    "Weinhandel", "Druckerei", "Schlösserei", "Hotels", "Müllerei", "Elektro", "Saatgut",
)  # fmt: skip
_FORMS = {
    "CHF": ("AG", "GmbH", "& Söhne AG", "Genossenschaft"),
    "EUR": ("GmbH", "e.K.", "KG"),
    "USD": ("Inc.", "LLC"),
}
_CITIES = {
    "CHF": ("Zürich", "Genève", "Bern", "Neuchâtel", "Köniz", "St. Gallen", "Küsnacht"),
    "EUR": ("München", "Köln", "Wien", "Düsseldorf", "Lübeck"),
    "USD": ("New York", "Boston", "Milwaukee"),
}
_COUNTRIES = {
    "CHF": ("CH", "Schweiz", "Switzerland", "ch ", "Suisse"),
    "EUR": ("DE", "Deutschland", "Germany", "de"),
    "USD": ("US", "USA", "United States", "us "),
}
_CURRENCIES = {
    "CHF": ("CHF", "chf", "Fr.", "SFr.", "CHF "),
    "EUR": ("EUR", "€", "Euro", "eur "),
    "USD": ("USD", "$", "US$", "usd"),
}
_STATUSES = {
    "paid": ("paid", "Paid", "bezahlt", "PAID ", "paid"),
    "open": ("open", "offen", "Open "),
    "cancelled": ("cancelled", "storniert", "Storno"),
}
_SERVICES = ("Beratung", "Prüfung", "Schulung", "Übersetzung", "Wartung", "Lizenz")
_MONTHS_DE = (
    "Januar", "Februar", "März", "April", "Mai", "Juni", "Juli", "August", "September",
    "Oktober", "November", "Dezember",
)  # fmt: skip
_MONTHS_EN = (
    "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
)  # fmt: skip

_TITLE = Font(bold=True, size=14)
_HEAD = Font(bold=True)
_FILL = PatternFill("solid", fgColor="DDE6F0")


@dataclass
class Client:
    """One client as it really is."""

    number: int
    name: str
    city: str
    currency: str
    since: date
    credit_limit: int

    @property
    def client_id(self) -> str:
        return f"C-{self.number:04d}"


@dataclass
class Invoice:
    """One invoice as it really is. Quantity in halves, so that the amount in cents is a whole number."""

    number: str
    day: date
    client_id: str
    service: str
    halves: int
    price_cents: int
    currency: str
    status: str

    @property
    def cents(self) -> int:
        return self.halves * self.price_cents // 2


@dataclass
class Truth:
    """What a correct clean-up arrives at. Cancelled invoices count as invoices, not as revenue."""

    clients: int
    invoices: dict[int, int]
    revenue_cents: dict[str, int]
    revenue_chf: dict[int, float]
    rates: dict[str, dict[str, float]] = field(default_factory=dict)


class _Dice:
    """Choices from `Random.random` alone."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed).random

    def below(self, limit: int) -> int:
        return int(self._random() * limit)

    def pick(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def positions(self, count: int, limit: int) -> set[int]:
        chosen: set[int] = set()
        while len(chosen) < count:
            chosen.add(self.below(limit))
        return chosen


def _clients(dice: _Dice) -> list[Client]:
    pairs = [(family, trade) for trade in _TRADES for family in _FAMILIES]
    made = []
    for number in range(1, CLIENTS + 1):
        family, trade = pairs.pop(dice.below(len(pairs)))
        currency = dice.pick(("CHF", "CHF", "CHF", "EUR", "EUR", "USD"))
        made.append(
            Client(
                number=number,
                name=f"{family} {trade} {dice.pick(_FORMS[currency])}",
                city=dice.pick(_CITIES[currency]),
                currency=currency,
                since=date(2009, 1, 1) + timedelta(days=dice.below(5400)),
                credit_limit=500 * (2 + dice.below(120)),
            )
        )
    return made


def _invoices(dice: _Dice, clients: list[Client], year: int) -> list[Invoice]:
    made = []
    for index in range(INVOICES[year]):
        client = dice.pick(clients)
        credit_note = dice.chance(0.03)
        made.append(
            Invoice(
                number=f"INV-{year}-{index + 1:04d}",
                day=date(year, 1, 1) + timedelta(days=index * 365 // INVOICES[year]),
                client_id=client.client_id,
                service=dice.pick(_SERVICES),
                halves=(1 + dice.below(80)) * (-1 if credit_note else 1),
                price_cents=2 * (2000 + dice.below(20000))
                if dice.chance(0.6)
                else 5000 * (1 + dice.below(8)),
                currency=client.currency,
                status=dice.pick(("paid",) * 8 + ("open", "cancelled")),
            )
        )
    return made


def _rates(dice: _Dice) -> dict[str, dict[str, float]]:
    """CHF for one unit, by month; invented."""
    found: dict[str, dict[str, float]] = {}
    eur, usd = 0.951, 0.884
    for year in (2024, 2025):
        for month in range(1, 13):
            eur = round(eur + (dice.below(21) - 10) / 1000, 4)
            usd = round(usd + (dice.below(25) - 12) / 1000, 4)
            found[f"{year}-{month:02d}"] = {"CHF": 1.0, "EUR": eur, "USD": usd}
    # One gap, as the note in the sheet says: the month before counts.
    found["2025-02"]["USD"] = found["2025-01"]["USD"]
    return found


# -- how the same thing is written differently ----------------------------------------------------


def _number_text(cents: int, thousands: str, point: str) -> str:
    return f"{cents // 100:,}".replace(",", thousands) + f"{point}{cents % 100:02d}"


def _amount_text(dice: _Dice, cents: int, currency: str) -> str:
    size = abs(cents)
    if currency == "CHF":
        plain = _number_text(size, dice.pick(("'", "'", "’")), ".")
        if size % 100 == 0 and dice.chance(0.7):
            plain = plain[:-3] + dice.pick((".-", ".--"))
        form = dice.pick(("{}", "CHF {}", "{} CHF", "Fr. {}", " {} "))
    elif currency == "EUR":
        plain = _number_text(size, dice.pick((".", ".", "\u00a0", " ")), ",")
        form = dice.pick(("{}", "€ {}", "{} EUR", "{}€"))
    else:
        plain = _number_text(size, ",", ".")
        if cents < 0:
            return f"({plain})"
        form = dice.pick(("{}", "${}", "US$ {}", "{} USD"))
    text = form.format(plain)
    return text if cents >= 0 else dice.pick(("-", "−")) + text


def _date_cell(dice: _Dice, day: date) -> Any:
    serial = (day - date(1899, 12, 30)).days
    kind = dice.below(10)
    if kind < 3:
        return datetime(day.year, day.month, day.day)
    return (
        serial,
        str(serial),
        f"{day:%d.%m.%Y}",
        f"{day.day}.{day.month}.{day:%y}",
        f"{day:%Y-%m-%d}",
        f"{day.day}. {_MONTHS_DE[day.month - 1]} {day.year}",
        f"{day:%d}-{_MONTHS_EN[day.month - 1]}-{day.year} ",
    )[kind - 3]


def _id_text(dice: _Dice, client_id: str, *, clean: bool) -> str:
    if clean:
        return client_id
    digits = client_id[2:]
    return dice.pick((f"c-{digits}", f"{client_id} ", f" C{digits}", f"C {digits}", f"c{digits}\u00a0"))


def _name_text(dice: _Dice, name: str) -> str:
    return dice.pick((name.upper(), name.lower(), f"{name}  ", f" {name}", name.replace(" ", "  ", 1)))


# -- sheets ---------------------------------------------------------------------------------------


def _title(sheet: Worksheet, text: str, columns: int) -> None:
    sheet.append([text])
    sheet.merge_cells(start_row=1, start_column=1, end_row=1, end_column=columns)
    sheet["A1"].font = _TITLE
    sheet["A1"].alignment = Alignment(horizontal="center")


def _head(sheet: Worksheet, names: Sequence[str | None]) -> None:
    sheet.append(list(names))
    for cell in sheet[sheet.max_row]:
        cell.font = _HEAD
        cell.fill = _FILL


def _clients_sheet(sheet: Worksheet, dice: _Dice, clients: list[Client]) -> None:
    _title(sheet, "Kundenstamm – Client master data", 8)
    sheet.append(["Export CRM, do not edit", None, None, None, "Conditions"])
    sheet.merge_cells("A2:D2")
    sheet.merge_cells("E2:H2")
    sheet.append([])
    _head(sheet, ("Client ID", "Name ", "City", "Country", "Currency", "Since", "Credit limit", "E-Mail"))
    rows = [(client, True) for client in clients]
    for _ in range(CLIENT_COPIES):
        rows.insert(dice.below(len(rows) + 1), (dice.pick(clients), False))
    for client, original in rows:
        limit: Any = client.credit_limit
        if not original:
            limit = None
        elif dice.chance(0.3):
            limit = _amount_text(dice, client.credit_limit * 100, client.currency)
        city = client.city if dice.chance(0.8) else dice.pick((client.city.upper(), client.city + " "))
        sheet.append(
            [
                _id_text(dice, client.client_id, clean=original and dice.chance(0.85)),
                client.name if original else _name_text(dice, client.name),
                city if original or dice.chance(0.5) else None,
                dice.pick(_COUNTRIES[client.currency]),
                dice.pick(_CURRENCIES[client.currency]),
                _date_cell(dice, client.since),
                limit,
                f"info@c{client.number:04d}.example" if original else None,
            ]
        )
    last = sheet.max_row
    sheet.append([])
    sheet.append(["Total clients", f"=COUNTA(A5:A{last})"])


def _invoice_row(dice: _Dice, invoice: Invoice, row: int, *, original: bool) -> list[Any]:
    quantity: Any = invoice.halves / 2
    price: Any = invoice.price_cents / 100
    kind = dice.below(20)
    if kind < 7:
        amount: Any = f"=E{row}*F{row}"
    else:
        amount = invoice.cents / 100 if kind < 12 else _amount_text(dice, invoice.cents, invoice.currency)
        if dice.chance(0.4):
            quantity = price = None
    number = invoice.number
    if not original:
        number = dice.pick((number.lower(), f"{number} ", number.replace("-", " "), number))
    # The currency may be missing only where the amount names it.
    named = isinstance(amount, str) and any(mark in amount for mark in ("CHF", "Fr.", "€", "EUR", "$", "USD"))
    return [
        number,
        _date_cell(dice, invoice.day),
        _id_text(dice, invoice.client_id, clean=dice.chance(0.8)),
        invoice.service if dice.chance(0.9) else invoice.service.upper() + " ",
        quantity,
        price,
        None if named and dice.chance(0.5) else dice.pick(_CURRENCIES[invoice.currency]),
        amount,
        f"=ROUND(H{row}*Lookups!$H$4,2)" if invoice.currency == "CHF" and kind < 12 else None,
        dice.pick(_STATUSES[invoice.status]),
    ]


def _invoices_sheet(
    sheet: Worksheet, dice: _Dice, year: int, invoices: list[Invoice], carried: list[Invoice]
) -> None:
    _title(sheet, f"Rechnungen {year} – Invoices", 10)
    sheet.append([None, None, "Client", None, "Amount", None, None, None, None, "State"])
    sheet.merge_cells("C2:D2")
    sheet.merge_cells("E2:I2")
    head = (
        "Invoice",
        "Date",
        "Client ID",
        "Service",
        "Qty",
        "Unit price",
        "Curr.",
        "Amount",
        "VAT",
        "Status",
    )
    _head(sheet, head)
    rows = [(invoice, True) for invoice in invoices]
    copies = [dice.pick(invoices) for _ in range(INVOICE_COPIES[year])] + carried
    for copy in copies:
        rows.insert(dice.below(len(rows) + 1), (copy, False))
    empty = dice.positions(EMPTY_ROWS, len(rows))
    quarter = len(rows) // 4 + 1
    first = row = 4  # the row that comes next; max_row does not count empty rows
    for index, (invoice, original) in enumerate(rows):
        if index and index % quarter == 0:
            sheet.append([f"Zwischentotal Q{index // quarter}", *[None] * 6, f"=SUM(H{first}:H{row - 1})"])
            sheet.merge_cells(start_row=row, start_column=1, end_row=row, end_column=4)
            first = row = row + 1
        if index in empty:
            sheet.append([" "] if dice.chance(0.3) else [])
            row += 1
        sheet.append(_invoice_row(dice, invoice, row, original=original))
        row += 1
    sheet.append([])
    sheet.append(["TOTAL", *[None] * 6, f"=SUM(H4:H{row - 1})"])


def _fx_sheet(sheet: Worksheet, rates: dict[str, dict[str, float]]) -> None:
    _title(sheet, "FX – CHF per 1 unit, monthly average", 4)
    for line in (
        "Notes:",
        "1) Rates are invented. An invoice is converted at the rate of its month.",
        "2) A missing rate means: use the month before.",
    ):
        sheet.append([line])
        sheet.merge_cells(start_row=sheet.max_row, start_column=1, end_row=sheet.max_row, end_column=4)
    sheet.append([])
    _head(sheet, ("Month", "EUR", "USD ", "Remark"))
    first = sheet.max_row + 1
    for index, (month, rate) in enumerate(rates.items()):
        year, number = (int(part) for part in month.split("-"))
        spellings: tuple[Any, ...] = (datetime(year, number, 1), f"{number:02d}/{year}", month)
        label = spellings[index % 3]
        eur: Any = f"{rate['EUR']:.4f}".replace(".", ",") if index % 7 == 3 else rate["EUR"]
        usd: Any = None if month == "2025-02" else rate["USD"]
        sheet.append([label, eur, usd, "see note 2" if usd is None else None])
    last = sheet.max_row
    sheet.append(["Average", f"=AVERAGE(B{first}:B{last})", f"=AVERAGE(C{first}:C{last})"])


def _lookups_sheet(sheet: Worksheet) -> None:
    _title(sheet, "Lookups", 8)
    sheet.append([])
    _head(sheet, ("Kind", "Written", "Means", None, None, None, None, "VAT rate"))
    tables = {"country": _COUNTRIES, "currency": _CURRENCIES, "status": _STATUSES}
    iso = {"CHF": "CH", "EUR": "DE", "USD": "US"}
    rows: list[list[Any]] = []
    for kind, table in tables.items():
        for means, spellings in table.items():
            for written in dict.fromkeys(text.strip() for text in spellings):
                rows.append([kind, written, iso[means] if kind == "country" else means])
    rows[0] += [None, None, None, None, 0.081]
    for row in rows:
        sheet.append(row)


def _summary_sheet(sheet: Worksheet) -> None:
    _title(sheet, "Übersicht – Summary (totals mix currencies: do not use)", 3)
    sheet.append([])
    _head(sheet, ("What", "2024", "2025"))
    sheet.append(["Invoices", *(f"=COUNTA('Invoices {year}'!A4:A9999)" for year in INVOICES)])
    sheet.append(["Amount", *(f"=SUM('Invoices {year}'!H4:H9999)" for year in INVOICES)])
    sheet.append(["Clients", "=Clients!B" + str(5 + CLIENTS + CLIENT_COPIES + 1), None])
    sheet.append(["EUR average", "=FX!B31", None])


@dataclass
class _World:
    clients: list[Client]
    rates: dict[str, dict[str, float]]
    invoices: dict[int, list[Invoice]]


def _world(dice: _Dice) -> _World:
    clients = _clients(dice)
    rates = _rates(dice)
    return _World(clients, rates, {year: _invoices(dice, clients, year) for year in INVOICES})


def build(seed: int = SEED) -> Workbook:
    """The workbook. The same seed gives the same cells."""
    dice = _Dice(seed)
    world = _world(dice)
    book = Workbook()
    book.properties.creator = "Treuhand Beispiel AG"
    book.properties.created = book.properties.modified = datetime(2025, 12, 31, 18, 0)
    sheets: Iterator[Worksheet] = (
        book.create_sheet(name) for name in ("Clients", "Invoices 2024", "Invoices 2025", "FX", "Lookups")
    )
    summary = book.active
    assert summary is not None
    summary.title = "Summary"
    _summary_sheet(summary)
    _clients_sheet(next(sheets), dice, world.clients)
    _invoices_sheet(next(sheets), dice, 2024, world.invoices[2024], [])
    carried = world.invoices[2024][-CARRIED_OVER:]
    _invoices_sheet(next(sheets), dice, 2025, world.invoices[2025], carried)
    _fx_sheet(next(sheets), world.rates)
    _lookups_sheet(next(sheets))
    return book


def truth(seed: int = SEED) -> Truth:
    """The figures behind the workbook."""
    world = _world(_Dice(seed))
    cents = dict.fromkeys(_CURRENCIES, 0)
    chf = dict.fromkeys(INVOICES, 0.0)
    for year, invoices in world.invoices.items():
        for invoice in invoices:
            if invoice.status != "cancelled":
                cents[invoice.currency] += invoice.cents
                rate = world.rates[f"{invoice.day:%Y-%m}"][invoice.currency]
                chf[year] += round(invoice.cents / 100 * rate, 2)
    return Truth(
        clients=len(world.clients),
        invoices={year: len(invoices) for year, invoices in world.invoices.items()},
        revenue_cents=cents,
        revenue_chf={year: round(total, 2) for year, total in chf.items()},
        rates=world.rates,
    )


def main(arguments: Sequence[str]) -> None:
    """Write the workbook to the file named, else to `data/clients.xlsx` beside this script."""
    target = Path(arguments[0]) if arguments else Path(__file__).parent / "data" / "clients.xlsx"
    target.parent.mkdir(parents=True, exist_ok=True)
    build().save(target)
    print(f"{target}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
