"""Drawing and scoring on the card: against the twins on fresh inputs, then timed as graphs.

Knows nothing of the engine but its sampler.
"""

import math
import time
from collections.abc import Callable

import torch
from timing import capture, event_ms, host_us
from torch import Tensor

from zipage_lang.kernels import sampling
from zipage_lang.kernels.backend import RowSettings
from zipage_lang.kernels.reference import sampling as reference
from zipage_lang.runtime.sampler import Sampler
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.step_plan import RowSetup

DEVICE = torch.device("cuda", 0)
VOCAB, ODD_VOCAB = 151_936, 32_003
MARGIN = 1e-5  # of the total weight: what the rounding of exp may move an edge by
KINDS = ("zipf", "flat", "normal", "ties", "equal")


class Kernels:
    """As much of a backend as a sampler calls."""

    draw_rows = staticmethod(sampling.draw_rows)
    score_tokens = staticmethod(sampling.score_tokens)
    penalize = staticmethod(sampling.penalize)


def make_logits(kind: str, num_lines: int, vocab_size: int, dtype: torch.dtype) -> Tensor:
    shape = (num_lines, vocab_size)
    noise = torch.randn(shape, device=DEVICE)
    if kind == "equal":
        return torch.zeros(shape, dtype=dtype, device=DEVICE)
    if kind == "zipf":  # a language model's: the token of rank r has probability r^-1.5
        ranks = torch.rand(shape, device=DEVICE).argsort(1) + 1.0
        return (18 - 1.5 * ranks.log() + 0.3 * noise).to(dtype)
    if kind == "ties":
        return (4 * noise).round().div(2).to(dtype)
    return ((0.3 if kind == "flat" else 3.0) * noise).to(dtype)


def make_settings(num_rows: int, vocab_size: int, **fixed: float) -> RowSettings:
    """Random settings of every mixture, but for what is fixed."""

    def pick(name: str, choices: tuple[float, ...]) -> Tensor:
        if name in fixed:
            return torch.full((num_rows,), float(fixed[name]), dtype=torch.float64, device=DEVICE)
        chosen = torch.randint(len(choices), (num_rows,), device=DEVICE)
        return torch.tensor(choices, dtype=torch.float64, device=DEVICE)[chosen]

    return RowSettings(
        torch.randint(-(2**62), 2**62, (num_rows,), device=DEVICE),
        torch.randint(0, 5000, (num_rows,), device=DEVICE),
        pick("temperature", (0.0, 0.3, 0.6, 1.0, 1.7, 20.0)),
        pick("top_k", (1, 20, 50, 3000, vocab_size, vocab_size)).long(),
        pick("top_p", (1e-6, 0.5, 0.95, 0.99999, 1.0, 1.0)),
        pick("min_p", (0.0, 0.0, 0.05)),
    )


def twin_draw(logits: Tensor, settings: RowSettings, shift: float) -> Tensor:
    """What the twin draws with random numbers moved by `shift`, lines and rows being the same."""
    seeds, position, heat, top_k, top_p, min_p = settings
    uniform = (reference.random_uniform(seeds, position) + shift).clamp(0, 1 - 2**-53)
    logits, vocab_size = logits.float(), logits.shape[1]
    found = logits.argmax(-1)
    is_filtered = ((top_k < vocab_size) | (top_p < 1)) & (heat > 0)
    for lines in is_filtered.nonzero()[:, 0].split(64):
        part = [x[lines] for x in (logits, heat, top_k, top_p, min_p, uniform)]
        found[lines] = reference.draw_filtered_tokens(*part, vocab_size)
    for lines in (~is_filtered & (heat > 0)).nonzero()[:, 0].split(64):
        part = [x[lines] for x in (logits, heat, min_p, uniform)]
        found[lines] = reference.draw_tokens(*part)
    return found


def check_draws(kind: str, num_lines: int, vocab_size: int, dtype: torch.dtype) -> None:
    logits = make_logits(kind, num_lines, vocab_size, dtype)
    settings = make_settings(num_lines, vocab_size)
    rows = torch.arange(num_lines, device=DEVICE)
    found, best = sampling.draw_rows(logits, rows, settings, vocab_size)
    near = torch.stack([twin_draw(logits, settings, shift) for shift in (0, -MARGIN, MARGIN)])
    is_near, is_same = (near == found).any(0), near[0] == found
    is_best_right = torch.equal(best, logits.float().amax(-1))
    name = f"{kind:7} {num_lines:4} x {vocab_size:6} {str(dtype)[6:]:9}"
    print(
        f"  {name} same {int(is_same.sum()):4}, a near tie {int((is_near & ~is_same).sum())}",
        end="",
    )
    print("" if is_near.all() and is_best_right else f"  WRONG (best {is_best_right})")
    for line in (~is_near).nonzero()[:4, 0].tolist():
        setting = [part[line].item() for part in settings]
        print(
            f"    WRONG line {line}: {found[line].item()}, twin {near[:, line].tolist()} {setting}"
        )


