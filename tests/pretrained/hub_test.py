"""Places on the Hugging Face Hub: its cache, a server on this machine, and one line for everything that is missing."""

import base64
import hashlib
import http.server
import importlib
import json
import pathlib
import sys
import threading

import numpy as np
import pytest

from equivit import convert, models, pretrained
from equivit.models import saved
from equivit.pretrained import hub, reading
from tests.pretrained.formats_test import same_model, written

COMMIT, OLD = "a" * 40, "b" * 40


@pytest.mark.parametrize("place", ["hf:", "hf:name", "hf:a/b@", "hf:a/b@1@2", "hf://a/b", "hf:a b/c"])
def test_places_that_are_none(place):
    with pytest.raises(ValueError, match="must be hf:ORG/NAME, hf:ORG/NAME@REVISION or hf:ORG/NAME/FILE"):
        hub.fetch(place)


def test_without_the_library_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="hf:a/b: huggingface_hub is not installed .* pip install -r requirements-hub"):
        pretrained.load("hf:a/b")


@pytest.fixture
def library(monkeypatch, tmp_path):
    """huggingface_hub with an empty cache, offline."""
    library = pytest.importorskip("huggingface_hub")
    for module in ("constants", "hf_api"):  # loaded lazily otherwise
        importlib.import_module(f"huggingface_hub.{module}")
    monkeypatch.setattr(library.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library.constants, "HF_HUB_OFFLINE", True)
    return library


@pytest.fixture
def files(tmp_path):
    """The files of a repository of transformers, by name."""
    weights = tmp_path / "model.safetensors"
    reading.write(weights, pretrained.state_dict("transformers", written("plain")[0]))
    facts = dict(model_type="vit", num_attention_heads=2, layer_norm_eps=1e-6, image_size=32)
    return {"config.json": json.dumps(facts).encode(), weights.name: weights.read_bytes(), "notes.txt": b"unread"}


def cached(library, files, commit, reference):
    """Put the files into the cache."""
    folder = library.constants.HF_HUB_CACHE + "/models--org--name"
    for name, content in {f"snapshots/{commit}/{name}": files[name] for name in files}.items():
        pathlib.Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(folder, name).write_bytes(content)
    pathlib.Path(folder, "refs").mkdir(exist_ok=True)
    pathlib.Path(folder, "refs", reference).write_text(commit)


def test_the_cache_without_a_network(library, files, tmp_path):
    cached(library, files, COMMIT, "main")
    same_model(pretrained.load("hf:org/name"), written("plain")[0])
    same_model(pretrained.load("transformers", "hf:org/name/model.safetensors"), written("plain")[0])
    same_model(pretrained.load(f"hf:org/name@{COMMIT}"), written("plain")[0])
    size = dict(width=64, depth=3, num_heads=2, patch_size=8, mlp_dim=128)
    model = models.create("vit_s16", pretrained="hf:org/name", num_classes=3, **size)
    assert model.config.num_classes == 3 and model.config.layer_scale is None
    np.testing.assert_array_equal(model.patch_embed.bias[...], written("plain")[0].patch_embed.bias[...])
    with pytest.raises(ValueError, match="model vit_b16: the weights at hf:org/name .* width 64, not 768, depth 3"):
        models.create("vit_b16", pretrained="hf:org/name")
    assert convert.main(["--input=hf:org/name", f"--output={tmp_path / 'model'}"]) == 0
    same_model(saved.load(tmp_path / "model"), written("plain")[0])


def test_revisions(library, files):
    other = dict(files, **{"config.json": files["config.json"].replace(b"1e-06", b"1e-05")})
    cached(library, files, COMMIT, "main")
    cached(library, other, OLD, "v1")
    assert pretrained.load("hf:org/name").config.norm_eps == 1e-6
    assert pretrained.load("hf:org/name@v1").config.norm_eps == 1e-5


