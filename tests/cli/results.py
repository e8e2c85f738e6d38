"""What the tests of commands share: the command line in this process, one clear line, a disk that takes no more."""

import contextlib
import resource

from click.testing import CliRunner

from gradaccum.cli import commands

USERS_OWN = "the user's own line"


def invoke(*arguments, main=commands):
    return CliRunner().invoke(main, [*map(str, arguments)])


def assert_one_clear_line(result, *parts):
    """Bad input: exit code 2, and one line of ours."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line != USERS_OWN]
    assert line.startswith("Error: ")
    assert all(part in line for part in parts), line


@contextlib.contextmanager
def full_disk(little=4096):
    """Files take so many bytes: the system refuses to write more, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (little, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
