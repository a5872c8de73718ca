"""The patch `nccl-guard`: no CUDA graphs across nodes on an NCCL that hangs on them.

No torch, NCCL or GPU is needed: vLLM's own code (the end of the config's checks, the
worker's distributed initialisation, reading NCCL's version, the environment variables)
is cut out of the sources and run as it is; only what it calls is a stand-in.
"""

import __future__

import ast
import ctypes
import enum
import functools
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.patch("nccl-guard")
ENVS = "vllm/envs.py"
NCCL = "vllm/utils/nccl.py"
IMPORT_UTILS = "vllm/utils/import_utils.py"
CONFIG = "vllm/config/vllm.py"
COMPILATION = "vllm/config/compilation.py"
WORKER = "vllm/v1/worker/gpu_worker.py"
GUARD = "VLLM_NCCL_GRAPH_GUARD"

BAD, GOOD, NEWER, OLDER = 22809, 23004, 23107, 22703
NAMES = {BAD: "2.28.9", GOOD: "2.30.4", NEWER: "2.31.7", OLDER: "2.27.3"}


# --- cutting code out of sources ----------------------------------------------------


def run_source(nodes: list[ast.stmt], namespace: dict[str, Any]) -> dict[str, Any]:
    """Execute statements without evaluating their annotations."""
    module = ast.Module(body=nodes, type_ignores=[])
    flags = __future__.annotations.compiler_flag
    exec(compile(module, "<cut out>", "exec", flags, dont_inherit=True), namespace)
    return namespace


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def definitions(body: list[ast.stmt]) -> dict[str, Any]:
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def methods(source: str, owner: str, *names: str) -> list[ast.FunctionDef]:
    found = definitions(definitions(parsed(source).body)[owner].body)
    return [found[name] for name in names if name in found]


def function(nodes: list[ast.stmt], name: str, arguments: str) -> ast.FunctionDef:
    """Statements from the middle of a function, as a function of their own."""
    made = ast.parse(f"def {name}({arguments}): ...").body[0]
    assert isinstance(made, ast.FunctionDef)
    made.body = nodes
    return ast.fix_missing_locations(made)


@functools.cache
def last_checks(source: str) -> list[ast.stmt]:
    """`VllmConfig.__post_init__` from the last change of the graph mode to the final check."""
    (post_init,) = methods(source, "VllmConfig", "__post_init__")

    def having(text: str) -> int:
        return max(i for i, line in enumerate(lines) if text in line)

    lines = [ast.unparse(node) for node in post_init.body]
    first = having("set_splitting_ops_for_v1(all2all_backend=")
    return post_init.body[first : having("requires_piecewise_compilation()") + 1]


# --- what the code under test meets -------------------------------------------------


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def __getattr__(self, level: str) -> Callable[..., None]:
        def record(message: str, *values: object) -> None:
            self.lines.append(f"{level.removesuffix('_once')}: {message % values}")

        return record

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.lines if line.startswith("warning")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """As much of `vllm.platforms.current_platform` as the patch may ask."""

    cuda: bool = True
    capability: int = 121

    def is_cuda(self) -> bool:
        return self.cuda

    def is_cuda_alike(self) -> bool:
        return True

    def is_device_capability_family(self, capability: int) -> bool:
        return self.capability // 10 == capability // 10


SPARK = Platform()
ELSEWHERE = {
    "sm90": Platform(capability=90),
    "sm100": Platform(capability=100),
    "sm110": Platform(capability=110),
    "gfx1200": Platform(cuda=False, capability=120),
}


