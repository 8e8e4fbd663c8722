"""Cost of a step fitted to measured prefill and decode times."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Columns as splitwise-sim's ``perf_model.csv`` has them, one element a run; times in ms."""

    prompt_size: Floats
    batch_size: Floats
    token_size: Floats
    prompt_time: Floats
    """Prefill of the whole batch."""
    token_time: Floats
    """One decode step, mean over the run."""


def fit(measured: Measurements, *, chunk_tokens: int = 2048) -> tuple[float, float, float, float]:
    """Base, per sequence, per context token, per prefill token, ms: see :class:`.Coefficients`.

    Least squares of the *relative* error, so that the long prefills do not drown the short decode
    steps. A decode step is taken at the middle of its run. Prefills enter up to ``chunk_tokens``,
    which is what one step computes, and for single prompts only: the published times of batched
    prefills grow faster than their tokens.
    """
    prefill = (measured.batch_size == 1) & (measured.prompt_size <= chunk_tokens)
    prompts = measured.prompt_size[prefill]
    context = measured.batch_size * (measured.prompt_size + measured.token_size / 2)
    one, none = np.ones_like(context), np.zeros_like(context)
    terms = np.concatenate(
        (
            np.stack((np.ones_like(prompts), *[np.zeros_like(prompts)] * 2, prompts), axis=1),
            np.stack((one, measured.batch_size, context, none), axis=1),
        )
    )
    times = np.concatenate((measured.prompt_time[prefill], measured.token_time))
    solution, *_ = np.linalg.lstsq(terms / times[:, None], np.ones_like(times))
    base, per_sequence, per_context, per_prefill = (float(value) for value in solution)
    return base, per_sequence, per_context, per_prefill
