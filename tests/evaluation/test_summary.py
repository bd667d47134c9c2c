"""From samples to the table: numbers are what counting by hand gives, and stand in the page."""

import html
import json

import pytest

from zipage_lang.evaluation.columns import columns_for
from zipage_lang.evaluation.results import (
    REPORT_FILE,
    SWEEP_FILE,
    TABLE_FILE,
    read_facts,
    write_results,
)
from zipage_lang.evaluation.run_file import Header, Lap, RunData, RunFile, Sample
from zipage_lang.evaluation.summary import summarise

FULL_LAP = Lap(
    wall_s=10.0,
    tokens=8000,
    peak_blocks=90,
    compactions=0,
    preemptions=1,
    swap_outs=2,
    max_running=8,
)


def header(task="trace", mode="fixed", budget=64, **fields):
    is_full = mode == "off"
    return Header(
        task=task,
        setting={
            "mode": mode,
            "policy": "" if is_full else "zipage",
            "budget": 0 if is_full else budget,
            "interval": 0 if is_full else 32,
            "protect": "" if is_full else "prompt",
            **fields,
        },
        sampling={"samples": 4, "seed": 0, "model": "m"},
        asked_budget="" if is_full else "25%",
    )


def samples(problem, pattern, lens, answers=None):
    """pattern: say 1100, right and wrong of four samples."""
    return [
        Sample(
            problem=problem,
            sample=index,
            correct=mark == "1",
            answer=(answers or pattern)[index],
            tokens=lens[index],
            finish="stop" if mark == "1" else "length",
            resident=50,
            compactions=3,
        )
        for index, mark in enumerate(pattern)
    ]


FULL = RunData(
    header(mode="off"),
    (
        *samples("a", "1111", [100] * 4),
        *samples("b", "1100", [200] * 4, "xxyy"),
        *samples("c", "0000", [300] * 4, "pqrs"),
    ),
    (FULL_LAP,),
)
SMALL = RunData(
    header(),
    (
        *samples("a", "1110", [110, 120, 130, 140]),
        *samples("b", "0100", [200] * 4, "xyxx"),
        *samples("c", "0000", [300] * 4, "pqrs"),
        *samples("half", "1", [999]),
    ),
    (),
)


def test_numbers_are_what_counting_gives():
    full, small = summarise([SMALL, FULL])
    assert (full.label, small.label) == ("full", "zipage")
    assert full.pass_at[1].value == pytest.approx((1 + 0.5 + 0) / 3)
    assert full.pass_at[2].value == pytest.approx((1 + 5 / 6 + 0) / 3)
    assert full.pass_at[4].value == pytest.approx(2 / 3)
    assert full.majority_at[4].value == pytest.approx((1 + 0.5 + 0) / 3)
    assert full.mean_len.value == 200
    assert full.share_cut == pytest.approx(0.5)
    assert full.mean_solved_len == pytest.approx((4 * 100 + 2 * 200) / 6)
    assert full.tok_s == 800
    assert full.tokens_per_solved == pytest.approx(2400 / 6)
    assert full.s_per_solved == pytest.approx(2400 / 6 / 800)
    assert (full.peak_blocks, full.num_displaced) == (90, 3)
    assert small.num_problems == 3  # of the fourth some samples are missing
    assert small.pass_difference.value == pytest.approx((-0.25 - 0.25 + 0) / 3)
    assert small.pass_ratio.value == pytest.approx((0.75 + 0.25) / 1.5)
    assert small.len_ratio.value == pytest.approx((125 + 200 + 300) / 600)
    assert small.tok_s is small.s_per_solved is small.peak_blocks is None
    assert small.tokens_per_solved == pytest.approx(2500 / 4)
    assert (small.mean_resident, small.compactions_per_sample) == (50, 3)


def test_without_full_kv_there_is_no_difference():
    (small,) = summarise([SMALL])
    assert small.pass_difference is small.pass_ratio is small.len_ratio is None


def test_full_kv_that_solves_nothing_has_no_ratio():
    nothing = RunData(header(mode="off"), tuple(samples("a", "0000", [5] * 4)), ())
    _, small = summarise([nothing, SMALL])
    assert small.pass_ratio is None
    assert small.pass_difference.value == pytest.approx(0.75)


@pytest.fixture
def folder(tmp_path):
    runs = {
        "full": FULL,
        "small": SMALL,
        "adaptive": RunData(header(mode="adaptive", budget=128), SMALL.samples, (FULL_LAP,)),
        "bare": RunData(header(protect="none"), SMALL.samples, (FULL_LAP,)),
        "other": RunData(header(task="a<b & c", mode="off"), FULL.samples, (FULL_LAP,)),
    }
    for name, run in runs.items():
        with RunFile(tmp_path / "runs" / f"{name}.jsonl", run.header) as file:
            for line in (*run.samples, *run.laps):
                file.add(line)
    return tmp_path


def test_the_page_holds_every_number_and_asks_for_nothing(folder):
    results = write_results(folder, {"machine": "a <small> one"})
    page = (folder / REPORT_FILE).read_text()
    for column in columns_for(results.cells):
        assert html.escape(column.title) in page
        for cell in results.cells:
            assert f">{html.escape(column.text(cell))}</td>" in page
    assert "a &lt;small&gt; one" in page
    assert "a&lt;b &amp; c" in page
    assert "://" not in page
    assert "<script" not in page
    assert "prefers-color-scheme: dark" in page
    # A point per cell in its budget panel and again in the throughput panel, if it has a rate.
    assert page.count("<title>zipage K=") == 3 + 2


def test_the_json_holds_what_the_page_was_made_of(folder):
    results = write_results(folder, {"machine": "x"})
    stored = json.loads((folder / SWEEP_FILE).read_text())
    assert len(stored["cells"]) == len(results.cells) == 5
    assert stored["cells"][0]["pass_at"]["1"]["value"] == results.cells[0].pass_at[1].value
    assert read_facts(folder)["machine"] == "x"
    assert read_facts(folder)["samples"] == "4"


def test_the_markdown_table_is_the_pages(folder):
    results = write_results(folder, {"machine": "x"})
    text = (folder / TABLE_FILE).read_text()
    columns = columns_for(results.cells)
    assert "machine: x" in text
    for cell in results.cells:
        row = " | ".join(column.text(cell) for column in columns)
        assert f"| {row} |\n" in text
    assert text.count("\n### ") == 2


def test_plots_are_written_per_task(folder):
    write_results(folder, {})
    names = sorted(path.name for path in folder.glob("*.png"))
    assert names == [
        "accuracy_by_budget--trace.png",
        "accuracy_by_throughput--a<b & c.png",
        "accuracy_by_throughput--trace.png",
    ]
    for path in folder.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no results yet"):
        write_results(tmp_path, {})
