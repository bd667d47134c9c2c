"""A long chain of three thoughts with a fork in the middle, on a KV cache that stays small.

The first thought is longer than its KV budget, so it is compacted while it is drawn. The second one
is drawn by several branches, which all go on from that compacted state. The likeliest of them is
kept, and the third thought goes on from there: from what is still in the cache, in no more memory.

    python examples/long_thought.py --budget 48 --trace long.jsonl
    zipage trace long.jsonl -o long.html
"""

import argparse

import zipage_lang as zipage

QUESTION = "Three friends plan a garden of 12 square meters. What should they think of?"


@zipage.function
def long_thought(s, question: str, branches: int, length: int):
    """Each thought is `length` tokens: a small model would stop before there is much to drop."""
    thought = {"max_tokens": length, "min_tokens": length}
    s += f"Question: {question}\nFirst thought:"
    s += zipage.gen("first", **thought)
    s += "\nSecond thought:"
    second = zipage.best_of(s, branches, zipage.gen("second", **thought))
    s.adopt(second.branch)
    s += "\nThird thought:" + zipage.gen("third", **thought)
    return second


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="name, folder or GGUF file")
    parser.add_argument("--budget", type=int, default=48, help="KV slots kept beyond the prompt")
    parser.add_argument("--interval", type=int, default=16, help="slots that may pile up on top")
    parser.add_argument("--branches", type=int, default=4, help="second thoughts")
    parser.add_argument("--length", type=int, default=96, help="tokens of each thought")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same thoughts")
    parser.add_argument("--trace", default="long_thought.jsonl", help="a file for the events")
    options = parser.parse_args()
    with zipage.Engine(options.model) as engine:
        state = long_thought.run(
            QUESTION,
            options.branches,
            options.length,
            backend=engine,
            kv=zipage.KV(mode="fixed", budget=options.budget, interval=options.interval),
            seed=options.seed,
            temperature=0.7,
            trace=options.trace,
        )
    report(state)
    print(f"The tree of it: zipage trace {options.trace}")


def report(state: zipage.ProgramState) -> None:
    """KV slots are counted per layer and KV head."""
    print(f"{'thought':<11}{'tokens':>8}{'reused':>8}{'length':>8}{'kept':>8}{'missing':>9}")
    rows = [("first", state)]
    rows += [("second", branch) for branch in state.ret_value.branches]
    rows += [("third", state)]
    for name, where in rows:
        usage, kv = where.meta(name).usage, where.kv(name)
        mark = "*" if name == "second" and where.index == state.ret_value.index else ""
        print(
            f"{name + mark:<11}{usage.completion_tokens:>8}{usage.cached_tokens:>8}"
            f"{kv.logical_len:>8}{kv.kept_len:>8}{kv.missing_len:>9}"
        )
    print(f"Third thought: {state['third'].strip()}")


if __name__ == "__main__":
    main()
