"""Typed errors. Every message says what came, what was expected and usually why."""


class MoeLabError(Exception):
    """Base of every error that moe_lab raises on purpose; its text is meant for the user."""


class ContractError(MoeLabError, ValueError):
    """Sizes, shapes or dtypes that the contest's contract does not allow."""


class DataError(MoeLabError, ValueError):
    """A file under data/ that does not hold what its dictionary says; the message names the row."""


class SubmissionError(MoeLabError, ValueError):
    """A submission file that cannot be read, parsed or rewritten."""


class ExportError(MoeLabError, ValueError):
    """A notebook whose submission cell cannot be exported."""


class BackendError(MoeLabError, RuntimeError):
    """This machine lacks something (a compiler, a device, a version); the message holds the remedy."""


class UnsupportedOnCPUError(BackendError):
    """A TileLang name that has no meaning on a CPU; the message says which and what to use instead."""


class ExerciseError(MoeLabError, AssertionError):
    """A wrong answer to an exercise of the notebooks."""

    def __init__(self, message: str, mistake: str | None = None) -> None:
        super().__init__(message)
        self.mistake = mistake  # its name; None if it is none of the usual ones

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the sentence alone, since the reader's own code is in the cell above."""
        return [str(self)]


class ExplorerError(MoeLabError):
    """Something that the tile explorer could not do or keep; it goes on without it."""


class NotebookError(MoeLabError):
    """A notebook that cannot be read, does not run from top to bottom, or holds an answer that would be lost."""


class RuleError(MoeLabError, ValueError):
    """A rule or a profile that does not exist; the message holds the nearest ones."""


class SandboxError(MoeLabError, RuntimeError):
    """A submission broke a rule while it was loaded or run."""

    def __init__(self, message: str, rule_id: str, line: int | None = None) -> None:
        super().__init__(message)
        self.rule_id = rule_id  # for ``moe-lab explain``
        self.line = line  # of the submission, from 1; None where it has none
