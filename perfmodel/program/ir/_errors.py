"""Errors in programs: each names the line and the value."""

from perfmodel.errors import PerfModelError


class ProgramError(PerfModelError):
    """A program that is malformed: one line that names the function, the line and the value.

    Lines count from 1 in the text that the program was parsed from, otherwise in its printed form.
    """

    def __init__(self, function: str, line: int, value: str, message: str) -> None:
        self.function, self.line, self.value = function, line, value
        super().__init__(f"@{function} line {line}: %{value}: {message}")


class RuleError(PerfModelError):
    """Raised inside an op's rule; the interpreter adds line and value."""
