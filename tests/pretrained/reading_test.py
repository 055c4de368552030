"""Files of every kind are read exactly, and nothing in a .pth file is ever run."""

import argparse
import collections
import os
import pathlib
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest

from equivit.pretrained import names, reading
from tests.pretrained import torch_archive

DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int64)
TORCH_FILE = pathlib.Path(__file__).parent.parent / "fixtures" / "torch" / "saved_by_torch.pth"


def tensors(dtype=np.float32):
    values = np.arange(24).reshape(2, 3, 4)
    return {"a": values.astype(dtype), "b.weight": values[0].astype(dtype), "scalar": np.asarray(7, dtype)}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("ending", [".pth", ".safetensors", ".npz"])
def test_every_type_comes_back_exactly(tmp_path, ending, dtype):
    if ending == ".npz" and dtype is ml_dtypes.bfloat16:
        pytest.skip("npz has no bfloat16")
    path = tmp_path / f"weights{ending}"
    (torch_archive.write if ending == ".pth" else reading.write)(path, tensors(dtype))
    found = reading.read(path)
    assert found.keys() == tensors().keys()
    for name, tensor in tensors(dtype).items():
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(found[name], tensor)


def test_strides_of_a_torch_file(tmp_path):
    transposed = np.arange(12, dtype=np.float32).reshape(3, 4).T
    torch_archive.write(tmp_path / "weights.pth", {"a": transposed})
    np.testing.assert_array_equal(reading.read(tmp_path / "weights.pth")["a"], transposed)


def test_a_file_that_torch_wrote():  # torch 2.15; two tensors are views of a third
    content = reading.read(TORCH_FILE)
    state, left_out = reading.state_dict(content)
    assert left_out == [] and content["epoch"] == 3 and type(content["args"]).__name__ == "Namespace"
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    expected = dict(
        matrix=matrix, transposed=matrix.T, row=matrix[1], half=matrix[0], bfloat16=matrix[0], long=[0, 1, 2]
    )
    assert state.keys() == {*expected, "parameter", "empty", "scalar"}
    for name, value in expected.items():
        np.testing.assert_array_equal(state[name].astype(np.float32), value)
    assert state["half"].dtype == np.float16 and state["long"].dtype == np.int64 and state["empty"].shape == (0, 4)


class Malicious:
    def __reduce__(self):
        return os.system, ("touch touched",)


@pytest.mark.parametrize("place", ["tensor", "args"])
def test_code_in_a_torch_file_is_refused_and_not_run(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    content = {"model": tensors(), "args": Malicious()} if place == "args" else {"model": {"a": Malicious()}}
    torch_archive.write("weights.pth", content)
    with pytest.raises(ValueError, match=r"asks for (posix|nt).system; only tensors .* no code is run"):
        reading.read("weights.pth")
    assert not pathlib.Path("touched").exists()


def test_a_namespace_is_an_empty_shell(tmp_path):
    content = collections.OrderedDict(model=tensors(), args=argparse.Namespace(lr=1e-3, model="vit"), epoch=3)
    torch_archive.write(tmp_path / "weights.pth", content)
    found = reading.read(tmp_path / "weights.pth")
    assert found["epoch"] == 3 and not isinstance(found["args"], argparse.Namespace)
    assert reading.state_dict(found)[0].keys() == tensors().keys()


@pytest.mark.parametrize("ending", [".pth", ".safetensors", ".npz"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_damaged_files(tmp_path, ending, share):
    path = tmp_path / f"weights{ending}"
    (torch_archive.write if ending == ".pth" else reading.write)(path, tensors())
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=rf"weights{ending}: is "):
        reading.read(path)


def test_a_tensor_beyond_its_storage_is_refused(tmp_path):
    path = tmp_path / "weights.pth"
    torch_archive.write(path, {"a": np.zeros(4, np.float32)})
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    assert members["weights/data.pkl"].count(b"K\x04\x85") == 1  # the size, (4,)
    members["weights/data.pkl"] = members["weights/data.pkl"].replace(b"K\x04\x85", b"K\x40\x85")
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(ValueError, match=r"size \(64,\) reads entry 63 of a storage of 4"):
        reading.read(path)


def test_other_refusals(tmp_path):
    (tmp_path / "old.pth").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match="is not a zip archive"):
        reading.read(tmp_path / "old.pth")
    torch_archive.write(tmp_path / "big.pth", tensors(), byteorder=b"big")
    with pytest.raises(ValueError, match="big-endian"):
        reading.read(tmp_path / "big.pth")
    with pytest.raises(FileNotFoundError, match="absent.pth: there is no such file"):
        reading.read(tmp_path / "absent.pth")
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="'.bin' is not one of .safetensors, .npz, .pth, .pt"):
        reading.read(tmp_path / "weights.bin")
    with pytest.raises(ValueError, match="not as '.pth'"):
        reading.write(tmp_path / "weights.pth", tensors())
    with pytest.raises(ValueError, match="'epoch' is int, not a tensor"):
        reading.state_dict({"epoch": 3})
    with pytest.raises(ValueError, match="without any"):
        reading.state_dict({"model": {}})


@pytest.mark.parametrize(
    "prefix", ["", "_orig_mod.", "module.", "backbone.", "module._orig_mod.", "backbone._orig_mod."]
)
@pytest.mark.parametrize("container", [None, "model", "teacher", "state_dict"])
def test_wrappers_and_containers(prefix, container):
    content = {f"{prefix}blocks.0._fsdp_wrapped_module.a": np.ones(2), f"{prefix}blocks.1.7.b": np.ones(3)}
    content["dino_head.mlp.0.weight"] = np.ones(1)
    content = content if container is None else {container: content, "epoch": 3}
    state, left_out = reading.state_dict(content, names.dinov2, (names.DINOV2_HEADS,))
    assert {name: value.shape for name, value in state.items()} == {"blocks.0.a": (2,), "blocks.7.b": (3,)}
    assert left_out == ["dino_head.mlp.0.weight"]


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two tensors are named 'a'"):
        reading.state_dict({"a": np.ones(1), "module.a": np.ones(1)})
