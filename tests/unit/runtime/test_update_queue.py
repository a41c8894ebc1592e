"""Updates behind the training thread, over a stream whose transfers are done when the test says so."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.hidden_turns import THREAD_NAME, Hidden, hidden_updates, refuse_threads

from zerooffload import InternalError, TierIOError
from zerooffload.optim.stream import ChunkWrites
from zerooffload.runtime.update_queue import UpdateQueue
from zerooffload.telemetry import Wait, Waits
from zerooffload.telemetry.recorder import CountingRecorder

LIMIT_SECONDS = 10
NUM_CHUNKS = 2


class Gate:
    """Something in flight: over when it is opened, and then as it was told."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.failure: BaseException | None = None
        self._opened = threading.Event()
        if is_open:
            self._opened.set()

    def open(self, failure: BaseException | None = None) -> None:
        self.failure = failure
        self._opened.set()

    def wait(self) -> None:
        assert self._opened.wait(LIMIT_SECONDS)
        if self.failure is not None:
            raise self.failure

    def done(self) -> bool:
        return self._opened.is_set()


@dataclass
class Block:
    """A home that notes what becomes of what is written ahead."""

    log: list[str]
    may: Callable[[int], bool] = lambda _: True

    def may_write_ahead(self, chunk: int) -> bool:
        return self.may(chunk)

    def take_ahead(self, chunk: int) -> None:
        self.log.append(f"take {chunk}")

    def drop_ahead(self, chunk: int) -> None:
        self.log.append(f"drop {chunk}")


@dataclass
class Flat:
    log: list[str]

    def show_away(self) -> None:
        self.log.append("away")

    def show_full(self) -> None:
        self.log.append("full")


@dataclass(eq=False)
class Part:
    name: str
    is_full_at_home: bool = False
    log: list[str] = field(default_factory=list)
    record_log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.flat = Flat(self.log)
        self.range = None if self.is_full_at_home else object()
        self.home = object()

    def show_at_home(self) -> None:
        self.flat.show_full()


@dataclass(frozen=True)
class Chunk:
    of: str
    chunk: int


class Update:
    """Of a part, of two chunks. `asked` is how its chunks were asked for."""

    def __init__(self, part: Part, scalars: str = "right", **block: Any) -> None:
        self.part = part
        self.scalars = scalars
        self.blocks = (Block(part.log, **block), Block(part.record_log, **block))
        self.asked: list[tuple[str, object]] = []

    def chunks(self, *, backwards: bool, ahead: bool, gradient_written: Any) -> Iterator[Chunk]:
        self.asked.append(("ahead" if ahead else "in its step", gradient_written(0)))
        numbers = range(NUM_CHUNKS)
        return (Chunk(self.part.name, number) for number in (reversed(numbers) if backwards else numbers))


class Stream:
    """Notes what it does. `act` is called, with what it does, before it is done."""

    num_rooms = 3

    def __init__(self) -> None:
        self.log: list[str] = []
        self.act: Callable[[str], None] = lambda _: None
        # Of the parameters, and of the optimizer's record, of a chunk.
        self.writes: dict[str, Gate] = {}
        self.record_writes: dict[str, Gate] = {}
        self.urgency: dict[str, int] = {}
        # Chunks whose parameters are in memory.
        self.kept: set[int] = set()
        self.begun = threading.Condition()
        self.paused = threading.Event()
        self.settle_failure: Exception | None = None
        self._staged: deque[Chunk] = deque()

    def can_lend(self, _home: object, chunk: int) -> bool:
        return chunk in self.kept

    def lend(self, home: object, chunk: int, use: Callable[[Any], Any]) -> bool:
        if self.can_lend(home, chunk):
            use(chunk)
        return self.can_lend(home, chunk)

    @property
    def has_room(self) -> bool:
        return len(self._staged) < self.num_rooms

    def stage(self, chunk: Chunk, urgency: int) -> None:
        self.urgency[chunk.of] = urgency
        self._note("stage", chunk)
        self._staged.append(chunk)

    def finish_first(self) -> ChunkWrites:
        chunk = self._staged.popleft()
        self._note("finish", chunk)
        name = f"{chunk.of}{chunk.chunk}"
        return ChunkWrites([self.writes.get(name, Gate())], [self.record_writes.get(name, Gate())])

    def abandon_first(self) -> None:
        self._note("abandon", self._staged.popleft())

    def abandon(self) -> None:
        self._staged.clear()

    def settle(self) -> None:
        if self.settle_failure is not None:
            raise self.settle_failure

    def _note(self, what: str, chunk: Chunk) -> None:
        text = f"{what} {chunk.of}{chunk.chunk}"
        self.act(text)
        with self.begun:
            self.log.append(text)
            self.begun.notify_all()

    def pause_at(self, text: str) -> Gate:
        """Before it does that it waits for the gate; `paused` is set then."""
        gate = Gate(is_open=False)

        def act(does: str) -> None:
            if does == text:
                self.paused.set()
                gate.wait()

        self.act = act
        return gate

    def wait_until(self, text: str) -> None:
        """It has done that."""
        with self.begun:
            assert self.begun.wait_for(lambda: text in self.log, LIMIT_SECONDS)

    def done(self, what: str) -> list[str]:
        """Of what it did, that: the chunks."""
        return [text.split()[1] for text in self.log if text.startswith(what)]


