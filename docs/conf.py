"""Sphinx configuration. Warnings are errors: `make docs`."""

import shutil
import sys
from pathlib import Path

import remat


HERE = Path(__file__).parent
# The test of the reference reads the same texts as the reference shows.
sys.path.append(str(HERE.parent / "tests"))
from support.public import MODULES, public_names, text_of


project = "remat"
author = "The remat authors"
project_copyright = author
release = remat.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_theme = "furo"
html_title = f"remat {release}"

default_role = "code"  # docstrings have single backticks, as Markdown
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# The notebooks are stored with outputs, and tests/whole/test_notebooks.py runs them.
nb_execution_mode = "off"

autodoc_typehints = "signature"
napoleon_attr_annotations = False  # of fields; the signature has them, with links
python_maximum_signature_line_length = 80
autodoc_member_order = "bysource"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Sphinx reads below docs/ only; the notebooks live beside it, where a user looks first.
# Their titles get a number here, as some pages have the same title in the sidebar.
# Links to pages and to notebooks are written for readers of the files, and change here.
shutil.rmtree(HERE / "notebooks", ignore_errors=True)
(HERE / "notebooks").mkdir()
for notebook in (HERE.parent / "notebooks").glob("*.ipynb"):
    title = f'"# Notebook {int(notebook.stem[:2])}: '
    text = notebook.read_text().replace('"# ', title, 1)
    text = text.replace("](../docs/", "](../")
    (HERE / "notebooks" / notebook.name).write_text(text)


NAMES = [name for name in public_names(MODULES) if not name.is_foreign]


def _own_text(app, what, name, obj, options, lines):
    """Give a value the text below its assignment. Sphinx shows that of its class."""
    del app, obj, options
    if what == "data":
        (found,) = (n for n in NAMES if n.full == name)
        lines[:] = [*text_of(found).splitlines(), ""]


def _notebooks_beside(app, page, source):
    """Point links at the copies of the notebooks, which only a build makes."""
    del app, page
    source[0] = source[0].replace("](../notebooks/", "](notebooks/")


def setup(app):
    app.connect("source-read", _notebooks_beside)
    # Before napoleon, which makes sections of it.
    app.connect("autodoc-process-docstring", _own_text, priority=1)
