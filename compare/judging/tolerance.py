"""How far a right kernel may be from the truth, and why just so far.

Two profiles. `calibrated` measures rows against the float64 oracle in units of what the eager
yardstick (torch: fp32 scores, P rounded to bfloat16, fp32 sums) loses on the same row. `flashmla`
is the element rule of FlashMLA's own tests (tests/test_flash_mla_sparse_prefill.py).

Notation of one (token, head) row: z_j the scaled scores of its n valid slots, m = max z_j,
L = sum exp(z_j - m), p_j the weight of key j in out (the sink's share taken off), V_j its value,
|x| the Euclidean norm, o the oracle's and t the yardstick's row. A ULP is the distance from a
float32 to the next larger one.

out, per row:      |x - o| <= 2 |t - o| + 2^-8 p2 + scores + floor,
                   p2 = sqrt(d) sqrt(sum_j p_j^2 |V_j|^2)

- |t - o| holds what every kernel of this precision loses: rounding P, rounding out. Both are noise
  over 512 columns, of the same size in any right kernel; 2 leaves room for another order of sums
  and for P rounded against other maxima.
- |t - o| alone isn't enough. If one key outweighs all others its P is exactly 1 in the yardstick,
  and rounds to nothing, while a kernel that rescales lazily holds it as 0.7 and rounds that. One
  rounding to bfloat16 is off by at most 2^-8, relatively (half of the spacing, 2^-7), and by 0.4 of
  that in the root mean square; a kernel that rounds P again when it rescales (FlashMLA does, for
  half of the columns) by 0.6. Losses of different keys have independent signs, so they add like p2,
  a root of squares.
- Copies of one key have equal P and lose the same, with one sign: d copies of weight p add like
  d p, not sqrt(d) p. With d the most copies of any key of the row, sqrt(d) makes p2 large enough.
- scores: a score that is off by e changes out by e p_j (V_j - o). Scores are sums in fp32, off by
  up to 4 ulp(A) (below), which is nothing beside 2^-8 until |q| |k| reaches thousands. Then it
  rules, and between two nearly equal scores it is one number for the whole row, which |t - o| may
  happen to have near 0. The root of squares of p_j |V_j - o| is at most p2 + |o|, and where one
  slot has all the weight but r, at most 4 r max |k_j|: the smaller of the two, times 4 ulp(A).
  Truncation (drift, below) moves nearly equal scores alike, which out doesn't see.
- floor: fp32 results under 2^-126 may be flushed to zero (FlashMLA is built with fast math), each
  of the 512 columns: sqrt(512) 2^-126. Where L + exp(sink - m) exceeds 2^126 its reciprocal is
  flushed itself, and 0 is as right as o: there the smaller of |x - o| and |x| counts.

out, per tensor:   |X - O| / |O| <= 2 |T - O| / |O| + 2^-10,  and the floor of each row

- Rows that all use half of their room show a fault that no single row shows. One more rounding to
  bfloat16 (0.4 of 2^-8 in the root mean square, as the yardstick's own rounding of out) adds to the
  rest in squares and stays under this: 2 x torch alone has room for three of them.
- It is a statement about a mean, so it asks for enough rows to have one: FEW_ROWS.

max_logits, per row:   |x - o| <= 2 |t - o| + 4 ulp(A) + drift(|m|)
lse, per row:          |x - o| <= 2 |t - o| + 4 ulp(B) + drift(|m| + ln n)

- A = max(|m| log2 e, |sm_scale| |q| max_j |k_j|): the score stands in base 2 in the kernel, and
  sums of up to |q| |k| pass through the accumulator before they cancel; sums in another order
  differ by roundings of that size. 4: two conversions between the bases, the scale, the sum.
- B = max(1, |m| log2 e, |lse|, ln L, |sm_scale| |q| max_j |k_j|): L is at least 1 and so is known
  to one ULP of 1 at best, which is what ln L inherits even where it is nearly 0.
- drift(s) = D/16 2^-24 s: the tensor cores of Hopper truncate where a CPU rounds to nearest. After
  k of the N = D/16 steps of 16 columns a sum that grows to s holds k s / N and loses at most one
  ULP, 2^-23 of it: N/2 2^-23 s in all, always towards zero. Truncation doesn't average out, and a
  float32 sum on a CPU, where the yardstick may run, doesn't have it. For lse the keys weigh by p:
  sum p_j |z_j| <= |m| + (m - sum p_j z_j) <= |m| + ln n.

data=exact: P is 0 or 1 and every sum is exact, so out is the oracle rounded to bfloat16, bit for
bit (both zeros are equal), max_logits is exact, and lse is within 2 ULP of ln n.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jaxtyping import Bool, Float64, Int64

from compare.judging.metrics import Tolerance

PROFILES = ("calibrated", "flashmla", "both")

TORCH_FACTOR = 2.0
P_ROUNDING = 2.0**-8
TENSOR_ROUNDING = 2.0**-10
STATISTIC_ULPS = 4.0
MMA_COLUMNS = 16
EXACT_LSE_ULPS = 2.0
FLUSHED = 2.0**-126
OUT_FLOOR = math.sqrt(512) * FLUSHED
LOG2E = math.log2(math.e)

FEW_ROWS = 64
"""Under this many rows the tensor rule is left to the row rule: a mean of fewer isn't one."""

