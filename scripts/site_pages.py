"""Hooks of mkdocs: pages whose source lies outside docs/, and a check of the paths in all of them.

README.md, CONTRIBUTING.md, the recipes and the notebook become pages as they are. Their links are
those of the repository, so that a git host follows them too; here they are turned to the pages. A
path of the repository that a page names in backticks must exist.
"""

from __future__ import annotations

import json
import logging
import re
from os.path import normpath, relpath
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
NOTEBOOK = "examples/notebook.ipynb"
# source in the repository: page of the site
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "recipes/README.md": "recipes.md",
    NOTEBOOK: "notebook.md",
}
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_FOLDERS = "benchmarks|docs|examples|recipes|research|scripts|src|tests"
_PATH = re.compile(rf"`((?:{_FOLDERS})/[\w./-]+)`")
log = logging.getLogger("mkdocs.hooks")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are made here."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=page_text(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links of the repository to pages, and looks for the files that the text names."""
    sources = {name: source for source, name in PAGES.items()}
    uri = page.file.src_uri
    source = sources.get(uri, f"docs/{uri}")
    for path in _PATH.findall(markdown):
        if not (ROOT / path).exists():
            log.warning(f"{source} names {path}, which is not there")

    def turned(match: re.Match[str]) -> str:
        target = site_path(source, match[2])
        return match[1] + (relpath(target, Path(uri).parent) if target else match[2]) + match[3]

    return _LINK.sub(turned, markdown)


def site_path(source: str, link: str) -> str | None:
    """The file of the site that a relative link of a source leads to; none where it leaves."""
    path = normpath(Path(source).parent / link)
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("recipes/") and path.endswith(".yaml") and (ROOT / path).exists():
        return f"recipes.md#{Path(path).name.replace('.', '')}"
    return PAGES.get(path)


def page_text(source: str) -> str:
    text = (ROOT / source).read_text(encoding="utf-8")
    if source.endswith(".ipynb"):
        return notebook_page(json.loads(text))
    if source == "recipes/README.md":
        text += "".join(recipe_text(file) for file in sorted((ROOT / "recipes").glob("*.yaml")))
    return text


def recipe_text(file: Path) -> str:
    return f"\n## {file.name}\n\n```yaml\n{file.read_text(encoding='utf-8')}```\n"


def notebook_page(notebook: dict[str, Any]) -> str:
    """The cells of a notebook as Markdown: texts, programs, and what these have written."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                picture = "".join(data["image/png"].split())
                parts.append(f"![drawn by the lines above](data:image/png;base64,{picture})")
            elif text := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"
