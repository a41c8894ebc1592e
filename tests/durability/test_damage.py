"""Bits that flip, files that are cut or gone: never a wrong number, and what is undamaged can still be continued."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from support.drive_images import KEEP, Image
from support.durable_training import Reference, Scenario, real_environment, training
from support.power_cuts import folder_with, recorded_run

import zerooffload as zo
from zerooffload.journal.manifest import Manifest, read_manifest
from zerooffload.journal.record import StepRecord, decode
from zerooffload.journal.verification import layout_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SCENARIO = Scenario()
RANK = "drive-0/zerooffload/rank-00000"
MANIFEST, STATES = f"{RANK}/manifest.json", f"{RANK}/states.bin"
NEWEST, PREVIOUS = f"{RANK}/record-1.bin", f"{RANK}/record-0.bin"
LAST_STEP = 3


@dataclass(frozen=True)
class Finished:
    """A run of three steps: what it left, and what its last step names."""

    image: Image
    manifest: Manifest
    record: StepRecord
    reference: Reference
    scratch: Path

    def damaged(self, name: str, change: Callable[[bytes], bytes | None]) -> Image:
        """With one file changed, or gone."""
        content = self.image.files[name]
        assert content is not None
        files = dict(self.image.files)
        changed = change(content)
        if changed is None:
            del files[name]
        else:
            assert changed != content
            files[name] = changed
        return Image(files)

    def resume(self, image: Image) -> int:
        """The step at which it resumes, compared."""
        with folder_with(image, self.scratch) as folder, training(SCENARIO, folder, real_environment()) as run:
            step = run.resume()
            assert self.reference.moments[step].differences(run.moment()) == []
            assert run.finish() == self.reference.losses[step:]
            return step

    def refuse(self, image: Image, names: str) -> None:
        """See that it is refused, with the file's name, and that nothing in the folder changes."""
        with folder_with(image, self.scratch) as folder:
            before = Image.of(folder)
            with (
                pytest.raises(zo.CheckpointError, match=names.replace(".", r"\.")),
                training(SCENARIO, folder, real_environment()) as run,
            ):
                run.resume()
            assert Image.of(folder).files == before.files


@pytest.fixture(scope="module")
def finished(uninterrupted: Callable[[Scenario], Reference], memory_folder: Path) -> Finished:
    folder = memory_folder / "finished"
    with training(SCENARIO, folder, real_environment()) as run:
        run.finish()
    image = Image.of(folder)
    content = image.files[NEWEST]
    assert content is not None
    record = decode(content, NEWEST)
    assert record.step == LAST_STEP
    return Finished(image, read_manifest(folder / MANIFEST), record, uninterrupted(SCENARIO), memory_folder)


def flipped(content: bytes, position: int, bit: int = 0) -> bytes:
    """With one bit changed."""
    return content[:position] + bytes([content[position] ^ (1 << bit)]) + content[position + 1 :]


def slot_extents(finished: Finished, *, named: bool) -> Iterable[tuple[int, int]]:
    """Offset and length of each chunk's slot that the newest step names, or of the other one."""
    slots = iter(finished.record.chunks.slots)
    for state in finished.manifest.states:
        layout = layout_of(state)
        for chunk, (_, offsets) in enumerate(state.chunks):
            slot = int(next(slots))
            if len(offsets) > 1:
                yield offsets[slot if named else 1 - slot], layout.file_nbytes(chunk)
            elif named:
                yield offsets[0], layout.file_nbytes(chunk)


def test_an_undamaged_run_is_continued(finished: Finished) -> None:
    assert finished.resume(finished.image) == LAST_STEP


def test_a_bit_of_a_chunk_that_the_newest_step_names(finished: Finished) -> None:
    extents = list(slot_extents(finished, named=True))
    assert len(extents) == len(finished.record.chunks.slots) == 7
    for number, (offset, nbytes) in enumerate(extents):
        position = offset + (number * 1237 + 11) % nbytes
        image = finished.damaged(STATES, lambda content, at=position: flipped(content, at, at % 8))  # type: ignore[misc]
        finished.refuse(image, "states.bin")


def test_bits_of_what_no_step_needs_do_not_matter(finished: Finished) -> None:
    content = finished.image.files[STATES]
    assert content is not None
    for offset, nbytes in slot_extents(finished, named=False):
        content = flipped(flipped(content, offset), offset + nbytes - 1)
    assert finished.resume(Image({**finished.image.files, STATES: content})) == LAST_STEP


POSITIONS = [*range(0, 64, 3), 63, 64, 72, 80, 200, 20_000, -1]


@pytest.mark.parametrize("position", POSITIONS)
def test_a_bit_of_the_newest_record_costs_one_step(
    position: int, finished: Finished, caplog: pytest.LogCaptureFixture
) -> None:
    image = finished.damaged(NEWEST, lambda content: flipped(content, position % len(content), position % 8))
    with caplog.at_level(logging.WARNING, "zerooffload"):
        assert finished.resume(image) == LAST_STEP - 1
    assert any("record-1.bin" in message for message in caplog.messages)


