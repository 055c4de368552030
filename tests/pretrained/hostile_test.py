"""Torch files that attack their reader: one line each, and the process is as it was."""

import zipfile

import ml_dtypes
import numpy as np
import pytest

from equivit import pretrained
from equivit.pretrained import reading
from tests.pretrained import torch_archive

TENSOR, STORAGE = b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nBFloat16Storage\n"


def text(value):
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def number(value):
    length = value.bit_length() // 8 + 1
    return b"\x8b" + length.to_bytes(4, "little") + value.to_bytes(length, "little", signed=True)


def whole(*values):
    return b"(" + b"".join(map(number, values)) + b"t"


def storage(length=b"K\4", kind=STORAGE):
    return b"(" + text("storage") + kind + text("0") + text("cpu") + length + b"tQ"


def tensor(stored=None, offset=b"K\0", size=None, stride=None):
    stored, size, stride = stored or storage(), size or whole(4), stride or whole(1)
    return TENSOR + b"(" + stored + offset + size + stride + b"\x89NtR"


def state(itemsize):
    """The pickle that once changed the size of bfloat16 in the whole process."""
    return STORAGE + b"(" + number(3) + text(">") + b"NNN" + number(itemsize) + number(-1) + number(0) + b"tb"


def nested(depth=60):
    """A tuple of two that are the same tuple of two, and so on: 2^depth entries in a few bytes."""
    return b")q\0" + b"".join(b"h%c\x86q%c" % (k, k + 1) for k in range(depth))


