"""The patch `shape-dispatch`, and what upstream does instead from 0.28 on, judged by the tables in
the real FlashInfer wheel of the stack.

Nothing of vLLM or FlashInfer is imported (both want torch): the code under test and
FlashInfer's own decision are cut out of their sources by AST and run as they are.
"""

import __future__

import ast
import re
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.patch("shape-dispatch")
SPARSE_SWA = "vllm/v1/attention/backends/mla/sparse_swa.py"
FLASHINFER_UTILS = "vllm/utils/flashinfer.py"
SM120_ATTENTION = "vllm/models/deepseek_v4/nvidia/flashinfer_sparse.py"
DECODE_MODULE = "flashinfer.mla._sparse_mla_sm120"

WINDOW = 128  # DeepSeek-V4-Flash's sliding_window
# DeepSeek-V4-Flash has 64 heads. vLLM's DeepseekV4Config takes the number from the
# checkpoint and has no default to read it from.
MODEL_HEADS = 64
TENSOR_PARALLEL = (1, 2, 4)
DRAFT_TOKENS = range(1, 33)
BATCH_TOKENS = range(1, 201)
D_QK = 512  # DSv4's head dim, which selects FlashInfer's DSv4 kernels


# --- cutting code out of sources ----------------------------------------------------


def run_source(nodes: list[ast.stmt], namespace: dict[str, Any]) -> dict[str, Any]:
    """Execute statements without evaluating their annotations."""
    module = ast.Module(body=nodes, type_ignores=[])
    flags = __future__.annotations.compiler_flag
    exec(compile(module, "<cut out>", "exec", flags, dont_inherit=True), namespace)
    return namespace


def top_level(source: str, *names: str) -> list[ast.stmt]:
    """The definitions and assignments of these names, in source order."""

    def named(node: ast.stmt) -> str | None:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            return node.name
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            return node.targets[0].id
        return None

    found = [node for node in ast.parse(source).body if named(node) in names]
    assert {named(node) for node in found} == set(names), "the source has moved"
    return found


def functions_of(node: ast.stmt) -> dict[str, ast.FunctionDef]:
    assert isinstance(node, ast.ClassDef)
    return {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}


def assigned_to_self(function: ast.FunctionDef, attribute: str) -> ast.expr:
    """What a method assigns to `self.<attribute>`."""
    (value,) = (
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == f"self.{attribute}"
    )
    return value


def between(text: str, start: str, end: str) -> str:
    _, found, rest = text.partition(start)
    body, ended, _ = rest.partition(end)
    assert found, f"the source has no {start!r}"
    assert ended, f"the source has no {end!r} after it"
    return body


# --- FlashInfer's side --------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashInfer:
    """What the wheel says it can dispatch."""

    decode_table: frozenset[tuple[int, int]]
    prefill_table: frozenset[tuple[int, int]]
    prefill_above: int
    decodes: Any  # FlashInfer's own predicate

    def dispatches(self, tokens: int, heads: int, width: int, page: int) -> bool:
        """FlashInfer's choice for a layer that has no compressed cache."""
        if self.decodes(tokens, heads, width, D_QK, page):
            return True
        return tokens > self.prefill_above and (heads, width) in self.prefill_table


def read_flashinfer(wheel: Path) -> FlashInfer:
    with zipfile.ZipFile(wheel) as archive:

        def text(name: str) -> str:
            return archive.read(f"flashinfer/{name}").decode()

        decode_source = text("mla/_sparse_mla_sm120.py")
        prefill_source = text("data/csrc/sparse_mla_sm120_prefill.cu")
        entry_source = text("data/csrc/sparse_mla_sm120.cu")
    decode = run_source(
        top_level(
            decode_source,
            "_DECODE_MAX_TOKENS",
            "_DECODE_DSV4_DISPATCH",
            "_DECODE_DSV4_PAGE_BLOCK_SIZE",
            "_decode_dsv4_dispatchable",
        ),
        {},
    )
    single = between(prefill_source, "dispatch_dsv4_single(int", "dispatch_dsv4_dual(int")
    heads = re.findall(r"case (\d+):\s*\\\n\s*DISPATCH_MG_CM\(CM, \1, TK,", single)
    widths = re.findall(r"topk == (\d+)\)\s*DISPATCH_BY_NH_CM\(\w+, \1\);", single)
    assert len(heads) == single.count("case "), "a case that the pattern does not know"
    assert len(widths) == single.count("topk == "), "a width it does not know"
    (floor,) = re.findall(r"TVM_FFI_ICHECK_GT\(num_tokens, (\d+)\)", entry_source)
    return FlashInfer(
        decode_table=decode["_DECODE_DSV4_DISPATCH"],
        prefill_table=frozenset((int(h), int(w)) for h in heads for w in widths),
        prefill_above=int(floor),
        decodes=decode["_decode_dsv4_dispatchable"],
    )


