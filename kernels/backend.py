"""The kernel seam: what the engine asks of a backend, and the one place where a backend is chosen.

Every act exists as a plain-torch twin in `kernels/reference/`; the `cpu` backend is those twins.
The `cuda` backend (FlashInfer, Triton) plugs in here with the same signatures.
Knows nothing of requests, plans or models.
"""

import importlib.util
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zipage_lang.kernels.setup_error import SetupError


class AttentionBatch(NamedTuple):
    """Which tokens attend to which slots, one sequence per running row of the step. Host tensors.

    Sequence i owns the flat query tokens [q_starts[i], q_starts[i+1]); its last query token sits at
    resident slot kv_lens[i] - 1 and token j of q_len attends to slots [0, kv_lens[i] - q_len + j].
    """

    q_starts: Tensor  # int32 [num_seqs + 1], host, starts at 0
    kv_lens: Tensor  # int32 [num_seqs], host; resident slots including this step's tokens
    block_tables: Tensor  # int32 [num_seqs, max_blocks], host, padding -1


class TailQueries(NamedTuple):
    """Which ring entries score a row's tail; a row is one request in one layer. Device tensors."""

    ring: Tensor  # [num_ring_entries, num_q_heads, head_dim]
    ring_lse: Tensor  # float32 [num_ring_entries, num_q_heads], base 2
    ring_slots: Tensor  # int64 [num_rows, num_queries], entries of `ring`, padding -1
    positions: Tensor  # int64 [num_rows, num_queries], logical positions, padding -1


class TailRequests(NamedTuple):
    """The tails that a step compacts by one policy: a line of numbers per request."""

    # int64 [num_requests, 8 + num_blocks], device: the tail's first slot within its first block,
    # tail_len, num_keep, stateful_len, logical_len, seed, query slot, queries stored in its ring;
    # then the tail's blocks, padding -1
    lines: Tensor
    max_tail: int
    num_queries: int  # that the policy scores with
    window: int  # queries a ring holds


class TailRows(NamedTuple):
    """Those tails in every layer of a pass; a row is one request in one layer. Device tensors."""

    slots: Tensor  # int64 [num_rows, max_tail], slots of all layers' blocks, padding -1
    positions: Tensor  # int32 [num_rows, num_kv_heads, max_tail], logical positions
    lens: Tensor  # int64 [num_rows]
    num_keep: Tensor  # int64 [num_rows]
    stateful_lens: Tensor  # int64 [num_rows]
    logical_lens: Tensor  # int64 [num_rows]
    seeds: Tensor  # int64 [num_rows]
    layers: Tensor  # int64 [num_rows]
    ring_slots: Tensor  # int64 [num_rows, num_queries], as in `TailQueries`
    query_positions: Tensor  # int64 [num_rows, num_queries], as in `TailQueries`


class ScoreBlend(NamedTuple):
    """A score still in its parts; `combine_scores` says what they make."""

    mass: Tensor  # float32 [num_rows, num_kv_heads, max_tail]
    similarity: Tensor  # float32, same shape
    decay: float
    pool_kernel: int
    temperature: float
    mass_weight: float


class ScoreTiers(NamedTuple):
    """A budget that is divided: by age, by up to three measures and by lot; see `compact_tiers`.

    Measures and history are float32 [num_rows, num_kv_heads, max_tail].
    """

    measures: tuple[Tensor, ...]  # those with a share, in the order in which they choose
    shares: tuple[float, ...]  # one per measure, of what the newest leave of the budget
    history: Tensor  # the global score F that kept slots carry from now on
    recent_share: float  # of the budget
    fresh: bool  # lots are drawn anew at each compaction


class Forecast(NamedTuple):
    """Weights of a linear forecast, per layer and KV head: how strongly a token is attended later.

    Number f of a head is the pair of its dimensions f and f + head_dim / 2. float32, contiguous.
    """

    key: Tensor  # [num_layers, num_kv_heads, head_dim], of the key before its rotation
    value: Tensor  # [num_layers, num_kv_heads, head_dim]
    age: Tensor  # [num_layers, num_kv_heads], of log(1 + tokens since)
    frequencies: Tensor  # [head_dim / 2], the rotary angle per position


class RowSettings(NamedTuple):
    """Sampling settings and state by row. Device tensors [num_rows], contiguous."""

    seeds: Tensor  # int64, any bits
    num_generated: Tensor  # int64, tokens drawn before; each draw adds one
    temperature: Tensor  # float64; 0 is greedy
    top_k: Tensor  # int64; vocab_size and above is off
    top_p: Tensor  # float64; 1 is off
    min_p: Tensor  # float64; 0 is off
    last_token_ids: Tensor  # int64; each draw writes its token


