"""A short run of every policy before anything is measured.

What an engine refuses is known at once instead of behind the full-KV cells, and what is compiled or
measured at first use is not in any cell's time. Knows nothing of problems.
"""

from zipage_lang.evaluation.grid import FULL, Grid, Setting
from zipage_lang.evaluation.runner import Job, Runner
from zipage_lang.runtime.sampling_params import SamplingParams

BUDGET, INTERVAL = 16, 16
NUM_TOKENS = BUDGET + 2 * INTERVAL + 2  # two compactions with the prompt protected
PROMPT = "0123456789"


def warm_up(runner: Runner, grid: Grid) -> None:
    """Raises EvaluationError, with its fix, for a policy that the engine does not take."""
    prompt = runner.tokenizer.encode(PROMPT)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=0)
    settings = [FULL]
    settings += [
        Setting(mode="fixed", policy=policy, budget=BUDGET, interval=INTERVAL, protect=protect)
        for policy in grid.policies
        for protect in grid.protects
    ]
    jobs = (Job(setting, prompt, sampling, setting.kv()) for setting in settings)
    for output in runner.run(jobs):
        assert output.finish_reason == "length", f"a warm-up ended by {output.finish_reason}"