@pytest.fixture(scope="module")
def flashinfer(flashinfer_wheel: Path) -> FlashInfer:
    return read_flashinfer(flashinfer_wheel)


# --- vLLM's side --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """As much of `vllm.platforms.current_platform` as the patch may ask."""

    cuda: bool
    capability: int | None

    def is_cuda(self) -> bool:
        return self.cuda

    def is_device_capability_family(self, capability: int) -> bool:
        return self.capability is not None and self.capability // 10 == capability // 10


SM121 = Platform(cuda=True, capability=121)


class Vllm:
    """The width that a tree, patched or not, gives to the DSpark draft."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        sources = [self.source(SPARSE_SWA), self.source("vllm/utils/math_utils.py")]
        cache, builder = top_level(
            sources[0], "DeepseekV4SWACache", "DeepseekSparseSWAMetadataBuilder"
        )
        methods = functions_of(builder)
        width = assigned_to_self(methods["__init__"], "noncausal_index_width")
        used = [
            methods[node.attr]
            for node in ast.walk(width)
            if isinstance(node, ast.Attribute) and node.attr in methods
        ]
        helpers = ["_smallest_dispatchable_width"] if used else []
        self.namespace = run_source(
            [*top_level(sources[1], "cdiv"), *top_level(sources[0], *helpers), *used],
            {},
        )
        self.members = {method.name: self.namespace[method.name] for method in used}
        self.expression = compile(ast.Expression(width), "<width>", "eval")
        page = assigned_to_self(functions_of(cache)["__init__"], "block_size")
        self.page: int = ast.literal_eval(page)
        (attention,) = top_level(self.source(SM120_ATTENTION), "DeepseekV4FlashInferSM120Attention")
        padding = functions_of(attention)["get_padded_num_q_heads"]
        padding.decorator_list.clear()
        self.pad = run_source([padding], {})["get_padded_num_q_heads"]

    def source(self, name: str) -> str:
        return (self.tree / name).read_text(encoding="utf-8")

    def padded_heads(self, heads: int) -> int:
        """What the SM12x attention class pads a rank's heads to."""
        return self.pad(None, heads)

    def width(
        self,
        draft_tokens: int,
        platform: Platform,
        *,
        heads: int = MODEL_HEADS,
        window: int = WINDOW,
        dspark: bool = True,
    ) -> int:
        """Evaluate the real assignment in the builder's `__init__`."""
        builder = type("Builder", (), self.members)()
        builder.is_dspark = dspark
        builder.window_size = window
        builder.num_speculative_tokens = draft_tokens
        builder.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(get_num_attention_heads=lambda _: heads),
            parallel_config=None,
        )
        self.namespace["current_platform"] = platform
        return eval(self.expression, self.namespace, {"self": builder})


@pytest.fixture(scope="module")
def patched(patched_tree: Path) -> Vllm:
    return Vllm(patched_tree)


@pytest.fixture(scope="module")
def pristine(pristine_tree: Path) -> Vllm:
    return Vllm(pristine_tree)