@dataclass
class Scene:
    stream: Stream
    queue: UpdateQueue
    recorder: CountingRecorder

    def begin(self, *updates: Update, order: str = "abcdef") -> None:
        self.queue.begin(updates, {update.part: order.index(update.part.name) for update in updates})  # type: ignore[arg-type,misc]

    def ahead(self, update: Update, urgency: int = 0) -> None:
        self.queue.begin_ahead(update, urgency)  # type: ignore[arg-type]

    def take(self, *updates: Update) -> list[Update]:
        return self.queue.take_ahead(updates)  # type: ignore[arg-type,return-value]

    def wait(self, *parts: Part) -> None:
        self.queue.wait_for_parameters(parts)  # type: ignore[arg-type]

    def is_home(self, *parts: Part) -> bool:
        return self.queue.has_parameters(parts)  # type: ignore[arg-type]


@pytest.fixture
def scene() -> Iterator[Scene]:
    stream, recorder = Stream(), CountingRecorder()
    queue = UpdateQueue(
        stream,  # type: ignore[arg-type]
        Waits(recorder),
        gradient_written=lambda part, chunk: (part.name, chunk),  # type: ignore[arg-type, return-value]
        in_background=recorder.in_background,
    )
    yield Scene(stream, queue, recorder)
    queue.close()
    assert not queue._thread.is_busy


def test_every_update_waits_for_the_writes_of_its_own_gradients(scene: Scene) -> None:
    now, behind, ahead = (Update(Part(name)) for name in "abc")
    scene.queue.run([now])  # type: ignore[list-item]
    scene.begin(behind)
    scene.ahead(ahead)
    assert [now.asked, behind.asked] == [[("in its step", (name, 0))] for name in "ab"]
    assert ahead.asked == [("ahead", ("c", 0))]


def failure() -> TierIOError:
    return TierIOError("write", "states", 5)


def test_at_once_there_and_back(scene: Scene) -> None:
    scene.queue.run([Update(Part("b")), Update(Part("a"))], backwards=True)  # type: ignore[list-item]
    assert scene.stream.done("finish") == ["b1", "b0", "a1", "a0"]
    assert scene.recorder.take().waits.keys() <= {"state write"}


def test_hidden_in_the_order_of_need(scene: Scene) -> None:
    with hidden_updates(Hidden.AT_ONCE):
        scene.begin(Update(Part("c")), Update(Part("a")), Update(Part("b")))
    assert scene.stream.done("stage") == ["a0", "a1", "b0", "b1", "c0", "c1"]
    assert scene.stream.urgency == {"a": 0, "b": 1, "c": 2}


def test_what_was_taken_keeps_its_place_among_what_is_begun(scene: Scene) -> None:
    """An update ahead that has not begun when the step is made goes before what is needed later, and after the rest."""
    held = scene.stream.pause_at("stage d0")
    parts = {name: Part(name) for name in "abcd"}
    scene.ahead(Update(parts["d"]), 3)
    assert scene.stream.paused.wait(LIMIT_SECONDS)
    scene.ahead(Update(parts["b"]), 1)
    step = [Update(part) for part in parts.values()]
    left = scene.take(*step)
    assert left == [step[0], step[2]]
    scene.begin(*left)
    held.open()
    scene.queue.finish()
    order = scene.stream.done("stage")
    assert order[0] == "d0"
    assert order[1:] == ["a0", "a1", "b0", "b1", "c0", "c1", "d1"]