def test_a_bit_of_the_record_before_it_costs_nothing(finished: Finished, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zerooffload"):
        assert finished.resume(finished.damaged(PREVIOUS, lambda content: flipped(content, 100))) == LAST_STEP
    assert any("record-0.bin" in message for message in caplog.messages)


def test_a_bit_of_each_record(finished: Finished) -> None:
    image = finished.damaged(NEWEST, lambda content: flipped(content, 100))
    previous = image.files[PREVIOUS]
    assert previous is not None
    finished.refuse(Image({**image.files, PREVIOUS: flipped(previous, 70)}), "record-0.bin")
    finished.refuse(Image({**image.files, PREVIOUS: flipped(previous, 70)}), "record-1.bin")


def test_the_newest_record_is_damaged_and_the_step_before_partly_overwritten(finished: Finished, scratch: Path) -> None:
    """The record's own step cannot be taken back: neither number is trusted, and repaired it goes on."""
    log = recorded_run(SCENARIO, scratch / "recorded")
    # Of the third step some writes are there, none of the record.
    drives = (
        drive.image(lambda _: KEEP) for drive in log.drives() if drive.committed == 2 and len(drive.uncertain) == 4
    )
    image = next(drives)
    record = image.files[PREVIOUS]
    assert record is not None
    broken = Image({**image.files, PREVIOUS: flipped(record, 100)})
    finished.refuse(broken, "states.bin")
    assert finished.resume(image) == 2


def test_a_bit_of_any_byte_of_the_manifest(finished: Finished, scratch: Path) -> None:
    content = finished.image.files[MANIFEST]
    assert content is not None
    path = scratch / "manifest.json"
    for position in range(len(content)):
        path.write_bytes(flipped(content, position, position % 8))
        with pytest.raises(zo.CheckpointError, match=r"manifest\.json"):
            read_manifest(path)
    for position in range(0, len(content), len(content) // 8):
        image = finished.damaged(MANIFEST, lambda content, at=position: flipped(content, at))  # type: ignore[misc]
        finished.refuse(image, "manifest.json")


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 4096, 40_000, 53_000])
def test_cut_states(nbytes: int, finished: Finished) -> None:
    finished.refuse(finished.damaged(STATES, lambda content: content[:nbytes]), "states.bin")


@pytest.mark.parametrize("nbytes", [0, 1, 1000])
def test_a_cut_manifest(nbytes: int, finished: Finished) -> None:
    finished.refuse(finished.damaged(MANIFEST, lambda content: content[:nbytes]), "manifest.json")


@pytest.mark.parametrize("nbytes", [0, 1, 64, 1000, 4096, 20_000, 100_000])
def test_a_cut_record(nbytes: int, finished: Finished) -> None:
    record_nbytes = 64 + 8 + len(finished.record.encode())
    newest = finished.damaged(NEWEST, lambda content: content[:nbytes])
    assert finished.resume(newest) == LAST_STEP - (nbytes < record_nbytes)
    assert finished.resume(finished.damaged(PREVIOUS, lambda content: content[:nbytes])) == LAST_STEP


def test_missing_files(finished: Finished) -> None:
    finished.refuse(finished.damaged(STATES, lambda _: None), "states.bin")
    finished.refuse(finished.damaged(MANIFEST, lambda _: None), "manifest.json")
    assert finished.resume(finished.damaged(NEWEST, lambda _: None)) == LAST_STEP - 1
    assert finished.resume(finished.damaged(PREVIOUS, lambda _: None)) == LAST_STEP
    without = {name: content for name, content in finished.image.files.items() if "record" not in name}
    finished.refuse(Image(without), "record-0.bin")


def test_a_record_of_another_run(finished: Finished, scratch: Path) -> None:
    with training(SCENARIO, scratch / "other", real_environment()) as run:
        run.finish()
    other = Image.of(scratch / "other").files
    assert other.keys() == finished.image.files.keys()
    assert finished.resume(Image({**finished.image.files, NEWEST: other[NEWEST]})) == LAST_STEP - 1
    both = Image({**finished.image.files, NEWEST: other[NEWEST], PREVIOUS: other[PREVIOUS]})
    finished.refuse(both, "belongs to another run")
    finished.refuse(Image({**finished.image.files, MANIFEST: other[MANIFEST]}), "belongs to another run")
    # The states of another run: the bytes of the same training are equal but for none.
    swapped = Image({**finished.image.files, NEWEST: finished.image.files[PREVIOUS], PREVIOUS: None})
    files = {name: content for name, content in swapped.files.items() if content is not None}
    finished.refuse(Image(files), "record-1.bin")


TWO_PATHS = Scenario(num_paths=2, num_batches=1)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("missing", [("manifest.json",), ("manifest.json", "record-0.bin", "record-1.bin")])
def test_one_of_two_paths_without_its_manifest_after_one_step(
    which: int, missing: tuple[str, ...], scratch: Path
) -> None:
    """The record of the start is still there, and means nothing any more."""
    with training(TWO_PATHS, scratch / "run", real_environment()) as run:
        run.finish()
    image = Image.of(scratch / "run")
    gone = {f"drive-{which}/zerooffload/rank-00000/{name}" for name in missing}
    left = Image({name: content for name, content in image.files.items() if name not in gone})
    with folder_with(left, scratch) as folder:
        before = Image.of(folder)
        with (
            pytest.raises(zo.CheckpointError, match=f"drive-{which}"),
            training(TWO_PATHS, folder, real_environment()) as again,
        ):
            again.resume()
        assert Image.of(folder).files == before.files


def test_paths_in_another_order_are_the_same_run(scratch: Path) -> None:
    with training(TWO_PATHS, scratch, real_environment()) as run:
        run.finish()
    backwards = {"nvme_paths": TWO_PATHS.paths(scratch)[::-1]}
    with training(TWO_PATHS, scratch, real_environment(), **backwards) as run:
        assert run.resume() == 1
