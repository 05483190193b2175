"""A model's name → its directory, from disk or from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from calc.core.errors import ModelError, Problem

_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def resolve(model: str) -> Path:
    """The directory of a model.

    Args:
        model: a directory's path, or a hub id such as ``Qwen/Qwen3-0.6B``.

    Raises:
        ModelError: no such directory, and the hub cannot supply it.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if path.is_absolute() or model.startswith((".", "~")):
        raise ModelError(Problem("MODEL_DIR_MISSING", model, "there is no such directory", hint="check the path"))
    try:
        return Path(snapshot_download(model, allow_patterns=_PATTERNS))
    except HFValidationError as error:
        raise ModelError(
            Problem("MODEL_DIR_MISSING", model, "neither a directory nor a hub id", got=str(error).splitlines()[0])
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            Problem(
                "MODEL_HUB_UNREACHABLE",
                model,
                "the model is not on this disk and the hub did not supply it",
                got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                hint="check the id and the network (and HF_HUB_OFFLINE), or give a local directory",
            )
        ) from error
