"""Repositories of the Hugging Face Hub as places of weights, by huggingface_hub (requirements-hub.txt).

    hf:ORG/NAME            the weights of a repository
    hf:ORG/NAME@REVISION   of a branch, a tag or a commit
    hf:ORG/NAME/FILE       one file of it

Files lie in the cache of huggingface_hub.  Without a network, or with HF_HUB_OFFLINE=1, they are taken from there.
"""

import importlib
import os
import pathlib
import re
from typing import Any

from equivit import errors

SCHEME = "hf:"
PLACE = re.compile(r"hf:(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<file>[^@]+))?(?:@(?P<revision>[^@]+))?")
INSTALL = "python -m pip install -r requirements-hub.txt"
# Files to get, by preference: weights in safetensors, in torch's format, or in any other.
WEIGHTS = (
    ("model*.safetensors", "parameters.safetensors"),
    ("pytorch_model*.bin",),
    ("*.safetensors", "*.npz", "*.bin"),
)
DESCRIPTIONS = ("*.json", "README.md")


def is_place(place: Any) -> bool:
    """Whether a place is on the Hub."""
    return isinstance(place, str) and place.startswith(SCHEME)


def fetch(place: str) -> pathlib.Path:
    """The local folder or file of a place on the Hub, downloaded unless it is in the cache.

    Raises:
      ValueError: the place is not written as above, or huggingface_hub is not installed.
      OSError: there is no such repository, revision or file, or it is neither in the cache nor reachable.
    """
    if (match := PLACE.fullmatch(place)) is None:
        raise ValueError(f"{errors.shown(place)} must be hf:ORG/NAME, hf:ORG/NAME@REVISION or hf:ORG/NAME/FILE.")
    options = dict(repo_id=match["repository"], revision=match["revision"])
    if match["file"]:
        return pathlib.Path(_called(place, "hf_hub_download", filename=match["file"], **options))
    for patterns in WEIGHTS:
        folder = pathlib.Path(_called(place, "snapshot_download", allow_patterns=[*patterns, *DESCRIPTIONS], **options))
        if any(found for pattern in patterns for found in folder.glob(pattern)):
            return folder
    kinds = ", ".join(pattern for patterns in WEIGHTS for pattern in patterns)
    raise FileNotFoundError(f"{place}: has no file of weights ({kinds}); give one of its files as {place}/FILE.")


def check_repository(repository: str) -> None:
    """ValueError unless a name is ORG/NAME."""
    match = PLACE.fullmatch(f"{SCHEME}{repository}")
    if match is None or match["file"] or match["revision"]:
        raise ValueError(f"the repository {errors.shown(repository)} must be ORG/NAME.")


def push(folder: str | os.PathLike, repository: str) -> str:
    """Upload a folder to a repository, which is created if needed, and return its address.

    Raises as `fetch`; `hf auth login` or the environment variable HF_TOKEN selects the account.
    """
    check_repository(repository)
    place = f"{SCHEME}{repository}"
    address = _called(place, "create_repo", repo_id=repository, exist_ok=True)
    _called(place, "upload_folder", repo_id=repository, folder_path=folder, commit_message="Upload a model of equivit")
    return str(address)


def _called(place: str, function: str, **options: Any) -> Any:
    """The result of a function of huggingface_hub; its errors become one line with the place."""
    try:
        library: Any = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ValueError(f"{place}: huggingface_hub is not installed ({error}); {INSTALL} installs it.") from error
    try:
        return getattr(library, function)(**options)
    except Exception as error:  # of the network, its protocols, the cache, and of names, each of a type of its own
        raise OSError(f"{place}: {_fix(error)} ({errors.reason(error)}).") from error


def _fix(error: Exception) -> str:
    """The likely cause of an error of huggingface_hub, and what helps."""
    kind = type(error).__name__
    if kind == "GatedRepoError":
        return "asks for consent; accept its terms on the site, then log in with: hf auth login"
    if kind == "RepositoryNotFoundError":
        return "there is no such repository; check the name, or log in with: hf auth login"
    if kind == "RevisionNotFoundError":
        return "the repository has no such branch, tag or commit"
    if kind in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
        return "the repository has no such file"
    return "is not in the cache and cannot be reached; load it once with a network, without HF_HUB_OFFLINE=1"