def write(path, pickle, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("weights/data.pkl", b"\x80\x02" + pickle + b".")
        archive.writestr("weights/data/0", bytes(8))
    return path


def module(inside):
    return b"c__torch__\nModule\n)\x81" + inside + b"b"


FORGED = {
    "the state of a type": (state(64) + b"0}" + text("a") + tensor(), "sets the state of a class or function"),
    "the state of a tensor": (tensor() + b"}b", "sets the state of a ndarray"),
    "a state that is set twice": (
        b"cargparse\nNamespace\n)\x81}" + text("a") + b"NsbNb",
        "sets the state of a Namespace",
    ),
    "a type between its storage and its tensor": (
        storage() + b"q\0" + state(64) + b"0" + tensor(b"h\0"),
        "sets the state of a class or function",
    ),
    "a nested key": (b"}" + nested() + b"Ns", "a key of type tuple"),
    "a nested key among others": (b"}(" + text("a") + b"N" + nested() + b"Nu", "a key of type tuple"),
    "a key that hashes long": (b"}" + number(2**4000) + b"Ns", "strings or whole numbers up to"),
    "a nested element of a set": (b"\x8f(" + nested() + b"\x90", "the operation EMPTY_SET"),
    "a nested element of a frozen set": (b"(" + nested() + b"\x91", "the operation FROZENSET"),
    "a nested storage": (b"(" + nested() + b"NNNNtQ", "not a storage"),
    "a nested length": (storage(length=nested()), "the length of a storage must be whole numbers"),
    "a nested size": (tensor(size=nested()), "the size of a tensor must be whole numbers"),
    "a nested offset": (tensor(offset=nested()), "must be whole numbers of 64 bits"),
    "a size of many digits": (tensor(size=whole(2**8000, 2**8000)), "must be whole numbers of 64 bits"),
    "a negative offset": (tensor(offset=number(-1)), r"offset -1, size \(4,\)"),
    "a negative stride": (tensor(size=whole(2, 2), stride=whole(-1, 1)), r"strides \(-1, 1\)"),
    "an offset beyond the storage": (tensor(offset=number(1)), "reads entry 4 of a storage of 4"),
    "a stride beyond the storage": (tensor(size=whole(2), stride=whole(2**62)), "of a storage of 4"),
    "another type in one storage": (
        b"(" + tensor() + tensor(storage(kind=b"ctorch\nDoubleStorage\n")) + b"t",
        "storage 0 has 8 bytes, not 4 x 8",
    ),
    "a tensor of no storage": (tensor(text("a")), "not a storage"),
    "a call of a type": (STORAGE + b")R", "calls torch.BFloat16Storage"),
    "a copy of a list for each byte": (b"ctorch\nSize\n](NNNe\x85R", "must be whole numbers"),
    "an object by its class": (b"(iargparse\nNamespace\n", "the operation INST"),
    "an extension": (b"\x82\1", "the operation EXT1"),
    "a name with line breaks": (text("torch") + text("a\n\nb") + b"\x93", r"asks for torch.a\\n\\nb; only tensors"),
    "an empty stack": (b"}\x86", "its stack is empty"),
    "no mark": (b"}u", "is damaged"),
    "a module in itself": (module(b"}") + b"q\0" + b"}" + text("a") + b"h\0sb", "has the module a in two places"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_pickle_is_one_line(tmp_path, name):
    pickle, message = FORGED[name]
    path = write(tmp_path / "weights.pth", pickle)
    with pytest.raises(ValueError, match=message) as error:
        reading.read(path)
    assert str(error.value).startswith(f"{path}: ") and len(str(error.value).splitlines()) == 1
    assert np.dtype(ml_dtypes.bfloat16).str == "<V2" and np.dtype(ml_dtypes.bfloat16).itemsize == 2


def test_a_valid_file_with_a_few_more_bytes_changes_nothing_in_the_process(tmp_path):
    """Each entry is refused or left out; its neighbours are read as always."""
    write(tmp_path / "evil.pth", state(-1) + b"0}" + text("a") + tensor() + b"s")
    with pytest.raises(ValueError, match="sets the state"):
        reading.read(tmp_path / "evil.pth")
    values = np.arange(4).astype(ml_dtypes.bfloat16)
    torch_archive.write(tmp_path / "good.pth", {"a": values})
    np.testing.assert_array_equal(reading.read(tmp_path / "good.pth")["a"], values)


def test_objects_are_in_proportion_to_the_file(tmp_path):
    """60 kB would become 4 GB of dictionaries, of a byte each; and the names of a deep tree repeat its path."""
    path = write(tmp_path / "many.pth", b"(" + b"}" * 10**6 + b"l", zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="many.pth: an object takes 100 bytes, and the total exceeds 67,108,864"):
        reading.read(path)
    step, depth = b"}" + text("n" * 100), 3000
    tree = b"".join(b"c__torch__\nModule\n)\x81" + step for _ in range(depth)) + b"}" + b"sb" * depth
    with pytest.raises(ValueError, match="deep.pth: a name takes .* bytes"):
        reading.read(write(tmp_path / "deep.pth", tree))


def test_a_checkpoint_that_contains_itself_has_no_tensors(tmp_path):
    path = write(tmp_path / "weights.pth", b"}q\0" + text("model") + b"h\0s")
    with pytest.raises(ValueError, match="weights: 'model' is dict, not a tensor"):
        reading.state_dict(reading.read(path))


def test_what_optimizers_and_state_dicts_have_is_read(tmp_path):
    """Numbers as keys, attributes of an OrderedDict, and strings of any kind in a protocol of today."""
    attributes = b"ccollections\nOrderedDict\n)R" + b"}" + text("_metadata") + b"}sb"
    content = b"}(" + text("state") + b"}K\0}s" + text("model") + attributes + text("x") + b"\x8c\1yu"
    read = reading.read(write(tmp_path / "weights.pth", content))
    assert read == {"state": {0: {}}, "model": {}, "x": "y"}


def test_an_error_about_the_tensors_of_a_file_names_the_file(tmp_path):
    path = tmp_path / "w.safetensors"
    reading.write(path, {"a": np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match="timm: no tensor 'patch_embed.proj.weight'") as error:
        pretrained.load("timm", path)
    assert str(error.value).startswith(f"{path}: ")
