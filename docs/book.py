"""The pages of the book, made from the repository's files at build time; a hook of mkdocs.yml.

The navigation in mkdocs.yml lists the pages. A page NAME.md is the file of that name, or the lesson
NAME.ipynb, or the course's sheet NAME.py. A page NAME.py.md is the annotated source of NAME.py.
"""

from base64 import b64decode
from pathlib import Path
import posixpath
import re
import shutil
import sys

import jupytext
import mathjax
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import annotate

FENCED = re.compile(r"(^```.*?^```+$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
NAME = re.compile(r"(?<![\[`])`([\w/.]+\.(?:py|ipynb|md|html))`(?![\]`])")
# Python-Markdown wants an empty line between a paragraph and a list
LIST = re.compile(r"^(?!\s|[-*|] |\d+\. )(.+)\n(?=- |1\. )", re.MULTILINE)

MATHJAX = Path(mathjax.__file__).parent / "static/mathjax/es5"
MATH_FILES = [
    "startup.js",
    "core.js",
    "input/tex.js",
    "output/chtml.js",
    "output/chtml/fonts/tex.js",
    "output/chtml/fonts/woff-v2/MathJax_[AMCZ]*.woff",  # without Fraktur, Typewriter and others
    "output/chtml/fonts/woff-v2/MathJax_Size*.woff",
]
MATH = """<script>MathJax = {{loader: {{load: ["input/tex", "output/chtml"]}}}}</script>
<script defer src="{}/mathjax/startup.js"></script></body>"""
# The theme takes from the net what search needs in pages opened from the disk; the book has it.
SHIM = "https://unpkg.com/iframe-worker/shim"


def listed(nav) -> list[str]:
    """Return the paths that the navigation lists."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [path for part in parts for path in listed(part)]


def source_of(page: str) -> str:
    """Return the path of the file that a page is made from."""
    stem = page.removesuffix(".md")
    for path in (page, stem, f"{stem}.ipynb", f"{stem}.py"):
        if (ROOT / path).exists():
            return path
    return page


def on_files(files, config):
    """Add the pages, their figures and MathJax to the files of docs/assets."""

    def add(path, **content):
        files.append(File.generated(config, path, **content))

    for page in listed(config.nav):
        path = source_of(page)
        if path == page:
            add(page, abs_src_path=str(ROOT / path))
        elif page == f"{path}.md":
            add(page, content=annotate.page(path, (ROOT / path).read_text()))
        else:
            text, figures = notebook(ROOT / path)
            add(page, content=text)
            for name, png in figures.items():
                add(f"{posixpath.dirname(page)}/{name}", content=png)
    for picture in (ROOT / "notebooks").glob("*.png"):
        add(f"notebooks/{picture.name}", abs_src_path=str(picture))
    for pattern in MATH_FILES:
        for path in MATHJAX.glob(pattern):
            add(f"mathjax/{path.relative_to(MATHJAX)}", abs_src_path=str(path))
    return files


def notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown with its stored outputs, and its figures: name → PNG."""
    parts = []
    figures = {}
    for cell in jupytext.read(path).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"````{annotate.FENCE}\n{cell.source}\n````")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}_{len(figures)}.png"
                figures[name] = b64decode(data["image/png"])
                parts.append(f"![]({name}){{.figure}}")
            else:
                text = output.get("text") or data.get("text/plain", "")
                parts.append(
                    f"````{{.text .output data-search-exclude=1}}\n{text.rstrip()}\n````"
                )
    return "\n\n".join(parts), figures


def on_page_markdown(markdown, page, config, files):
    """Let links, and paths in `backticks`, lead to pages; links to other files into `repo_url`."""
    here = posixpath.dirname(page.file.src_uri)
    pages = {source_of(path): path for path in files.src_uris}
    short = {}  # the names of lessons and of annotated files
    for path, uri in pages.items():
        if path.endswith(".ipynb") or uri == f"{path}.md":
            short[posixpath.basename(path)] = path

    def link(match):
        text, target, anchor = match.groups(default="")
        text = LINK.sub(link, text)  # a picture in a link
        path = posixpath.normpath(posixpath.join(here, target))
        if path in pages:
            return f"[{text}]({posixpath.relpath(pages[path], here or '.')}{anchor})"
        if not (ROOT / path).exists():
            return match[0]
        return (
            f"[{text}]({config.repo_url}/blob/main/{path})" if config.repo_url else text
        )

    def name(match):
        path = short.get(match[1], match[1])
        if path not in pages or pages[path] == page.file.src_uri or path == "README.md":
            return match[0]
        return f"[{match[0]}]({posixpath.relpath(pages[path], here or '.')})"

    pieces = FENCED.split(markdown)
    for i in range(0, len(pieces), 2):  # between two pieces of prose is code
        prose = LINK.sub(link, LIST.sub(r"\1\n\n", pieces[i]))
        lines = prose.split("\n")
        for j, line in enumerate(lines):
            if not line.startswith(("#", "    ")):
                lines[j] = NAME.sub(name, line)
        pieces[i] = "\n".join(lines)
    return "".join(pieces)


def on_page_context(context, page, config, nav):
    """Give a page in no section of the navigation the room of the side navigation."""
    if page.parent is None:
        page.meta["hide"] = ["navigation"]


def on_post_page(output, page, config):
    """Load MathJax on pages with formulas only, and the shim from the book itself."""
    root = posixpath.relpath(".", posixpath.dirname(page.url) or ".")
    if 'class="arithmatex"' in output:
        output = output.replace("</body>", MATH.format(root))
    return output.replace(SHIM, f"{root}/iframe-worker.js")


def on_post_template(output_content, template_name, config):
    """Drop the page of the 404 if the site's address, which its links need, is not known."""
    if template_name == "404.html" and not config.site_url:
        return ""
    return output_content.replace(SHIM, f"{config.site_url}iframe-worker.js")


def on_post_build(config):
    """Remove source maps, and what the search needs for other languages."""
    site = Path(config.site_dir)
    for path in site.rglob("*.map"):
        path.unlink()
    shutil.rmtree(site / "assets/javascripts/lunr")
