"""Where the pictures come from, and what is said about broken ones."""

import gzip
import hashlib

import numpy as np
import pooch
import pytest
import requests
from examples.demo import data as module
from examples.demo.data import DataError, load, read_idx
from examples.demo.progress import Progress

from tests.demo import fashion_mnist


@pytest.fixture
def progress():
    with Progress() as progress:
        yield progress


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """No cache, no system folder and no network, unless a test says otherwise."""
    monkeypatch.setattr(module, "_cache", lambda: tmp_path / "cache")
    monkeypatch.setattr(module, "SYSTEM", tmp_path / "system")

    def get(address, **options):
        raise requests.exceptions.ConnectionError("no network in a test")

    monkeypatch.setattr(requests, "get", get)


def serve(monkeypatch, folder, *, broken=()):
    """A network that has the files of this folder, with their checksums. Returns the addresses it was asked for."""
    sums = {name: "md5:" + hashlib.md5((folder / name).read_bytes()).hexdigest() for name in fashion_mnist.NAMES}
    monkeypatch.setattr(module, "CHECKSUMS", sums)
    asked = []

    class Response:
        def __init__(self, content):
            self._content = content
            self.headers = {"content-length": str(len(content))}

        def raise_for_status(self):
            pass

        def iter_content(self, chunk_size):
            yield from (self._content[k : k + chunk_size] for k in range(0, len(self._content), chunk_size))

    def get(address, **options):
        asked.append(address)
        content = (folder / address.rpartition("/")[2]).read_bytes()
        return Response(content[:-9] if any(part in address for part in broken) else content)

    monkeypatch.setattr(requests, "get", get)
    return asked


def test_a_folder_is_read_whole(tmp_path, progress):
    data = load(folder=fashion_mnist.write(tmp_path / "data"), progress=progress)
    images, labels = fashion_mnist.pictures(90, 0)
    np.testing.assert_array_equal(data.train_x, images.reshape(90, 784))
    np.testing.assert_array_equal(data.train_y, labels)
    assert (data.name, data.source, data.features) == ("FashionMNIST", str(tmp_path / "data"), 784)
    assert (len(data.test_x), len(data.test_y), data.train_y.dtype) == (40, 40, np.int64)


def test_unpacked_files_and_torchvisions_folder_are_found(tmp_path, progress):
    fashion_mnist.write(tmp_path / "a", pack=bytes, ending="")
    fashion_mnist.write(tmp_path / "b" / "FashionMNIST" / "raw", pack=bytes, ending="")
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert load(folder=folder, progress=progress).train_x.shape == (90, 784)


def test_the_cache_comes_before_the_system_folder(tmp_path, progress):
    fashion_mnist.write(tmp_path / "system")
    assert load(progress=progress).source == str(tmp_path / "system")
    fashion_mnist.write(tmp_path / "cache")
    assert load(progress=progress).source == str(tmp_path / "cache")


def test_it_is_downloaded_once_with_its_checksum(tmp_path, progress, monkeypatch, capsys):
    asked = serve(monkeypatch, fashion_mnist.write(tmp_path / "server"))
    assert load(progress=progress).source == str(tmp_path / "cache")
    assert [address.rpartition("/")[2] for address in asked] == fashion_mnist.NAMES
    assert load(progress=progress).source == str(tmp_path / "cache")
    assert len(asked) == 4, "the cache was not used"
    assert "Downloading train-images-idx3-ubyte.gz: " in capsys.readouterr().err


def test_a_broken_download_is_tried_at_the_other_address(tmp_path, progress, monkeypatch):
    asked = serve(monkeypatch, fashion_mnist.write(tmp_path / "server"), broken=["amazonaws.com"])
    assert load(progress=progress).train_x.shape == (90, 784)
    assert len(asked) == 8


def test_a_download_that_stays_broken_is_one_line_and_leaves_no_file(tmp_path, progress, monkeypatch):
    serve(monkeypatch, fashion_mnist.write(tmp_path / "server"), broken=["://"])
    with pytest.raises(DataError, match=r"could not be downloaded: .*train-images.*: its checksum is wrong") as raised:
        load("fashion-mnist", progress=progress)
    assert "\n" not in str(raised.value)
    assert not any(path.is_file() for path in (tmp_path / "cache").rglob("*"))


