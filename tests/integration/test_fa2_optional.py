"""The patch `fa2-optional`: vLLM without FlashAttention's libraries.

The modules under test are the tree's, as they are, in a package whose other modules are stand-ins
(they want torch and a GPU). Each case is a Python of its own.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from support.tools import run

pytestmark = pytest.mark.patch("fa2-optional")

PACKAGE = "vllm/vllm_flash_attn"
FA_UTILS = "vllm/v1/attention/backends/fa_utils.py"
STAND_INS = {
    "torch/__init__.py": "def __getattr__(name): return type(name, (), {})\n",
    "vllm/__init__.py": "",
    "vllm/envs.py": "def __getattr__(name): return False\n",
    "vllm/logger.py": "import logging\ninit_logger = logging.getLogger\n",
    "vllm/_custom_ops.py": "def reshape_and_cache_flash(): pass\n",
    "vllm/platforms/__init__.py": """
class current_platform:
    is_cuda = staticmethod(lambda: True)
    is_xpu = is_rocm = staticmethod(lambda: False)
    has_device_capability = staticmethod(lambda _: True)
    is_device_capability_family = staticmethod(lambda family: family == 120)
    get_device_capability = staticmethod(lambda: type("C", (), {"major": 12, "minor": 1}))
""",
    "vllm/config.py": "def get_current_vllm_config_or_none(): return None\n",
    "vllm/v1/__init__.py": "",
    "vllm/v1/attention/__init__.py": "",
    "vllm/v1/attention/backends/__init__.py": "",
}
# What a backend does at its top, what the indexer does, and what each model's import does.
STATEMENTS = {
    "a function": "from vllm.vllm_flash_attn import flash_attn_varlen_func",
    "the indexer": "from vllm.vllm_flash_attn.cute import utils",
    "rotary": "from vllm.vllm_flash_attn.layers.rotary import apply_rotary_emb",
    "any model": "from vllm.v1.attention.backends.fa_utils import get_flash_attn_version",
    "a backend": "from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func",
}
PROBE = f"""
import json, sys
answers = {{}}
for name, statement in {STATEMENTS!r}.items():
    try:
        exec(statement, {{}})
        answers[name] = "ok"
    except Exception as error:
        answers[name] = type(error).__name__
if answers["any model"] == "ok":
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    answers["version"] = get_flash_attn_version()
json.dump(answers, sys.stdout)
"""


def what_works(tree: Path, folder: Path, *, fa2: bool, fa4: bool) -> tuple[dict[str, object], str]:
    """What can be imported from a tree's modules, and what was said."""
    files = dict(STAND_INS)
    if fa2:
        files[f"{PACKAGE}/_vllm_fa2_C.py"] = ""
    if fa2 or fa4:
        files[f"{PACKAGE}/layers/rotary.py"] = "def apply_rotary_emb(): pass\n"
    if fa4:
        files |= {f"{PACKAGE}/cute/{name}.py": "" for name in ("__init__", "interface", "utils")}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in (f"{PACKAGE}/__init__.py", f"{PACKAGE}/flash_attn_interface.py", FA_UTILS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tree / name, folder / name)
    done = run(sys.executable, "-S", "-c", PROBE, cwd=folder, env={"PYTHONPATH": str(folder)})
    answers: dict[str, object] = json.loads(done.stdout)
    return answers, done.stderr


def test_upstream_loads_no_model_without_fa2(pristine_tree: Path, tmp_path: Path) -> None:
    answers, _ = what_works(pristine_tree, tmp_path, fa2=False, fa4=True)
    assert answers == dict.fromkeys(STATEMENTS, "ImportError")


def test_models_load_and_no_backend_is_chosen(patched_tree: Path, tmp_path: Path) -> None:
    answers, said = what_works(patched_tree, tmp_path, fa2=False, fa4=True)
    assert answers == {
        "a function": "ImportError", "a backend": "ImportError", "version": None,
        "the indexer": "ok", "rotary": "ok", "any model": "ok",
    }  # fmt: skip
    assert "FlashAttention backends are not available: vllm.vllm_flash_attn requires" in said


@pytest.mark.parametrize("fa4", [True, False])
def test_nothing_changes_with_fa2(
    pristine_tree: Path, patched_tree: Path, tmp_path: Path, fa4: bool
) -> None:
    before = what_works(pristine_tree, tmp_path / "before", fa2=True, fa4=fa4)
    after = what_works(patched_tree, tmp_path / "after", fa2=True, fa4=fa4)
    assert before == after
    assert after[0]["version"] == 2
    assert after[0]["a backend"] == "ok"


def test_without_any_of_it_the_package_is_not_there(patched_tree: Path, tmp_path: Path) -> None:
    """As on a platform that has no FlashAttention: models load, the package doesn't."""
    answers, _ = what_works(patched_tree, tmp_path, fa2=False, fa4=False)
    assert answers["the indexer"] in ("ImportError", "ModuleNotFoundError")
    assert (answers["a function"], answers["any model"]) == ("ImportError", "ok")


def test_shared_python_comes_with_each_component(pristine_tree: Path, patched_tree: Path) -> None:
    """layers/ and ops/ of FlashAttention, which rotary embeddings use."""
    name = "cmake/external_projects/vllm_flash_attn.cmake"
    loop = "foreach(_FA_COMPONENT _vllm_fa2_C _vllm_fa3_C"
    assert f"{loop})" in (pristine_tree / name).read_text()
    assert f"{loop} _vllm_fa4_cutedsl_C)" in (patched_tree / name).read_text()
