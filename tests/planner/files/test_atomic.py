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


def everything_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_new_file_and_one_that_is_replaced(tmp_path):
    path = tmp_path / "plan.json"
    write_whole(path, "ä\n", "the plan")
    assert path.read_bytes() == "ä\n".encode()
    os.chmod(path, 0o640)
    write_whole(path, b"two", "the plan")
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert everything_in(tmp_path) == ["plan.json"]


def test_a_new_file_has_the_permissions_that_the_user_gives_new_files(tmp_path):
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "new", b"", "the plan")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


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


@pytest.mark.parametrize("through_link", [True, False])
def test_a_device_stays_a_device(tmp_path, through_link):
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.write_bytes(b"")
    except PermissionError:
        pytest.skip("only root makes devices, and not everywhere")
    path = device
    if through_link:
        path = tmp_path / "link"
        path.symlink_to(device)
    write_whole(path, b"data", "the plan")
    assert stat.S_ISCHR(device.stat().st_mode)
    assert path.is_symlink() == through_link


def test_an_open_file_is_written_where_it_is(tmp_path):
    with (tmp_path / "log").open("w+b") as file:
        file.write(b"before ")
        file.flush()
        for name in (f"/dev/fd/{file.fileno()}", f"/proc/self/fd/{file.fileno()}"):
            write_whole(Path(name), b"data ", "the plan")
        link = tmp_path / "link"
        link.symlink_to(f"/dev/fd/{file.fileno()}")
        write_whole(link, b"more", "the plan")
        file.seek(0)
        assert file.read() == b"before data data more"


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("before")
    half = []

    def write(file: int, data: memoryview) -> int:
        if half:
            raise OSError(28, "No space left on device")
        half.append(real(file, data[:2]))
        return 2

    real = os.write
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(UsageError, match=r"plan.json: cannot write the plan: No space left on device"):
        write_whole(path, "after", "the plan")
    monkeypatch.undo()
    assert path.read_text() == "before"
    assert everything_in(tmp_path) == ["plan.json"]


def test_an_interrupt_leaves_no_temporary_file(tmp_path, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "plan.json", "after", "the plan")
    assert everything_in(tmp_path) == []


def test_what_cannot_be_written_is_said(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (tmp_path / "no" / "such" / "plan", tmp_path, loop):
        with pytest.raises(UsageError, match="cannot write the plan") as refused:
            write_whole(path, b"", "the plan")
        assert refused.value.exit_code == 2
    assert loop.is_symlink()
    with pytest.raises(WriteError, match="No space left on device"):
        write_whole(Path("/dev/full"), b"data", "the plan")


def test_a_durable_file_is_synced_with_its_directory(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(stat.S_ISDIR(os.fstat(file).st_mode)))
    write_whole(tmp_path / "manifest", b"data", "the checkpoint", durable=True)
    assert synced == [False, True]


def test_same_file_sees_through_links_and_into_directories(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1")
    two.write_text("2")
    (tmp_path / "hard").hardlink_to(one)
    (tmp_path / "soft").symlink_to(one)
    assert all(same_file(tmp_path / name, one) for name in ("one", "hard", "soft"))
    assert same_file(tmp_path / "hard", tmp_path)
    assert not same_file(one, two)
    assert not same_file(tmp_path / "three", one)
    assert not same_file(Path("/dev/null"), Path("/dev/null"))


def test_a_file_that_is_too_long_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(InputError, match=rf"huge: it has {2**40} bytes, more than the 10 that are read"):
        read_whole(path, 10, "the plan")
    with Path("/dev/zero").open("rb") as zero, pytest.raises(InputError, match="more bytes than the 10 that are read"):
        read_whole(Path(f"/dev/fd/{zero.fileno()}"), 10, "the plan")
    path.write_bytes(b"0123456789")
    assert read_whole(path, 10, "the plan") == b"0123456789"
    with pytest.raises(UsageError, match="cannot read the plan: Is a directory"):
        read_whole(tmp_path, 10, "the plan")


def test_only_files_are_read_and_nothing_is_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "plan").write_bytes(b"{}")
    (tmp_path / "link").symlink_to("plan")
    for path, kind in ((tmp_path / "fifo", "a FIFO"), (tmp_path / "zero", "a device"), (Path("/dev/full"), "a device")):
        with pytest.raises(UsageError, match=f"cannot read the plan: it is {kind}, not a file"):
            read_whole(path, 10, "the plan")
    assert read_whole(tmp_path / "link", 10, "the plan") == b"{}"
    assert read_whole(Path("/proc/self/stat"), 2**16, "the plan").startswith(str(os.getpid()).encode())


def test_a_pipe_that_is_open_is_read_to_its_end(monkeypatch):
    reads, writes = os.pipe()
    os.write(writes, b"{}")
    os.close(writes)
    assert read_whole(Path(f"/dev/fd/{reads}"), 10, "the plan") == b"{}"
    os.close(reads)
    monkeypatch.setattr(atomic, "MOST_STREAMED", 10)
    with Path("/dev/zero").open("rb") as zero, pytest.raises(InputError, match="more bytes than the 10 that are read"):
        read_whole(Path(f"/dev/fd/{zero.fileno()}"), 100, "the plan")


def test_what_is_written_unasked_goes_through_no_link_and_into_no_fifo(tmp_path):
    precious, link, fifo = tmp_path / "precious", tmp_path / "link", tmp_path / "fifo"
    precious.write_text("mine")
    link.symlink_to(precious)
    os.mkfifo(fifo)
    for path, kind in ((link, "a symbolic link"), (fifo, "a FIFO"), (tmp_path, "a directory")):
        with pytest.raises(UsageError, match=f"cannot write the report: it is {kind}, not a file"):
            write_plain(path, "new", "the report")
    assert precious.read_text() == "mine"
    for text in ("first", "second"):
        write_plain(tmp_path / "stall.json", text, "the report")
        assert (tmp_path / "stall.json").read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "link", "precious", "stall.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a link to another user")
def test_another_users_link_in_a_folder_of_all_leads_nowhere(tmp_path):
    precious, shared = tmp_path / "precious", tmp_path / "shared"
    precious.write_text("mine")
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "plan.json").symlink_to(precious)
    write_whole(shared / "plan.json", "by my own link", "the plan")
    for name in ("plan.json", "fifo"):
        if name == "fifo":
            os.mkfifo(shared / name)
        os.chown(shared / name, 12345, 12345, follow_symlinks=False)
        with pytest.raises(UsageError, match="of another user in a folder that all may write to"):
            write_whole(shared / name, "new", "the plan")
    assert precious.read_text() == "by my own link"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_syncs_no_directories_is_taken_as_it_is(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fails)
    if code == errno.EIO:
        with pytest.raises(UsageError, match="Input/output error"):
            write_whole(tmp_path / "a", "text", "the text", durable=True)
    else:
        write_whole(tmp_path / "a", "text", "the text", durable=True)
    assert (tmp_path / "a").read_text() == "text"