@dataclass(kw_only=True, slots=True)
class Cluster:
    """The NCCL of every rank; this process is `rank`."""

    versions: list[int | None]
    nodes: int = 2
    rank: int = 0
    gathered: int = 0
    calls: list[str] = field(default_factory=list)

    def load(self, name: str) -> Any:
        """`ctypes.CDLL` for NCCL."""
        version = self.versions[self.rank]
        if version is None:
            raise OSError(f"{name}: cannot open shared object file")

        def nccl_get_version(reference: Any) -> int:
            reference._obj.value = version
            return 0

        return SimpleNamespace(ncclGetVersion=nccl_get_version)

    def all_gather_object(self, into: list[Any], value: Any, *, group: object) -> None:
        assert group == "cpu group"
        assert len(into) == len(self.versions)
        assert value == self.versions[self.rank]
        into[:] = self.versions
        self.gathered += 1
        self.calls.append("gather")


class Vllm:
    """A tree's own code, with stand-ins for what it calls."""

    def __init__(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tree = tree
        self.monkeypatch = monkeypatch
        self.log = Log()
        self.cluster = Cluster(versions=[GOOD, GOOD])
        self.graph_mode = run_source(
            [definitions(parsed(self.source(COMPILATION)).body)["CUDAGraphMode"]],
            {"enum": enum},
        )["CUDAGraphMode"]
        # Compile-time numbers: whoever reads these has the wrong version.
        nccl = SimpleNamespace(version=lambda: pytest.fail("compile-time NCCL version"))
        self.torch = self.stub(
            "torch",
            version=SimpleNamespace(cuda="13.0", hip=None),
            cuda=SimpleNamespace(nccl=nccl),
            distributed=SimpleNamespace(
                all_gather_object=lambda *args, **kw: self.cluster.all_gather_object(*args, **kw)
            ),
        )
        for package in ("vllm", "vllm.utils", "vllm.model_executor", "vllm.model_executor.layers"):
            self.stub(package, __path__=[])
        self.stub("vllm.logger", init_logger=lambda _: self.log)
        self.platforms = self.stub("vllm.platforms", current_platform=SPARK)
        self.stub("vllm.model_executor.layers.batch_invariant", init_batch_invariance=lambda: None)
        self.envs = self.load("vllm.envs", ENVS)
        sys.modules["vllm"].envs = self.envs  # type: ignore[attr-defined]
        self.import_utils = self.stub(
            "vllm.utils.import_utils",
            **run_source(
                [
                    node
                    for name, node in definitions(parsed(self.source(IMPORT_UTILS)).body).items()
                    if "nccl" in name
                ],
                {},
            ),
        )
        self.nccl = self.load("vllm.utils.nccl", NCCL)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: self.cluster.load(name))

    def source(self, name: str) -> str:
        return (self.tree / name).read_text(encoding="utf-8")

    def stub(self, name: str, **members: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(members)
        self.monkeypatch.setitem(sys.modules, name, module)
        return module

    def load(self, name: str, path: str) -> ModuleType:
        """A whole module of vLLM, as it is."""
        spec = importlib.util.spec_from_file_location(name, self.tree / path)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        self.monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    def namespace(self) -> dict[str, Any]:
        return {
            "CUDAGraphMode": self.graph_mode,
            "CompilationMode": SimpleNamespace(VLLM_COMPILE=3),
            "current_platform": self.platforms.current_platform,
            "envs": self.envs,
            "logger": self.log,
        }

    def on(self, platform: Platform) -> None:
        self.platforms.current_platform = platform  # type: ignore[attr-defined]

    def config(self, *, nnodes: int = 2, mode: str = "FULL_AND_PIECEWISE", late: str = "") -> Any:
        """A `VllmConfig` shortly before its last checks, which these methods run."""
        real = run_source(
            [
                *methods(
                    self.source(CONFIG), "VllmConfig", "disable_cudagraphs", "_set_cudagraph_sizes"
                ),
                function(
                    last_checks(self.source(CONFIG)), "last_checks", "self, effective_dp_size"
                ),
            ],
            self.namespace(),
        )
        sizes = run_source(
            [*methods(self.source(COMPILATION), "CompilationConfig", "post_init_cudagraph_sizes")],
            {},
        )
        compilation = type("CompilationConfig", (), sizes)()
        compilation.cudagraph_mode = self.graph_mode[mode]
        compilation.max_cudagraph_capture_size = 8
        compilation.cudagraph_capture_sizes = [1, 2, 4, 8]
        compilation.compile_sizes = None
        compilation.mode = 3
        compilation.pass_config = SimpleNamespace(enable_sp=False)

        def set_splitting_ops_for_v1(**_: object) -> None:
            if late:  # as DeepEP's high-throughput kernels do
                compilation.cudagraph_mode = self.graph_mode[late]

        compilation.set_splitting_ops_for_v1 = set_splitting_ops_for_v1
        config = type("VllmConfig", (), real)()
        config.compilation_config = compilation
        config.model_config = SimpleNamespace(enforce_eager=False, disable_cascade_attn=True)
        config.kernel_config = None
        config.parallel_config = SimpleNamespace(
            nnodes=nnodes,
            all2all_backend="allgather_reducescatter",
            world_size=2,
            tensor_parallel_size=2,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            disable_custom_all_reduce=True,
            distributed_timeout_seconds=None,
            enable_elastic_ep=False,
        )
        return config

    def check_config(self, config: Any) -> None:
        config.last_checks(1)

    def start_worker(self, config: Any) -> None:
        """`init_worker_distributed_environment`, where NCCL's communicators are made."""
        tree = definitions(parsed(self.source(WORKER)).body)
        wanted = ("guard_cross_node_cudagraphs", "init_worker_distributed_environment")
        calls = self.cluster.calls

        def step(name: str) -> Callable[..., None]:
            return lambda *_, **__: calls.append(name)

        namespace = self.namespace() | {
            "torch": self.torch,
            "timedelta": timedelta,
            "override_envs_for_eplb": step("eplb"),
            "set_custom_all_reduce": step("custom all-reduce"),
            "init_distributed_environment": step("world"),
            "ensure_model_parallel_initialized": step("communicators"),
            "ensure_ec_transfer_initialized": step("ec"),
            "get_node_count": lambda: self.cluster.nodes,
            "get_world_group": lambda: SimpleNamespace(
                world_size=len(self.cluster.versions), cpu_group="cpu group"
            ),
            **{
                name: getattr(module, name)
                for module in (self.import_utils, self.nccl)
                for name in ("_get_runtime_nccl_version", "allow_cross_node_cudagraphs")
                if hasattr(module, name)
            },
        }
        run_source([tree[name] for name in wanted if name in tree], namespace)
        namespace["init_worker_distributed_environment"](config, self.cluster.rank)

    def graphs(self, config: Any) -> bool:
        """Whether the worker will capture graphs, asked in each way that vLLM asks."""
        off = config.compilation_config.cudagraph_mode == self.graph_mode.NONE
        assert config.model_config.enforce_eager == off
        assert (config.compilation_config.cudagraph_capture_sizes == []) == off
        assert (config.compilation_config.max_cudagraph_capture_size == 0) == off
        return not off


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (GUARD, "VLLM_NCCL_SO_PATH", "VLLM_USE_BREAKABLE_CUDAGRAPH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def patched(patched_tree: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vllm]:
    return Vllm(patched_tree, monkeypatch)


@pytest.fixture
def pristine(pristine_tree: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vllm]:
    return Vllm(pristine_tree, monkeypatch)


both_stages = pytest.mark.parametrize("stage", ["check_config", "start_worker"])


# --- the fault ----------------------------------------------------------------------


def test_pristine_starts_on_a_bad_nccl(pristine: Vllm) -> None:
    pristine.cluster = Cluster(versions=[BAD, BAD])
    config = pristine.config()
    pristine.check_config(config)
    pristine.start_worker(config)
    assert pristine.graphs(config)
    assert not pristine.log.warnings


@both_stages
def test_patched_refuses_a_bad_nccl(patched: Vllm, stage: str) -> None:
    patched.cluster = Cluster(versions=[BAD, BAD])
    with pytest.raises(RuntimeError) as raised:
        getattr(patched, stage)(patched.config())
    message = str(raised.value)
    assert f"Found NCCL {NAMES[BAD]}" in message
    assert f"wanted {NAMES[GOOD]}" in message
    assert "deadlock" in message
    for fix in ("nvidia-nccl", "every node", "--enforce-eager", f"{GUARD}=eager"):
        assert fix in message
    assert "communicators" not in patched.cluster.calls


@both_stages
def test_a_good_nccl_is_silent(patched: Vllm, stage: str) -> None:
    config = patched.config()
    getattr(patched, stage)(config)
    assert patched.graphs(config)
    assert not patched.log.warnings


# --- every rank counts --------------------------------------------------------------


@pytest.mark.parametrize(
    ("versions", "bad_ranks"),
    [
        ([GOOD, BAD], "(rank 1)"),
        ([BAD, GOOD], "(rank 0)"),
        ([OLDER, BAD], "(rank 1)"),  # the minimum alone would not show it
        ([NEWER, BAD, None, BAD], "(rank 1, 3)"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_one_bad_rank_is_enough(
    patched: Vllm, versions: list[int | None], bad_ranks: str, rank: int
) -> None:
    """And all ranks, the good ones too, come to the same result."""
    patched.cluster = Cluster(versions=versions, rank=rank)
    with pytest.raises(RuntimeError) as raised:
        patched.start_worker(patched.config())
    assert f"NCCL {NAMES[BAD]} {bad_ranks}" in str(raised.value)


def test_every_rank_takes_part(patched: Vllm) -> None:
    """A node started with --enforce-eager must not leave the others waiting."""
    for mode, guard in (("NONE", "error"), ("FULL", "eager"), ("PIECEWISE", "warn")):
        patched.monkeypatch.setenv(GUARD, guard)
        patched.cluster = Cluster(versions=[BAD, BAD])
        patched.start_worker(patched.config(mode=mode))
        assert patched.cluster.gathered == 1


def test_before_the_communicators(patched: Vllm) -> None:
    """Two versions of NCCL may not even agree on a communicator."""
    patched.start_worker(patched.config())
    calls = patched.cluster.calls
    assert calls.index("world") < calls.index("gather") < calls.index("communicators")


def test_elastic_ranks_join_alone(patched: Vllm) -> None:
    patched.cluster = Cluster(versions=[GOOD, BAD], rank=1)
    config = patched.config()
    config.parallel_config.enable_elastic_ep = True
    with pytest.raises(RuntimeError, match=NAMES[BAD]):
        patched.start_worker(config)
    assert patched.cluster.gathered == 0


def test_ray_has_one_node_in_its_config(patched: Vllm) -> None:
    """`nnodes` is of the mp backend alone; the worker counts nodes itself."""
    patched.cluster = Cluster(versions=[BAD, BAD])
    config = patched.config(nnodes=1)
    patched.check_config(config)
    assert patched.graphs(config)
    with pytest.raises(RuntimeError):
        patched.start_worker(config)


# --- where it does not apply --------------------------------------------------------


@both_stages
@pytest.mark.parametrize("platform", ELSEWHERE.values(), ids=ELSEWHERE)
def test_other_devices(patched: Vllm, platform: Platform, stage: str) -> None:
    patched.on(platform)
    patched.cluster = Cluster(versions=[BAD, BAD])
    config = patched.config()
    getattr(patched, stage)(config)
    assert patched.graphs(config)
    assert not patched.log.warnings
    if not platform.cuda:
        assert patched.cluster.gathered == 0


def test_one_node(patched: Vllm) -> None:
    patched.cluster = Cluster(versions=[BAD, BAD], nodes=1)
    config = patched.config(nnodes=1)
    patched.check_config(config)
    patched.start_worker(config)
    assert patched.graphs(config)
    assert patched.cluster.gathered == 0


@both_stages
def test_without_graphs(patched: Vllm, stage: str) -> None:
    patched.cluster = Cluster(versions=[BAD, BAD])
    getattr(patched, stage)(patched.config(mode="NONE"))
    assert not patched.log.warnings


def test_graphs_that_another_setting_turns_off(patched: Vllm) -> None:
    """The check comes after the last change of the mode."""
    patched.cluster = Cluster(versions=[BAD, BAD])
    patched.check_config(patched.config(late="NONE"))


# --- what one may ask for -----------------------------------------------------------


@both_stages
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"])
def test_eager(patched: Vllm, stage: str, mode: str) -> None:
    patched.monkeypatch.setenv(GUARD, "eager")
    patched.cluster = Cluster(versions=[GOOD, BAD], rank=1)
    config = patched.config(mode=mode)
    getattr(patched, stage)(config)
    assert not patched.graphs(config)
    (warning,) = patched.log.warnings
    assert NAMES[BAD] in warning
    assert "CUDA graphs are off" in warning


def test_eager_keeps_graphs_on_a_good_nccl(patched: Vllm) -> None:
    patched.monkeypatch.setenv(GUARD, "eager")
    config = patched.config()
    patched.check_config(config)
    patched.start_worker(config)
    assert patched.graphs(config)


@both_stages
def test_warn(patched: Vllm, stage: str) -> None:
    patched.monkeypatch.setenv(GUARD, "warn")
    patched.cluster = Cluster(versions=[BAD, BAD])
    config = patched.config()
    getattr(patched, stage)(config)
    assert patched.graphs(config)
    (warning,) = patched.log.warnings
    assert NAMES[BAD] in warning
    assert "on all the same" in warning


@both_stages
@pytest.mark.parametrize("version", [OLDER, NEWER, None])
def test_unknown_version_warns(patched: Vllm, stage: str, version: int | None) -> None:
    patched.cluster = Cluster(versions=[version, version])
    config = patched.config()
    getattr(patched, stage)(config)
    assert patched.graphs(config)
    (warning,) = patched.log.warnings
    assert f"NCCL version {NAMES[version] if version else 'unknown'}:" in warning
    assert NAMES[GOOD] in warning


# --- the table and the variable -----------------------------------------------------


def test_table(patched: Vllm) -> None:
    """Bad versions are data; each has a source, and there is a good one to point to."""
    table = patched.nccl.SM12X_CROSS_NODE_GRAPHS
    assert table[BAD]
    assert table[GOOD] is None
    names = [patched.import_utils._format_nccl_raw_version(version) for version in table]
    assert all(re.fullmatch(r"2\.\d+\.\d+", name) for name in names)


@both_stages
def test_table_alone_decides(patched: Vllm, stage: str) -> None:
    """A newer version can be bad as well, and is then not what is wanted."""
    patched.monkeypatch.setitem(patched.nccl.SM12X_CROSS_NODE_GRAPHS, NEWER, "it is cursed")
    patched.cluster = Cluster(versions=[NEWER, NEWER])
    with pytest.raises(RuntimeError, match=r"Found NCCL 2\.31\.7.*wanted 2\.30\.4:.*cursed"):
        getattr(patched, stage)(patched.config())


def test_variable(patched: Vllm, pristine_tree: Path) -> None:
    assert getattr(patched.envs, GUARD) == "error"
    patched.monkeypatch.setenv(GUARD, "off")
    with pytest.raises(ValueError, match=GUARD):
        getattr(patched.envs, GUARD)
    assert GUARD not in (pristine_tree / ENVS).read_text(encoding="utf-8")


def test_variable_is_declared_and_in_no_compile_cache_key(patched: Vllm) -> None:
    """Nodes may differ in it, and it does not change what is compiled."""
    tree = parsed(patched.source(ENVS))
    declared = {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert GUARD in declared
    factors = ast.unparse(definitions(tree.body)["compile_factors"])
    assert f"'{GUARD}'" in factors
