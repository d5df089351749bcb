"""What MkDocs does beyond its own: generated pages, files of the repository, and a last check.

The documentation links to files beside `docs/`: results of benchmarks, the changelog. On a code
host those links work as they stand. Here the linked files become part of the site, and links are
rewritten to where they are in it. Links to source files become plain text.

A built site must load nothing from elsewhere; `make docs` fails where a page would.
"""

from __future__ import annotations

import html.parser
import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parents[1]
BESIDE = ("BENCHMARK.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/*.md")
RESULTS = "benchmarks/results"

_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
_OUTSIDE = re.compile(r"^(?:[a-z][a-z0-9+.-]*:)?//|^https?:")
_LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
_LINKED = frozenset(("stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch"))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages, and the files of the repository that pages link to."""
    from mkdocs.structure.files import File

    sys.path.insert(0, str(REPOSITORY))
    from tools.reference import pages

    for name, text in pages().items():
        files.append(File.generated(config, name, content=text))
    beside = [path for pattern in BESIDE for path in sorted(REPOSITORY.glob(pattern))]
    results = sorted((REPOSITORY / RESULTS).iterdir())
    for path in (*beside, *results):
        name = path.relative_to(REPOSITORY).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    links = "\n".join(f"- [{path.name}]({path.name})" for path in results)
    text = f"# Result files\n\nMachine, versions, command and every repeat.\n\n{links}\n"
    files.append(File.generated(config, f"{RESULTS}/index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Links to files beside ``docs`` lead to their copies in the site."""
    here = page.file.src_uri
    in_docs = not (page.file.generated_by and (REPOSITORY / here).exists())
    return rewrite_links(markdown, here, in_docs=in_docs, known=set(files.src_uris))


def rewrite_links(markdown: str, page: str, *, in_docs: bool, known: set[str]) -> str:
    """The text with every relative link as it is inside the site."""
    folder = posixpath.dirname(f"docs/{page}" if in_docs else page)

    def replace(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, mark, anchor = target.partition("#")
        if not path or _OUTSIDE.match(path) or path.startswith("mailto:"):
            return match[0]
        place = posixpath.normpath(posixpath.join(folder, path))
        inside = "index.md" if place == "README.md" else place.removeprefix("docs/")
        if inside == RESULTS:
            inside += "/index.md"
        elif f"{inside}/README.md" in known:
            inside += "/README.md"
        if inside in known:
            beside = posixpath.relpath(inside, posixpath.dirname(page) or ".")
            return f"[{text}]({beside}{mark}{anchor})"
        return text if (REPOSITORY / place).exists() else match[0]

    return _LINK.sub(replace, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Fails where a page would load something from another place."""
    from mkdocs.exceptions import PluginError

    found = [
        f"{path.relative_to(config.site_dir)}: {address}"
        for path in sorted(Path(config.site_dir).rglob("*.html"))
        for address in loaded_from_outside(path.read_text(encoding="utf-8"))
    ]
    if found:
        raise PluginError("pages load from other places:\n" + "\n".join(found))


def loaded_from_outside(page: str) -> list[str]:
    """Addresses that a browser would fetch from elsewhere when it opens a page."""
    finder = _Finder()
    finder.feed(page)
    return finder.found


class _Finder(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        address = values.get(_LOADS.get(tag, "")) or ""
        if tag == "link" and _LINKED & set((values.get("rel") or "").split()):
            address = values.get("href") or ""
        self._in_style = tag == "style"
        for text in (address, *_imported(values.get("style") or "")):
            if _OUTSIDE.match(text):
                self.found.append(text)

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.found += [address for address in _imported(data) if _OUTSIDE.match(address)]


def _imported(style: str) -> list[str]:
    return re.findall(r"(?:url\(|@import)\s*['\"]?([^'\")\s;]+)", style)
