"""Threads and processes that can't be started: the request is told, and the line goes on."""

import sys
import threading

import pytest

from zipage_lang.runtime import grammar_pool
from zipage_lang.runtime.compile_queue import CompileQueue, Job
from zipage_lang.runtime.grammar import GrammarError
from zipage_lang.runtime.grammar_pool import GrammarPool
from zipage_lang.runtime.grammar_source import GrammarSource
from zipage_lang.runtime.sampling_params import SamplingParams

LARGE = [b"a" * 1000] * 1000  # more than a pipe holds, so its reader must be there


def settled(queue, count):
    jobs = []
    while len(jobs) < count:
        queue.wait(10.0)
        jobs += queue.take_settled()
    return jobs


@pytest.mark.parametrize("num_failing", [1, 3])
def test_jobs_end_with_an_error_where_no_thread_can_be_started(monkeypatch, num_failing):
    prepared, left = [], [num_failing]
    start = threading.Thread.start

    def start_seldom(thread):
        if left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_seldom)
    queue = CompileQueue(prepared.append)
    for index in range(6):
        queue.add(Job(SamplingParams(regex=f"a{index}"), tenant=""))
    jobs = settled(queue, 6)
    failed = [job for job in jobs if job.error is not None]
    assert len(failed) == num_failing
    assert all("can't start new thread; try again later" in job.error for job in failed)
    assert len(prepared) == 6 - num_failing


def test_workers_that_end_at_once_are_not_started_for_ever(monkeypatch):
    started = []
    worker_type = grammar_pool._Worker

    def count(setup):
        started.append(setup)
        return worker_type(setup)

    monkeypatch.setattr(grammar_pool, "_Worker", count)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    pool = GrammarPool(LARGE, [0])
    pool.start_one()
    with pytest.raises(GrammarError, match="ended as soon as it was started"):
        pool.compile(GrammarSource("regex", "a"))
    assert len(started) == 2  # the one that was to be ready, and another
    assert not pool._idle
