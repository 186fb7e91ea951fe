"""Ladders: the same kernel from naive to peak, one idea a rung, in each language; the last rung is the library's kernel.

A language is a package ``ladder/<language>/`` with

``RUNGS``      literal dict, rung id (``ladder.triton.step3``) -> dotted module name, in the order of the ladder
``SOURCE``     one sentence: whose figures PUBLISHED are, and on which GPU
``layouts``    (kernel module, problem, config, arch) -> list of sentences on what moves between layouts; leave it out where
               nothing can tell
``EXPERIMENTS`` dict name -> Experiment: side experiments of the source; may be left out

and a line in ``LANGUAGES`` under the name of its backend.  A rung is a module ``step<k>_<idea>.py`` that can be read alone:
the five names of the kernel contract (Config, reject, default_config, search_space, launch; perhaps prepare), ``launches``,
which describes what ``launch`` launches and is what compiles without a GPU, a device function that is called
``attention_fwd_kernel`` in every rung, so that the diff between neighbours is the idea, and literals:

``IDEA``       one sentence
``PREDICTION`` what is expected, and why; written before the first run and left as it was
``WHY``        the reason read from the measurement and the machine code; empty until there is one
``PUBLISHED``  dict of the source's figures for its GPU, text by text: {"full 4k": "21.8 TFLOP/s"}; may be empty
``VISITS``     "all" key tiles, or only "visible" ones: what the count of executed operations needs to know
``TUNED``      True when the config is the fastest of ``search_space`` on the machine; may be left out
``KERNEL``     only in a rung that is the library's kernel: its id.  The five names are then that kernel's
``DEVICE``     only where the device code is not Python: its file, beside the module

Rungs compute forward attention, full or causal, of any lengths, with grouped heads; float16 and bfloat16, and float32 where
the language has it.  ``subjects`` pairs rungs with configs, ``checking`` holds them to the oracle, ``compiling`` reads their
code, ``running`` times them, ``tables`` and ``figure`` show the records (``rows``).
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from peakattn import backends
from peakattn.backends.binding import meta_tensors
from peakattn.backends.contract import Artifacts
from peakattn.backends.sources import kernel_hash
from peakattn.problem import AttentionProblem

LANGUAGES: dict[str, str] = {
    "triton": "peakattn_lab.ladder.triton",
    "cute": "peakattn_lab.ladder.cute",
    "cuda": "peakattn_lab.ladder.cuda",
    "cutile": "peakattn_lab.ladder.cutile",
}

LITERALS = ("IDEA", "PREDICTION", "WHY", "PUBLISHED", "VISITS", "TUNED", "KERNEL", "DEVICE")


@dataclass(frozen=True)
class Experiment:
    """Rungs under given configs side by side, to see one effect: (step, knobs) pairs, on one mask."""

    claim: str
    causal: bool
    subjects: tuple[tuple[int, dict[str, Any]], ...]


@dataclass(frozen=True)
class Rung:
    """One rung. What it says about itself is read from its file; ``kernel`` imports the language."""

    id: str
    module: str

    @property
    def language(self) -> str:
        return self.id.split(".")[1]

    @property
    def step(self) -> int:
        return int(self.id.rpartition(".step")[2])

    @property
    def name(self) -> str:
        """``step3 autotune``, from the module's name."""
        return self.module.rpartition(".")[2].replace("_", " ")

    @property
    def idea(self) -> str:
        return str(self._literals["IDEA"])

    @property
    def prediction(self) -> str:
        return str(self._literals["PREDICTION"])

    @property
    def why(self) -> str:
        return str(self._literals["WHY"])

    @property
    def published(self) -> dict[str, str]:
        return dict(self._literals["PUBLISHED"])

    @property
    def visits_all(self) -> bool:
        return bool(self._literals["VISITS"] == "all")

    @property
    def tuned(self) -> bool:
        return bool(self._literals.get("TUNED", False))

    @property
    def kernel_id(self) -> str | None:
        """The library's kernel that this rung is, or None."""
        return self._literals.get("KERNEL")

    @property
    def kernel(self) -> ModuleType:
        """The module with the five names."""
        return importlib.import_module(self.module) if self.kernel_id is None else backends.load(self.kernel_id)

    @property
    def source(self) -> str:
        """The text of the rung's file, followed by that of the file with its device code where that is another one."""
        if self.kernel_id is None:
            return _file(self.module).read_text(encoding="utf-8") + self._device_code
        file = _file(backends.KERNELS[self.kernel_id])
        files = (file, file.with_name(f"device_{file.name}"), file.with_suffix(".cu"))
        return "\n".join(one.read_text(encoding="utf-8") for one in files if one.is_file())

    @property
    def _device_code(self) -> str:
        device = self._literals.get("DEVICE")
        return "" if device is None else "\n" + _file(self.module).with_name(device).read_text(encoding="utf-8")

    @property
    def source_hash(self) -> str:
        """Of the code that computes: comments, and what the rung says about itself, do not count."""
        if self.kernel_id is not None:
            return str(kernel_hash(self.kernel_id))
        tree = ast.parse(_file(self.module).read_text(encoding="utf-8"))
        code = [node for node in tree.body if not (_literal_name(node) in LITERALS or isinstance(node, ast.Expr))]
        said = [_plain(code), *map(kernel_hash, _library_kernels(tree)), *_without_comments(self._device_code)]
        return hashlib.sha256(repr(said).encode()).hexdigest()[:16]

    def artifacts(self, problem: AttentionProblem, config: Any, arch: int) -> list[Artifacts]:
        """What its language's compiler makes of it, with no GPU."""
        softcap = 0.5 if problem.softcap else 0.0
        launches = self.kernel.launches(problem, config, *meta_tensors(problem), 1.0, softcap)
        made: list[Artifacts] = backends.toolchain(self.language).artifacts_of(launches, arch)
        return made

    def layouts(self, problem: AttentionProblem, config: Any, arch: int) -> list[str]:
        """Sentences on layouts, where the language's compiler writes them down."""
        tell = getattr(_package(self.language), "layouts", None)
        return [] if tell is None else list(tell(self.kernel, problem, config, arch))

    @property
    def _literals(self) -> dict[str, Any]:
        return _literals(self.module)


