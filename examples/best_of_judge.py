"""Best of n with a judge: drafts side by side, each graded by the model, the best one is kept.

The judge is a program of its own. It goes on from a draft, so it reads it from the KV cache, and
leaves no text there. Its grade is the mean over all grades, each by its probability, which tells
drafts apart that would get the same single grade. A grade of `--good-enough` ends it early.

    python examples/best_of_judge.py --drafts 6
"""

import argparse

import zipage_lang as zipage

SYSTEM = "You write one short slogan when asked for one."
GRADES = ["1", "2", "3", "4", "5"]


@zipage.function
def slogan(s, product: str, drafts: int, good_enough: float | None = None):
    s += zipage.system(SYSTEM)
    s += zipage.user(f"A slogan for {product}, please. One line.")
    result = zipage.best_of(
        s,
        drafts,
        zipage.assistant(zipage.gen("slogan", max_tokens=24, temperature=1.0, stop="\n")),
        score=grade,
        threshold=good_enough,
    )
    s.adopt(result.branch)
    return result


@zipage.function
def grade(s):
    s += zipage.user(
        "Grade this slogan from 1 (dull or not a slogan) to 5 (short, clear, and hard to forget). "
        "Answer with the number only."
    )
    s += zipage.assistant("Grade: " + zipage.select("grade", GRADES))
    probabilities = s.meta("grade").probabilities
    return sum(int(text) * share for text, share in zip(GRADES, probabilities, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="name, folder or GGUF file")
    parser.add_argument("--product", default="a bicycle bell")
    parser.add_argument("--drafts", type=int, default=6)
    parser.add_argument("--good-enough", type=float, help="a grade that ends it early")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same drafts")
    options = parser.parse_args()
    with zipage.Engine(options.model) as engine:
        state = slogan.run(
            options.product,
            options.drafts,
            options.good_enough,
            backend=engine,
            seed=options.seed,
        )
    report(state)


def report(state: zipage.ProgramState) -> None:
    result = state.ret_value
    for index, (score, text) in enumerate(zip(result.scores, result.answers, strict=True)):
        mark = "*" if index == result.index else " "
        print(f"{mark} {'stopped' if score is None else f'{score:.3f}'}  {(text or '').strip()}")
    print(f"The best: {state['slogan'].strip()}")
    print(f"{result.num_stopped} drafts stopped early, ended by {result.reason}")


if __name__ == "__main__":
    main()
