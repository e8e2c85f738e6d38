"""Reports of checks, runs and the demo, as text, picture or HTML page."""

from gradaccum.core.sizes import format_bytes
from gradaccum.lazy import listed
from gradaccum.report.blocks import Bars, Block, Code, Curve, Curves, Table, Text, format_value
from gradaccum.report.report import Report, check_writable, write

__all__ = [
    "Bars", "Block", "Code", "Curve", "Curves", "Report", "Table", "Text", "check_writable", "format_bytes",
    "format_value", "write",
]  # fmt: skip

__dir__ = listed(__name__)
