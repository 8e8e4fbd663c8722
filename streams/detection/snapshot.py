"""A judge's state as bytes: NumPy's own .npz, compressed, without pickle."""

import io
import zipfile
from typing import Any

import numpy as np
import numpy.typing as npt

from latencyprism.streams.detection.evidence import EvidenceBook
from latencyprism.streams.detection.mixture import ConditionalMixture
from latencyprism.streams.detection.stage import StageJudge

FORMAT = 1
STAGE_PARTS = ("slow", "fast", "seen", "shift", "ratio")
MODEL_PARTS = ("weights", "means", "covariances", "density_floor")


def pack(stages: dict[str, StageJudge], book: EvidenceBook, steps: int, generation: int) -> bytes:
    """State of format :data:`FORMAT`."""
    arrays: dict[str, npt.NDArray[Any]] = {"format": np.array([FORMAT, steps, generation])}
    for stage, judge in stages.items():
        slow, fast = judge.reference.arrays()
        arrays |= {
            f"{stage}.slow": slow,
            f"{stage}.fast": fast,
            f"{stage}.seen": np.array([judge.reference.seen]),
            f"{stage}.shift": judge.shift.values().astype(np.float32),
            f"{stage}.ratio": judge.ratio.values().astype(np.float32),
        }
        if judge.model is not None:
            arrays |= {
                f"{stage}.model.{part}": np.asarray(getattr(judge.model, part))
                for part in MODEL_PARTS
            }
    for signal, history in book.histories().items():
        arrays[f"evidence.{signal}"] = history.astype(np.float32)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def unpack(state: bytes, stages: dict[str, StageJudge], book: EvidenceBook) -> tuple[int, int]:
    """Take up a state; returns the steps and the generation it had reached.

    Raises ValueError when the bytes are damaged or of another format.
    """
    try:
        with np.load(io.BytesIO(state), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return _take(arrays, stages, book)
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"state of the detector that can't be read: {error}") from error


def _take(
    arrays: dict[str, npt.NDArray[Any]], stages: dict[str, StageJudge], book: EvidenceBook
) -> tuple[int, int]:
    number, steps, generation = arrays["format"].tolist()
    if number != FORMAT:
        raise ValueError(f"format {number}, want {FORMAT}")
    parts = [f"{stage}.{part}" for stage in stages for part in STAGE_PARTS]
    missing = [name for name in parts if name not in arrays]
    if missing:
        raise ValueError(f"without {missing[0]}")
    models = {stage: _model(arrays, stage) for stage in stages}
    for stage, judge in stages.items():
        judge.reference.restore(
            arrays[f"{stage}.slow"],
            arrays[f"{stage}.fast"],
            int(arrays[f"{stage}.seen"][0]),
        )
        judge.shift.restore(arrays[f"{stage}.shift"].astype(np.float64))
        judge.ratio.restore(arrays[f"{stage}.ratio"].astype(np.float64))
        judge.model = models[stage]
    prefix = "evidence."
    book.restore(
        {
            name.removeprefix(prefix): history.astype(np.float64)
            for name, history in arrays.items()
            if name.startswith(prefix)
        }
    )
    return steps, generation


def _model(arrays: dict[str, npt.NDArray[Any]], stage: str) -> ConditionalMixture | None:
    if f"{stage}.model.weights" not in arrays:
        return None
    weights, means, covariances, floor = (arrays[f"{stage}.model.{part}"] for part in MODEL_PARTS)
    return ConditionalMixture(weights, means, covariances, float(floor))
