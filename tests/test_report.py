"""The page of HTML: it holds all that it shows, whatever state the runs are in."""

from __future__ import annotations

import json
import math
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ledger.command_line import main
from ledger.report.chart import MOST_POINTS, Bar, Line, Mark, Part, bars, lines, thinned, ticks
from ledger.report.page import page
from ledger.runs import read_run
from tests.durable import run as train

EAGER, COMPILED = "20260101-000000-debug-000000", "20260101-000001-debug-000001"
VOID = {"meta"}


class Page(HTMLParser):
    """Checks that what is opened is closed, and keeps texts and attributes."""

    def __init__(self, source: str):
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(source)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An eager and a compiled run of the same work."""
    folder = tmp_path_factory.mktemp("runs")
    for name, flags in ((EAGER, ()), (COMPILED, ("--run.mode", "compile", "--compile.backend", "aot_eager"))):
        train(folder, *flags, steps=8).folder.rename(folder / name)
    return folder


@pytest.fixture
def runs(real: Path, tmp_path: Path) -> Path:
    """A copy of them that a test may spoil."""
    return Path(shutil.copytree(real, tmp_path / "runs"))


def edit(folder: Path, path: str, value: object) -> None:
    record = json.loads((folder / "record.json").read_text())
    section = record
    *sections, name = path.split(".")
    for each in sections:
        section = section[each]
    section[name] = value
    (folder / "record.json").write_text(json.dumps(record))


def test_two_runs(runs: Path, capsys):
    assert main(["report", "--runs", str(runs), EAGER, COMPILED]) == 0
    assert capsys.readouterr().out.strip() == str(runs / "report.html")
    source = (runs / "report.html").read_text()
    parsed, text = Page(source), " ".join(Page(source).text)
    for heading in (
        "Runs",
        "Comparison",
        "The wait before the first step",
        "Time in all",
        "Against published figures",
        "Environment",
    ):
        assert heading in text
    assert "The runs did the same work." in text and "cannot tell" in text and "other device" in text
    assert "No late compiles." in text and "first step + steady pace" in text
    charts = [attributes for tag, attributes in parsed.found if tag == "svg"]
    assert len(charts) >= 5 and all(chart["role"] == "img" and chart["aria-label"] for chart in charts)
    targets = {attributes["id"] for _, attributes in parsed.found if "id" in attributes}
    links = [attributes["href"] for tag, attributes in parsed.found if tag == "a"]
    assert links and all(link and link.startswith("#") and link[1:] in targets for link in links)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in parsed.found}
    assert not any(name in ("src", "style") or name.startswith("on") for _, attributes in parsed.found for name in attributes)
    assert "url(" not in source and "@import" not in source


def test_one_run_goes_into_its_folder(runs: Path, capsys):
    assert main(["report", "--runs", str(runs), EAGER]) == 0
    text = " ".join(Page((runs / EAGER / "report.html").read_text()).text)
    assert "Comparison" not in text and "forward" in text
    assert main(["report", "--runs", str(runs), EAGER, "--output", str(runs / "nowhere" / "x.html")]) == 2
    assert "--output: got" in capsys.readouterr().err


def test_late_compiles_and_disturbances_are_shown(runs: Path):
    late = {
        "step": 5,
        "seconds": 2.5,
        "function": "block (model.py)",
        "direction": "forward",
        "trace_seconds": 0.1,
        "cause": "shape",
    }
    edit(runs / COMPILED, "compile.late_compiles", [late])
    windows = json.loads((runs / COMPILED / "record.json").read_text())["timing"]["windows"]
    windows[2]["disturbed_by"] = "compilation"
    edit(runs / COMPILED, "timing.windows", windows)
    text = " ".join(Page(page([read_run(runs / COMPILED)])).text)
    assert "late compile in step 5: 2.5 s" in text and "block (model.py)" in text and "compile, disturbed" in text


def test_unequal_work_is_not_divided(runs: Path):
    edit(runs / COMPILED, "work.seq_len", 64)
    text = " ".join(Page(page([read_run(runs / EAGER), read_run(runs / COMPILED)])).text)
    assert "Not comparable:" in text and "What differs" in text and "ratio" not in text


def test_what_a_record_says_is_text(runs: Path):
    edit(runs / EAGER, "identity.recipe.name", "<script>alert(1)</script>")
    edit(runs / EAGER, "cause", '"><img src=x onerror=alert(1)>')
    source = page([read_run(runs / EAGER)])
    assert "<script" not in source and "<img" not in source
    assert "<script>alert(1)</script>" in Page(source).text


def test_every_rank_has_a_bar(runs: Path):
    ranks = json.loads((runs / EAGER / "record.json").read_text())["timing"]["ranks"]
    many = [ranks[0] | {"rank": rank, "time_to_first_step_seconds": float(rank)} for rank in range(70)]
    edit(runs / EAGER, "timing.ranks", many[:4])
    text = " ".join(Page(page([read_run(runs / EAGER)])).text)
    assert "Every rank of" in text and "rank 3" in text
    edit(runs / EAGER, "timing.ranks", many)
    text = " ".join(Page(page([read_run(runs / EAGER)])).text)
    assert "The slowest 64 of 70 ranks" in text and "rank 69" in text and "rank 5 " not in text


@pytest.mark.parametrize("spoilt", ["cut off", "emptied", "no record", "first step only"])
def test_a_run_in_any_state_has_a_page(spoilt: str, runs: Path):
    record = runs / EAGER / "record.json"
    if spoilt == "cut off":
        record.write_text(record.read_text()[:500])
    elif spoilt == "emptied":
        record.write_text("{}")
    elif spoilt == "no record":
        record.unlink()
        (runs / EAGER / "steps.jsonl").unlink()
    else:
        edit(runs / EAGER, "timing.windows", [])
        edit(runs / EAGER, "timing.steady", None)
    for chosen in ([EAGER], [EAGER, COMPILED]):
        text = " ".join(Page(page([read_run(runs / name) for name in chosen])).text)
        assert "n/a" in text


# --- charts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.4, 0.6), (3, 3), (0, 0), (-5, 12345), (1e-7, 2e-7), (99, 101), (0, 7e9)])
def test_ticks_reach_round_both_ends(low: float, high: float):
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 8 and len(set(found)) == len(found)


def test_no_peak_is_lost_when_points_are_thinned():
    points = [(float(x), math.sin(x)) for x in range(20_000)]
    points[12_345] = (12_345.0, 40.0)
    points[777] = (777.0, math.nan)
    kept = list(thinned(points))
    assert len(kept) <= MOST_POINTS and (12_345.0, 40.0) in kept and kept == sorted(kept)


def test_a_gap_in_a_line_and_nothing_to_draw():
    drawn = lines("t", [Line("a", [(1, 1.0), (2, math.nan), (3, 2.0)], 1)], "x", "y", [Mark(2, "here")])
    assert drawn.count("M") >= 2 and "<title>here</title>" in drawn
    assert lines("t", [Line("a", [(1, math.nan)], 1)], "x", "y") == "" and bars("t", [Bar("a")], "x", "s") == ""
    pale = bars("t", [Bar("a", [Part("p", 2.0, 1, pale=0.5)])], "x", "s")
    assert 'class="pale"' in pale and "p: 2 s" in pale
