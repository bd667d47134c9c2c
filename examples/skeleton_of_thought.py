"""Skeleton of thought: an outline first, then all its points at the same time, then one text.

The points are branches, so they share the question and the outline in the KV cache, and together
they take about as long as the longest of them alone.

    python examples/skeleton_of_thought.py --question "How do I keep bread fresh?"
"""

import argparse
import re

import zipage_lang as zipage

POINT = "[A-Z][a-z]+( [a-z]+){1,5}"
OUTLINE = rf"1\. {POINT}\n2\. {POINT}\n3\. {POINT}\n(4\. {POINT}\n)?"  # what the model may write
SENTENCES = {"min_tokens": 8, "max_tokens": 48, "temperature": 0.3, "stop": "\n\n"}


@zipage.function
def skeleton_of_thought(s, question: str):
    s += zipage.user(f"{question}\nFirst give only an outline: short numbered points.")
    s += zipage.assistant(zipage.gen("outline", max_tokens=100, temperature=0.3, regex=OUTLINE))
    points = points_of(s["outline"])
    branches = s.fork(len(points))
    branches += [
        zipage.user(f"Write one or two sentences about this point: {point}")
        + zipage.assistant(f"{point}:" + zipage.gen("sentences", **SENTENCES))
        for point in points
    ]
    branches.join()
    s += zipage.user("Put it all together.")
    s += zipage.assistant(
        "\n".join(
            f"{point}: {' '.join(text.split())}"
            for point, text in zip(points, s["sentences"], strict=True)
        )
    )
    return points


def points_of(outline: str) -> list[str]:
    """The texts of numbered lines."""
    return [text.strip() for text in re.findall(r"(?m)^\d+\. (.+)$", outline)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="name, folder or GGUF file")
    parser.add_argument("--question", default="How do I keep bread fresh?")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same text")
    parser.add_argument("--trace", help="a file for the events; see `zipage trace`")
    options = parser.parse_args()
    with zipage.Engine(options.model) as engine:
        state = skeleton_of_thought.run(
            options.question, backend=engine, seed=options.seed, trace=options.trace
        )
    report(state)


def report(state: zipage.ProgramState) -> None:
    print(state.messages()[-1]["content"])
    usages = [output.usage for output in state.meta("sentences")]
    print(
        f"{len(usages)} points at once: {sum(u.completion_tokens for u in usages)} tokens, "
        f"the longest {max(u.completion_tokens for u in usages)}; of their "
        f"{sum(u.prompt_tokens for u in usages)} prompt tokens "
        f"{sum(u.cached_tokens for u in usages)} came from the cache"
    )


if __name__ == "__main__":
    main()