def check_scores(kind: str, num_lines: int, vocab_size: int, dtype: torch.dtype) -> None:
    logits = make_logits(kind, num_lines, vocab_size, dtype)
    logits[:, 5:80] = -math.inf
    token_ids = torch.randint(vocab_size, (num_lines,), device=DEVICE)
    found = sampling.score_tokens(logits, token_ids, 20)
    wanted = reference.score_tokens(logits, token_ids, 20)
    is_right = all(
        torch.allclose(part.double(), twin.double(), rtol=1e-6, atol=3e-5)
        for part, twin in zip(found, wanted, strict=True)
    )
    print(f"  scores {kind:7} {num_lines:4} x {vocab_size:6}: {'right' if is_right else 'WRONG'}")


def graph_us(work: Callable[[], object]) -> float:
    return event_ms(capture(work).replay) * 1e3


def time_draws(kind: str, num_lines: int, dtype: torch.dtype, **fixed: float) -> None:
    logits, rows = (
        make_logits(kind, num_lines, VOCAB, dtype),
        torch.arange(num_lines, device=DEVICE),
    )
    neutral = {"temperature": 1.0, "top_k": VOCAB, "top_p": 1.0, "min_p": 0.0}
    settings = make_settings(num_lines, VOCAB, **{**neutral, **fixed})
    is_filtered = "top_k" in fixed or "top_p" in fixed
    us = graph_us(lambda: sampling.draw_rows(logits, rows, settings, VOCAB * is_filtered))
    print(f"  {kind:6} {num_lines:4} {str(dtype)[6:]:9} {us:8.1f} us  {fixed}")


def time_one_filtered_line(num_lines: int) -> None:
    """The rest draw plainly, and must hardly pay for it."""
    logits = make_logits("zipf", num_lines, VOCAB, torch.bfloat16)
    plain = {"temperature": 1.0, "top_k": VOCAB, "top_p": 1.0, "min_p": 0.0}
    settings, rows = (
        make_settings(num_lines, VOCAB, **plain),
        torch.arange(num_lines, device=DEVICE),
    )
    for filters in (0, VOCAB):
        us = graph_us(lambda filters=filters: sampling.draw_rows(logits, rows, settings, filters))
        print(
            f"  {num_lines} plain lines, {'may filter' if filters else 'none filters'}: {us:.1f} us"
        )
    settings.top_k[3], settings.top_p[3] = 20, 0.95
    us = graph_us(lambda: sampling.draw_rows(logits, rows, settings, VOCAB))
    print(f"  {num_lines} lines of which one filters: {us:.1f} us")


def time_scores(num_lines: int, num_top: int, dtype: torch.dtype) -> None:
    logits = make_logits("zipf", num_lines, VOCAB, dtype)
    token_ids = torch.randint(VOCAB, (num_lines,), device=DEVICE)
    us = graph_us(lambda: sampling.score_tokens(logits, token_ids, num_top))
    print(f"  scores {num_lines:4} {str(dtype)[6:]:9} top {num_top:2}: {us:8.1f} us")


def time_sampler(num_rows: int, **fields: object) -> None:
    """A step of the sampler: draw, state, copies; on the device, and until the host goes on."""
    sampler = Sampler(
        max_rows=num_rows, vocab_size=VOCAB, eos_token_ids=(1,), backend=Kernels(), device=DEVICE
    )
    for row in range(num_rows):
        sampler.set_up_row(RowSetup(row, (1, 2, 3), 3, SamplingParams(**fields), row))
    logits, rows = make_logits("zipf", num_rows, VOCAB, torch.bfloat16), list(range(num_rows))

    def step() -> None:
        sampler.draw(logits, rows).start_copy()

    us, host = event_ms(step) * 1e3, host_us(step)
    print(f"  sampler {num_rows:4}: {us:7.1f} us, host {host:7.1f} us  {fields}")


@torch.inference_mode()
def main() -> None:
    started = time.perf_counter()
    torch.manual_seed(int(time.time()))
    print("draws against the twin")
    for kind in KINDS:
        for num_lines in (1, 7, 128, 256) if kind == "zipf" else (128,):
            check_draws(kind, num_lines, VOCAB, torch.bfloat16)
        check_draws(kind, 128, ODD_VOCAB, torch.float32)
        check_scores(kind, 32, VOCAB, torch.bfloat16)
    print(f"after {time.perf_counter() - started:.1f} s; times of draw_rows, 1 to 3 launches")
    half, qwen = torch.bfloat16, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    time_draws("zipf", 128, half, temperature=0.0)
    time_draws("zipf", 128, half)
    time_draws("zipf", 128, half, min_p=0.05)
    for kind in ("zipf", "normal", "flat"):
        for fixed in (qwen, {"top_k": 50}, {"temperature": 0.6, "top_p": 0.95}, {"top_p": 0.95}):
            time_draws(kind, 128, half, **fixed)
    time_draws("zipf", 128, half, top_p=0.95, min_p=0.05)
    for num_lines in (1, 32, 256):
        time_draws("zipf", num_lines, half, **qwen)
        time_draws("zipf", num_lines, half, top_p=0.95)
    time_draws("equal", 8, half, top_p=0.95)
    time_one_filtered_line(128)
    for num_top in (0, 5, 20):
        time_scores(128, num_top, half)
    time_sampler(128, temperature=1.0)
    time_sampler(128, **qwen)
    time_sampler(128, temperature=1.0, logprobs=5)
    print(f"all in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
