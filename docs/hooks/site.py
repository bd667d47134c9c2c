"""What MkDocs does to our pages: drawings are put into the page, links to our files stay inside.

Knows nothing of what the pages say.
"""

import re
from pathlib import Path
from typing import Any

DRAWING = re.compile(r'<p>\s*<img alt="([^"]*)" src="[^"]*?img/([\w-]+\.svg)"\s*/?>\s*</p>')
EXAMPLE = re.compile(r"\]\(\.\./examples/(?:(\w+)\.py)?\)")
SHOWN = {  # files of the root that have a page which shows them
    "](../ARCHITECTURE.md": "](architecture.md",
    "](../BENCHMARKS.md": "](benchmarks.md",
    "](../QUALITY.md": "](quality.md",
    "](../README.md": "](index.md",
    "](../SECURITY.md": "](security.md",
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """In the repository pages link to the files themselves, on the site to the pages of them."""
    for file, page in SHOWN.items():
        markdown = markdown.replace(file, page)
    return EXAMPLE.sub(
        lambda link: f"](examples.md#{link[1]}py)" if link[1] else "](examples.md)", markdown
    )


def on_page_content(html: str, *, config: Any, **_: Any) -> str:
    """An SVG as an image knows the system's colours only; in the page it follows the site's."""
    folder = Path(config["docs_dir"]) / "img"

    def drawing(image: re.Match[str]) -> str:
        svg = (folder / image[2]).read_text()
        caption = f"<figcaption>{image[1]}</figcaption>"
        return f'<figure class="drawing"><div class="drawing-scroll">{svg}</div>{caption}</figure>'

    return DRAWING.sub(drawing, html)
