"""A cell's file: what goes in comes out, a torn line is dropped, other settings are refused."""

import pytest

from zipage_lang.evaluation.run_file import Header, Lap, RunFile, Sample, read_run

HEADER = Header(
    task="trace",
    setting={"mode": "fixed", "budget": 64, "more": (("w", 0.5),)},
    sampling={"seed": 0, "samples": 2},
    asked_budget="12%",
)


def sample(problem="a", index=0, **fields):
    values = {"correct": True, "answer": "5", "tokens": 9, "finish": "stop", **fields}
    return Sample(problem=problem, sample=index, **values)


def lap():
    return Lap(
        wall_s=2.0,
        tokens=18,
        peak_blocks=3,
        compactions=1,
        preemptions=0,
        swap_outs=0,
        max_running=4,
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "trace.jsonl"


def test_what_was_written_is_read_again(path):
    kept = [sample(), sample(index=1, note="why", text="the text", compactions=3)]
    with RunFile(path, HEADER) as file:
        for item in (*kept, lap()):
            file.add(item)
    data = read_run(path)
    assert data.samples == tuple(kept)
    assert data.laps == (lap(),)
    assert data.header.task == "trace"
    with RunFile(path, HEADER) as file:
        assert list(file.samples.values()) == kept


def test_problems_with_a_missing_sample_are_missing_whole(path):
    with RunFile(path, HEADER) as file:
        for item in (sample("a", 0), sample("a", 1), sample("b", 1)):
            file.add(item)
        assert file.missing_problems(["a", "b", "c"], 2) == ["b", "c"]


def test_a_sample_that_is_there_is_not_written_twice(path):
    with RunFile(path, HEADER) as file:
        file.add(sample())
        file.add(sample(tokens=99))
    assert read_run(path).samples == (sample(),)


@pytest.mark.parametrize("num_lost", [1, 5, 40])
def test_a_line_torn_by_a_kill_is_dropped_and_the_file_goes_on(path, num_lost):
    with RunFile(path, HEADER) as file:
        file.add(sample("a"))
        file.add(sample("b"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-num_lost])
    assert [item.problem for item in read_run(path).samples] == ["a"]
    with RunFile(path, HEADER) as file:
        assert file.missing_problems(["a", "b"], 1) == ["b"]
        file.add(sample("b"))
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": {"seed": 1, "samples": 2}}, "sampling.seed: 0, now 1"),
        ({"task": "recall"}, "task: trace, now recall"),
        ({"sampling": {"seed": 0, "samples": 2, "top_p": 0.5}}, "sampling.top_p: None, now 0.5"),
    ],
)
def test_results_of_other_settings_are_not_gone_on_with(path, changes, message):
    RunFile(path, HEADER).close()
    fields = {name: getattr(HEADER, name) for name in Header.__struct_fields__}
    with pytest.raises(ValueError, match=f"other settings .{message}.; give another --out"):
        RunFile(path, Header(**{**fields, **changes}))


def test_the_word_for_a_budget_is_not_a_setting(path):
    RunFile(path, HEADER).close()
    fields = {name: getattr(HEADER, name) for name in Header.__struct_fields__}
    RunFile(path, Header(**{**fields, "asked_budget": "64"})).close()


@pytest.mark.parametrize("content", [b"not json\n", b'{"line": "sample"}\n', b"{}\n"])
def test_a_file_of_another_kind_is_refused_with_its_line(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"trace.jsonl, line 1: "):
        RunFile(path, HEADER)
