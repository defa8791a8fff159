"""The start rate: at most so many starts in any second, spread over it (see the rules at the top of machine.py)."""

from __future__ import annotations

from collections.abc import Iterable

from sidecar.core.context import Context

STEP_MS = 100
# Any second touches at most so many steps.
WINDOW_STEPS = 11

Started = tuple[int, int]  # the number of a step (cluster time / STEP_MS), and how many runs started in it


class Governor:
    """Counts starts by steps of cluster time. The counts of the last steps are state."""

    def __init__(self, context: Context, started: Iterable[Started]) -> None:
        self._context = context
        self.started = list(started)

    def allowance(self) -> int:
        """How many runs may start now."""
        return max(0, self._left_at(self._context.now_ms // STEP_MS))

    def note(self) -> None:
        """A run starts now."""
        step = self._context.now_ms // STEP_MS
        if self.started and self.started[-1][0] == step:
            self.started[-1] = (step, self.started[-1][1] + 1)
        else:
            self.started = [each for each in self.started if each[0] > step - WINDOW_STEPS]
            self.started.append((step, 1))

    def next_ms(self) -> int:
        """The first cluster time after now at which a run may start. To be asked when none may now."""
        step = self._context.now_ms // STEP_MS
        later = range(step + 1, step + WINDOW_STEPS)
        return STEP_MS * next((each for each in later if self._left_at(each) > 0), step + WINDOW_STEPS)

    def _left_at(self, step: int) -> int:
        """Should nothing more start until then."""
        per_second = self._context.limits.starts_per_second_max
        in_step = in_window = 0
        for each, count in self.started:
            if each == step:
                in_step = count
            if each > step - WINDOW_STEPS:
                in_window += count
        return min(-(-per_second * STEP_MS // 1_000) - in_step, per_second - in_window)
