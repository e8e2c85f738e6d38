"""A small FashionMNIST: files of the same names and format, with pictures that a network can learn."""

import gzip
import struct

import numpy as np
from examples.demo.data import Data

NAMES = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


def pictures(rows, seed):
    """Noise, with a bright patch where the class says."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, rows)
    images = random.integers(0, 100, (rows, 28, 28))
    for image, label in zip(images, labels, strict=True):
        image[2 * label : 2 * label + 4] += 120
    return images.astype(np.uint8), labels.astype(np.uint8)


def data(train=90, test=40):
    """Such pictures as the experiment takes them."""
    train_x, train_y = pictures(train, 0)
    test_x, test_y = pictures(test, 1)
    x = [images.reshape(len(images), -1) for images in (train_x, test_x)]
    return Data("FashionMNIST", "here", x[0], train_y.astype(np.int64), x[1], test_y.astype(np.int64), scale=255.0)


def idx(array):
    """An array of bytes in the IDX format."""
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write(folder, train=90, test=40, pack=gzip.compress, ending=".gz"):
    """All four files."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, rows, seed in (("train", train, 0), ("t10k", test, 1)):
        images, labels = pictures(rows, seed)
        (folder / f"{part}-images-idx3-ubyte{ending}").write_bytes(pack(idx(images)))
        (folder / f"{part}-labels-idx1-ubyte{ending}").write_bytes(pack(idx(labels)))
    return folder
