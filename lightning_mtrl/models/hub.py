"""Whether the Hugging Face Hub can be reached, found out by one request and not by minutes of attempts."""

from __future__ import annotations


class OutOfReach(Exception):
    """The Hub does not answer, and what is wanted is not in its cache on this machine; says why."""


def is_only_cached(name: str, file: str) -> bool:
    """Whether a repository has to come from the Hub's cache on this machine, since the Hub does not answer.

    Any answer will do, also that there is no such repository: the client tells that itself, at once. Without
    one it would try each file of a model again and again.

    Args:
        name: of the repository.
        file: without which it is of no use, such as "config.json".

    Raises:
        OutOfReach: if it is not in the cache either.
    """
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(name, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (HfHubHTTPError, ValueError, TypeError, LookupError):
        return False  # it refuses, the name is none, or a mirror answers in words of its own
    except Exception as error:  # of whichever HTTP library the client is built on
        if isinstance(try_to_load_from_cache(name, file), str):
            return True
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise OutOfReach(f"{constants.ENDPOINT} does not answer: {lines[0].rstrip('.')}") from error
    return False