def _without_comments(code: str) -> list[str]:
    """The lines of C++ that compute, without what is said beside them."""
    lines = [line.split("//")[0].rstrip() for line in code.splitlines()]
    return [line for line in lines if line]


def _plain(node: Any) -> Any:
    """A syntax tree as lists, the same from every version of Python: fields that are empty or absent are left out."""
    if isinstance(node, ast.AST):
        return [type(node).__name__, *((n, _plain(v)) for n, v in ast.iter_fields(node) if v is not None and v != [])]
    return [_plain(x) for x in node] if isinstance(node, list) else node


def _library_kernels(tree: ast.Module) -> list[str]:
    """Kernels of the library that a rung imports: it may be one of them under a config of its own."""
    imported: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            imported |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return [kernel for kernel, module in backends.KERNELS.items() if module in imported]


def rungs(language: str, steps: Sequence[str] = ()) -> list[Rung]:
    """The rungs of a language in order, or those of the given steps: ids, ``step3`` or ``3``."""
    known = _package(language).RUNGS
    wanted = {_full_id(language, step, known) for step in steps} or set(known)
    return [Rung(rung_id, module) for rung_id, module in known.items() if rung_id in wanted]


def rung(rung_id: str) -> Rung:
    """The rung of an id such as ``ladder.cutile.step5``; ValueError with those there are."""
    (found,) = rungs(rung_id.split(".")[1], [rung_id])
    return found


def source(language: str) -> str:
    """Whose figures the rungs' PUBLISHED are."""
    return str(_package(language).SOURCE)


def experiment(language: str, name: str) -> Experiment:
    """A side experiment of a language, or ValueError with the names there are."""
    known: dict[str, Experiment] = getattr(_package(language), "EXPERIMENTS", {})
    if name not in known:
        raise ValueError(f"experiment is {name!r}; the {language} ladder has {', '.join(known) or 'none'}.")
    return known[name]


def difference(before: Rung, after: Rung) -> str:
    """The unified diff of two rungs' files: the idea."""
    a, b = (one.source.splitlines(keepends=True) for one in (before, after))
    return "".join(difflib.unified_diff(a, b, before.name, after.name, n=2))


@functools.cache
def _literals(module: str) -> dict[str, Any]:
    tree = ast.parse(_file(module).read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for node in tree.body:
        name = _literal_name(node)
        if name in LITERALS and isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            found[name] = ast.literal_eval(node.value)
    missing = [name for name in LITERALS if name not in (*found, "TUNED", "KERNEL", "DEVICE")]
    if missing:
        raise ValueError(f"{module} does not say {', '.join(missing)}; peakattn_lab.ladder describes what a rung says.")
    return found


def _literal_name(node: ast.stmt) -> str | None:
    """The name that a statement gives a value, or None."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else None


def _file(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"the ladder names the module {module}, and there is none.")
    return Path(spec.origin)


def _package(language: str) -> ModuleType:
    if language not in LANGUAGES:
        raise ValueError(f"there is no ladder in {language!r}; there are ladders in {', '.join(LANGUAGES)}.")
    return importlib.import_module(LANGUAGES[language])


def _full_id(language: str, step: str, known: dict[str, str]) -> str:
    full = step if step in known else f"ladder.{language}.step{step.removeprefix('step')}"
    if full not in known:
        steps = ", ".join(rung_id.rpartition(".step")[2] for rung_id in known)
        raise ValueError(f"rung {step!r} is unknown; the {language} ladder has the steps {steps}.")
    return full