class GraphPlanner(Protocol):
    """Plans decode attention whose launch is fixed per bucket, so that a graph may hold it.

    A bucket has one launch that serves any step, and may have a second, faster for some steps: a
    plan says which one it is for (`is_second`), and runs in captures of that one only.
    """

    def has_second(self, bucket: int) -> bool: ...
    def plan(self, batch: AttentionBatch, bucket: int, *, may_be_second: bool = True) -> Any: ...
    def plan_padding(self, bucket: int, *, is_second: bool) -> Any: ...


class Backend(Protocol):
    """One set of kernels. Shapes and dtypes are documented at the twins in `kernels/reference/`."""

    name: str
    device: torch.device

    # residual_stream.py: what layers read normalised and add to. Where norms and additions happen
    # is the backend's business, so a stream is read, cut and written by the acts on it alone
    def open_stream(self, hidden: Tensor, eps: float) -> Any: ...
    def normed_stream(self, stream: Any, weight: Tensor) -> Tensor: ...
    def rows_of_stream(self, stream: Any, index: Tensor) -> Any: ...

    # linear.py: prepare each weight [out_size, in_size] once, multiply rows with it every step. A
    # weight that reads a stream is prepared with that of the norm between them
    def prepare_linear(
        self, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None = None
    ) -> Any: ...
    def prepare_gated_linear(
        self, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None = None
    ) -> Any: ...
    def linear(self, x: Tensor, prepared: Any) -> Tensor: ...
    def normed_linear(self, stream: Any, prepared: Any) -> Tensor: ...
    def normed_gated_linear(self, stream: Any, prepared: Any) -> Tensor: ...
    def add_linear(self, stream: Any, x: Tensor, prepared: Any) -> None: ...

    # attention.py: plan once per step on host metadata, run once per layer on tensors
    def plan_attention(
        self,
        batch: AttentionBatch,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
    ) -> Any: ...
    def attention(
        self,
        q: Tensor,
        layer_kv: Tensor,
        plan: Any,
        scale: float,
        need_lse: bool,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]: ...

    def graph_planner(
        self,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        *,
        max_rows: int,
        max_blocks: int,
    ) -> GraphPlanner | None: ...

    # kv_store.py
    def store_kv(self, layer_kv: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None: ...
    def store_lse(self, ring_lse: Tensor, ring_slots: Tensor, lse: Tensor) -> None: ...
    def copy_blocks(self, pools: list[Tensor], src: Tensor, dst: Tensor) -> None: ...

    # host_copy.py: whole blocks as lines of bytes, which travel to host memory and back
    def pack_blocks(self, pools: list[Tensor], block_ids: Tensor, lines: Tensor) -> None: ...
    def unpack_blocks(self, pools: list[Tensor], block_ids: Tensor, lines: Tensor) -> None: ...

    # fused_ops.py
    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor: ...
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]: ...
    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]: ...
    def silu_mul(self, gate_up: Tensor) -> Tensor: ...
    def qk_norm_rope_store(
        self,
        qkv: Tensor,
        q_norm_weight: Tensor | None,
        k_norm_weight: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        layer_kv: Tensor,
        slots: Tensor,
        ring: Tensor | None = None,
        ring_slots: Tensor | None = None,
    ) -> Tensor: ...

    # sampling.py
    def random_uniform(self, seeds: Tensor, positions: Tensor) -> Tensor: ...
    def penalize(
        self,
        logits: Tensor,
        in_prompt: Tensor,
        num_generated: Tensor,
        repetition: Tensor,
        presence: Tensor,
        frequency: Tensor,
    ) -> Tensor: ...
    def draw_tokens(
        self, logits: Tensor, temperature: Tensor, min_p: Tensor, uniform: Tensor
    ) -> Tensor: ...
    def draw_filtered_tokens(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        uniform: Tensor,
        max_top_k: int,
    ) -> Tensor: ...
    def draw_rows(
        self, logits: Tensor, rows: Tensor, settings: RowSettings, max_top_k: int
    ) -> Tensor: ...
    def score_tokens(
        self, logits: Tensor, token_ids: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

    # ranges.py
    def value_range(self, kv_blocks: Tensor, slots: Tensor) -> Tensor: ...

    # forecast.py
    def forecast_scores(
        self,
        kv_blocks: Tensor,
        score_blocks: Tensor,
        slots: Tensor,
        positions: Tensor,
        stateful_lens: Tensor,
        logical_lens: Tensor,
        layers: Tensor,
        forecast: Forecast,
    ) -> tuple[Tensor, Tensor]: ...

    # scores.py: one row per (layer, request), slots by physical number
    def gather_keys(self, kv_blocks: Tensor, slots: Tensor) -> Tensor: ...
    def gather_values(self, kv_blocks: Tensor, slots: Tensor) -> Tensor: ...
    def attention_mass(
        self,
        kv_blocks: Tensor,
        slots: Tensor,
        positions: Tensor,
        queries: TailQueries,
        scale: float,
    ) -> Tensor: ...
    def lightning_similarity(
        self, kv_blocks: Tensor, slots: Tensor, positions: Tensor, chunk: int, threshold: float
    ) -> Tensor: ...
    def flash_similarity(
        self, kv_blocks: Tensor, slots: Tensor, positions: Tensor, threshold: float
    ) -> Tensor: ...
    def mass_and_similarity(
        self,
        kv_blocks: Tensor,
        slots: Tensor,
        positions: Tensor,
        queries: TailQueries,
        scale: float,
        chunk: int,
        threshold: float,
    ) -> tuple[Tensor, Tensor]: ...
    def combine_scores(
        self,
        mass: Tensor,
        similarity: Tensor,
        history: Tensor,
        lens: Tensor,
        in_order: Tensor,
        *,
        decay: float,
        pool_kernel: int,
        temperature: float,
        mass_weight: float,
    ) -> tuple[Tensor, Tensor]: ...

    # tails.py
    def expand_tails(
        self,
        requests: TailRequests,
        position_blocks: Tensor,
        first_layer: int,
        num_layers: int,
        entries_per_layer: int,
    ) -> TailRows: ...

    # select.py
    def protect_slots(
        self,
        scores: Tensor,
        positions: Tensor,
        lens: Tensor,
        logical_lens: Tensor,
        num_recent: int,
        num_sinks: int,
    ) -> Tensor: ...
    def select_top_k(
        self, scores: Tensor, positions: Tensor, lens: Tensor, num_keep: Tensor
    ) -> Tensor: ...

    # compact.py
    def fill_holes(
        self,
        kv_blocks: Tensor,
        score_blocks: Tensor,
        position_blocks: Tensor,
        slots: Tensor,
        keep: Tensor,
        num_keep: Tensor,
        positions: Tensor,
        scores: Tensor | None,
    ) -> None: ...

    # blend.py: from a score's parts to the moved slots
    def compact_blend(
        self,
        kv_blocks: Tensor,
        score_blocks: Tensor,
        position_blocks: Tensor,
        rows: TailRows,
        blend: ScoreBlend,
        num_recent: int,
        num_sinks: int,
    ) -> None: ...

    # tiers.py: the same for a divided budget
    def compact_tiers(
        self,
        kv_blocks: Tensor,
        score_blocks: Tensor,
        position_blocks: Tensor,
        rows: TailRows,
        tiers: ScoreTiers,
        num_recent: int,
        num_sinks: int,
    ) -> None: ...


def choose_backend(
    name: str, dtype: torch.dtype = torch.float32, *, deterministic: bool = False
) -> Backend:
    """The backend called `name`: "cpu", "cuda", or "auto" (cuda where there is a card, else cpu).

    Args:
        dtype: of weights and KV cache; a backend may choose its kernels by it.
        deterministic: no row's bits may depend on the rows beside it.

    Raises ValueError for an unknown name and SetupError when what it needs is missing.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() and _has_gpu_packages() else "cpu"
    if name == "cpu":
        return _cpu_backend(deterministic)
    if name == "cuda":
        return _cuda_backend(dtype, deterministic)
    raise ValueError(f"backend={name!r} must be one of auto, cpu, cuda")


def _cpu_backend(deterministic: bool) -> Backend:
    if deterministic:
        from zipage_lang.kernels.strict_cpu_backend import StrictCpuBackend

        return StrictCpuBackend()
    from zipage_lang.kernels.cpu_backend import CpuBackend

    return CpuBackend()


def _cuda_backend(dtype: torch.dtype, deterministic: bool) -> Backend:
    if not torch.cuda.is_available():
        raise SetupError("backend='cuda' needs an NVIDIA card and torch with CUDA; use 'cpu'")
    if not _has_gpu_packages():
        raise SetupError("backend='cuda' needs Triton and FlashInfer: install zipage-lang[gpu]")
    if deterministic:
        from zipage_lang.kernels.strict_cuda_backend import StrictCudaBackend

        return StrictCudaBackend(dtype)
    from zipage_lang.kernels.cuda_backend import CudaBackend

    return CudaBackend(dtype)


def _has_gpu_packages() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("triton", "flashinfer"))
