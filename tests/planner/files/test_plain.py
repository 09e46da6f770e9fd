"""Only plain files of a folder are opened, and none is waited for."""

import os
import socket

import pytest

from quintsched.errors import InputError
from quintsched.files.read_plain_files_only import open_plain, read_plain, require_folder, require_plain_name


def test_what_takes_the_place_of_a_file_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "f"
    path.write_bytes(b"1")
    look = os.lstat

    def swapped(name):
        status = look(name)
        if name == path:
            path.unlink()
            os.mkfifo(path)
        return status

    monkeypatch.setattr(os, "lstat", swapped)
    with pytest.raises(InputError, match="it is a FIFO, not a file"):
        read_plain(path, "the file", 99)


def test_folders_and_names(tmp_path):
    require_folder(tmp_path, "the folder")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(InputError, match="it is a symbolic link, not a directory"):
        require_folder(tmp_path / "link", "the folder")
    require_plain_name("rank-00000.safetensors")
    for name in ("", ".", "..", "a/b", "/etc/passwd", "a\0", "..\\x", "x" * 201):
        with pytest.raises(InputError, match="is not the name of a file"):
            require_plain_name(name)


def test_a_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"12345")
    assert read_plain(path, "the file", 5) == b"12345"
    with pytest.raises(InputError, match=r"/f: it has 5 bytes, more than the 4 that are read"):
        read_plain(path, "the file", 4)


@pytest.mark.parametrize("kind", ["a symbolic link", "a directory", "a FIFO", "a socket", "a device"])
def test_what_is_no_file_is_refused_at_once(kind, tmp_path):
    path = tmp_path / "f"
    with socket.socket(socket.AF_UNIX) as server:
        match kind:
            case "a symbolic link":
                path.symlink_to("/dev/zero")
            case "a directory":
                path.mkdir()
            case "a FIFO":
                os.mkfifo(path)
            case "a socket":
                server.bind(str(path))
            case _:
                path = tmp_path.__class__("/dev/zero")
        with pytest.raises(InputError, match=f"cannot read the file: it is {kind}, not a file"):
            read_plain(path, "the file", 99)


def test_what_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match=r"/f: cannot read the file: No such file"):
        read_plain(tmp_path / "f", "the file", 9)
    (tmp_path / "f").write_bytes(b"")
    failed = pytest.raises(InputError, match=r"/f: cannot read the file: Input/output error")
    with failed, open_plain(tmp_path / "f", "the file"):
        raise OSError(5, "Input/output error")
