"""mkdocs hooks: pages that are made from the code, pages from outside docs/, and links that leave docs/.

A link is written for a reader of the repository: `../benchmarks/results/rotary.csv`. The site has that file under
`files/`, unless it is a page. A link to a file that does not exist stops a strict build.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import reference

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "recipes/README.md": "recipes.md",
}
"""Files outside docs/ that are pages of the site, and their names there."""
SOURCES = {page: source for source, page in PAGES.items()}
LINK = re.compile(r"""(\]\(|\b(?:src|srcset|href)=")([^)"#\s]+)""")
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", flags=re.M | re.S)
MADE: dict[str, Callable[[], str]] = {
    "reference/python.md": reference.python,
    "reference/cli.md": reference.commands,
    "reference/laws.md": reference.laws,
    "reference/json.md": reference.schemas,
    "examples.md": lambda: reference.examples(ROOT / "examples"),
}

log = logging.getLogger("mkdocs.hooks.rpe3d")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made, the pages from outside docs/, and every file that a page links to."""
    for name, make in MADE.items():
        files.append(File.generated(config, name, content=make()))
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    for page in list(files.documentation_pages()):
        if page.src_uri in MADE:
            continue
        for target in linked(page.src_uri, page.content_string):
            path = ROOT / target
            if (
                site_name(target).startswith("files/")
                and path.is_file()
                and not files.get_file_from_path(site_name(target))
            ):
                files.append(File.generated(config, site_name(target), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links of a page at the site's own names."""
    name = page.file.src_uri
    if name in MADE:
        return markdown
    for target in linked(name, markdown):
        if not (ROOT / target).exists():
            log.warning("%s links to %s, which does not exist", source_of(name), target)
    return LINK.sub(lambda found: found[1] + rewritten(name, found[2]), markdown)


def source_of(page: str) -> str:
    """Return where a page of the site lies in the repository."""
    return SOURCES.get(page, f"docs/{page}")


def target_of(page: str, link: str) -> str | None:
    """Return what a link of a page points to, from the root of the repository; None for another host or an anchor."""
    if re.match(r"[a-z]+:", link) or not link:
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source_of(page)), link))


def site_name(target: str) -> str:
    """Return the name that a file of the repository has in the site."""
    if target in PAGES:
        return PAGES[target]
    return target.removeprefix("docs/") if target.startswith("docs/") else f"files/{target}"


def linked(page: str, markdown: str) -> list[str]:
    """Return what the links of a page point to, from the root of the repository."""
    links = LINK.findall(CODE.sub("", markdown))
    return [target for _, link in links if (target := target_of(page, link)) is not None]


def rewritten(page: str, link: str) -> str:
    """Return a link as the site needs it: relative to the page's own place there."""
    target = target_of(page, link)
    if target is None or not (ROOT / target).exists():
        return link
    return Path(os.path.relpath(site_name(target), posixpath.dirname(page) or ".")).as_posix()
