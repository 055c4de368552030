"""Hooks of mkdocs.yml: pages from outside of docs/, the API reference from docstrings, and links between all of them.

The Markdown of the repository links to files, as it is read there.  On the site such a link leads to the page of that
file: the page made of a Markdown file, or the entry of a module in the reference.  Other files have no page, and only
the text of the link is left.
"""

import pathlib
import posixpath
import re

ROOT = pathlib.Path(__file__).parents[1]
# Files outside of docs/ that are pages, and their place on the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "colabs/README.md": "notebooks.md",
    "configs/README.md": "recipes.md",
    "experiments/README.md": "results/index.md",
    "experiments/benchmarks/README.md": "results/benchmarks.md",
    "experiments/studies/README.md": "results/studies.md",
    "experiments/studies/adaptive.md": "results/adaptive.md",
    "experiments/studies/depthwise.md": "results/depthwise.md",
    "experiments/studies/exactness.md": "results/exactness.md",
    "experiments/studies/initial_weights.md": "results/initial_weights.md",
    "experiments/studies/jumbo.md": "results/jumbo.md",
    "experiments/studies/octify.md": "results/octify.md",
    "experiments/tables/README.md": "results/tables.md",
    "tests/README.md": "tests.md",
}
FILES = {page: file for file, page in PAGES.items()}
# The rooms of the reference, in the order of their imports; "commands" are the modules of equivit itself.
ROOMS = ("commands", "symmetry", "kernels", "layers", "models", "depthwise", "data", "objectives", "evaluation")
ROOMS += ("pretrained", "training", "testing", "targets", "acceleration", "guarantees", "configs")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def on_files(files, config):
    """Add the pages, the pictures and the reference."""
    from mkdocs.structure.files import File

    for file, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / file).read_text()))
    for picture in (ROOT / "experiments").rglob("*.png"):
        place = picture.relative_to(ROOT).as_posix()
        files.append(File.generated(config, place, abs_src_path=str(picture)))
    for page, content in reference().items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown, page, **_):
    """Replace the links of a page; code is left as it is."""
    uri = page.file.src_uri
    file = FILES.get(uri, f"docs/{uri}")
    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(lambda link: linked(link, file, uri), part) for part in parts[::2]]
    return "".join(parts)


def linked(link: re.Match[str], file: str, page: str) -> str:
    """The Markdown of a link that stands in a file of the repository, for a page of the site."""
    picture, text, target = link.groups()
    if target.startswith(("https://", "#")):
        return link[0]
    path, _, anchor = target.partition("#")
    place = site_place(posixpath.normpath(posixpath.join(posixpath.dirname(file), path)))
    if place is None:
        return text
    there, _, own = place.partition("#")
    anchor = anchor or own
    relative = posixpath.relpath(there, posixpath.dirname(page) or ".")
    return f"{picture}[{text}]({relative}{'#' if anchor else ''}{anchor})"


def site_place(file: str) -> str | None:
    """The page of a file, or its picture, on the site; None if it has none."""
    if file in PAGES:
        return PAGES[file]
    if file == "docs/README.md":
        return "index.md"
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    if file.endswith(".png"):
        return file
    name = module(pathlib.PurePosixPath(file))
    return next((f"reference/{room}.md#{name}" for room in ROOMS if name in modules(room)), None)


def reference() -> dict[str, str]:
    """The pages of the reference, one for each room."""
    pages = {}
    for room in ROOMS:
        entries = "\n\n".join(f"::: {name}" for name in modules(room))
        pages[f"reference/{room}.md"] = f"# {room}\n\n{entries}\n"
    return pages


def modules(room: str) -> list[str]:
    """The modules of a room, the package first; of an operation of `kernels`, its own module."""
    folder = ROOT / "equivit" / room
    paths = (ROOT / "equivit").glob("[!_]*.py") if room == "commands" else folder.rglob("*.py")
    paths = sorted(paths, key=lambda path: (path.parent, path.stem != "__init__", path.stem))
    if room == "kernels":
        paths = [path for path in paths if path.parent == folder or path.stem == "__init__"]
    return [module(path.relative_to(ROOT)) for path in paths]


def module(path: pathlib.PurePath) -> str:
    """The name of the module of a Python file or a package; a folder of a clone has the name that imports use."""
    parts = path.with_suffix("").parts
    parts = ("equivit", *parts) if parts[0] in ("kernels", "configs") else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
