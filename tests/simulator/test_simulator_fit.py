"""The shipped coefficients are what the fit makes of the published measurements."""

from pathlib import Path

import numpy as np
import pytest

from latencyprism.simulator.config import A100_LIKE
from latencyprism.simulator.fit import Measurements, fit
from latencyprism.simulator.workload import Draw, Phase, azure_conversation

DATA = Path(__file__).with_name("data") / "splitwise_llama2_70b_a100_tp8.csv"


def measurements() -> Measurements:
    rows = np.genfromtxt(DATA, delimiter=",", names=True)
    return Measurements(**{name: rows[name] for name in rows.dtype.names or ()})


def test_shipped_coefficients_are_the_fit() -> None:
    assert fit(measurements()) == pytest.approx(
        (
            A100_LIKE.base_ms,
            A100_LIKE.per_sequence_ms,
            A100_LIKE.per_context_token_ms,
            A100_LIKE.per_prefill_token_ms,
        ),
        rel=0.005,
    )


def test_fit_explains_the_measured_decode_steps() -> None:
    measured = measurements()
    base, per_sequence, per_context, _ = fit(measured)
    context = measured.batch_size * (measured.prompt_size + measured.token_size / 2)
    fitted = base + per_sequence * measured.batch_size + per_context * context
    errors = np.abs(fitted / measured.token_time - 1)
    assert float(np.median(errors)) < 0.02
    assert float(np.percentile(errors, 95)) < 0.12


def test_fit_finds_the_cost_that_made_the_times() -> None:
    prompt = np.array([128.0, 512, 1024, 2048, 512, 512])
    batch = np.array([1.0, 1, 1, 1, 8, 32])
    token = np.full(6, 128.0)
    made = Measurements(
        prompt_size=prompt,
        batch_size=batch,
        token_size=token,
        prompt_time=7 + 0.3 * prompt,
        token_time=7 + 0.2 * batch + 0.001 * batch * (prompt + 64),
    )
    assert fit(made) == pytest.approx((7, 0.2, 0.001, 0.3))


def test_shape_of_the_trace_is_scaled_and_bounded() -> None:
    shape = azure_conversation()
    assert len(shape.gap) == 3500
    assert float(shape.gap.mean()) == pytest.approx(1.0, abs=0.01)
    assert float(shape.gap.std()) > 0.9  # as irregular as a Poisson process, at least
    draw = Draw(np.random.default_rng(1))
    phase = Phase(duration_s=1, rate_rps=5, prompt_scale=0.5, max_prompt_tokens=600)
    asks = [(draw.ask(phase), draw.gap_s(phase)) for _ in range(3500)]
    assert max(ask.prompt_tokens for ask, _ in asks) == 600
    assert sum(gap for _, gap in asks) == pytest.approx(3500 / 5, rel=0.01)


def test_shared_prefixes_come_as_often_as_asked() -> None:
    draw = Draw(np.random.default_rng(1))
    phase = Phase(duration_s=1, prompt_scale=0.01, shared_share=0.3)
    asks = [draw.ask(phase) for _ in range(2000)]
    shared = [ask for ask in asks if ask.prefix is not None]
    assert len(shared) / 2000 == pytest.approx(0.3, abs=0.04)
    assert {ask.prefix for ask in shared} == {0, 1, 2, 3}
    assert min(ask.prompt_tokens for ask in shared) > 512
