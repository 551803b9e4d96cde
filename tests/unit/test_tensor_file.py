"""Promise: files of tensors are those that safetensors would write, bit for bit."""

from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from common.checkpoint.tensor_file import _NAMES, write_tensors


@pytest.mark.parametrize("facts", [None, {"format": "pt"}])
def test_file_is_that_of_safetensors(tmp_path: Path, facts: dict[str, str] | None) -> None:
    content = torch.arange(48).to(torch.uint8).remainder(2)
    tensors = {
        f'{name} "\\\u00fc\n.{dtype}': content.view(dtype).view(2, -1) for dtype in _NAMES for name in ("b", "a")
    }
    tensors |= {"number": torch.tensor(1.5), "empty": torch.zeros(0, 3), "": torch.ones(3)}
    digest = write_tensors(tmp_path / "ours", tensors, facts)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "theirs", facts)
    written = (tmp_path / "ours").read_bytes()
    assert written == (tmp_path / "theirs").read_bytes() and digest == xxhash.xxh3_128_hexdigest(written)
    assert load_file(tmp_path / "ours").keys() == tensors.keys()


def test_type_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"b is of torch\.complex128, which safetensors files cannot hold"):
        write_tensors(tmp_path / "file", {"a": torch.ones(1), "b": torch.ones(1, dtype=torch.complex128)})
    assert not (tmp_path / "file").exists()
