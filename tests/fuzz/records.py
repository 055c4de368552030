"""Data sets as TFDS prepares them: descriptions in JSON, and array_record files of examples."""

import json
import os
import pathlib
import tempfile
from typing import Any

import tensorflow_datasets as tfds
from array_record.python import array_record_module
from hypothesis import strategies as st

from equivit.data import reading
from equivit.data.prepared import Tfds
from tests.fuzz.attack import Files, Reader, made_in_child
from tests.fuzz.mutations import damaged, document, one_of_files
from tests.fuzz.pictures import JPEG, PNG

tfds.builder_from_directory  # noqa: B018  what is imported lazily must be there before the first fork

CLASS = "tensorflow_datasets.core.features"
FEATURES: dict[str, Any] = {
    "pythonClassName": f"{CLASS}.features_dict.FeaturesDict",
    "featuresDict": {
        "features": {
            "image": {
                "pythonClassName": f"{CLASS}.image_feature.Image",
                "image": {"shape": {"dimensions": ["-1", "-1", "3"]}, "dtype": "uint8", "encodingFormat": "jpeg"},
            },
            "label": {"pythonClassName": f"{CLASS}.class_label_feature.ClassLabel", "classLabel": {"numClasses": "3"}},
        }
    },
}
SPLIT = {
    "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
    "name": "train",
    "numBytes": "1500",
    "shardLengths": ["2"],
}
INFO = {"fileFormat": "array_record", "moduleName": "tiny", "name": "tiny", "splits": [SPLIT], "version": "1.0.0"}
FOLDER = "tiny/1.0.0"
RECORDS = f"{FOLDER}/tiny-train.array_record-00000-of-00001"
# fmt: off
CLASSES = (
    f"{CLASS}.tensor_feature.Tensor", f"{CLASS}.text_feature.Text", f"{CLASS}.sequence_feature.Sequence", "os.system",
    "antigravity.x", "xmlrpc.client.ServerProxy", "subprocess.Popen", f"{CLASS}.video_feature.Video",
    f"{CLASS}.audio_feature.Audio", "x", ".", "a.b",
)
MORE = (
    *CLASSES, "tfrecord", "riegeli", "float32", "uint16", "string", "bfloat16", "object", "png", "3000000000",
    ["4", "4", "3"], ["-1"], "{DATASET}", "{SPLIT}-{SHARD_X_OF_Y}", "/etc/passwd", "../../{DATASET}",
    ["1000000000000"], ["-1"], ["1", "1"], "2.0.0", "test",
)
# fmt: on


def field(number: int, content: bytes | int) -> bytes:
    """A field of a protocol buffer."""
    if isinstance(content, int):
        return bytes([number << 3]) + _varint(content)
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    number %= 2**64
    parts = []
    while number > 127:
        parts.append(number % 128 | 128)
        number //= 128
    return bytes([*parts, number])


def example(entries: list[tuple[str, bytes]]) -> bytes:
    """A tf.train.Example of named features."""
    return field(1, b"".join(field(1, field(1, name.encode()) + field(2, value)) for name, value in entries))


def image(content: bytes) -> bytes:
    """A feature of bytes."""
    return field(1, field(1, content))


def label(number: int) -> bytes:
    """A feature of whole numbers."""
    return field(3, field(1, _varint(number)))


def _contents() -> list[list[bytes]]:
    """Records as they should be, and other ones."""
    good = [example([("image", image(content)), ("label", label(1))]) for content in (JPEG[0], PNG[0])]
    others = [
        b"",
        b"\n",
        b"\xff" * 40,
        b"\n\xff\xff\xff\xff\x0f",
        good[0][:-3],
        good[0] * 2,
        field(1, 7),
        b"\x0b" * 5000,
        b"\x0b\x0c",
    ]
    others += [
        example([("image", image(b"no image")), ("label", label(1))]),
        example([("label", label(1))]),
        example([]),
    ]
    others += [
        example([("image", image(JPEG[0])), ("label", label(number))]) for number in (0, 2, 3, 2**31, 2**63, 2**64 - 1)
    ]
    others += [
        example([("image", label(1)), ("label", image(b"a"))]),
        example([("image", image(JPEG[0])), ("label", field(2, b"\n\4abcd"))]),
    ]
    others += [
        example([("image", field(1, b"")), ("label", field(3, b""))]),
        example([("image", image(b"")), ("label", label(1))]),
    ]
    others += [example([("image", field(1, field(1, JPEG[0]) * 2)), ("label", label(1) + label(2))])]
    return [good, *([one, good[0]] for one in others), [], [good[0]] * 3]


def _written() -> list[bytes]:
    """All of them as array_record files."""
    files = []
    for records in _contents():
        with tempfile.NamedTemporaryFile() as file:
            writer = array_record_module.ArrayRecordWriter(file.name, "group_size:1")
            for record in records:
                writer.write(record)
            writer.close()
            files.append(pathlib.Path(file.name).read_bytes())
    return files


VALID, *OTHERS = made_in_child(_written)
FILES: Files = {
    f"{FOLDER}/features.json": json.dumps(FEATURES).encode(),
    f"{FOLDER}/dataset_info.json": json.dumps(INFO).encode(),
    f"{FOLDER}/label.labels.txt": b"a\nb\nc\n",
    RECORDS: VALID,
}
BLOCK = len(VALID.rstrip(b"\0"))


@st.composite
def records(draw) -> bytes:
    """A file of other records, or one with its bytes damaged."""
    whole = draw(st.sampled_from([VALID, VALID, *OTHERS]))
    if whole is not VALID and draw(st.booleans()):
        return whole
    cut = draw(st.sampled_from((64, 128, 2048, len(whole) - 65536, len(whole))))
    return draw(
        st.one_of(
            damaged(whole[:cut]).map(lambda head: head + whole[cut:]),
            damaged(whole[cut:]).map(lambda rest: whole[:cut] + rest),
        )
    )


DAMAGES = {
    f"{FOLDER}/features.json": document(FEATURES, more=MORE),
    f"{FOLDER}/dataset_info.json": document(INFO, more=MORE),
    f"{FOLDER}/label.labels.txt": st.sampled_from(
        (b"", b"a\nb", b"a\n" * 5000, b"\xff\xfe", b"a\na\na\n", b"a\r\nb\r\nc")
    ),
    RECORDS: records(),
}


def read(folder: pathlib.Path) -> Any:
    """All examples of a split."""
    if os.environ.get("TFDS_DATA_DIR") != str(folder):
        os.environ["TFDS_DATA_DIR"] = str(folder)
    source = Tfds("tiny", "train", void=(255,))
    return [reading.read(source, k, source.channels) for k in range(min(len(source), 20))]


READERS = (Reader("tfds", FILES, one_of_files(FILES, DAMAGES), read),)
