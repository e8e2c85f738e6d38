"""The pictures of the experiment: FashionMNIST from disk or from its public address, or scikit-learn's digits."""

from __future__ import annotations

import dataclasses
import gzip
import math
import pathlib
import struct
import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
from examples.demo.progress import Progress

from gradaccum.extras import require
from gradaccum.report import format_bytes

__all__ = ["Data", "DataError", "DataSet", "load", "read_idx"]

DataSet = Literal["auto", "fashion-mnist", "digits"]

SYSTEM = pathlib.Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package `dataset-fashion-mnist` puts it."""

ADDRESSES = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
)
# MD5 as its authors publish it, against broken downloads; the files are read as numbers only.
CHECKSUMS = {
    "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
}
CONNECT_SECONDS, READ_SECONDS = 5.0, 30.0


class DataError(ValueError):
    """The data cannot be read, or is not what it should be; the message names the file and is one line."""


@dataclass(frozen=True)
class Data:
    """Pictures and their labels.

    Args:
        name: For people: "FashionMNIST".
        source: Where they came from: a folder, or a library.
        train_x, test_x: uint8, one row per picture, its pixels side by side.
        train_y, test_y: int64, classes from 0 on.
        scale: What a pixel is divided by to lie between 0 and 1.
    """

    name: str
    source: str
    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    scale: float

    @property
    def features(self) -> int:
        """Pixels of a picture."""
        return int(self.train_x.shape[1])

    def first(self, rows: int) -> Data:
        """The same with the first rows alone to train with."""
        return dataclasses.replace(self, train_x=self.train_x[:rows], train_y=self.train_y[:rows])


def load(dataset: DataSet = "auto", folder: pathlib.Path | None = None, *, progress: Progress) -> Data:
    """The data set.

    FashionMNIST comes from `folder` where one is given; else from the cache, else from Debian's package, else from its
    public address into the cache. `auto` falls back to scikit-learn's digits, and prints that, if none of these works.

    Raises:
        DataError: A file is missing, broken or truncated, or nothing could be downloaded.
    """
    if dataset == "digits":
        if folder is not None:
            raise DataError("--data is a folder of FashionMNIST; the digits come with scikit-learn. Leave one out.")
        return _digits()
    if folder is not None:
        return _fashion_mnist(folder)
    cache = _cache()
    for place in (cache, SYSTEM):
        if all((place / name).is_file() for name in CHECKSUMS):
            return _fashion_mnist(place)
    try:
        _download(cache, progress)
    except DataError as error:
        if dataset == "fashion-mnist":
            raise
        progress.say(f"{error} Using scikit-learn's digits instead (1797 scanned digits of 8 x 8 pixels).")
        return _digits()
    return _fashion_mnist(cache)


def read_idx(path: pathlib.Path) -> np.ndarray:
    """An array of bytes from an IDX file (big-endian: two zero bytes, type, dimensions, shape, data), gzipped or not.

    Raises:
        DataError: Missing, broken, truncated, longer than it says, or no such file at all.
    """
    try:
        packed = path.read_bytes()
        content = gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed
    except FileNotFoundError:
        raise DataError(f"{path}: no such file.") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: broken or truncated ({error}).") from None
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise DataError(f"{path}: not an IDX file of bytes (it begins with {content[:4].hex(' ') or 'nothing'}).")
    header = 4 + 4 * content[3]
    if len(content) < header:
        raise DataError(f"{path}: truncated: its header takes {header} bytes. Received: {len(content)}.")
    shape = struct.unpack(f">{content[3]}I", content[4:header])
    if len(content) - header != math.prod(shape):
        raise DataError(
            f"{path}: broken or truncated: shape {shape} takes {math.prod(shape)} bytes. "
            f"Received: {len(content) - header}."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)


def _fashion_mnist(folder: pathlib.Path) -> Data:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder.")
    train, test = _pair(folder, "train"), _pair(folder, "t10k")
    if train[0].shape[1] != test[0].shape[1]:
        raise DataError(f"{folder}: pictures of {train[0].shape[1]} pixels to train with, {test[0].shape[1]} to test.")
    return Data("FashionMNIST", str(folder), *train, *test, scale=255.0)


def _pair(folder: pathlib.Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    images_path = _find(folder, f"{part}-images-idx3-ubyte.gz")
    labels_path = _find(folder, f"{part}-labels-idx1-ubyte.gz")
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.ndim != 3 or images.size == 0:
        raise DataError(f"{images_path}: expected pictures, (number, height, width). Received: shape {images.shape}.")
    if labels.shape != images.shape[:1]:
        raise DataError(f"{labels_path}: expected {len(images)} labels. Received: shape {labels.shape}.")
    if labels.max() > 9:
        raise DataError(f"{labels_path}: expected classes 0 to 9. Received: {labels.max()}.")
    return images.reshape(len(images), -1), labels.astype(np.int64)


def _find(folder: pathlib.Path, name: str) -> pathlib.Path:
    """The file, also unpacked, also where torchvision puts it."""
    plain = name.removesuffix(".gz")
    places = [folder / name, folder / plain, *(folder / "FashionMNIST" / "raw" / file for file in (name, plain))]
    return next((path for path in places if path.is_file()), places[0])


def _digits() -> Data:
    """Every sixth picture is for the test; the other 1498 end in a short window of ragged micro-batches."""
    digits = require("sklearn.datasets").load_digits()
    x, y = digits.data.astype(np.uint8), digits.target.astype(np.int64)
    test = np.arange(len(x)) % 6 == 5
    return Data("digits", "scikit-learn", x[~test], y[~test], x[test], y[test], scale=16.0)


def _cache() -> pathlib.Path:
    return pathlib.Path(require("pooch").os_cache("gradaccum")) / "fashion-mnist"


def _download(folder: pathlib.Path, progress: Progress) -> None:
    pooch = require("pooch")
    pooch.get_logger().setLevel("WARNING")  # the progress bar says it
    for name, checksum in CHECKSUMS.items():
        problem = ""
        for address in ADDRESSES:
            progress.start(f"Downloading {name}", total=None)
            bar = _Bar(progress)
            downloader = pooch.HTTPDownloader(progressbar=bar, timeout=(CONNECT_SECONDS, READ_SECONDS))
            try:
                pooch.retrieve(address + name, checksum, fname=name, path=folder, downloader=downloader)
            except (OSError, ValueError) as error:  # every error of the network, and pooch's for a wrong checksum
                reason = "its checksum is wrong" if isinstance(error, ValueError) else type(error).__name__
                problem = f"FashionMNIST could not be downloaded: {address}{name}: {reason}."
                progress.done(f"failed ({type(error).__name__})")
            else:
                progress.done(format_bytes((folder / name).stat().st_size))
                break
        else:
            raise DataError(problem)


class _Bar:
    """What pooch calls to tell how far it is."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._total = 0.0

    @property
    def total(self) -> float:
        return self._total

    @total.setter
    def total(self, total: float) -> None:
        self._total = total
        self._progress.expect(total)

    def update(self, units: float) -> None:
        self._progress.advance(units)

    def reset(self) -> None:
        """pooch refills the bar at the end; `Progress.done` does that here."""

    def close(self) -> None:
        """Nothing to close."""
