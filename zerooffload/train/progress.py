"""The run on a terminal: a line for what goes on, then a bar with step, loss, speed, bytes moved and time left."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from zerooffload.formats import format_bytes, format_seconds
from zerooffload.train.loop import Observer, StepRecord, TrainingResult

_FIELDS = (
    "loss {task.fields[loss]} | {task.fields[speed]} tokens/s | {task.fields[moved]} moved | {task.fields[written]}"
)


class ProgressBar(Observer):
    """Shows a run on `console`; where that is no terminal, a line for each step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._moved_bytes = 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def doing(self, what: str) -> None:
        """A line."""
        self._stop()
        self._console.print(f"{what} ...", style="dim", highlight=False)

    def announced(self, result: TrainingResult) -> None:
        """What will be trained on what."""
        training = result.recipe.training
        self._console.print(
            f"{training.steps} steps of {training.tokens_per_step} tokens"
            f" ({training.accumulation_steps} x {training.batch_size} x {training.sequence_length})",
            highlight=False,
        )
        self._num_steps = training.steps

    def resumed(self, num_done: int) -> None:
        """A line."""
        self._console.print(f"going on behind step {num_done}", highlight=False)

    def evaluated(self, when: str, loss: float) -> None:
        """A line."""
        self._console.print(f"held-out loss {when}: {loss:.4f}", highlight=False)

    def noticed(self, text: str) -> None:
        """A line, above the bar."""
        self._console.print(text, style="dim", highlight=False, markup=False)

    def finished_step(self, record: StepRecord) -> None:
        """Move the bar on."""
        self._moved_bytes += sum(record.report.bytes_moved.values())
        fields: dict[str, Any] = {
            "loss": f"{record.loss:.4f}",
            "speed": f"{record.tokens / record.seconds:.0f}",
            "moved": format_bytes(self._moved_bytes),
            "written": f"{format_bytes(record.report.bytes_moved.get('nvme_written', 0))} written a step",
        }
        if not self._console.is_terminal:
            left = format_seconds((self._num_steps - record.step) * record.seconds)
            self._console.print(
                f"step {record.step}/{self._num_steps} | loss {fields['loss']} | {fields['speed']} tokens/s"
                f" | {fields['moved']} moved | {fields['written']} | {left} left",
                highlight=False,
            )
            return
        bar, task = self._started(fields)
        bar.update(task, completed=record.step, **fields)

    def _started(self, fields: dict[str, Any]) -> tuple[Progress, TaskID]:
        if self._bar is None or self._task is None:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TextColumn(_FIELDS),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("training", total=self._num_steps, **fields)
            self._bar.start()
        return self._bar, self._task

    def _stop(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()
