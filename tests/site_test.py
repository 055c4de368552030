"""Pages and links of the site that `make docs` builds; mkdocs itself refuses a link without a target."""

import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
assert SPEC is not None and SPEC.loader is not None
site_pages = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(site_pages)


@pytest.mark.parametrize(
    ("file", "page", "markdown", "expected"),
    [
        ("docs/data.md", "data.md", "[a](how_to/own_images.md)", "[a](how_to/own_images.md)"),
        ("docs/how_to/a.md", "how_to/a.md", "[a](../models.md#public-weights)", "[a](../models.md#public-weights)"),
        ("README.md", "index.md", "[a](docs/models.md), [b](https://x)", "[a](models.md), [b](https://x)"),
        ("README.md", "index.md", "![a](experiments/figures/fields.png)", "![a](experiments/figures/fields.png)"),
        ("experiments/README.md", "results/index.md", "[a](tables/README.md#cost)", "[a](tables.md#cost)"),
        ("docs/export.md", "export.md", "[a [4]](../README.md#citing)", "[a [4]](index.md#citing)"),
        ("docs/a.md", "a.md", "[a](../kernels/gelu/)", "[a](reference/kernels.md#equivit.kernels.gelu)"),
        ("docs/a.md", "a.md", "[a](../configs/cifar.py)", "[a](reference/configs.md#equivit.configs.cifar)"),
        ("docs/a.md", "a.md", "[a](../tests/imports_test.py) and `[b](c)`", "a and `[b](c)`"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(file, page, markdown, expected):
    assert site_pages.LINK.sub(lambda link: site_pages.linked(link, file, page), markdown) == expected


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    pages |= {*site_pages.PAGES.values(), *site_pages.reference()}
    assert not [page for page in pages if f": {page}\n" not in navigation]
    assert "::: equivit.layers.isotypic\n" in site_pages.reference()["reference/layers.md"]
