"""Sphinx configuration. Warnings are errors: `make docs`."""

import shutil
from pathlib import Path

import remat


HERE = Path(__file__).parent

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
html_theme = "furo"
html_title = f"remat {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# The notebooks are stored with outputs, and tests/whole/test_notebooks.py runs them.
nb_execution_mode = "off"

autodoc_typehints = "description"
autodoc_member_order = "bysource"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Sphinx reads below docs/ only; the notebooks live beside it, where a user looks first.
(HERE / "notebooks").mkdir(exist_ok=True)
for notebook in (HERE.parent / "notebooks").glob("*.ipynb"):
    shutil.copyfile(notebook, HERE / "notebooks" / notebook.name)
