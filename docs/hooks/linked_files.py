"""Files outside of ``docs`` that pages link to, such as raw results, become part of the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(?<=\]\()(?!https?://)([^)#\s]+)(?=[)#])")


def on_files(files: Files, config: Any) -> Files:
    """Take in every file that a page links to by a path that leaves ``docs``."""
    for page in list(files.documentation_pages()):
        text = Path(str(page.abs_src_path)).read_text(encoding="utf-8")
        for target in _LINK.findall(text):
            path = _outside(page, target)
            if path is not None and files.get_file_from_path(f"files/{path}") is None:
                source = str(ROOT / path)
                files.append(File.generated(config, f"files/{path}", abs_src_path=source))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead such links there."""

    def lead(found: re.Match[str]) -> str:
        path = _outside(page.file, found[1])
        if path is None:
            return found[1]
        return posixpath.relpath(f"files/{path}", posixpath.dirname(page.file.src_uri) or ".")

    return _LINK.sub(lead, markdown)


def _outside(page: File, target: str) -> str | None:
    """The path, from the root of the project, of a link that leaves ``docs``."""
    found = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.src_uri), target))
    return None if found.startswith("docs/") or not (ROOT / found).is_file() else found
