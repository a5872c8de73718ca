"""The CMake toolchain file and the environment that make vLLM's build produce for the target.

Everything CMake must know is in the toolchain file, since setup.py splits CMAKE_ARGS at
spaces. Paths of this machine reach neither debug information (there is none) nor __FILE__
(-ffile-prefix-map), and libraries get no RPATH: torch is found as already loaded, and an
absolute or empty entry would be searched on the node.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.files import sha256_text
from sm121.toolkit.machine import Compilers, host_machine

# How CMake passes the prefix maps of toolchain_text to nvcc.
NVCC_PREFIX_MAP = "-Xcompiler=-ffile-prefix-map="
# --as-needed as Debian's GCC has it by default, so that every distribution's build has the same
# NEEDED; -s: symbols for the linker only would name nothing useful.
LINK_FLAGS = ("-Wl,--as-needed,-s,--build-id=sha1",)
# ccache's variables that a user's environment may set: to do without it, to compile all the
# same, and a store that several machines share (ccache manual, "Remote storage backends").
_USERS = ("CCACHE_DISABLE", "CCACHE_RECACHE", "CCACHE_REMOTE_STORAGE")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """Everything the compiler needs, made by the toolkit stage. Folders.

    cuda: toolkit root. torch: folder that holds torch/ of the target. python_include: the
    target's headers. environment: the host's virtual environment.
    """

    machine: str
    cuda: Path
    torch: Path
    python_include: Path
    python_version: str
    environment: Path
    compilers: Compilers

    @property
    def cross(self) -> bool:
        return self.machine != host_machine()


def prefix_maps(folders: Mapping[Path, str], *, ninja_tree: Path) -> dict[str, str]:
    """Build folders, as compilers may see them, and what replaces them in the output.

    Absolute; and relative to where ninja runs the compilers, since that is how ccache gives
    paths on (CCACHE_BASEDIR). With one of them alone, objects would differ by whether there is
    a ccache. ninja_tree: setup.py's --build-base.
    """
    start = ninja_tree / "temp"  # setup.py's build_temp, one level down
    absolute = {str(folder): name for folder, name in folders.items()}
    return absolute | {os.path.relpath(folder, start): name for folder, name in folders.items()}


def prefix_flags(prefixes: Mapping[str, str], *, option: str = "-ffile-prefix-map") -> list[str]:
    """The compiler's options for prefix_maps. option: GCC's, or what another calls it."""
    return [
        f"{option}={folder}={name}"
        # The longest prefix last: GCC and rustc let the last matching option win.
        for folder, name in sorted(prefixes.items(), key=lambda item: len(item[0]))
    ]


def toolchain_text(
    tools: Tools,
    *,
    prefixes: Mapping[str, str],
    variables: Mapping[str, Path],
    launcher: Sequence[str | Path] = (),
) -> str:
    """The toolchain file (cmake-toolchains(7)).

    prefixes: see prefix_maps. variables: CMake variables
    that name folders of third-party sources. launcher: command before each compile.
    """
    maps = " ".join(prefix_flags(prefixes))
    torch = tools.torch / "torch/share/cmake"
    lines = [
        f"set(CMAKE_SYSTEM_NAME Linux)\nset(CMAKE_SYSTEM_PROCESSOR {tools.machine})"
        if tools.cross
        else "",
        f"set(CMAKE_C_COMPILER {tools.compilers.cc})",
        f"set(CMAKE_CXX_COMPILER {tools.compilers.cxx})",
        f"set(CMAKE_CUDA_COMPILER {tools.cuda}/bin/nvcc)",
        f"set(CMAKE_CUDA_HOST_COMPILER {tools.compilers.cxx})",
        f"set(CUDA_HOST_COMPILER {tools.compilers.cxx})",
        f'set(CMAKE_C_FLAGS_INIT "{maps}")',
        f'set(CMAKE_CXX_FLAGS_INIT "{maps}")',
        f'set(CMAKE_CUDA_FLAGS_INIT "-Xcompiler={maps.replace(" ", ",")}")',
        "set(CMAKE_SKIP_RPATH ON)",
        # -L: CMake links CUDA libraries with -lcudart_static -lcudadevrt, and learns where they are
        # from a program that it links; crossing, it links none (below).
        *(
            f'set(CMAKE_{kind}_LINKER_FLAGS_INIT "{" ".join(LINK_FLAGS)} -L{tools.cuda}/lib64")'
            for kind in ("SHARED", "MODULE")
        ),
        f"set(Torch_DIR {torch}/Torch)",
        # Without this one, the host's libtorch would be mixed with the target's.
        f"set(Caffe2_DIR {torch}/Caffe2)",
        f"set(Python_INCLUDE_DIR {tools.python_include})",
        f"set(CUDA_TOOLKIT_ROOT_DIR {tools.cuda})",
        f"set(CUDAToolkit_ROOT {tools.cuda})",
        *(f"set({name} {folder})" for name, folder in variables.items()),
        *(_launcher(launcher) if launcher else ()),
    ]
    if tools.cross:
        tag = tools.python_version.replace(".", "")
        lines += [
            f"set(Python_SOABI cpython-{tag}-{tools.machine}-linux-gnu)",
            "set(Python_SOSABI abi3)",
            # Caffe2's check that the headers are nvcc's release runs a program of the target.
            "set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)",
        ]
    return "\n".join(line for line in lines if line) + "\n"


def _launcher(command: Sequence[str | Path]) -> list[str]:
    """Ours before each compile, and inside it the one that setup.py has asked for.

    setup.py passes ccache, if it finds one, as a cache variable; a normal variable goes before
    that. CMake's own try-compiles are no objects of this build.
    """
    words = " ".join(map(str, command))
    return [
        "get_property(sm121_trying GLOBAL PROPERTY IN_TRY_COMPILE)",
        "if(NOT sm121_trying)",
        *(
            f"  set(CMAKE_{language}_COMPILER_LAUNCHER {words} "
            f"$CACHE{{CMAKE_{language}_COMPILER_LAUNCHER}})"
            for language in ("C", "CXX", "CUDA")
        ),
        "endif()",
    ]


def build_environment(
    tools: Tools,
    *,
    toolchain: Path,
    components: Sequence[str],
    arch: str,
    jobs: int,
    version: str,
    epoch: int,
    cache_base: Path,
    home: Path,
    sources: Mapping[str, Path],
    ccache_dir: Path,
    replaced: Collection[str],
    ninja: Path,
    settings: Path,
) -> dict[str, str]:
    """The whole environment of setup.py; nothing of the user's leaks in except PATH's tail.

    sources: environment variable of each third-party source and its folder. epoch: seconds,
    SOURCE_DATE_EPOCH. cache_base: below it, a compiler cache takes paths as relative. home:
    an empty folder, since distutils and ccache read configuration from the user's. replaced:
    what stands in the output for what, the same in every checkout. ninja: the program that CMake
    builds with. settings: the launcher's.
    """
    path = [
        str(tools.environment / "bin"),
        str(tools.cuda / "bin"),
        *system_path(os.environ.get("PATH", "")),
    ]
    home.mkdir(parents=True, exist_ok=True)
    environment = {
        "PATH": os.pathsep.join(path),
        "HOME": str(home),
        "LC_ALL": "C.UTF-8",
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
        "CUDA_HOME": str(tools.cuda),
        "CUDA_TOOLKIT_ROOT": str(tools.cuda),
        "TORCH_CUDA_ARCH_LIST": arch,
        "CMAKE_TOOLCHAIN_FILE": str(toolchain),
        "CMAKE_BUILD_TYPE": "Release",
        "VLLM_TARGET_DEVICE": "cuda",
        "VLLM_BUILD_COMPONENTS": ",".join(components),
        "VLLM_VERSION_OVERRIDE": version,
        "MAX_JOBS": str(jobs),
        "NVCC_THREADS": "1",
        "NINJA_STATUS": "[sm121 %f/%t] ",
        "SOURCE_DATE_EPOCH": str(epoch),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "_PYTHON_HOST_PLATFORM": f"linux-{tools.machine}",
        # setup.py appends it to CMake's arguments.
        "CMAKE_ARGS": f"-DCMAKE_MAKE_PROGRAM={ninja}",
        "SM121_LAUNCH": str(settings),
        # sccache compiles in a server of its own, outside of our memory budget and of what is
        # ended when a build is killed.
        "VLLM_DISABLE_SCCACHE": "1",
        **cache_environment(ccache_dir, cache_base, replaced),
    }
    environment.update({name: str(folder) for name, folder in sources.items()})
    return environment


def cache_environment(
    ccache_dir: Path, cache_base: Path, replaced: Collection[str]
) -> dict[str, str]:
    """ccache's part of an environment: see build_environment.

    A compiler cache serves every checkout (ccache manual, "Compiling in different
    directories"): sources, torch's and CUDA's headers are all below the build folder.
    """
    return {
        "CCACHE_DIR": str(ccache_dir),
        "CCACHE_BASEDIR": str(cache_base),
        "CCACHE_NOHASHDIR": "1",
        # ccache knows that a prefix map holds paths, but not that nvcc's -Xcompiler holds one.
        # The output has only what the paths are replaced by, so that goes into the key instead.
        "CCACHE_IGNOREOPTIONS": f"{NVCC_PREFIX_MAP}*",
        "CCACHE_NAMESPACE": f"sm121-{sha256_text(*sorted(replaced))[:16]}",
        **{name: os.environ[name] for name in _USERS if os.environ.get(name)},
    }


def system_path(path: str) -> list[str]:
    """The user's PATH, and the system's folders if they are not on it: a non-interactive ssh
    may have none worth the name."""
    kept = [folder for folder in path.split(os.pathsep) if folder]
    return kept + [folder for folder in ("/usr/bin", "/bin") if folder not in kept]


def compiler_cache(path: str) -> str | None:
    """The compiler cache that vLLM's setup will find on this PATH, for the record."""
    return shutil.which("ccache", path=path) and "ccache"
