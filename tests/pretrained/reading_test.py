"""Files of every kind are read exactly, and nothing in a .pth file is ever run."""

import argparse
import collections
import io
import json
import os
import pathlib
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest

from equivit import archives
from equivit.pretrained import reading, torch_files
from tests.pretrained import torch_archive

DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int64)
TORCH_FILES = pathlib.Path(__file__).parent.parent / "fixtures" / "torch"


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


@pytest.mark.parametrize("name", ["saved_by_torch.pth", "saved_by_old_torch.pth"])
def test_a_file_that_torch_wrote(name):
    """torch 2.15, and 2.13 in the format before 1.6; two tensors are views of a third."""
    content = reading.read(TORCH_FILES / name)
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


def changed(path, **replacements):
    """The .pth file with some bytes of its pickle replaced, each of which must be there once, and compressed."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for old, new in replacements.values():
        assert members["weights/data.pkl"].count(old) == 1
        members["weights/data.pkl"] = members["weights/data.pkl"].replace(old, new)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def test_a_tensor_beyond_its_storage_is_refused(tmp_path):
    path = tmp_path / "weights.pth"
    torch_archive.write(path, {"a": np.zeros(4, np.float32)})
    changed(path, size=(b"K\x04\x85", b"K\x40\x85"))  # (4,)
    with pytest.raises(ValueError, match=r"size \(64,\) reads entry 63 of a storage of 4"):
        reading.read(path)


def test_what_a_torch_file_becomes_is_in_proportion(tmp_path, monkeypatch):
    """Compressed zeros and a tensor whose strides are 0 cost a file nothing, and its reader any memory."""
    path = tmp_path / "weights.pth"
    monkeypatch.setattr(archives, "FREE", 10**6)
    torch_archive.write(path, {"a": np.zeros(2 * 10**6, np.int8)})
    assert reading.read(path)["a"].size == 2 * 10**6  # as torch writes it
    changed(path)
    with pytest.raises(ValueError, match=r"weights.pth: 'weights/data/0' takes 2,000,000 bytes, .* expand to; save it"):
        reading.read(path)
    torch_archive.write(path, {"a": np.zeros(4, np.float32)})
    changed(
        path, size=(b"K\x04\x85", b"J" + (10**6).to_bytes(4, "little") + b"\x85"), stride=(b"K\x01\x85", b"K\0\x85")
    )
    with pytest.raises(ValueError, match=r"weights.pth: a tensor of size \(1000000,\) takes 4,000,000 bytes"):
        reading.read(path)


def test_nothing_is_inflated_that_the_tensors_do_not_need(tmp_path, monkeypatch):
    path, read = tmp_path / "weights.pth", []
    torch_archive.write(path, {"a": np.zeros(4, np.float32)})
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("weights/data/0", bytes(10**6))
    opened = zipfile.ZipFile.open
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *arguments: read.append(arguments[1]) or opened(*arguments))
    with pytest.raises(ValueError, match="storage 0 has 1000000 bytes, not 4 x 4"):
        reading.read(path)
    assert "weights/data.pkl" in read and "weights/data/0" not in read


def test_a_pickle_cannot_set_places_aside(tmp_path):
    path = tmp_path / "weights.pth"
    torch_archive.write(path, {"a": np.zeros(4, np.float32)})
    changed(path, place=(b"q\0", b"r\0\0\0\x7f"))
    with pytest.raises(ValueError, match="weights.pth: is damaged: it stores an object at memo index 2,130,706,432"):
        reading.read(path)


def test_types_of_safetensors_that_numpy_does_not_have(tmp_path):
    header = json.dumps({"x.weight": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "weights.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match="weights.safetensors: tensor 'x.weight' has .* F8_E4M3; write it as"):
        reading.read(tmp_path / "weights.safetensors")


def test_an_npz_whose_header_lies(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (10**6, 10**6)})
    with zipfile.ZipFile(tmp_path / "weights.npz", "w") as archive:
        archive.writestr("a.npy", header.getvalue() + bytes(16))
    with pytest.raises(ValueError, match=r"weights.npz: 'a' declares float32 \[1000000, 1000000\] and holds 16 bytes"):
        reading.read(tmp_path / "weights.npz")


def test_what_does_not_fit_into_memory_is_told(tmp_path, monkeypatch):
    def tensor(*arguments):
        raise MemoryError("Unable to allocate 9 GiB")

    torch_archive.write(tmp_path / "weights.pth", tensors())
    monkeypatch.setattr(torch_files, "_tensor", tensor)
    with pytest.raises(ValueError, match="weights.pth: its tensors do not fit into .* memory"):
        reading.read(tmp_path / "weights.pth")


def replaced(old, new):
    return lambda content: content.replace(old, new)


OLD_DAMAGES = {
    "cut": (lambda content: content[:-1], "ends inside the storage '.*' of .* entries; download it again"),
    "headless": (lambda content: content[:60], "is damaged or not a torch file"),
    "big-endian": (replaced(b"\x88X\n\0\0\0type", b"\x89X\n\0\0\0type"), "big-endian byte order"),
    "long": (lambda content: content[:-56] + b"\xff" * 7 + content[-49:], "ends inside the storage|is damaged"),
    "code": (replaced(b"torch\nFloatStorage", b"posix\nFloatStorage"), "asks for posix.FloatStorage"),
    "type": (replaced(b"FloatStorage", b"FlyatStorage"), "a storage '.*' of an unknown type"),
}


@pytest.mark.parametrize("name", OLD_DAMAGES)
def test_a_damaged_old_file_is_one_line(tmp_path, name):
    damage, message = OLD_DAMAGES[name]
    content = (TORCH_FILES / "saved_by_old_torch.pth").read_bytes()
    assert damage(content) != content
    (tmp_path / "old.pth").write_bytes(damage(content))
    with pytest.raises(ValueError, match=rf"old.pth: .*({message})") as error:
        reading.read(tmp_path / "old.pth")
    assert "\n" not in str(error.value)


def test_other_refusals(tmp_path):
    (tmp_path / "old.pth").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match="old.pth: is a pickle that torch.save did not write"):
        reading.read(tmp_path / "old.pth")
    torch_archive.write(tmp_path / "big.pth", tensors(), byteorder=b"big")
    with pytest.raises(ValueError, match="big-endian"):
        reading.read(tmp_path / "big.pth")
    with pytest.raises(FileNotFoundError, match="absent.pth: there is no such file"):
        reading.read(tmp_path / "absent.pth")
    with pytest.raises(FileNotFoundError, match="olt.pth: there is no such file; the nearest is 'old.pth'"):
        reading.read(tmp_path / "olt.pth")
    with pytest.raises(ValueError, match="has 2 files of weights; give one of them: big.pth, old.pth"):
        reading.read(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="weights.bin: is empty"):
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
    state, left_out = reading.state_dict(content, reading.unchunked, reading.DINOV2_HEADS)
    assert {name: value.shape for name, value in state.items()} == {"blocks.0.a": (2,), "blocks.7.b": (3,)}
    assert left_out == ["dino_head.mlp.0.weight"]


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two tensors are named 'a'"):
        reading.state_dict({"a": np.ones(1), "module.a": np.ones(1)})
