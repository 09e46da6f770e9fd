"""Files are written whole or not at all, whatever stands at their path, and read no further than their limit."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from quintsched.errors import InputError, UsageError, WriteError
from quintsched.files import atomic
from quintsched.files.atomic import read_whole, same_file, write_plain, write_whole
from tests.helpers.refusals import require_refusals


def everything_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_new_file_and_one_that_is_replaced(tmp_path):
    path, before = tmp_path / "plan.json", os.umask(0o027)
    try:
        write_whole(path, "ä\n", "the plan")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640, "as the user gives new files"
    assert path.read_bytes() == "ä\n".encode()
    os.chmod(path, 0o604)
    write_whole(path, b"two", "the plan")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"two", 0o604)
    assert everything_in(tmp_path) == ["plan.json"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_its_target_is_written(tmp_path, exists):
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "target", tmp_path / "link"
    if exists:
        target.write_text("before")
    link.symlink_to(Path("far") / "target")
    write_whole(link, "after", "the plan")
    assert link.is_symlink()
    assert target.read_text() == "after"
    assert everything_in(tmp_path) == ["far", "link"]


def test_a_fifo_stays_a_fifo(tmp_path):
    fifo, read = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()))
    reader.start()
    write_whole(fifo, b"x" * 2**18, "the plan")
    reader.join(10)
    assert read == [b"x" * 2**18]
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_a_device_stays_a_device(tmp_path):
    device, link = tmp_path / "null", tmp_path / "link"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.write_bytes(b"")
    except PermissionError:
        pytest.skip("only root makes devices, and not everywhere")
    link.symlink_to(device)
    for path in (device, link):
        write_whole(path, b"data", "the plan")
    assert stat.S_ISCHR(device.stat().st_mode)
    assert link.is_symlink()


def test_an_open_file_is_written_where_it_is(tmp_path):
    with (tmp_path / "log").open("w+b") as file:
        file.write(b"before ")
        file.flush()
        link = tmp_path / "link"
        link.symlink_to(f"/dev/fd/{file.fileno()}")
        for name in (f"/dev/fd/{file.fileno()}", f"/proc/self/fd/{file.fileno()}", link):
            write_whole(Path(name), b"data ", "the plan")
        file.seek(0)
        assert file.read() == b"before data data data "


def test_a_full_disk_and_an_interrupt_leave_what_was_there(tmp_path, monkeypatch):
    path, half, real = tmp_path / "plan.json", [], os.write
    path.write_text("before")

    def write(file: int, data: memoryview) -> int:
        if half:
            raise OSError(28, "No space left on device")
        half.append(real(file, data[:2]))
        return 2

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    full = "plan.json: cannot write the plan: No space left on device"
    for name, wrong, error, words in (
        ("write", write, UsageError, full),
        ("replace", interrupt, KeyboardInterrupt, "^$"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, wrong)
            require_refusals((words, lambda: write_whole(path, "after", "the plan")), error=error)
    assert path.read_text() == "before"
    assert everything_in(tmp_path) == ["plan.json"]


def test_what_cannot_be_written_is_said(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (tmp_path / "no" / "such" / "plan", tmp_path, loop):
        require_refusals(("cannot write the plan", lambda path=path: write_whole(path, b"", "the plan")))
    assert loop.is_symlink()
    device = Path("/dev/full")
    require_refusals(("No space left on device", lambda: write_whole(device, b"data", "the plan")), error=WriteError)
    assert UsageError.exit_code == 2


def test_a_durable_file_is_synced_with_its_directory_where_the_file_system_does_that(tmp_path, monkeypatch):
    synced: list[bool] = []
    fails: list[int] = []

    def fsync(file: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(file).st_mode))
        if synced[-1] and fails:
            raise OSError(fails[0], os.strerror(fails[0]))

    monkeypatch.setattr(os, "fsync", fsync)
    for code in (0, errno.EINVAL, errno.ENOTSUP):
        fails[:] = [code] * bool(code)
        write_whole(tmp_path / "manifest", f"{code}", "the checkpoint", durable=True)
        assert (tmp_path / "manifest").read_text() == f"{code}"
    assert synced == [False, True] * 3
    fails[:] = [errno.EIO]
    with pytest.raises(UsageError, match="Input/output error"):
        write_whole(tmp_path / "manifest", "text", "the checkpoint", durable=True)


def test_same_file_sees_through_links_and_into_directories(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1")
    two.write_text("2")
    (tmp_path / "hard").hardlink_to(one)
    (tmp_path / "soft").symlink_to(one)
    null = Path("/dev/null")
    alike = [*((tmp_path / name, one) for name in ("one", "hard", "soft")), (tmp_path / "hard", tmp_path)]
    assert [same_file(*both) for both in alike] == [True] * 4
    assert [same_file(*both) for both in ((one, two), (tmp_path / "three", one), (null, null))] == [False] * 3


def test_a_file_that_is_too_long_is_not_read(tmp_path, monkeypatch):
    path, more = tmp_path / "huge", "more bytes than the 10 that are read"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(InputError, match=rf"huge: it has {2**40} bytes, more than the 10 that are read"):
        read_whole(path, 10, "the plan")
    path.write_bytes(b"0123456789")
    assert read_whole(path, 10, "the plan") == b"0123456789"
    reads, writes = os.pipe()
    os.write(writes, b"{}")
    os.close(writes)
    assert read_whole(Path(f"/dev/fd/{reads}"), 10, "the plan") == b"{}", "a pipe that is open, to its end"
    os.close(reads)
    with Path("/dev/zero").open("rb") as zero:
        endless = Path(f"/dev/fd/{zero.fileno()}")
        require_refusals((more, lambda: read_whole(endless, 10, "the plan")), error=InputError)
        monkeypatch.setattr(atomic, "MOST_STREAMED", 10)
        require_refusals((more, lambda: read_whole(endless, 100, "the plan")), error=InputError)


def test_only_files_are_read_and_nothing_is_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "plan").write_bytes(b"{}")
    (tmp_path / "link").symlink_to("plan")
    words = "cannot read the plan: it is {}, not a file"
    require_refusals(
        (words.format("a FIFO"), lambda: read_whole(tmp_path / "fifo", 10, "the plan")),
        (words.format("a device"), lambda: read_whole(tmp_path / "zero", 10, "the plan")),
        (f"full: {words.format('a device')}", lambda: read_whole(Path("/dev/full"), 10, "the plan")),
        ("cannot read the plan: Is a directory", lambda: read_whole(tmp_path, 10, "the plan")),
    )
    assert read_whole(tmp_path / "link", 10, "the plan") == b"{}"
    assert read_whole(Path("/proc/self/stat"), 2**16, "the plan").startswith(str(os.getpid()).encode())


def test_what_is_written_unasked_goes_through_no_link_and_into_no_fifo(tmp_path):
    precious, link, fifo = tmp_path / "precious", tmp_path / "link", tmp_path / "fifo"
    precious.write_text("mine")
    link.symlink_to(precious)
    os.mkfifo(fifo)
    for path, kind in ((link, "a symbolic link"), (fifo, "a FIFO"), (tmp_path, "a directory")):
        words = f"cannot write the report: it is {kind}, not a file"
        require_refusals((words, lambda path=path: write_plain(path, "new", "the report")))
    assert precious.read_text() == "mine"
    for text in ("first", "second"):
        write_plain(tmp_path / "stall.json", text, "the report")
        assert (tmp_path / "stall.json").read_text() == text
    assert everything_in(tmp_path) == ["fifo", "link", "precious", "stall.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a link to another user")
def test_another_users_link_in_a_folder_of_all_leads_nowhere(tmp_path):
    precious, shared = tmp_path / "precious", tmp_path / "shared"
    precious.write_text("mine")
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "plan.json").symlink_to(precious)
    write_whole(shared / "plan.json", "by my own link", "the plan")
    os.mkfifo(shared / "fifo")
    for name in ("plan.json", "fifo"):
        os.chown(shared / name, 12345, 12345, follow_symlinks=False)
        with pytest.raises(UsageError, match="of another user in a folder that all may write to"):
            write_whole(shared / name, "new", "the plan")
    assert precious.read_text() == "by my own link"
