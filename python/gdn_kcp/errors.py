"""Typed errors. Every message names the argument, what was expected and what came.

All derive from :class:`Error`, a ``RuntimeError``; those about arguments are ``ValueError`` too.
They are raised before the first launch and before the first collective, on every rank.
"""

from __future__ import annotations

import operator
import re


class Error(RuntimeError):
    """Base of all errors of this package."""

    heard = False  # by every rank of the call


class InvalidArgumentError(Error, ValueError):
    """A wrong rank, shape, dtype, stride, alignment, value or combination."""


class UnsupportedError(Error, NotImplementedError):
    """Valid, but no backend here takes it; the message says why."""


class WorkspaceTooSmallError(Error, ValueError):
    """A workspace or saved set smaller than its byte query says."""


class PeerFailedError(Error):
    """Another rank reported an error, left, or never came."""


class DeviceError(Error):
    """A device call or a launch failed."""


class MissingPackageError(Error, ImportError):
    """A package that gdn_kcp.compat is for is not installed, or too old."""


class InternalError(Error):
    """A broken invariant of the library; please report it."""


def int64(name: str, value, expected: str = "an integer of 64 bits") -> int:
    """The argument, if it is an integer that the core can hold."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 1 << 63
    if not -(1 << 63) <= number < 1 << 63:
        raise InvalidArgumentError(f"{name}: expected {expected}, got {value!r}")
    return number


# By the core's ErrorCode (gdn/status.h).
_BY_CODE = {
    1: InvalidArgumentError,
    2: UnsupportedError,
    3: WorkspaceTooSmallError,
    4: PeerFailedError,
    5: DeviceError,
    7: InternalError,
}
_CODE_OF = {error: code for code, error in _BY_CODE.items()}
_TEXT = re.compile(r"gdn_kcp: (\d+): (.*)", re.DOTALL)
# What torch says of an argument that an op's schema does not take, and its names beside ours.
_SCHEMA = re.compile(
    r"Expected a value of type '([^']+)' for argument '(\w+)' but instead found type '([^']+)'"
)
_OUR_NAME = {"want_final": "output_final_state", "d_o": "do"}


def typed(error: BaseException) -> BaseException:
    """The typed error of what an op threw; any other error as it is."""
    if isinstance(error, Error) or not isinstance(error, RuntimeError):
        return error
    found = _TEXT.search(str(error))
    if not found:
        schema = _SCHEMA.search(str(error))
        if not schema:
            return error
        expected, name, got = schema.groups()
        expected = re.sub(r"^Optional\[(.*)\]$", r"\1 or None", expected)
        return InvalidArgumentError(f"{_OUR_NAME.get(name, name)}: expected {expected}, got {got}")
    # What C++ threw may carry a trace after its own lines.
    message = found.group(2).split("\nException raised from")[0].rstrip()
    return _BY_CODE.get(int(found.group(1)), Error)(message)


def packed(error: BaseException) -> tuple[int, str]:
    """(code, message) to send to other ranks."""
    return _CODE_OF.get(type(error), 7), f"{error}"


def unpacked(code: int, message: str) -> Error:
    """The error of another rank."""
    return _BY_CODE.get(code, Error)(message)