def stub(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def utils(patched: Vllm, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`vllm.utils.flashinfer`, cut down to what the patch adds to it."""
    nodes = top_level(
        patched.source(FLASHINFER_UTILS),
        "_FLASHINFER_SM120_DSV4_PREFILL_SHAPES",
        "get_flashinfer_sm120_dsv4_shapes",
    )
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list.clear()  # functools.cache would outlive a test
    return stub(monkeypatch, "vllm.utils.flashinfer", **run_source(nodes, {}))


@pytest.fixture
def sm12x(
    patched: Vllm,
    flashinfer: FlashInfer,
    utils: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> Vllm:
    """The patched tree where FlashInfer's real decode table can be imported."""
    stub(monkeypatch, DECODE_MODULE, _DECODE_DSV4_DISPATCH=flashinfer.decode_table)
    stub(
        monkeypatch,
        "vllm.models.deepseek_v4.nvidia.flashinfer_sparse",
        DeepseekV4FlashInferSM120Attention=SimpleNamespace(
            get_padded_num_q_heads=patched.padded_heads
        ),
    )
    return patched


HEADS_PER_RANK = [MODEL_HEADS // tp for tp in TENSOR_PARALLEL]
per_rank = pytest.mark.parametrize("heads", HEADS_PER_RANK)


# --- on SM12x -----------------------------------------------------------------------


@per_rank
def test_pristine_width_is_not_dispatchable(
    pristine: Vllm, flashinfer: FlashInfer, heads: int
) -> None:
    kernel_heads = pristine.padded_heads(heads)
    for k in DRAFT_TOKENS:
        width = pristine.width(k, SM121, heads=heads)
        assert width == 256
        for tokens in BATCH_TOKENS:
            assert not flashinfer.dispatches(tokens, kernel_heads, width, pristine.page)


@per_rank
def test_patched_width_is_dispatchable(sm12x: Vllm, flashinfer: FlashInfer, heads: int) -> None:
    kernel_heads = sm12x.padded_heads(heads)
    for k in DRAFT_TOKENS:
        width = sm12x.width(k, SM121, heads=heads)
        assert width >= WINDOW + k
        for tokens in BATCH_TOKENS:
            assert flashinfer.dispatches(tokens, kernel_heads, width, sm12x.page)


@per_rank
def test_patched_width_is_the_smallest(sm12x: Vllm, flashinfer: FlashInfer, heads: int) -> None:
    """Over every width that the tables can give, not only DSpark's usual one."""
    kernel_heads = sm12x.padded_heads(heads)

    def always(width: int) -> bool:
        return all(
            flashinfer.dispatches(tokens, kernel_heads, width, sm12x.page) for tokens in (1, 64, 65)
        )

    good = [width for width in range(1, 2049) if always(width)]
    assert good
    for window in range(good[-1]):
        expected = next(width for width in good if width >= window + 1)
        assert sm12x.width(1, SM121, heads=heads, window=window) == expected


def test_a_head_count_that_prefill_lacks_is_padded_first(
    sm12x: Vllm, flashinfer: FlashInfer
) -> None:
    """At TP 8 a rank has 8 heads: FlashInfer decodes those but cannot prefill them."""
    width = sm12x.width(5, SM121, heads=8)
    assert (8, width) in flashinfer.decode_table - flashinfer.prefill_table
    assert flashinfer.dispatches(65, sm12x.padded_heads(8), width, sm12x.page)


@per_rank
def test_above_the_largest_width(sm12x: Vllm, heads: int) -> None:
    assert sm12x.width(1024 - WINDOW, SM121, heads=heads) == 1024
    with pytest.raises(ValueError) as raised:
        sm12x.width(1025 - WINDOW, SM121, heads=heads)
    message = str(raised.value)
    assert re.findall(r"\b\d{2,4}\b", message) == ["1025", str(heads), "1024"]
    assert "num_speculative_tokens" in message


def test_pure_choice(patched: Vllm) -> None:
    choose = patched.namespace["_smallest_dispatchable_width"]
    shapes = {(16, 512), (16, 128), (32, 192)}
    assert choose(128, 16, shapes) == 128
    assert choose(129, 16, shapes) == 512
    assert choose(129, 32, shapes) == 192
    with pytest.raises(ValueError, match=r"193 .* 32 .* 192\."):
        choose(193, 32, shapes)
    with pytest.raises(ValueError, match="none at all"):
        choose(1, 64, shapes)


# --- the tables ---------------------------------------------------------------------


def test_prefill_constant_is_flashinfers_table(utils: ModuleType, flashinfer: FlashInfer) -> None:
    assert flashinfer.prefill_table == utils._FLASHINFER_SM120_DSV4_PREFILL_SHAPES


def test_constant_names_its_source(patched: Vllm, flashinfer_wheel: Path) -> None:
    """The file and lines in the comment are where the table is."""
    source = patched.source(FLASHINFER_UTILS)
    cited = re.search(r"`(\w+)`, (csrc/\w+\.cu):(\d+)-(\d+)\s+# in FlashInfer", source)
    assert cited
    function, name, first, last = cited.groups()
    with zipfile.ZipFile(flashinfer_wheel) as archive:
        lines = archive.read(f"flashinfer/data/{name}").decode().splitlines()
    body = lines[int(first) - 1 : int(last)]
    assert function in body[0]
    assert body[-1] == "}"


def test_shapes_are_what_decode_and_prefill_share(
    sm12x: Vllm, utils: ModuleType, flashinfer: FlashInfer
) -> None:
    shared = flashinfer.decode_table & flashinfer.prefill_table
    assert utils.get_flashinfer_sm120_dsv4_shapes() == shared


def test_without_flashinfer(sm12x: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, DECODE_MODULE, None)
    with pytest.raises(RuntimeError, match="_DECODE_DSV4_DISPATCH") as raised:
        sm12x.width(5, SM121)
    assert isinstance(raised.value.__cause__, ImportError)


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"_DECODE_DSV4_DISPATCH": None},
        {"_DECODE_DSV4_DISPATCH": {(64, 512, 64)}},
        {"_DECODE_DSV4_DISPATCH": {512}},
    ],
    ids=["gone", "none", "triples", "numbers"],
)
def test_with_a_table_that_has_moved(
    sm12x: Vllm, monkeypatch: pytest.MonkeyPatch, members: dict[str, Any]
) -> None:
    stub(monkeypatch, DECODE_MODULE, **members)
    with pytest.raises(RuntimeError, match=r"SM12x.*_DECODE_DSV4_DISPATCH"):
        sm12x.width(5, SM121)


