"""Cheap checks of a Hugging Face model folder: which files it has, and whether its safetensors are whole.

Imports no torch and no transformers, so that a run's preflight can call it.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tasks.errors import UserError

SETTING = "policy.model"
MAX_HEADER = 100_000_000  # bytes; the bound of the safetensors format
ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16,
    "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def check_model_folder(path: Path) -> None:
    """Check that `path` holds config.json, a fast tokenizer, and whole safetensors files.

    Reads only the headers of the weights. Raises UserError for the setting `policy.model`.
    """
    if not path.is_dir():
        raise UserError(
            SETTING, f"folder {path} does not exist", "give a Hugging Face folder, a hub name, or 'tiny'"
        )
    config = _json_file(path / "config.json", "is the folder of a Hugging Face model?")
    if "model_type" not in config and "architectures" not in config:
        raise UserError(
            SETTING, f"{path}/config.json names no model_type", "give a Hugging Face model's folder"
        )
    _json_file(path / "tokenizer.json", "save the model's fast tokenizer there")
    for name in weight_files(path):
        check_safetensors(path / name)


def weight_files(path: Path) -> list[str]:
    """Names of the safetensors files of a model folder. Raises UserError if there are none or one is missing."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_json_file(index, "download the model again").get("weight_map", {}).values()))
    else:
        names = ["model.safetensors"] if (path / "model.safetensors").is_file() else []
    if not names:
        raise UserError(SETTING, f"{path} has no model.safetensors", "save the model as safetensors there")
    for name in names:
        if not (path / name).is_file():
            raise UserError(
                SETTING, f"{path}/{name} is missing, but the index names it", "download the model again"
            )
    return names


def check_safetensors(file: Path) -> dict[str, Any]:
    """Check a safetensors header against the file's size; returns the tensors' descriptions by name.

    Raises UserError for a header that cannot be read or data that is shorter or longer than it says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER + 1
        if length > min(MAX_HEADER, size - 8):
            raise _corrupt(file, "its header is cut off")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            ends = [_tensor_end(name, tensor) for name, tensor in header.items()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _corrupt(file, f"its header is not valid ({error})") from None
    if size != 8 + length + max(ends, default=0):
        raise _corrupt(file, f"it has {size} bytes, but its header says {8 + length + max(ends, default=0)}")
    return header


def _tensor_end(name: str, tensor: dict[str, Any]) -> int:
    begin, end = tensor["data_offsets"]
    bits = ITEM_BITS.get(tensor["dtype"])
    for extent in tensor["shape"]:
        bits = None if bits is None else bits * extent
    if bits is not None and bits != 8 * (end - begin):
        raise ValueError(f"tensor {name} has {end - begin} bytes for shape {tensor['shape']}")
    return end


def _json_file(file: Path, fix: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        raise UserError(SETTING, f"{file} is missing", fix) from None
    except (OSError, ValueError) as error:
        raise UserError(SETTING, f"{file} cannot be read ({error})", "download the model again") from None
    if not isinstance(content, dict):
        raise UserError(SETTING, f"{file} is not a JSON object", "download the model again")
    return content


def _corrupt(file: Path, problem: str) -> UserError:
    return UserError(SETTING, f"{file} is corrupt: {problem}", "download the model again")