def test_waiting_is_for_one_flat_only(scene: Scene) -> None:
    a, b, c = Part("a"), Part("b", is_full_at_home=True), Part("c")
    scene.stream.writes["b1"] = Gate(is_open=False)
    scene.begin(Update(a), Update(b), Update(c))
    scene.wait(a)
    scene.wait(Part("of no update"))
    assert scene.is_home(a)
    assert not scene.is_home(a, b)
    assert b.log == ["away"]
    scene.stream.writes["b1"].open()
    scene.wait(b)
    assert b.log == ["away", "full"]
    scene.queue.wait_idle()
    assert scene.is_home(c)
    assert a.log == []
    assert set(scene.recorder.take().waits) == {"update"}


def test_parameters_are_not_waited_for_longer_than_they_take(scene: Scene) -> None:
    """What the optimizer keeps of them may be on its way still: that is waited for by who needs all states."""
    a = Part("a", is_full_at_home=True)
    gate = scene.stream.record_writes["a1"] = Gate(is_open=False)
    scene.begin(Update(a))
    scene.wait(a)
    assert scene.is_home(a)
    assert a.log == ["away", "full"]
    written = scene.queue.under_way()
    assert not written.done()
    gate.open()
    written.wait()
    scene.queue.finish()
    assert scene.queue.under_way().done()


def test_parameters_that_were_updated_ahead_count_when_they_are_taken_and_home(scene: Scene) -> None:
    a = Part("a")
    gate = scene.stream.record_writes["a0"] = Gate(is_open=False)
    scene.ahead(Update(a))
    scene.stream.wait_until("finish a1")
    assert a.log == []
    assert scene.take(Update(a)) == []
    scene.wait(a)
    assert (a.log, a.record_log) == (["take 0", "take 1"], [])
    gate.open()
    scene.queue.finish()
    assert sorted(a.record_log) == ["take 0", "take 1"]


def test_a_step_is_computed_before_its_parameters_are_home(scene: Scene) -> None:
    a = Part("a")
    gate = scene.stream.writes["a1"] = Gate(is_open=False)
    scene.begin(Update(a))
    scene.queue.wait_for_steps([a])  # type: ignore[list-item]
    scene.queue.wait_for_steps()
    assert not scene.is_home(a)
    gate.open()
    scene.wait(a)


def test_parameters_are_lent_where_the_last_step_has_left_them(scene: Scene) -> None:
    a, seen = Part("a"), list[int]()

    def is_lent(chunk: int) -> bool:
        lends = scene.queue.lends(a, [chunk])  # type: ignore[arg-type]
        assert scene.queue.lend(a, chunk, seen.append) == lends  # type: ignore[arg-type]
        return lends

    scene.stream.kept = {1}
    assert not is_lent(0)
    assert is_lent(1)
    scene.ahead(Update(a))
    scene.queue.wait_idle()
    assert not is_lent(1), "nobody knows yet whether it counts"
    gate = scene.stream.writes["a1"] = Gate(is_open=False)
    scene.take(Update(a))
    assert is_lent(1)
    held = scene.stream.pause_at("finish a1")
    scene.queue.finish()
    scene.begin(Update(a))
    assert scene.stream.paused.wait(LIMIT_SECONDS)
    assert not scene.queue.lends(a, [1]), "not computed yet"  # type: ignore[arg-type]
    held.open()
    scene.queue.wait_for_steps()
    assert not scene.is_home(a)
    assert is_lent(1)
    gate.open()
    assert seen == [1, 1, 1]


def test_an_update_ahead_begins_when_the_states_of_the_one_before_are_home(scene: Scene) -> None:
    a, b, c = Part("a"), Part("b"), Part("c")
    gate = scene.stream.record_writes["a0"] = Gate(is_open=False)
    held = scene.stream.pause_at("finish b1")
    scene.begin(Update(a), Update(b))
    assert scene.stream.paused.wait(LIMIT_SECONDS)
    scene.wait(a)
    del scene.stream.record_writes["a0"]
    scene.ahead(Update(a))
    scene.ahead(Update(c), 1)
    held.open()
    scene.stream.wait_until("finish c1")
    assert scene.stream.done("stage") == ["a0", "a1", "b0", "b1", "c0", "c1"]
    gate.open()
    scene.queue.wait_idle()
    assert scene.stream.done("stage")[6:] == ["a0", "a1"]