# --- elsewhere ----------------------------------------------------------------------

ELSEWHERE = {
    "sm90": Platform(cuda=True, capability=90),
    "sm100": Platform(cuda=True, capability=100),
    "sm103": Platform(cuda=True, capability=103),
    "sm110": Platform(cuda=True, capability=110),
    "gfx950": Platform(cuda=False, capability=95),
    "gfx1200": Platform(cuda=False, capability=120),
    "xpu": Platform(cuda=False, capability=None),
}


@pytest.mark.parametrize("platform", ELSEWHERE.values(), ids=ELSEWHERE)
def test_unchanged_elsewhere(
    patched: Vllm,
    pristine: Vllm,
    platform: Platform,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Same numbers, also past FlashInfer's largest, and no import is tried."""
    for name in (DECODE_MODULE, "flashinfer", "vllm.utils.flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)
    for window in (0, 64, 127, 128, 512, 4096):
        for k in (*DRAFT_TOKENS, 127, 128, 129, 1000):
            old = pristine.width(k, platform, window=window)
            assert patched.width(k, platform, window=window) == old


@pytest.mark.parametrize("platform", [SM121, *ELSEWHERE.values()], ids=["sm121", *ELSEWHERE])
def test_nothing_without_dspark(
    patched: Vllm,
    pristine: Vllm,
    platform: Platform,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, DECODE_MODULE, None)
    assert pristine.width(5, platform, dspark=False) == 0
    assert patched.width(5, platform, dspark=False) == 0


def test_flashinfer_is_never_imported_with_the_module(patched: Vllm) -> None:
    for name in (SPARSE_SWA, FLASHINFER_UTILS):
        for node in ast.parse(patched.source(name)).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "flashinfer" not in ast.unparse(node)


# --- without the patch ----------------------------------------------------------------


@pytest.mark.stacks("0.28.0")
def test_upstreams_width_is_one_that_flashinfer_has(
    pristine_tree: Path, flashinfer: FlashInfer
) -> None:
    """From 0.28 on the width is the next multiple of 64, which takes FlashInfer 0.6.18 or newer."""
    utils = pristine_tree / "vllm/v1/attention/backends/mla/compressor_utils.py"
    math_utils = (pristine_tree / "vllm/utils/math_utils.py").read_text()
    names = ("_DSPARK_SWA_INDEX_ALIGNMENT", "get_dspark_swa_index_width")
    namespace = run_source(top_level(math_utils, "cdiv"), {})
    width = run_source(top_level(utils.read_text(), *names), namespace)[names[1]]
    for draft_tokens in range(1, WINDOW + 1):
        found = width(WINDOW, draft_tokens)
        assert found >= WINDOW + draft_tokens
        for heads in (8, 16, 32, 64, 128):
            for tokens in (1, 64, 65, 200):
                assert flashinfer.dispatches(tokens, heads, found, 64), (found, heads, tokens)