def test_the_checksums_are_of_the_files_names():
    assert list(module.CHECKSUMS) == fashion_mnist.NAMES
    assert all(len(checksum) == len("md5:") + 32 for checksum in module.CHECKSUMS.values())


def test_auto_falls_back_to_the_digits_and_says_so(progress, capsys):
    data = load(progress=progress)
    assert (data.name, data.source, data.scale) == ("digits", "scikit-learn", 16.0)
    assert data.train_x.shape == (1498, 64)
    assert data.test_x.shape == (299, 64)
    assert data.train_x.max() == 16
    said = capsys.readouterr().err
    assert "could not be downloaded" in said
    assert "Using scikit-learn's digits instead" in said


def test_fashion_mnist_by_name_does_not_fall_back(progress):
    with pytest.raises(DataError, match=r"could not be downloaded: .*: ConnectionError"):
        load("fashion-mnist", progress=progress)


def test_the_digits_need_no_folder(tmp_path, progress):
    with pytest.raises(DataError, match="Leave one out"):
        load("digits", tmp_path, progress=progress)


def cut(content):
    return content[: len(content) // 2]


def flip(content):
    return content[:-20] + bytes([content[-20] ^ 0xFF]) + content[-19:]


@pytest.mark.parametrize("name", fashion_mnist.NAMES)
@pytest.mark.parametrize(
    "damage",
    [
        cut,
        flip,
        lambda content: b"",
        lambda content: b"<html>404</html>",
        lambda content: gzip.compress(b"<html>404</html>"),
        lambda content: gzip.compress(b"\0\0\x08"),
        lambda content: gzip.compress(b"\0\0\x08\x03\0\0"),
        lambda content: gzip.compress(cut(gzip.decompress(content))),
        lambda content: gzip.compress(gzip.decompress(content) + b"\0"),
        lambda content: gzip.compress(fashion_mnist.idx(np.zeros((3, 4), np.uint8))),
    ],
    ids=[
        "cut",
        "flipped",
        "empty",
        "a page",
        "a packed page",
        "no header",
        "half a header",
        "cut inside",
        "longer",
        "2d",
    ],
)
def test_a_broken_file_is_named_in_one_line(tmp_path, progress, name, damage):
    path = fashion_mnist.write(tmp_path / "data") / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError) as raised:
        load(folder=tmp_path / "data", progress=progress)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", fashion_mnist.NAMES)
def test_a_missing_file_is_named(tmp_path, progress, name):
    path = fashion_mnist.write(tmp_path / "data") / name
    path.unlink()
    with pytest.raises(DataError, match="no such file") as raised:
        load(folder=tmp_path / "data", progress=progress)
    assert str(path) in str(raised.value)


def test_a_missing_folder_is_named(tmp_path, progress):
    with pytest.raises(DataError, match="missing: no such folder"):
        load(folder=tmp_path / "missing", progress=progress)


def test_labels_and_pictures_belong_together(tmp_path, progress):
    folder = fashion_mnist.write(tmp_path / "data")
    labels = folder / "t10k-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(fashion_mnist.idx(np.zeros(39, np.uint8))))
    with pytest.raises(DataError, match=r"t10k-labels.*expected 40 labels\. Received: shape \(39,\)"):
        load(folder=folder, progress=progress)
    labels.write_bytes(gzip.compress(fashion_mnist.idx(np.full(40, 10, np.uint8))))
    with pytest.raises(DataError, match=r"t10k-labels.*expected classes 0 to 9\. Received: 10"):
        load(folder=folder, progress=progress)


def test_pictures_of_both_parts_have_one_size(tmp_path, progress):
    folder = fashion_mnist.write(tmp_path / "data")
    smaller = fashion_mnist.idx(np.zeros((40, 8, 8), np.uint8))
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(smaller))
    with pytest.raises(DataError, match="784 pixels to train with, 64 to test"):
        load(folder=folder, progress=progress)


def test_an_idx_file_gives_its_array(tmp_path):
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    for content in (fashion_mnist.idx(array), gzip.compress(fashion_mnist.idx(array))):
        (tmp_path / "a").write_bytes(content)
        np.testing.assert_array_equal(read_idx(tmp_path / "a"), array)


def test_the_cache_is_the_users(monkeypatch):
    monkeypatch.undo()
    assert module._cache().is_relative_to(pooch.os_cache("gradaccum"))