def test_a_state_that_could_not_be_written_is_told_though_the_parameters_are_there(scene: Scene) -> None:
    a = Part("a")
    gate = scene.stream.record_writes["a1"] = Gate(is_open=False)
    scene.begin(Update(a))
    scene.wait(a)
    gate.open(failure())
    with pytest.raises(TierIOError):
        scene.queue.finish()
    assert isinstance(scene.queue.failure, TierIOError)
    assert scene.queue.has_told
    scene.wait(a)


def test_ahead_nothing_counts_until_it_is_taken(scene: Scene) -> None:
    a, b = Part("a"), Part("b")
    scene.ahead(Update(a))
    scene.ahead(Update(b))
    scene.queue.wait_idle()
    assert scene.stream.done("finish") == ["a0", "a1", "b0", "b1"]
    assert (a.log, b.log) == ([], [])
    again = Update(b, "other")
    assert scene.take(Update(a), again) == [again]
    assert a.log == ["take 0", "take 1"]
    assert b.log == ["drop 0", "drop 1"]
    scene.begin(again)
    scene.queue.finish()
    assert scene.stream.done("finish")[4:] == ["b0", "b1"]
    assert b.log == ["drop 0", "drop 1"]


def test_what_is_taken_in_flight_counts_when_all_of_it_is_home(scene: Scene) -> None:
    a = Part("a")
    scene.stream.writes["a1"] = Gate(is_open=False)
    scene.ahead(Update(a))
    scene.stream.wait_until("finish a1")
    assert scene.take(Update(a)) == []
    assert not scene.is_home(a)
    assert a.log == []
    scene.stream.writes["a1"].open()
    scene.wait(a)
    assert a.log == ["take 0", "take 1"]


def test_what_is_done_again_begins_when_nothing_of_what_was_dropped_is_in_flight(scene: Scene) -> None:
    a, b = Part("a"), Part("b")
    gate = scene.stream.writes["a0"] = Gate(is_open=False)
    scene.ahead(Update(a))
    scene.stream.wait_until("finish a0")
    other = Update(a, "other")
    assert scene.take(other) == [other]
    del scene.stream.writes["a0"]
    scene.begin(other, Update(b))
    assert scene.stream.done("stage") == ["a0", "a1"]
    gate.open()
    scene.queue.finish()
    assert sorted(scene.stream.done("stage")[2:]) == ["a0", "a1", "b0", "b1"]
    assert "drop 0" in a.log
    assert "take 0" not in a.log


def test_what_is_dropped_before_it_began_does_nothing(scene: Scene) -> None:
    held = scene.stream.pause_at("stage a0")
    a, b = Part("a"), Part("b")
    scene.ahead(Update(a))
    scene.ahead(Update(b), 1)
    assert scene.stream.paused.wait(LIMIT_SECONDS)
    scene.queue.drop_ahead([b])  # type: ignore[list-item]
    scene.queue.drop_ahead([b])  # type: ignore[list-item]
    scene.queue.drop_ahead()
    held.open()
    scene.queue.wait_idle()
    assert scene.stream.done("finish") == []
    assert scene.stream.done("abandon") == ["a0"]
    assert (a.log, b.log) == ([], [])


def test_ahead_twice_the_second_waits_for_the_first(scene: Scene) -> None:
    """A gradient that changed: what was begun is dropped, and begun again."""
    a = Part("a")
    gate = scene.stream.writes["a1"] = Gate(is_open=False)
    scene.ahead(Update(a, "first"))
    scene.stream.wait_until("finish a1")
    scene.queue.drop_ahead([a])  # type: ignore[list-item]
    del scene.stream.writes["a1"]
    scene.ahead(Update(a))
    assert scene.stream.done("stage") == ["a0", "a1"]
    gate.open()
    assert scene.take(Update(a)) == []
    scene.queue.finish()
    assert a.log == ["drop 0", "drop 1", "take 0", "take 1"]


