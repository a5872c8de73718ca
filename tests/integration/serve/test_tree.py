"""Every flag, variable and value that we render is known to the patched release's source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sm121.serve.load import load_serve
from sm121.serve.nodes import Nodes
from sm121.serve.render import command, variables
from support.nodes import two_nodes


def parsed(tree: Path, file: str) -> ast.Module:
    return ast.parse((tree / "vllm" / file).read_text(encoding="utf-8"))


def fields(module: ast.Module, *classes: str) -> set[str]:
    """Annotated fields of classes."""
    return {
        item.target.id
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef) and node.name in classes
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def known_flags(tree: Path) -> set[str]:
    """What `vllm serve` takes: add_argument of engine and server, and the front end's fields."""
    found = set()
    for file in ("engine/arg_utils.py", "entrypoints/openai/cli_args.py"):
        for node in ast.walk(parsed(tree, file)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                found |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    own = fields(parsed(tree, "entrypoints/openai/cli_args.py"), "FrontendArgs", "BaseFrontendArgs")
    return {str(flag) for flag in found} | {f"--{name.replace('_', '-')}" for name in own}


def known_variables(tree: Path) -> set[str]:
    """Keys of envs.environment_variables."""
    for node in ast.walk(parsed(tree, "envs.py")):
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and target.id == "environment_variables":
            assert isinstance(node, ast.AnnAssign)
            assert isinstance(node.value, ast.Dict)
            return {key.value for key in node.value.keys if isinstance(key, ast.Constant)}  # type: ignore[misc]
    raise AssertionError("envs.py has no environment_variables")


def literals(module: ast.Module, name: str) -> set[object]:
    """Values of a module's `name = Literal[…]`."""
    for node in module.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return {n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)}
    raise AssertionError(f"there is no {name}")


@pytest.fixture
def rendered(root: Path, stack_name: str) -> tuple[list[str], list[str], dict[str, str]]:
    """Words of head and worker, and the variables of both."""
    serve, nodes = load_serve(root / "pins", stack_name), Nodes.model_validate(two_nodes())
    both = variables(serve, nodes, 0, stack=stack_name) | variables(
        serve, nodes, 1, stack=stack_name
    )
    return command(serve, nodes, 0), command(serve, nodes, 1), both


def test_each_flag_is_one_of_vllms(patched_tree: Path, rendered) -> None:
    flags = {w for words in rendered[:2] for w in words if w.startswith("--")}
    assert len(flags) >= 14
    assert flags - known_flags(patched_tree) == set()


def test_each_variable_is_one_of_vllms(patched_tree: Path, rendered) -> None:
    ours = {name for name in rendered[2] if name.startswith("VLLM_")}
    assert len(ours) >= 4
    assert ours - known_variables(patched_tree) == set()


def test_a_renamed_flag_or_variable_would_be_noticed(patched_tree: Path, tmp_path: Path) -> None:
    """The reading above, on a tree in which three names were changed."""
    for file in ("engine/arg_utils.py", "entrypoints/openai/cli_args.py", "envs.py"):
        copy = tmp_path / "vllm" / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = (patched_tree / "vllm" / file).read_text(encoding="utf-8")
        for old in ('"--node-rank"', '"--headless"', '"VLLM_DSV4_SM120_JIT_ATTN"'):
            text = text.replace(old, old[:-1] + '-new"')
        copy.write_text(text, encoding="utf-8")
    gone = known_flags(patched_tree) - known_flags(tmp_path)
    assert gone == {"--node-rank", "--headless"}
    assert known_variables(patched_tree) - known_variables(tmp_path) == {"VLLM_DSV4_SM120_JIT_ATTN"}


def test_values_are_vllms(root: Path, stack_name: str, patched_tree: Path) -> None:
    arguments = load_serve(root / "pins", stack_name).arguments
    assert arguments.kv_cache_dtype.value in literals(parsed(patched_tree, "config/cache.py"), "CacheDType")  # fmt: skip
    speculative = parsed(patched_tree, "config/speculative.py")
    value = arguments.speculative_config.value
    assert value.method in literals(speculative, "DSparkModelTypes")
    assert set(value.model_dump()) - {"method"} <= fields(speculative, "SpeculativeConfig")
    assert "method" in fields(speculative, "SpeculativeConfig")


def test_block_size_is_the_attentions(root: Path, stack_name: str, patched_tree: Path) -> None:
    """Of every DeepSeek-V4 backend of NVIDIA's: a list with one number."""
    found = []
    for file in (
        "models/deepseek_v4/sparse_mla.py",
        "models/deepseek_v4/nvidia/flashinfer_sparse.py",
    ):
        for node in ast.walk(parsed(patched_tree, file)):
            if (
                isinstance(node, ast.FunctionDef)
                and node.name == "get_supported_kernel_block_sizes"
            ):
                found.append(ast.literal_eval(node.body[-1].value))  # type: ignore[attr-defined]
    assert len(found) >= 2
    size = load_serve(root / "pins", stack_name).arguments.block_size.value
    assert found == [[size]] * len(found)


def test_what_the_start_helper_relies_on(patched_tree: Path) -> None:
    """The ranks meet at master-addr, whose store it watches; process titles begin with VLLM::."""
    state = (patched_tree / "vllm/distributed/parallel_state.py").read_text()
    assert (
        "ip = parallel_config.master_addr\n            port = parallel_config.master_port" in state
    )
    assert "get_distributed_init_method(ip, port)" in state
    titles = (patched_tree / "vllm/utils/system_utils.py").read_text()
    assert 'setproctitle.setproctitle(f"{prefix}::{name}")' in titles
    assert '"VLLM_PROCESS_NAME_PREFIX", "VLLM"' in (patched_tree / "vllm/envs.py").read_text()
    request = (patched_tree / "vllm/v1/worker/utils.py").read_text()
    assert "init_snapshot.total_memory * cache_config.gpu_memory_utilization" in request
    measure = (patched_tree / "vllm/utils/mem_utils.py").read_text()
    assert "psutil.virtual_memory().available" in measure


def test_deep_gemms_variables(patched_tree: Path, rendered) -> None:
    """DeepGEMM's source is in git only; what vLLM's tree says of it."""
    said = (patched_tree / "docs/usage/troubleshooting.md").read_text()
    said += (patched_tree / "vllm/utils/deep_gemm.py").read_text()
    ours = [name for name in rendered[2] if name.startswith("DG_")]
    assert len(ours) == 3
    assert [name for name in ours if name not in said] == []
