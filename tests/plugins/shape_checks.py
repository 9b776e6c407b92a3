"""The checker behind `--jaxtyping-packages`: it compares tensors with the shapes written in signatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray


def shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the shapes and dtypes of a function's tensors, and no other annotation.

    Every other type is mypy's to check. At run time it would only get in the way: an `int` is no `float`
    there, and a method that returns `Self` cannot be decorated at all.

    Args:
        function: jaxtyping's stand-in, which has the signature of the checked function and does nothing.
    """
    hints = {n: h if _has_shape(h) else Any for n, h in function.__annotations__.items()}
    function.__annotations__ = hints
    return beartype(function) if any(hint is not Any for hint in hints.values()) else function


def _has_shape(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(_has_shape(part) for part in get_args(hint))
