"""Where the pictures come from, and what is said about broken ones."""

import contextlib
import gzip
import hashlib

import numpy as np
import pytest
import requests
from examples.demo import data as module
from examples.demo.data import DataError, load
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


class Response:
    """What `requests.get` answers."""

    def __init__(self, content):
        self.content, self.headers = content, {"content-length": str(len(content))}

    def raise_for_status(self):
        pass

    def iter_content(self, chunk_size):
        yield from (self.content[k : k + chunk_size] for k in range(0, len(self.content), chunk_size))


def serve(monkeypatch, folder, *, broken=()):
    """A network that has the files of this folder, with their checksums. Returns the addresses it was asked for."""
    sums = {name: "md5:" + hashlib.md5((folder / name).read_bytes()).hexdigest() for name in fashion_mnist.NAMES}
    monkeypatch.setattr(module, "CHECKSUMS", sums)
    asked = []

    def get(address, **options):
        asked.append(address)
        content = (folder / address.rpartition("/")[2]).read_bytes()
        return Response(content[:-9] if any(part in address for part in broken) else content)

    monkeypatch.setattr(requests, "get", get)
    return asked


def test_a_folder_is_read_whole_unpacked_or_as_torchvision_has_it(tmp_path, progress):
    folders = fashion_mnist.write(tmp_path / "data"), fashion_mnist.write(tmp_path / "a", pack=bytes, ending="")
    fashion_mnist.write(tmp_path / "b" / "FashionMNIST" / "raw", pack=bytes, ending="")
    images, labels = fashion_mnist.pictures(90, 0)
    for folder in (*folders, tmp_path / "b"):
        data = load(folder=folder, progress=progress)
        np.testing.assert_array_equal(data.train_x, images.reshape(90, 784))
        np.testing.assert_array_equal(data.train_y, labels)
        assert (data.name, data.features, data.train_y.dtype) == ("FashionMNIST", 784, np.int64)
        assert (len(data.test_x), len(data.test_y)) == (40, 40)


def test_the_cache_comes_before_the_system_folder(tmp_path, progress):
    for name in ("system", "cache"):
        fashion_mnist.write(tmp_path / name)
        assert load(progress=progress).source == str(tmp_path / name)


@pytest.mark.parametrize(("broken", "files"), [((), 4), (["amazonaws.com"], 8)], ids=["", "broken at one address"])
def test_it_is_downloaded_once_with_its_checksum(broken, files, tmp_path, progress, monkeypatch, capsys):
    asked = serve(monkeypatch, fashion_mnist.write(tmp_path / "server"), broken=broken)
    for _ in range(2):
        data = load(progress=progress)
        assert (data.source, data.train_x.shape) == (str(tmp_path / "cache"), (90, 784))
        assert len(asked) == files, "the cache was not used"
    assert "Downloading train-images-idx3-ubyte.gz: " in capsys.readouterr().err


def test_auto_falls_back_to_the_digits_and_says_so(progress, capsys):
    data = load(progress=progress)
    assert (data.name, data.source, data.scale, data.train_x.max()) == ("digits", "scikit-learn", 16.0, 16)
    assert (data.train_x.shape, data.test_x.shape) == ((1498, 64), (299, 64))
    assert "Using scikit-learn's digits instead" in capsys.readouterr().err


def test_what_cannot_be_had_is_an_error_of_one_line(tmp_path, progress, monkeypatch):
    """FashionMNIST by its name doesn't fall back, the digits need no folder, and a folder has to be there."""
    cases = [
        (("fashion-mnist", None), r"could not be downloaded: .*: ConnectionError"),
        (("digits", tmp_path), "Leave one out"),
        (("auto", tmp_path / "missing"), "missing: no such folder"),
        (("fashion-mnist", None), r"could not be downloaded: .*train-images.*: its checksum is wrong"),
    ]
    for arguments, message in cases:
        if "checksum" in message:
            serve(monkeypatch, fashion_mnist.write(tmp_path / "server"), broken=["://"])
        with pytest.raises(DataError, match=message) as raised:
            load(*arguments, progress=progress)
        assert "\n" not in str(raised.value)
    assert not any(path.is_file() for path in (tmp_path / "cache").rglob("*"))


def flip(content):
    return content[:-20] + bytes([content[-20] ^ 0xFF]) + content[-19:]


def inside(change):
    return lambda content: gzip.compress(change(gzip.decompress(content)))


DAMAGES = {
    "cut": lambda content: content[: len(content) // 2],
    "flipped": flip,
    "empty": lambda content: b"",
    "a page": lambda content: b"<html>404</html>",
    "a packed page": inside(lambda content: b"<html>404</html>"),
    "no header": inside(lambda content: b"\0\0\x08"),
    "half a header": inside(lambda content: b"\0\0\x08\x03\0\0"),
    "cut inside": inside(lambda content: content[: len(content) // 2]),
    "longer": inside(lambda content: content + b"\0"),
    "2d": inside(lambda content: fashion_mnist.idx(np.zeros((3, 4), np.uint8))),
    "missing": None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_or_missing_file_is_named_in_one_line(tmp_path, progress, damage):
    for path in (fashion_mnist.write(tmp_path / "data") / name for name in fashion_mnist.NAMES):
        whole = path.read_bytes()
        path.unlink() if damage == "missing" else path.write_bytes(DAMAGES[damage](whole))
        with pytest.raises(DataError) as raised:
            load(folder=path.parent, progress=progress)
        assert "\n" not in str(raised.value)
        assert str(raised.value).startswith(f"{path}: ") or f"{path}: no such file" in str(raised.value)
        path.write_bytes(whole)


def test_files_belong_together(tmp_path, progress):
    folder = fashion_mnist.write(tmp_path / "data")
    for kind, array, message in [
        ("labels-idx1", np.zeros(39), r"t10k-labels.*expected 40 labels\. Received: shape \(39,\)"),
        ("labels-idx1", np.full(40, 10), r"t10k-labels.*expected classes 0 to 9\. Received: 10"),
        ("labels-idx1", np.zeros(40), None),
        ("images-idx3", np.zeros((40, 8, 8)), "784 pixels to train with, 64 to test"),
    ]:
        (folder / f"t10k-{kind}-ubyte.gz").write_bytes(gzip.compress(fashion_mnist.idx(array.astype(np.uint8))))
        with pytest.raises(DataError, match=message) if message else contextlib.nullcontext():
            load(folder=folder, progress=progress)
