"""The examples of the docs that need other libraries run, page by page, in order."""

import re

import pytest
from support.decoders import hf


pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
for needed in "accelerate", "lightning", "peft":
    pytest.importorskip(needed, reason="needs the extra `clients`")
BLOCK = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_examples_of_modules_run(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = request.config.rootpath / "docs/modules.md"
    text, namespace = page.read_text(), {"__name__": "example"}
    examples = [*BLOCK.finditer(text)]
    assert len(examples) == 5
    for match in examples:
        # Blank lines in front make a traceback name the line in the page.
        code = "\n" * text.count("\n", 0, match.start(1)) + match[1]
        exec(compile(code, str(page), "exec"), namespace)
    assert isinstance(namespace["merged"], hf.BertForMaskedLM)
