"""Files of a model directory: found, proven to belong to the model, and parsed."""

from __future__ import annotations

import json
from pathlib import Path

from calc.core.errors import Problems

JsonObject = dict[str, object]


def owned_root(model_dir: Path) -> Path:
    """The directory that every file of the model must really lie in.

    In a Hugging Face hub cache, ``snapshots/<revision>/`` holds links into ``blobs/``: the root is their parent.
    """
    real = model_dir.resolve()
    return real.parent.parent if real.parent.name == "snapshots" else real


def find(model_dir: Path, name: str, problems: Problems) -> Path | None:
    """The file `name` of the model, None if there is none; a link out of the model is a problem.

    The path is returned with its links resolved: what is read later is what was checked here.
    """
    path = model_dir / name
    real = path.resolve()
    if not real.is_relative_to(owned_root(model_dir)):
        problems.add(
            "MODEL_LINK_ESCAPES",
            name,
            "the path leads out of the model's own directory",
            expected=f"a file under {owned_root(model_dir)}",
            got=real,
            hint="copy the file into the model's directory",
        )
        return None
    return real if real.is_file() else None


def read_json(model_dir: Path, name: str, problems: Problems) -> JsonObject | None:
    """The JSON object in the file `name`, None (and a problem, unless the file is absent) if there is none."""
    path = find(model_dir, name, problems)
    if path is None:
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        problems.add("MODEL_JSON_DAMAGED", name, "the file is not valid JSON", got=error, hint="download it again")
        return None
    if not isinstance(data, dict):
        problems.add("MODEL_JSON_DAMAGED", name, "the file holds no JSON object", got=type(data).__name__)
        return None
    return data
