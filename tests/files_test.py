"""Files that are written are there whole, and as the umask says."""

import errno
import os
import pathlib
import stat
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure

from equivit import files, safetensors_files
from equivit.pretrained import reading


def permissions(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o022, 0o027, 0o002], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


WRITERS = {
    "text": lambda path: files.write_text(path, "new"),
    "safetensors": lambda path: safetensors_files.write(path, {"w": np.ones((2, 2)).T}),
    "weights": lambda path: reading.write(path.with_suffix(".npz"), {"w": np.ones(2)}),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_files_have_the_permissions_of_the_umask(tmp_path, umask, write):
    write(tmp_path / "new" / "file")
    (found,) = (tmp_path / "new").iterdir()
    assert permissions(found) == 0o666 & ~umask
    found.chmod(0o600)
    write(tmp_path / "new" / "file")
    assert permissions(found) == 0o666 & ~umask and list((tmp_path / "new").iterdir()) == [found]


@pytest.mark.parametrize(
    "tensor", [np.float32(4.6), np.array(7), np.arange(6.0).reshape(2, 3).T, np.ones((0, 2), bool)]
)
def test_tensors_of_any_shape_and_order_come_back(tmp_path, tensor):
    safetensors_files.write(tmp_path / "file.safetensors", {"w": tensor})
    found = safetensors_files.read(tmp_path / "file.safetensors")["w"]
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    np.testing.assert_array_equal(found, tensor)


@pytest.mark.parametrize("ending", [".txt", ".npz", ".png", ".safetensors", ""])
def test_an_interrupted_write_leaves_the_old_file(tmp_path, ending):
    path = tmp_path / f"file{ending}"
    for content in (None, b"old"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(KeyboardInterrupt), files.replacing(path) as unfinished:
            assert unfinished.parent == path.parent and unfinished.suffix == ending and unfinished != path
            unfinished.write_bytes(b"ne")
            raise KeyboardInterrupt
        assert (path.read_bytes() if path.exists() else None) == content
        assert os.listdir(tmp_path) == ([path.name] if content else [])


def killed(path, what):
    """The files left by a process that is killed while it writes."""
    code = f"import os, signal\nfrom equivit import files\nwith files.{what} as new:\n"
    code += "    (new if new.is_file() else new / 'a').write_text('half')\n    os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", code], cwd=pathlib.Path(__file__).parents[1]).returncode == -9


def test_what_a_killed_process_has_left_is_removed_by_the_next_write(tmp_path):
    path = tmp_path / "report[1].json"
    files.write_text(path, "old")
    killed(path, f"replacing({str(path)!r})")
    assert path.read_text() == "old" and len(os.listdir(tmp_path)) == 2
    alive = tmp_path / f".report[1]-{os.getppid()}-unfinished.json"  # that of another process, which goes on
    alive.write_text("half")
    files.write_text(path, "new")
    assert path.read_text() == "new" and sorted(os.listdir(tmp_path)) == [alive.name, path.name]


def test_a_new_directory_is_there_with_all_its_files_or_not_at_all(tmp_path):
    path = tmp_path / "model"
    killed(path, f"replacing_in_directory({str(path)!r}, ('a', 'b'))")
    assert not path.exists()
    with files.replacing_in_directory(path, ("a", "b")) as new:
        for name in "ab":
            (new / name).write_text(name)
        assert not path.exists()
    assert sorted(os.listdir(path)) == ["a", "b"] and os.listdir(tmp_path) == ["model"]


def test_the_other_files_of_a_directory_stay(tmp_path):
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt), files.replacing_in_directory(tmp_path, ("a",)) as new:
        (new / "a").write_text("half")
        raise KeyboardInterrupt
    assert (tmp_path / "a").read_text() == "old"
    with files.replacing_in_directory(tmp_path, ("a",)) as new:
        (new / "a").write_text("new")
    assert (tmp_path / "a").read_text() == "new" and sorted(os.listdir(tmp_path)) == ["a", "notes"]


def test_the_current_directory_is_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with files.replacing_in_directory(".", ("a",)) as new:
        (new / "a").write_text("new")
    assert (tmp_path / "a").read_text() == "new" and os.listdir(tmp_path) == ["a"]


def test_links_and_devices_stay_what_they_are(tmp_path):
    (tmp_path / "link").symlink_to("target")
    files.write_text(tmp_path / "link", "content")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "content"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    files.write_text(tmp_path / "pipe", "content")
    assert os.read(reader, 100) == b"content" and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    os.close(reader)


def test_errors_name_the_file_that_cannot_be_written(tmp_path):
    path = tmp_path / "report.json"
    with pytest.raises(OSError, match=f"'{path}'$") as raised, files.replacing(path):
        raise OSError(errno.ENOSPC, "no space")
    assert raised.value.errno == errno.ENOSPC and not os.listdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=f"{tmp_path}/file: .* is a file; give a directory"):
        files.write_text(tmp_path / "file" / "report.json", "")
    with pytest.raises(IsADirectoryError, match=f"'{tmp_path}'"):
        files.write_text(tmp_path, "")


def test_pictures_keep_their_format(tmp_path):
    with files.replacing(tmp_path / "a.pdf") as unfinished:
        Figure().savefig(unfinished)
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