FLASHMLA = {
    "out": Tolerance(absolute=8e-4, relative=3.01 / 128, cosine=7e-6),
    "max_logits": Tolerance(absolute=1e-6, relative=2.01 / 65536, cosine=1e-7),
    "lse": Tolerance(absolute=1e-6, relative=2.01 / 65536, cosine=1e-7),
}


def check_profile(profile: str) -> None:
    """Raises ValueError for an unknown one."""
    if profile not in PROFILES:
        raise ValueError(f"profile: {profile!r}; accepted are {', '.join(PROFILES)}")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RowFacts:
    """What the inputs alone say about the rows of n tokens, computed without any attention.

    count [n]: valid slots. copies [n]: the most valid slots that name one key. longest [n]: max_j
    |k_j|. reach [n, H]: |sm_scale| |q| max_j |k_j| in natural units, an upper bound of every |z_j|
    and of every partial sum. d_qk: D.
    """

    count: Int64[np.ndarray, " n"]
    copies: Int64[np.ndarray, " n"]
    longest: Float64[np.ndarray, " n"]
    reach: Float64[np.ndarray, "n H"]
    d_qk: int


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Bounds:
    """The calibrated bound of each (token, head) row, [n, H]. flushed: rows that may be 0 too."""

    out: Float64[np.ndarray, "n H"]
    flushed: Bool[np.ndarray, "n H"]
    max_logits: Float64[np.ndarray, "n H"]
    lse: Float64[np.ndarray, "n H"]


def ulp(magnitude: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """One float32 ULP at a magnitude, in float64; 0 at 0, where nothing is rounded, and NaN beyond
    float32.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        spacing = np.spacing(np.abs(magnitude).astype(np.float32)).astype(np.float64)
    return np.where(magnitude == 0.0, 0.0, spacing)


def reciprocal_is_flushed(
    max_logits: Float64[np.ndarray, "n H"],
    lse: Float64[np.ndarray, "n H"],
    sink: Float64[np.ndarray, " H"] | None,
) -> Bool[np.ndarray, "n H"]:
    """Rows whose L + exp(sink - m) exceeds 2^126: 1 over it is subnormal, and out may be 0."""
    if sink is None:
        return np.zeros(lse.shape, bool)
    with np.errstate(invalid="ignore"):
        return np.logaddexp(lse - max_logits, sink - max_logits) * LOG2E > 126.0


def lse_magnitude(
    facts: RowFacts,
    max_logits: Float64[np.ndarray, "n H"],
    lse: Float64[np.ndarray, "n H"],
) -> Float64[np.ndarray, "n H"]:
    """B: the largest magnitude that lse passes through."""
    base2 = np.abs(max_logits) * LOG2E
    return np.maximum.reduce([np.ones_like(lse), base2, facts.reach, np.abs(lse), lse - max_logits])


def calibrated_bounds(
    facts: RowFacts,
    *,
    out_norm: Float64[np.ndarray, "n H"],
    max_logits: Float64[np.ndarray, "n H"],
    lse: Float64[np.ndarray, "n H"],
    p2: Float64[np.ndarray, "n H"],
    flushed: Bool[np.ndarray, "n H"],
    torch_errors: dict[str, Float64[np.ndarray, "n H"]],
) -> Bounds:
    """Bounds from the oracle's |o|, max_logits, lse and p2 and the yardstick's errors by tensor.

    Rows with special values get bounds that mean nothing; they are judged before this.
    """
    p2 = p2 * np.sqrt(np.maximum(facts.copies, 1))[:, None]
    count = np.log(np.maximum(facts.count, 1))[:, None]
    with np.errstate(invalid="ignore"):
        base2 = np.abs(max_logits) * LOG2E
        of_max = np.maximum(base2, facts.reach)
        of_lse = lse_magnitude(facts, max_logits, lse)
        beside_largest = -np.expm1(max_logits - lse)  # r: the weight of all slots but one
        spread = np.minimum(p2 + out_norm, 4.0 * beside_largest * facts.longest[:, None])
        scores = STATISTIC_ULPS * ulp(of_max) * spread
        drift = facts.d_qk / MMA_COLUMNS * 2.0**-24
        return Bounds(
            out=TORCH_FACTOR * torch_errors["out"] + P_ROUNDING * p2 + scores + OUT_FLOOR,
            flushed=flushed,
            max_logits=TORCH_FACTOR * torch_errors["max_logits"]
            + STATISTIC_ULPS * ulp(of_max)
            + drift * np.abs(max_logits),
            lse=TORCH_FACTOR * torch_errors["lse"]
            + STATISTIC_ULPS * ulp(of_lse)
            + drift * (np.abs(max_logits) + count),
        )


def tensor_bound(torch_rel_l2: float) -> float:
    """The largest relative L2 error of a whole out, before the floor."""
    return TORCH_FACTOR * torch_rel_l2 + TENSOR_ROUNDING
