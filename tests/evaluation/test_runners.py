"""Jobs on real engines: one in this process, one in its own; the same outputs from both."""

import pytest

from zipage_lang.evaluation.inprocess_runner import InProcessRunner
from zipage_lang.evaluation.process_runner import ProcessRunner
from zipage_lang.evaluation.runner import EvaluationError, Job
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams

OPTIONS = {
    "num_threads": 1,
    "num_blocks": 120,
    "max_running": 4,
    "num_query_slots": 4,
    "swap_space": 0.0,
}
BOUNDED = KVParams(mode="fixed", policy="zipage", budget=24, interval=16)


@pytest.fixture(scope="module")
def in_process(tiny_model):
    return InProcessRunner(str(tiny_model), **OPTIONS)


@pytest.fixture(scope="module")
def in_own_process(tiny_model):
    runner = ProcessRunner.start(str(tiny_model), **OPTIONS)
    yield runner
    runner.close()


@pytest.fixture(params=["in_process", "in_own_process"])
def runner(request):
    return request.getfixturevalue(request.param)


def jobs(num_jobs, num_samples=2, max_tokens=40, kv=BOUNDED, **sampling):
    for index in range(num_jobs):
        params = SamplingParams(max_tokens=max_tokens, n=num_samples, seed=index, **sampling)
        yield Job(index, [1, *range(5 + index, 25 + index)], params, kv)


def outputs_of(runner, *given, **options):
    found = {}
    for output in runner.run(jobs(*given, **options)):
        assert output.finish_reason in ("stop", "length")
        found[output.key, output.sample_index] = output
    return found


def test_both_engines_say_the_same_of_more_jobs_than_rows(in_process, in_own_process):
    options = {"max_tokens": 60, "ignore_eos": True}
    ours = outputs_of(in_process, 9, **options)
    theirs = outputs_of(in_own_process, 9, **options)
    assert len(ours) == 18
    assert ours == theirs
    assert all(output.kv.compactions for output in ours.values())
    assert len({tuple(output.token_ids) for output in ours.values()}) > 9


def test_jobs_are_taken_as_rows_come_free(runner):
    taken = []

    def watched():
        for job in jobs(30, num_samples=1):
            taken.append(job.key)
            yield job

    for number, _ in enumerate(runner.run(watched())):
        if number == 0:
            assert len(taken) < 30
    assert taken == list(range(30))


def test_more_samples_than_rows_are_one_job_too(runner):
    assert len(outputs_of(runner, 1, num_samples=13, max_tokens=5)) == 13


def test_tokens_are_counted_and_text_leaves_out_what_ended_it(runner):
    before = runner.num_tokens
    found = outputs_of(runner, 3, temperature=1.5)
    assert runner.num_tokens - before == sum(len(o.token_ids) for o in found.values())
    for output in found.values():
        if output.finish_reason == "stop":
            assert output.text_token_ids == output.token_ids[:-1]
        else:
            assert output.text_token_ids == output.token_ids


def test_a_flush_counts_the_peak_anew(runner):
    outputs_of(runner, 4, ignore_eos=True, max_tokens=100)
    assert runner.stats()["peak_held"] > 5
    runner.flush_cache()
    assert runner.stats()["peak_held"] == 0


def test_leaving_early_aborts_what_runs(runner):
    for _ in runner.run(jobs(6, ignore_eos=True, max_tokens=400)):
        break
    found = outputs_of(runner, 2)
    assert len(found) == 4
    assert runner.stats()["num_running"] == 0


def test_a_refused_request_ends_the_run_with_its_reason(runner):
    wrong = KVParams(mode="fixed", policy="no-such-policy", budget=24, interval=16)
    with pytest.raises(EvaluationError, match="unknown kv policy 'no-such-policy'"):
        outputs_of(runner, 3, kv=wrong)
    assert len(outputs_of(runner, 2)) == 4


def test_an_error_in_the_jobs_reaches_the_caller(runner):
    def broken():
        yield from jobs(1)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        list(runner.run(broken()))
