"""A straight line learned one point at a time, with the error of what it tells."""

import math
from dataclasses import dataclass

Z90 = 1.645
"""Half width of the central 90 % of a normal distribution, in standard deviations."""


@dataclass(slots=True)
class Line:
    """Least squares y = a + b·x with exponential forgetting; a few floats of state.

    ``memory`` is the number of points after which an old one has lost 63 % of its weight. The
    slope is kept at 0 or above: what is estimated here (tokens of bytes, time of tokens) never
    shrinks with its cause.
    """

    memory: float = 256.0
    weight: float = 0.0
    mean_x: float = 0.0
    mean_y: float = 0.0
    var_x: float = 0.0
    cov_xy: float = 0.0
    var_error: float = 0.0

    def learn(self, x: float, y: float) -> None:
        """Take one point; one that is far off pulls no more than one four deviations away.

        Points that are not finite are ignored.
        """
        if not (math.isfinite(x) and math.isfinite(y)):
            return
        error = 0.0
        if self.ready:
            expected = self.predict(x)
            reach = 4 * max(math.sqrt(self.var_error), 0.1 * expected)
            error = min(reach, max(-reach, y - expected))
            y = expected + error
        self.weight = self.weight * (1 - 1 / self.memory) + 1
        share = 1 / self.weight
        dx, dy = x - self.mean_x, y - self.mean_y
        self.mean_x += share * dx
        self.mean_y += share * dy
        self.var_x += share * ((1 - share) * dx * dx - self.var_x)
        self.cov_xy += share * ((1 - share) * dx * dy - self.cov_xy)
        self.var_error += share * (error * error - self.var_error)

    @property
    def ready(self) -> bool:
        """Whether enough points were seen to tell anything."""
        return self.weight >= 8

    @property
    def slope(self) -> float:
        """Growth of y per x; 0 while all x were equal."""
        return max(0.0, self.cov_xy / self.var_x) if self.var_x > 1e-9 else 0.0

    def predict(self, x: float) -> float:
        """Expected y, at least 0."""
        return max(0.0, self.mean_y + self.slope * (x - self.mean_x))

    @property
    def half_width(self) -> float:
        """Half width of the 90 % interval around a single prediction."""
        return Z90 * math.sqrt(max(0.0, self.var_error))

    def state(self) -> list[float]:
        """All that was learned, for :meth:`restored`."""
        return [self.weight, self.mean_x, self.mean_y, self.var_x, self.cov_xy, self.var_error]

    @classmethod
    def restored(cls, state: list[float], *, memory: float = 256.0) -> "Line":
        """The line of :meth:`state`. Raises ValueError for anything that is not six numbers."""
        if len(state) != 6 or not all(math.isfinite(value) for value in state):
            raise ValueError(f"a line has six finite numbers, not {state!r}")
        return cls(memory, *state)
