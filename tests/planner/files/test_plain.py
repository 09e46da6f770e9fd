"""Only plain files of a folder are opened, and none is waited for."""

import os

import pytest

from quintsched.errors import InputError
from quintsched.files.plain_files import read_plain, require_folder, require_plain_name


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
