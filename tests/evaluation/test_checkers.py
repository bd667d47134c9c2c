"""Which answers count: tables of what each checker accepts and rejects."""

import random
import time

import pytest

from zipage_lang.evaluation.checkers import math_process
from zipage_lang.evaluation.checkers.boxed import BoxedMath, final_answer
from zipage_lang.evaluation.checkers.choice import chosen_letter
from zipage_lang.evaluation.checkers.find import find_checker
from zipage_lang.evaluation.checkers.latex_math import read_answer, same_value
from zipage_lang.evaluation.families import FAMILIES


@pytest.fixture(scope="module")
def boxed():
    return BoxedMath()


EQUAL = [
    ("1/2", r"\frac{1}{2}"),
    (r"\frac12", r"\dfrac{1}{2}"),
    ("0.5", r"\frac{1}{2}"),
    (r"\frac{2}{4}", "1/2"),
    ("1,234", "1234"),
    (r"10{,}000", "10000"),
    (r"\$18", "18"),
    ("18.0", "18"),
    (r"50\%", "50"),
    (r"90^\circ", "90"),
    (r"x = 3", "3"),
    (r"x \in [-2, 7]", "[-2,7]"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\sqrt[3]{27}", "3"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    (r"2\frac{1}{3}", r"\frac{7}{3}"),
    (r"(x+1)^2", "x^2+2x+1"),
    (r"\pi/4", r"\frac{\pi}{4}"),
    (r"\sin^2 x + \cos^2 x", "1"),
    (r"\log_2 8", "3"),
    (r"\ln e^2", "2"),
    (r"\binom{5}{2}", "10"),
    ("5!", "120"),
    (r"2^{10}", "1024"),
    (r"(3, \frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)"),
    (r"\{1,2,3\}", r"\{3, 1, 2\}"),
    ("1, -2", "-2, 1"),
    (r"1 \text{ or } -2", "-2,1"),
    (r"(-\infty, 2]", r"(-\infty,2]"),
    (
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        r"\begin{pmatrix}1&\frac{4}{2}\\3&4\end{pmatrix}",
    ),
    (r"12\text{ cm}", "12"),
    (r"\text{A}", "A"),
    (r"|{-3}|", "3"),
    (r"6 + 9i", "9i+6"),
    ("-(-3)", "3"),
    (r"3 \cdot 4 \div 6", "2"),
    (r"e^{i\pi}", "-1"),
]

UNEQUAL = [
    ("1/2", "0.49"),
    ("1/3", "0.333"),
    (r"\frac{1}{2}", r"\frac{2}{1}"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "(1,2,3)"),
    (r"\{1,2\}", r"\{1,3\}"),
    ("x", "y"),
    ("x^2", "2x"),
    ("1/0", "2/0"),
    (r"\sqrt{2}", "1.41421356"),
    ("12", "12a"),
    ("3", r"\unknown{3}"),
    ("3", "(" * 60 + "3" + ")" * 60),
    ("", "0"),
    (
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        r"\begin{pmatrix} 1 & 2 \\ 4 & 3 \end{pmatrix}",
    ),
    ("__import__('os')", "0"),
]


@pytest.mark.parametrize(("left", "right"), EQUAL)
def test_answers_that_are_the_same(boxed, left, right):
    assert boxed.are_equal(left, right)
    assert boxed.are_equal(right, left)


@pytest.mark.parametrize(("left", "right"), UNEQUAL)
def test_answers_that_are_not_the_same(boxed, left, right):
    assert not boxed.are_equal(left, right)
    assert not boxed.are_equal(right, left)


def test_whole_fractions_are_equal_exactly_when_their_values_are(boxed):
    rng = random.Random(3)
    for _ in range(200):
        a, b, c, d = (rng.randint(1, 6) for _ in range(4))
        assert boxed.are_equal(rf"\frac{{{a}}}{{{b}}}", f"{c}/{d}") == (a * d == b * c)


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        (r"so \boxed{12} and then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{no} \fboxed{7}", "7"),
        ("It adds up.\n#### 1,200", "1,200"),
        ("The answer is 42.", "42"),
        ("Answer: x = 3", "x = 3"),
        (r"cut off: \boxed{1", None),
        ("no answer here", "here"),
        ("nothing", None),
        ("", None),
    ],
)
def test_the_last_box_is_the_answer_or_what_follows_the_last_mark(output, answer):
    assert final_answer(output) == answer


