"""`python -m sm121 VERB`: the one place that turns failures into messages and exit codes."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from sm121 import cli
from sm121.errors import Interrupted, Sm121Error, from_oserror
from sm121.ui import Ui


def _on_term(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Run a verb; returns the exit code (see sm121.errors)."""
    ui = Ui()
    # SIGHUP too: an ssh session that drops must not leave compilers behind.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _on_term)
    try:
        return cli.run(sys.argv[1:] if argv is None else argv, ui)
    except Sm121Error as error:
        ui.error(error)
        return error.exit_code
    except KeyboardInterrupt:
        stopped = Interrupted(
            "Interrupted.",
            remedy="Run the same command again: finished stages and objects are kept.",
        )
        ui.error(stopped)
        return stopped.exit_code
    except BrokenPipeError:
        return Interrupted.exit_code
    except OSError as error:
        failure = from_oserror(error)
        ui.error(failure)
        return failure.exit_code


if __name__ == "__main__":
    sys.exit(main())
