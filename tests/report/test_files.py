"""Files are written whole or not at all, and whether they can be is found out before anything takes long."""

import errno
import os
import pathlib

import pytest

from gradaccum.report import Report, check_writable, write
from tests.report.disks import full_disk


def test_a_file_is_made_with_its_folder_and_replaced_whole(tmp_path):
    path = tmp_path / "new" / "folder" / "a.bin"
    for content in (b"first", b"2"):
        assert write(path, content) == path
        assert path.read_bytes() == content
    assert os.listdir(path.parent) == ["a.bin"]


def test_a_link_stays_a_link_and_a_device_is_written_to(tmp_path):
    write(tmp_path / "a", b"1")
    (tmp_path / "link").symlink_to("a")
    write(tmp_path / "link", b"2")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a").read_bytes() == b"2"
    write("/dev/null", b"1")
    assert not os.path.isfile("/dev/null")


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path):
    path = Report("Old").save(tmp_path / "report.txt")
    with full_disk(), pytest.raises(OSError) as raised:
        Report("New" * 10_000).save(path)
    assert raised.value.filename == str(path)
    assert raised.value.errno == errno.EFBIG
    assert path.read_text(encoding="utf-8").startswith("Old")
    assert os.listdir(tmp_path) == ["report.txt"]


@pytest.mark.parametrize("during", ["write_bytes", "replace"])
def test_ctrl_c_leaves_the_old_file_and_nothing_else(during, tmp_path, monkeypatch):
    path = write(tmp_path / "report.txt", b"old")

    def interrupted(file, *arguments):
        if during == "write_bytes":
            with open(file, "wb") as part:
                part.write(b"ne")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, during, interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["report.txt"]


def test_a_link_to_a_file_in_a_folder_that_is_not_there_makes_both(tmp_path):
    (tmp_path / "link").symlink_to("new/a")
    check_writable(tmp_path / "link")
    assert os.listdir(tmp_path) == ["link"]
    write(tmp_path / "link", b"1")
    assert (tmp_path / "new" / "a").read_bytes() == b"1"


def test_what_can_be_written_to_is_left_as_it_was(tmp_path):
    check_writable(tmp_path / "new" / "folder" / "report.txt")
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    impossible = [tmp_path, tmp_path / "file" / "a", tmp_path / "loop" / "a", tmp_path / (300 * "x") / "a"]
    for path in (*impossible, tmp_path / (300 * "x"), "/proc/self/report.txt", "/proc/self/new/report.txt"):
        with pytest.raises(OSError) as raised:
            check_writable(path)
        assert raised.value.filename == str(path)
        assert raised.value.strerror
    with full_disk(), pytest.raises(OSError):
        check_writable(tmp_path / "report.txt")
