"""How `make docs` builds the site: Sphinx, these pages, and the docstrings behind the public names; no network."""

import importlib
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import grace

ROOT = Path(__file__).parent.parent

project, author, copyright = "Grace", "the authors of Grace", "the authors of Grace"
version = release = grace.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme, html_title = "furo", f"Grace {version}"
html_static_path, html_css_files, html_copy_source, html_show_sourcelink = ["_static"], ["grace.css"], False, False
html_theme_options = {"navigation_with_keys": True}
highlight_language, pygments_style, pygments_dark_style = "none", "tango", "github-dark"
exclude_patterns = ["_static"]
nitpicky = True  # with -W: a reference that leads nowhere fails the build

myst_heading_anchors = 3
copybutton_prompt_text, copybutton_prompt_is_regexp = r">>> |\.\.\. ", True

autodoc_typehints, autodoc_member_order, python_use_unqualified_type_names = "signature", "bysource", True
FRAMEWORKS = "torch", "tensorflow", "keras", "horovod", "transformers", "lightning", "accelerate"
autodoc_mock_imports = [name for name in FRAMEWORKS if find_spec(name) is None]
python_maximum_signature_line_length = 100
napoleon_use_ivar, napoleon_use_rtype = True, False

MODULES = {"tf": "tensorflow", "dist": "torch.distributed"}
"""Modules by the names that quoted annotations have for them."""


def with_links(app, path, parent, source):
    """The repository's own pages link from its root: lead to the site's pages from there, and to nothing else."""
    if Path(app.srcdir, path).resolve().parent != ROOT:
        return
    pages = {f"{page.stem.upper()}.md": page.name for page in Path(app.srcdir, "project").glob("*.md")}

    def link(match):
        text, target = match.groups()
        if target in pages:
            return f"[{text}]({pages[target]})"
        if target.startswith("docs/"):
            return f"[{text}](../{target.removeprefix('docs/')})"
        if not (ROOT / target).exists():
            raise ValueError(f"{path} links to {target}, which is not there")
        return text if text.startswith("`") else f"`{text}`"

    source[0] = re.sub(r"\[([^\]]+)\]\((?!https?:|#)([^)]+)\)", link, source[0])


def with_parts(app, page, source):
    """Put Grace's own classes of a kind in the place of ``.. parts:: KIND``."""

    def classes(match):
        found = [f"{cls.__module__}.{cls.__name__}" for cls in grace.known(match[1]).values()]
        return "\n".join(f".. autoclass:: {name}" for name in sorted(found) if name.startswith("grace."))

    source[0] = re.sub(r"^\.\. parts:: (\w+)$", classes, source[0], flags=re.M)


def as_rst(app, what, name, obj, options, lines):
    """Docstrings indent formulas and write |x|, as people read it: say in reStructuredText what that is."""
    # Napoleon takes the first line of an attribute for "type: text", unless a comment stands before it.
    text, formula = ["..", ""] if what in ("attribute", "property") else [], False
    for before, line in zip(["", *lines], lines, strict=False):
        if line and not line.startswith(" "):
            formula = False
        elif line and not before and not formula:  # what belongs to "Args:" follows it without an empty line
            formula = True
            text += [".. code-block:: none", ""]
        example = formula or line.lstrip().startswith((">>>", "..."))
        line = line.replace("``", "") if formula else line
        text.append(line if example else re.sub(r"(``.*?``)|\|", lambda bar: bar[1] or r"\|", line))
    lines[:] = text


def plain_name(app, env, node, content):
    """What docstrings name and the site has no page for: code that is there becomes text, anything else fails."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py":
        return None
    if "." in target:
        head, _, rest = target.partition(".")
        return content if exists(f"{MODULES.get(head, head)}.{rest}") else None
    if node.get("reftype") in ("class", "obj", "exc"):  # in signatures too
        return content
    inside = ".".join(filter(None, (node.get("py:module"), node.get("py:class"), target)))
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith("grace.")]
    return content if exists(inside) or any(hasattr(module, target) for module in loaded) else None


def exists(path):
    """Whether a dotted path is that of a module, or of something in one."""
    names = path.split(".")
    if names[0] in autodoc_mock_imports:  # nobody can tell here
        return True
    for cut in range(len(names), 0, -1):
        try:
            value = importlib.import_module(".".join(names[:cut]))
        except grace.MissingExtraError:  # it needs what is not installed
            return True
        except ImportError as error:
            if error.name and error.name.partition(".")[0] != names[0]:
                return True
            continue
        for name in names[cut:]:
            value = getattr(value, name, None)
        return value is not None
    return False


def build_pages(app):
    """Write the pages that are made from the code and from recorded runs."""
    from grace.bench.common.results import load
    from grace.bench.report.page import write_report
    from tools.methods_page import methods_page
    from tools.strategy_page import strategy_page

    docs = Path(app.srcdir)
    (docs / "methods.md").write_text(methods_page())
    (docs / "strategy-files.md").write_text(strategy_page())
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    results = [load(path) for path in files if "grace_bench" in path.read_text()]  # others are scripts' own
    write_report(docs / "benchmarks.html", results)


def setup(app):
    """Called by Sphinx."""
    app.connect("builder-inited", build_pages, priority=100)  # before pages are looked for
    app.connect("include-read", with_links)
    app.connect("source-read", with_parts)
    app.connect("missing-reference", plain_name)
    app.connect("autodoc-process-docstring", as_rst, priority=400)  # before napoleon
