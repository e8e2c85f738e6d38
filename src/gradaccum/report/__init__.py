"""What a check, a run or a demo found, as text, picture and page."""

from gradaccum.report.report import Bars, Block, Curve, Curves, Report, Table, Text, format_bytes, format_value, require

__all__ = ["Bars", "Block", "Curve", "Curves", "Report", "Table", "Text", "format_bytes", "format_value", "require"]