def test_right_answers_are_one_vote_however_written(boxed):
    verdicts = [boxed.check("1/2", rf"\boxed{{{text}}}") for text in ("0.5", r"\frac12", "2/4")]
    assert all(verdict.is_correct for verdict in verdicts)
    assert len({verdict.answer for verdict in verdicts}) == 1
    assert boxed.check("1/2", "no idea").answer is None


def test_an_expression_that_takes_too_long_is_wrong_and_the_next_is_judged(monkeypatch):
    monkeypatch.setattr(math_process, "TIME_LIMIT_S", 0.3)
    process = math_process.MathProcess()
    assert process.are_equal("2x", "x+x")
    started = time.perf_counter()
    assert not process.are_equal("9999999!", "x")
    assert time.perf_counter() - started < 20
    assert process.num_timeouts == 1
    monkeypatch.setattr(math_process, "TIME_LIMIT_S", 20.0)
    assert process.are_equal("(x+1)(x-1)", "x^2-1")
    process.close()


@pytest.mark.parametrize(
    "text", ["", "(", "1+", r"\frac{1}", "{1", "1)", "^2", r"\begin{pmatrix}1"]
)
def test_what_can_not_be_read_is_a_value_error(text):
    with pytest.raises(ValueError):
        read_answer(text)


def test_an_exponent_that_would_be_computed_digit_by_digit_is_not():
    with pytest.raises(ValueError, match="is not computed"):
        same_value("10^{10^{9}}", "3")


@pytest.mark.parametrize(
    ("output", "letter"),
    [
        (r"Therefore \boxed{B}.", "B"),
        (r"\boxed{\text{(C)}}", "C"),
        ("The answer is (D).", "D"),
        ("the answer is **A**", "A"),
        ("Answer: C", "C"),
        ("I first thought the answer is A, but the answer is B", "B"),
        ("Some reasoning.\n(E)", "E"),
        ("C", "C"),
        ("The answer is a matter of taste", None),
        ("A plane takes off", None),
        ("", None),
    ],
)
def test_the_last_letter_named_as_answer_is_chosen(output, letter):
    assert chosen_letter(output) == letter


def test_exact_takes_the_whole_output_and_one_of_several_answers():
    checker = find_checker("exact")
    assert checker.check("Paris", " Paris\n").is_correct
    assert checker.check(["Paris", "paris"], "paris").is_correct
    assert not checker.check("Paris", "It is Paris").is_correct


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_families_check_themselves_and_their_answer_line_votes(name):
    problem = FAMILIES[name].draw(random.Random(4), 0)
    checker = find_checker(f"family:{name}")
    right = checker.check(problem.answer, problem.solution)
    assert right.is_correct
    assert right.answer == problem.answer
    cut = checker.check(problem.answer, problem.solution.rpartition("answer: ")[0])
    assert (cut.is_correct, cut.answer) == (False, None)


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [
        ("choice", "b", "must be one letter"),
        ("choice", 3, "must be one letter"),
        ("exact", 5, "must be a text or a list of texts"),
        ("boxed", None, "must be a number or a text in LaTeX"),
        ("boxed", True, "must be a number or a text in LaTeX"),
        ("python", "", "must be a text of asserts"),
        ("python", [{"input": "1"}], "must be a text of asserts"),
        ("family:trace", 4, "must be a text"),
    ],
)
def test_an_answer_that_a_checker_can_not_hold_against_is_refused(name, answer, message):
    with pytest.raises(ValueError, match=message):
        find_checker(name).check_answer(answer)


def test_an_unknown_checker_or_family_names_the_known_ones():
    with pytest.raises(ValueError, match="known: boxed, choice, exact, python, family:NAME"):
        find_checker("sympy")
    with pytest.raises(ValueError, match="give one of countdown, trace"):
        find_checker("family:chess")
