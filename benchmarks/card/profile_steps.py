"""Where the device's time goes in steady state: kernels of some engine steps, in ms per step.

python3 benchmarks/card/profile_steps.py --steps 2400 -- --load aime --mode fixed
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import throughput
from loads import LOADS

from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.sampling_params import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2400, help="steps before the profile")
    parser.add_argument("--profiled", type=int, default=24)
    ours, rest = parser.parse_known_args()
    sys.argv = [sys.argv[0], *[word for word in rest if word != "--"]]
    options = throughput.parse_arguments()
    engine = throughput.make_engine(options)
    throughput.warm_up(engine)
    for index, (prompt, num_output) in enumerate(LOADS[options.load]()):
        sampling = SamplingParams(
            max_tokens=num_output, temperature=options.temperature, ignore_eos=True, seed=index
        )
        engine.handle(AddRequest(request_id=str(index), token_ids=prompt, sampling=sampling))
    for _ in range(ours.steps):
        engine.step()
    before = engine.stats()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(ours.profiled):
            engine.step()
        torch.cuda.synchronize()
    after = engine.stats()
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in profile.key_averages():
        sums[event.key[:90]][0] += event.self_device_time_total / 1e3
        sums[event.key[:90]][1] += event.count
    compactions = after["num_compactions"] - before["num_compactions"]
    print(f"{before['num_running']} running, {compactions} compactions in {ours.profiled} steps")
    total = sum(ms for ms, _ in sums.values())
    print(f"{total / ours.profiled:8.3f} ms a step in all kernels")
    for name, (ms, count) in sorted(sums.items(), key=lambda item: -item[1][0])[:45]:
        print(f"{ms / ours.profiled:8.3f} ms {count / ours.profiled:7.1f} x  {name}")


main()
