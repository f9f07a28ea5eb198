"""The examples of the docs that need other libraries run, page by page, in order."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
from support.decoders import hf
from support.tables_of_docs import rows, run

import remat


pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
BLOCK = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_examples(page, count):
    """Run the examples of a page, and return what they define."""
    text, namespace = page.read_text(), {"__name__": "example"}
    examples = [*BLOCK.finditer(text)]
    assert len(examples) == count
    for match in examples:
        # Blank lines in front make a traceback name the line in the page.
        code = "\n" * text.count("\n", 0, match.start(1)) + match[1]
        exec(compile(code, str(page), "exec"), namespace)
    return namespace


def test_the_examples_of_modules_run(request, tmp_path, monkeypatch):
    for needed in "accelerate", "lightning", "peft":
        pytest.importorskip(needed, reason="needs the extra `clients`")
    monkeypatch.chdir(tmp_path)
    found = run_examples(request.config.rootpath / "docs/modules.md", 6)
    assert isinstance(found["merged"], hf.BertForMaskedLM)


ROWS = rows("From Hugging Face")


def test_the_table_of_hugging_face_has_its_rows():
    assert len(ROWS) == 9


@pytest.mark.parametrize("code", sorted({code for _, ours in ROWS for code in ours}))
def test_our_call_runs(code):
    config = hf.BertConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8)
    model = remat.nn.enable(hf.BertModel(config))
    unet = hf.BertModel(config)  # any model that has the switch
    names = {"remat": remat, "model": model, "pipeline": SimpleNamespace(unet=unet)}
    run(code, {**names, "TrainingArguments": partial(hf.TrainingArguments, "out")})
