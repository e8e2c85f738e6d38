"""A report as text, PNG and HTML, and its files."""

import base64
import builtins
import copy
import errno
import functools
import html.parser
import importlib
import io
import os
import pathlib
import pickle
import re
import subprocess
import sys

import matplotlib
import pytest

from gradaccum import extras, report
from gradaccum.report import Bars, Code, Curve, Curves, Report, Table, Text, pictures
from tests.cli.results import full_disk

TABLE = Table(["run", "loss", "memory"], [["a < b", 0.123456, "8.1 MiB"], ["[bold]b", None, "12 KiB"]], caption="Both")
CURVES = Curves(
    "Loss", [Curve("a", [1, 2], [2.0, 1.0]), Curve("b", [1, 2], [2.0, 1.0])], x_label="epoch", limits={"goal": 1.5}
)
BARS = Bars("Memory", {"a": 8.0, "b": 2.0}, unit="MiB", limits={"free": 6.0})


def make(**changes):
    blocks = [Text("Two & two."), TABLE, CURVES, BARS, Code("pip install <it>")]
    return Report(**{"title": "A & B", "blocks": blocks, "ok": True, "summary": "Equal.", **changes})


@functools.cache
def drawn():
    """The report as it is, drawn once."""
    return make().html()


class Page(html.parser.HTMLParser):
    """Tags, texts and attributes of a page."""

    VOID = ("meta", "img", "source", "link", "br")

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.attributes, self.text = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_plain_text_has_everything_but_the_pictures_and_is_shown_where_there_is_no_terminal(capsys):
    assert str(make()) == (
        "A & B\n=====\nEqual.\n\nTwo & two.\n\n"
        "Both\nrun        loss   memory\n-------  ------  -------\na < b    0.1235  8.1 MiB\n[bold]b       -   12 KiB"
        "\n\n    pip install <it>"
    )
    make().show()
    file = io.StringIO()
    make().show(file)
    assert capsys.readouterr().out == file.getvalue() == f"{make()}\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(report, monkeypatch, **environment):
    """What a terminal gets."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "100", **environment}.items():
        monkeypatch.setenv(name, value)
    file = Terminal()
    report.show(file)
    return file.getvalue()


def without_colours(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_show_is_coloured_on_a_terminal_unless_that_is_unwanted(monkeypatch):
    good = shown(make(), monkeypatch)
    assert "\x1b[32mEqual." in good
    assert "\x1b[31mEqual." in shown(make(ok=False), monkeypatch)
    assert "\x1b[32m" not in shown(make(), monkeypatch, NO_COLOR="1")
    for part in ("A & B", "Two & two.", "a < b", "[bold]b", "0.1235", "12 KiB", "pip install <it>"):
        assert part in without_colours(good), f"{part!r} is missing, or was taken for markup"


@pytest.mark.parametrize("columns", [80, 24])
def test_a_narrow_terminal_loses_no_digit(columns, monkeypatch):
    report = Report("A", [Table(["run", "some long name"], [["a long name of a run", 1.25e-07]] * 2)])
    text = without_colours(shown(report, monkeypatch, COLUMNS=str(columns)))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= columns


def test_html_is_one_file_that_needs_nothing_else_with_light_and_dark_pictures_in_words_as_well():
    page = Page(drawn())
    assert page.open == []
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    sources = [value for tag, name, value in page.attributes if name in ("src", "srcset", "href")]
    assert len(set(sources)) == 4, "two pictures, each for light and dark"
    assert all(value.startswith("data:image/svg+xml;base64,") for value in sources)
    assert all(b"<svg" in base64.b64decode(uri.partition("base64,")[2]) for uri in sources)
    styles = re.findall(r"<style>(.*?)</style>", drawn(), re.DOTALL)
    assert "prefers-color-scheme: dark" in styles[0]
    assert not re.search(r"url\(|@import", styles[0])
    words = [value for tag, name, value in page.attributes if (tag, name) == ("img", "alt")]
    assert all(title in text for title, text in zip(("Loss", "Memory"), words, strict=True))
    assert "8 MiB" in words[1]


def test_html_escapes_what_it_shows():
    page = Page(make(title="<script>alert(1)</script>", summary='"><img src=x>').html())
    assert "script" not in page.tags
    assert page.tags.count("img") == 2
    for part in ("<script>alert(1)</script>", '"><img src=x>', "Two & two.", "a < b", "pip install <it>"):
        assert part in page.text


@pytest.mark.parametrize(("ok", "style"), [(True, "summary good"), (False, "summary bad"), (None, "summary")])
def test_html_colours_the_verdict(ok, style):
    assert ("p", "class", style) in Page(make(ok=ok, blocks=[TABLE]).html()).attributes


def test_png_shows_all_figures_side_by_side():
    one, two = make(blocks=[CURVES]).png(), make().png()
    widths = [int.from_bytes(png[16:20], "big") for png in (one, two)]
    assert all(png.startswith(b"\x89PNG\r\n\x1a\n") for png in (one, two))
    assert widths[1] == 2 * widths[0]


def test_pictures_are_the_same_each_time_and_leave_matplotlib_as_it_was():
    before = copy.copy(dict(matplotlib.rcParams))
    assert make().png() == make().png()
    assert make().html() == drawn()
    assert dict(matplotlib.rcParams) == before


def test_drawing_loads_no_pyplot():
    program = (
        "import sys; from gradaccum.report import *\n"
        "Report('A', [Bars('B', {'a': 1.0})]).png()\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    "figure",
    [
        Curves("Empty", []),
        Curves("One point", [Curve("a", [1], [2.0])]),
        Curves("NaN", [Curve("a", [1, 2], [float("nan")] * 2)]),
        Curves("Log", [Curve("a", [1.5, 20], [1e-9, 1e3])], log=True, log_x=True),
        Curves("Points", [Curve("a", [1, 2], [1.0, 2.0], points=True), Curve("b", [1, 2], [1.1, 2.1])]),
        Curves("Many", [Curve(str(k), [0, 1], [k, k]) for k in range(9)]),
        Bars("Empty", {}),
        Bars("Zero on a log axis", {"a": 0.0, "b": 1e-9}, log=True),
        Bars("Many", {f"layer.{k}": float(k) for k in range(40)}),
        Bars("$a_1$ and a $", {"$x^": 1.0}),
    ],
    ids=lambda figure: figure.title,
)
def test_any_figure_can_be_drawn_and_said(figure, monkeypatch):
    monkeypatch.setattr(pictures, "data_uri", lambda figure, theme: "data:")  # which draws the same, twice more
    assert Report("A", [figure]).png().startswith(b"\x89PNG")
    assert figure.title in figure.plain()
    assert figure.title in Page(Report("A", [figure]).html()).attributes[-1][-1]


def test_a_report_is_saved_by_its_ending(tmp_path):
    for name, begin in (("a.html", b"<!doctype html>"), ("b.PNG", b"\x89PNG"), ("new/folder/c.txt", b"A & B\n")):
        path = make().save(tmp_path / name)
        assert path == tmp_path / name
        assert path.read_bytes().startswith(begin)
    assert make().save(str(tmp_path / "d.txt")).is_file()


@pytest.mark.parametrize("name", ["report", "report.pdf", "report.html.gz", "new/report.png"])
def test_another_ending_and_a_png_without_figures_are_refused(tmp_path, name):
    message = r"saved as \.html, \.png or \.txt\. Received: .*report|has no figures to draw"
    with pytest.raises(ValueError, match=message):
        make(blocks=[TABLE]).save(tmp_path / name)
    assert list(tmp_path.iterdir()) == [], "it left an empty folder behind"


def hide(monkeypatch, library):
    """As if this library were not installed."""
    imported = importlib.import_module

    def import_module(name, *rest):
        if name.partition(".")[0] == library:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return imported(name, *rest)

    monkeypatch.setattr(extras.importlib, "import_module", import_module)


USES = [("rich", Report.show), ("jinja2", Report.html), ("matplotlib", Report.html), ("matplotlib", Report.png)]


@pytest.mark.parametrize(("library", "use"), USES)
def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch, library, use):
    hide(monkeypatch, library)
    with pytest.raises(ModuleNotFoundError, match=re.escape(f"needs {library}, which is not installed")) as raised:
        use(make())
    assert 'pip install "gradaccum[cli]"' in str(raised.value)


def test_print_needs_no_library_and_html_without_figures_no_matplotlib(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", lambda name, *rest: pytest.fail(f"print imported {name}"))
        text = str(make())
    assert text.startswith("A & B")
    hide(monkeypatch, "matplotlib")
    assert "Two &amp; two." in make(blocks=[Text("Two & two."), TABLE]).html()


def test_an_error_inside_a_library_is_not_taken_for_its_absence(monkeypatch):
    def broken(name):
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    monkeypatch.setattr(extras.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="numpy"):
        extras.require("matplotlib")


def test_a_table_has_a_cell_for_each_column_quantities_on_the_right_and_may_have_no_rows():
    with pytest.raises(ValueError, match="must have a cell for each column"):
        Table(["a", "b"], [[1, 2], [3]])
    assert Table(["a", "bc"], []).plain() == "a  bc\n-  --"
    table = Table(["a", "b", "c", "d"], [["x", 1, "-2 KiB", None], ["3", "< 4", None, None]])
    assert table.numeric == [False, True, True, False]
    report = make(blocks=[table, CURVES])
    assert pickle.loads(pickle.dumps(report)) == report, "a report is a value"


# Files are written whole or not at all, and whether they can be is found out before anything takes long.


def test_a_file_is_made_with_its_folder_and_replaced_whole_a_link_stays_and_a_device_is_written_to(tmp_path):
    path, link = tmp_path / "new" / "folder" / "a.bin", tmp_path / "link"
    link.symlink_to("new/folder/a.bin")
    report.check_writable(link)
    assert os.listdir(tmp_path) == ["link"], "what can be written to is left as it was"
    for target, content in ((path, b"first"), (path, b"2"), (link, b"3"), (str(path), b"4")):
        assert report.write(target, content) == pathlib.Path(target)
        assert path.read_bytes() == content
    assert os.listdir(path.parent) == ["a.bin"]
    assert link.is_symlink()
    report.write("/dev/null", b"1")
    assert not os.path.isfile("/dev/null")


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path):
    path = Report("Old").save(tmp_path / "report.txt")
    with full_disk(), pytest.raises(OSError) as raised:
        Report("New" * 10_000).save(path)
    assert (raised.value.filename, raised.value.errno) == (str(path), errno.EFBIG)
    assert path.read_text(encoding="utf-8").startswith("Old")
    assert os.listdir(tmp_path) == ["report.txt"]


@pytest.mark.parametrize("during", ["write_bytes", "replace"])
def test_ctrl_c_leaves_the_old_file_and_nothing_else(during, tmp_path, monkeypatch):
    path = report.write(tmp_path / "report.txt", b"old")

    def interrupted(file, *arguments):
        if during == "write_bytes":
            with open(file, "wb") as part:
                part.write(b"ne")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pathlib.Path, during, interrupted)
        report.write(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["report.txt"]


def test_what_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    impossible = [tmp_path, tmp_path / "file" / "a", tmp_path / "loop" / "a", tmp_path / (300 * "x") / "a"]
    for path in (*impossible, tmp_path / (300 * "x"), "/proc/self/report.txt", "/proc/self/new/report.txt"):
        with pytest.raises(OSError) as raised:
            report.check_writable(path)
        assert raised.value.filename == str(path)
        assert raised.value.strerror
    with full_disk(), pytest.raises(OSError):
        report.check_writable(tmp_path / "report.txt")