def test_what_is_not_in_the_cache_is_one_line(library, files, capsys):
    assert convert.main(["--input=hf:org/absent", "--output=unused"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: hf:org/absent: is not in the cache and cannot be reached; load it once with")
    cached(library, {"notes.txt": b""}, COMMIT, "main")
    with pytest.raises(OSError, match="hf:org/name: has no file of weights .* one of its files as hf:org/name/FILE"):
        pretrained.load("hf:org/name")


class Hub(http.server.BaseHTTPRequestHandler):
    """The few addresses of the Hub that a model needs, with `files` of one repository."""

    files: dict[str, bytes]

    def do_GET(self):
        place = self.path.split("?")[0]
        if place == "/api/models/org/name/revision/main":
            return self.answer(json.dumps(dict(id="org/name", sha=COMMIT, siblings=[])).encode())
        if place == f"/api/models/org/name/tree/{COMMIT}":
            tree = [dict(type="file", path=name, size=len(x), oid=etag(x)) for name, x in self.files.items()]
            return self.answer(json.dumps(tree).encode())
        name = place.rsplit(f"/org/name/resolve/{COMMIT}/")[-1]
        if name in self.files:
            return self.answer(self.files[name], etag(self.files[name]))
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            return self.answer(json.dumps(dict(url=f"http://{self.headers['Host']}/org/new")).encode())
        if self.path == "/api/validate-yaml":
            return self.answer(json.dumps(dict(errors=[], warnings=[])).encode())
        if "/preupload/" in self.path:
            names = [entry["path"] for entry in json.loads(content)["files"]]
            modes = [dict(path=name, uploadMode="regular", shouldIgnore=False, oid=None) for name in names]
            return self.answer(json.dumps(dict(files=modes)).encode())
        entries = [json.loads(line) for line in content.splitlines()]
        pushed = [entry["value"] for entry in entries if entry["key"] == "file"]
        self.files.update({entry["path"]: base64.b64decode(entry["content"]) for entry in pushed})
        address = f"http://{self.headers['Host']}/org/new/commit/{OLD}"
        return self.answer(json.dumps(dict(commitUrl=address, commitOid=OLD)).encode())

    def answer(self, content: bytes, tag: str | None = None):
        self.send_response(200)
        for name, value in {"ETag": tag and f'"{tag}"', "X-Repo-Commit": tag and COMMIT}.items():
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format, *args):
        pass


def etag(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@pytest.fixture
def server(library, files, monkeypatch):
    """A server with the repository, which huggingface_hub asks."""
    handler = type("Handler", (Hub,), dict(files=files))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(library.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(library.constants, "ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(library.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(library.hf_api.api, "endpoint", address)
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_repository_is_downloaded_once(server, library, monkeypatch):
    same_model(pretrained.load("hf:org/name"), written("plain")[0])
    monkeypatch.setattr(library.constants, "HF_HUB_OFFLINE", True)
    same_model(pretrained.load("hf:org/name"), written("plain")[0])
    assert "notes.txt" not in {path.name for path in hub.fetch("hf:org/name").iterdir()}
    monkeypatch.setattr(library.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(OSError, match="hf:org/absent: there is no such repository; check the name, or log in"):
        pretrained.load("hf:org/absent")


def test_push(server, tmp_path, capsys):
    server.files.clear()
    saved.save(tmp_path / "model", written("plain")[0])
    there = ["--to=hf", f"--input={tmp_path / 'model'}", f"--output={tmp_path / 'there'}", "--push=org/new"]
    assert convert.main(there) == 0
    assert "/org/new." in capsys.readouterr().out
    assert server.files.keys() == {"README.md", "config.json", "model.json", "parameters.safetensors"}
    assert b'pretrained.load("hf:org/new")' in server.files["README.md"]
    for name, content in server.files.items():
        assert content == (tmp_path / "there" / name).read_bytes()
    with pytest.raises(ValueError, match="the repository 'new' must be ORG/NAME"):
        hub.push(tmp_path / "there", "new")
