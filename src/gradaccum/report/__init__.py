"""What a check, a run or a demo found, as text, picture and page."""

from gradaccum.core.sizes import format_bytes
from gradaccum.report.files import check_writable, write
from gradaccum.report.report import Bars, Block, Code, Curve, Curves, Report, Table, Text, format_value

__all__ = [
    "Bars", "Block", "Code", "Curve", "Curves", "Report", "Table", "Text", "check_writable", "format_bytes",
    "format_value", "write",
]  # fmt: skip
