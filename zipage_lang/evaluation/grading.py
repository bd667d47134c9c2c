"""Checks outputs beside the engine: text is made and graded in threads of its own.

Knows nothing of engines or of what any checker does.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from zipage_lang.evaluation.checkers.checker import Checker
from zipage_lang.evaluation.checkers.find import find_checker
from zipage_lang.evaluation.problem import EvalProblem
from zipage_lang.evaluation.run_file import Sample
from zipage_lang.evaluation.runner import Output

Decode = Callable[[Sequence[int]], str]


class Grader:
    """Grades in the background; finished samples are taken up in the order they were given."""

    def __init__(self, decode: Decode, num_threads: int, keeps_text: bool) -> None:
        self._decode, self._keeps_text = decode, keeps_text
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="zipage-grade")
        self._checkers: dict[str, Checker] = {}
        self._graded: deque[Future[tuple[object, Sample]]] = deque()

    def add(self, owner: object, problem: EvalProblem, output: Output) -> None:
        """Grade `output`; `owner` comes back with the sample."""
        checker = self._checker(problem.checker)
        self._graded.append(self._pool.submit(self._grade, owner, problem, checker, output))

    def take_graded(self) -> Iterator[tuple[object, Sample]]:
        """Those that are done, without waiting."""
        while self._graded and self._graded[0].done():
            yield self._graded.popleft().result()

    def wait(self) -> Iterator[tuple[object, Sample]]:
        """All that are left."""
        while self._graded:
            yield self._graded.popleft().result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _checker(self, name: str) -> Checker:
        if name not in self._checkers:
            self._checkers[name] = find_checker(name)
        return self._checkers[name]

    def _grade(
        self, owner: object, problem: EvalProblem, checker: Checker, output: Output
    ) -> tuple[object, Sample]:
        text = self._decode(output.text_token_ids)
        verdict = checker.check(problem.answer, text)
        assert output.finish_reason is not None
        return owner, Sample(
            problem=problem.id,
            sample=output.sample_index,
            correct=verdict.is_correct,
            answer=verdict.answer,
            tokens=len(output.token_ids),
            finish=output.finish_reason,
            resident=output.kv.max_resident_len,
            compactions=output.kv.compactions,
            dropped=output.kv.dropped,
            note=verdict.note,
            text=text if self._keeps_text else None,
        )