def test_ahead_again_without_a_word_takes_the_place_of_the_first(scene: Scene) -> None:
    a = Part("a")
    scene.ahead(Update(a, "first"))
    scene.queue.wait_idle()
    scene.ahead(Update(a))
    scene.queue.wait_idle()
    assert scene.take(Update(a)) == []
    assert a.log == ["drop 0", "drop 1", "take 0", "take 1"]


def test_where_there_is_no_second_place_now_it_is_left_to_the_step(scene: Scene) -> None:
    a = Part("a")
    scene.stream.num_rooms = 1
    scene.ahead(Update(a, may=lambda chunk: chunk == 0))
    scene.queue.wait_idle()
    assert scene.stream.done("finish") == ["a0"]
    assert a.log == ["drop 0"]
    update = Update(a)
    assert scene.take(update) == [update]
    scene.begin(update)
    scene.queue.finish()
    assert scene.stream.done("finish") == ["a0", "a0", "a1"]


def test_what_is_taken_does_not_ask_for_a_second_place_again(scene: Scene) -> None:
    a = Part("a")
    held = scene.stream.pause_at("stage a0")
    scene.ahead(Update(a, may=lambda chunk: chunk == 0))
    assert scene.take(Update(a)) == []
    held.open()
    scene.queue.finish()
    assert a.log == ["take 0", "take 1"]


def test_a_failure_is_told_to_everyone_who_waits(scene: Scene) -> None:
    a, b, c = Part("a"), Part("b", is_full_at_home=True), Part("c")
    for name in ("b0", "c1"):
        scene.stream.writes[name] = Gate(is_open=False)
    scene.begin(Update(a), Update(b), Update(c))
    scene.wait(a)
    scene.stream.writes["b0"].open(failure())
    for _ in range(2):
        for part in (b, c):
            with pytest.raises(TierIOError, match="states"):
                scene.wait(part)
    with pytest.raises(TierIOError, match="states"):
        scene.queue.finish()
    assert isinstance(scene.queue.failure, TierIOError)
    assert scene.queue.has_told
    assert scene.is_home(a)
    assert not scene.is_home(b)
    assert b.log == ["away"]
    with pytest.raises(TierIOError, match="states"):
        scene.queue.under_way().wait()


@pytest.mark.parametrize(
    "error", [failure(), RuntimeError("kernel"), MemoryError()], ids=lambda error: type(error).__name__
)
@pytest.mark.parametrize("what", ["stage a1", "finish a1"])
def test_whatever_goes_wrong_nobody_is_left_waiting(scene: Scene, what: str, error: Exception) -> None:
    def act(text: str) -> None:
        if text == what:
            raise error

    scene.stream.act = act
    scene.stream.settle_failure = RuntimeError("settling too")
    a = Part("a")
    scene.begin(Update(a))
    with pytest.raises(type(error)):
        scene.wait(a)
    assert scene.queue.failure is error


def test_a_failure_ahead_is_no_failure_of_the_step(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    a, b = Part("a"), Part("b")
    scene.stream.writes["b1"] = Gate(is_open=False)
    scene.ahead(Update(a))
    scene.ahead(Update(b))
    scene.stream.wait_until("finish b1")
    scene.stream.writes.pop("b1").open(failure())
    scene.queue.wait_idle()
    assert "done again" in caplog.text
    step = [Update(a), Update(b)]
    assert scene.take(*step) == step
    scene.begin(*step)
    scene.queue.finish()
    assert scene.queue.failure is None
    assert not scene.queue.has_told
    assert (a.log, b.log) == ([], [])


def test_a_failure_of_what_was_taken_is_one(scene: Scene) -> None:
    a = Part("a")
    scene.stream.writes["a1"] = Gate(is_open=False)
    scene.ahead(Update(a))
    assert scene.take(Update(a)) == []
    scene.stream.writes["a1"].open(failure())
    with pytest.raises(TierIOError, match="states"):
        scene.wait(a)
    assert scene.queue.failure is not None
    assert a.log == []


def test_a_second_place_that_cannot_be_had_is_a_failure_ahead(scene: Scene) -> None:
    def refuse(_: int) -> bool:
        raise failure()

    a = Part("a")
    scene.ahead(Update(a, may=refuse))
    scene.queue.wait_idle()
    assert scene.queue.failure is None
    update = Update(a)
    assert scene.take(update) == [update]


def test_at_once_after_a_failure_nothing_is_left(scene: Scene) -> None:
    scene.stream.writes["a0"] = Gate()
    scene.stream.writes["a0"].failure = failure()
    with pytest.raises(TierIOError, match="states"):
        scene.queue.run([Update(Part("a"))])  # type: ignore[list-item]
    assert scene.queue.failure is None
    scene.stream.writes.clear()
    scene.queue.run([Update(Part("b"))])  # type: ignore[list-item]
    assert scene.stream.done("finish")[-2:] == ["b0", "b1"]


def test_without_a_thread_to_be_had_it_is_done_at_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch, THREAD_NAME)
    a, b = Part("a"), Part("b")
    scene.ahead(Update(a))
    assert scene.stream.done("finish") == ["a0", "a1"]
    assert scene.take(Update(a)) == []
    scene.begin(Update(b))
    assert scene.is_home(a, b)
    scene.stream.writes["b0"] = Gate()
    scene.stream.writes["b0"].failure = failure()
    scene.begin(Update(b))
    with pytest.raises(TierIOError, match="states"):
        scene.wait(b)


def test_ctrl_c_is_not_kept_where_the_work_is_done_at_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch, THREAD_NAME)

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    scene.stream.act = interrupt
    a = Part("a")
    with pytest.raises(KeyboardInterrupt):
        scene.begin(Update(a))
    scene.stream.act = lambda _: None
    with pytest.raises(InternalError, match="interrupted"):
        scene.wait(a)


def test_ctrl_c_before_the_thread_has_begun_leaves_nobody_waiting(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = Part("a")

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scene.queue._thread, "wake", interrupt)
        with pytest.raises(KeyboardInterrupt):
            scene.begin(Update(a))
    scene.wait(a)
    assert scene.stream.done("finish") == ["a0", "a1"]


def test_ctrl_c_in_a_wait_can_be_followed_by_another(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    a = Part("a", is_full_at_home=True)
    scene.begin(Update(a))

    really_wait = Waits.until

    def interrupt(waits: Waits, cause: Wait, waitable: Any) -> None:
        if cause is Wait.UPDATE:
            raise KeyboardInterrupt
        really_wait(waits, cause, waitable)

    with monkeypatch.context() as patch:
        patch.setattr(Waits, "until", interrupt)
        with pytest.raises(KeyboardInterrupt):
            scene.wait(a)
    assert not scene.queue.has_told
    scene.wait(a)
    assert a.log == ["away", "full"]


def test_a_failure_while_a_step_takes_what_was_begun(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken is waited for from the same moment on: a failure finds it."""
    a = Part("a")
    gate = scene.stream.writes["a0"] = Gate(is_open=False)
    scene.ahead(Update(a))
    scene.stream.wait_until("finish a1")
    with monkeypatch.context() as patch:
        patch.setattr(scene.queue, "drop_ahead", lambda: gate.open(failure()))
        assert scene.take(Update(a)) == []
    with pytest.raises(TierIOError, match="states"):
        scene.wait(a)


def test_closing_ends_everything(scene: Scene) -> None:
    a, b = Part("a", is_full_at_home=True), Part("b")
    scene.begin(Update(a))
    scene.ahead(Update(b), 5)
    scene.queue.close()
    scene.queue.close()
    assert a.log == ["away", "full"]
    assert not scene.queue._thread.is_busy
    assert "take 0" not in b.log


def test_closing_after_a_failure_raises_nothing(scene: Scene) -> None:
    scene.stream.act = lambda _: (_ for _ in ()).throw(RuntimeError("kernel"))
    scene.begin(Update(Part("a")))
    scene.queue.close()
    assert isinstance(scene.queue.failure, RuntimeError)


def test_a_forked_child_is_refused(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    a = Part("a")
    scene.stream.writes["a0"] = Gate(is_open=False)
    scene.begin(Update(a))
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: -1)
        with pytest.raises(InternalError, match="forked"):
            scene.wait(a)
    scene.stream.writes["a0"].open()


def test_idle_waits_have_a_name(scene: Scene) -> None:
    a = Part("a")
    scene.stream.writes["a0"] = Gate(is_open=False)
    scene.ahead(Update(a))
    scene.stream.wait_until("finish a0")
    threading.Thread(target=scene.stream.writes["a0"].open).start()
    scene.queue.wait_idle()
    assert set(scene.recorder.take().waits) <= {"update"}
    assert a.log == []
