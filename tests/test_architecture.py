"""The shape of the package: floors, imports without torch, public names.

Every rule is a function of sources, so that the last tests can show it sources that break it.
"""

import ast
import graphlib
import importlib
import inspect
import re
import subprocess
import sys
import threading
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.ranks import run_ranks

import furlong

ROOT = Path(furlong.__file__).parent

# From the top down. A name may import from floors below its own, never from its own or above;
# "furlong" is the package's __init__, which resolves the public names.
FLOORS = (
    ("__main__",),
    ("cli",),
    ("verify",),
    ("furlong",),
    ("train", "integrations"),
    ("calibrate",),
    ("api", "chunked_model"),
    ("runtime", "data"),
    ("models",),
    ("testing",),
    ("ops", "kv", "values"),
    ("planners",),
    ("report",),
    ("simulate",),
    ("cost",),
    ("timeline",),
    ("plan", "config"),
    ("files",),
    ("errors", "units"),
    ("families",),
    ("version",),
)
FIRST_FLOOR_WITHOUT_TORCH = FLOORS.index(("planners",))


def read_sources():
    """Module name -> source, for every file of the package."""
    sources = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("furlong", *path.relative_to(ROOT).with_suffix("").parts)
        sources[".".join(parts).removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return sources


SOURCES = read_sources()
PACKAGES = {
    ".".join(("furlong", *path.parent.relative_to(ROOT).parts))
    for path in ROOT.rglob("__init__.py")
}


def imports_of(module, source, modules, packages):
    """Modules of furlong that `module` names in any import, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                keep = len(parents) - node.level + (module in packages)
                base = ".".join([*parents[:keep], *filter(None, [node.module])])
            inside = {f"{base}.{alias.name}" for alias in node.names}
            names = {name.rpartition(".")[2] for name in inside & modules}
            found |= inside & modules
            if names != {alias.name for alias in node.names}:
                found.add(base)
    return {name for name in found if name.split(".")[0] == "furlong"} - {module}


def unit_of(module):
    """The name on a floor that a module belongs to."""
    return [*module.split("."), "furlong"][1]


def floor_of(module):
    return next((i for i, floor in enumerate(FLOORS) if unit_of(module) in floor), None)


def forbidden_imports(sources, packages):
    """Imports that do not go to a lower floor, except within one package."""
    modules = set(sources)
    return [
        f"{module} imports {target}"
        for module, source in sources.items()
        for target in sorted(imports_of(module, source, modules, packages))
        if unit_of(module) != unit_of(target)
        and not (floor_of(module) or 0) < (floor_of(target) or 0)
    ]


def first_circle(sources, packages):
    """Modules that import each other in a circle, or nothing."""
    graph = {
        name: imports_of(name, source, set(sources), packages) for name, source in sources.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def fragments(sources):
    """Docstrings, also of attributes, that only parse behind the name above them."""
    return [
        f"{module}: {node.value.value.split(chr(10))[0]}"
        for module, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and str(node.value.value).startswith(("Of ", "What "))
    ]


def test_docstrings_parse_alone():
    assert fragments(SOURCES) == []


NAMES_OF_MANY = {
    "run": "each verb of the command line has one",
    "candidates": "each planner has one",
    "OffloadKind": "run files know no plans; tests/test_config.py holds both equal",
    "OffloadTarget": "as OffloadKind",
    "Trainer": "that of furlong train, and the class for transformers' trainers",
    "IGNORE_INDEX": "data are read without torch; PyTorch's default is the same",
}


def names_of_many(sources):
    """Public names that several modules define."""
    owners = defaultdict(list)
    for module, source in sources.items():
        for node in ast.parse(source).body:
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    owners[name].append(module)
                case (
                    ast.Assign(targets=[ast.Name(id=name)])
                    | ast.AnnAssign(target=ast.Name(id=name))
                ):
                    owners[name].append(module)
    return {name for name, own in owners.items() if len(own) > 1 and not name.startswith("_")}


def test_a_public_name_has_one_owner():
    assert names_of_many(SOURCES) == {*NAMES_OF_MANY}


def test_the_picture_of_contributing_shows_these_floors():
    page = (ROOT.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^(?:│ ([\w, ]+?) +│|(├)─)", page, flags=re.MULTILINE)
    shown = [tuple(names.split(", ")) if names else None for names, _ in rows]
    below = FIRST_FLOOR_WITHOUT_TORCH
    assert shown == [*FLOORS[:below], None, *FLOORS[below:]]


def test_every_module_has_a_floor():
    assert [module for module in SOURCES if floor_of(module) is None] == []


def test_imports_go_downward():
    assert forbidden_imports(SOURCES, PACKAGES) == []


def test_no_circles():
    assert first_circle(SOURCES, PACKAGES) == []


def heavy_modules_after(*modules):
    """Which of torch and transformers a fresh interpreter has loaded after importing `modules`."""
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "print(*sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_everything_under_the_torch_line_and_the_cli_load_neither_torch_nor_transformers():
    light = [module for module in SOURCES if floor_of(module) >= FIRST_FLOOR_WITHOUT_TORCH]
    assert "furlong.plan.check" in light
    commands = [name for name in ("furlong.cli.main",) if name in SOURCES]
    assert heavy_modules_after("furlong", *light, *commands) == []


def test_public_names_are_sorted():
    assert furlong.__all__ == sorted(set(furlong.__all__))
    assert dir(furlong) == furlong.__all__


@pytest.mark.parametrize("name", furlong.__all__)
def test_public_names_resolve(name):
    assert getattr(furlong, name).__name__ == name


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = furlong.no_such_name


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("furlong.plan.text", "import furlong.runtime.executor", "furlong.runtime.executor"),
        ("furlong.plan.text", "from furlong.runtime import executor", "furlong.runtime.executor"),
        (
            "furlong.plan.text",
            "from furlong.runtime.executor import run",
            "furlong.runtime.executor",
        ),
        ("furlong.plan.text", "from ..runtime import executor", "furlong.runtime.executor"),
        ("furlong.plan.text", "from ..runtime.executor import run", "furlong.runtime.executor"),
        ("furlong.plan", "from ..runtime import executor", "furlong.runtime.executor"),
        ("furlong.plan.text", "from furlong import ChunkOptions", "furlong"),
        ("furlong.plan.text", "def f():\n    import furlong.units", "furlong.units"),
        ("furlong.plan.text", "if TYPE_CHECKING:\n    import furlong.units", "furlong.units"),
    ],
)
def test_finds_every_form_of_import(module, source, expected):
    modules = {"furlong.plan", "furlong.runtime", "furlong.runtime.executor"}
    assert imports_of(module, source, modules, {"furlong.plan", "furlong.runtime"}) == {expected}


def test_the_rules_can_fail():
    upward = {"furlong.plan.text": "import furlong.api", "furlong.api": ""}
    assert forbidden_imports(upward, set()) == ["furlong.plan.text imports furlong.api"]
    sideways = {"furlong.ops.loss": "from furlong.kv import store", "furlong.kv.store": ""}
    assert forbidden_imports(sideways, set()) == ["furlong.ops.loss imports furlong.kv.store"]
    downward = {"furlong.api": "import furlong.plan.text", "furlong.plan.text": ""}
    assert forbidden_imports(downward, set()) == []
    circle = {"furlong.plan.a": "import furlong.plan.b", "furlong.plan.b": "import furlong.plan.a"}
    assert len(first_circle(circle, set())) == 3
    attribute = 'class A:\n    n: int\n    """Of the rank."""'
    assert fragments({"a": attribute, "b": '"""Offers."""'}) == ["a: Of the rank."]
    assert names_of_many({"a": "def f(): ...", "b": "f = 1", "c": "_f = 1"}) == {"f"}
    assert heavy_modules_after("torch") == ["torch"]
    assert floor_of("furlong.utils") is None


MOST_FILES_OF_A_PLAN = 45
MOST_FILES_OF_A_FIRST_STEP = 95
MOST_FILES_OF_A_STEP = {"one device": 33, "token values": 34, "sp 2": 37}
"""Planners and plan included. Raise one of them for a file that a reader of a step gains by."""


def entered_by(call, until=None):
    """Files and functions of ours that ran, imports aside, in the order of their first calls: what
    one has to open to follow it; with `until` those before the first call of that function."""
    entered = {}
    last = until and until.__code__
    is_over = False

    def note(frame, event, _):
        nonlocal is_over
        is_over |= frame.f_code is last
        # the bodies of modules and classes, which an import runs, are not optimized
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED and not is_over:
            entered.setdefault((frame.f_code.co_filename, frame.f_code.co_qualname))

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    ours = ((f, name) for f, name in entered if f.startswith(str(ROOT)))
    return [(str(Path(f).relative_to(ROOT)), name) for f, name in ours]


def files_of(entered):
    return sorted({file for file, _ in entered})


def misplaced(page, entered):
    """Functions of a page of docs/ that were not called, or before the one above them."""
    text = (ROOT.parents[1] / "docs" / page).read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", text, flags=re.MULTILINE)
    assert len(rows) > 15
    places = {row: place for place, row in enumerate(entered)}
    return [
        row for above, row in pairwise([rows[0], *rows])
        if not places.get(above, -1) <= places.get(row, -1)
    ]  # fmt: skip


def test_a_plan_on_eight_devices_enters_few_files(tmp_path, capsys):
    lengths = tmp_path / "lengths.json"
    lengths.write_text('{"version": 1, "lengths": [9000, 700, 300]}')
    main = importlib.import_module("furlong.cli.main").main
    flags = "--model.name Qwen2.5-0.5B --devices 8 --hardware H100"
    codes = []
    entered = entered_by(
        lambda: codes.append(main(["plan", "--lengths", str(lengths), *flags.split()]))
    )
    files = files_of(entered)
    assert codes == [0], capsys.readouterr().err
    assert misplaced("follow-plan.md", entered) == []
    assert 0 < len(files) <= MOST_FILES_OF_A_PLAN, files


def test_a_run_enters_few_files_before_its_first_step(tmp_path, capsys):
    """From the command line to the first step of the optimizer, with `auto` for all of the plan."""
    import torch
    from helpers.tiny_runs import build_tiny_run

    main = importlib.import_module("furlong.cli.main").main
    flags = "--chunks.size=auto", "--train.steps=1", "--train.epochs=null"
    arguments = build_tiny_run(tmp_path).arguments(tmp_path / "out", *flags)
    codes = []
    step = inspect.unwrap(torch.optim.Adam.step)
    entered = entered_by(lambda: codes.append(main(arguments)), until=step)
    files = files_of(entered)
    assert codes == [0], capsys.readouterr().err
    assert misplaced("follow-run.md", entered) == []
    assert 0 < len(files) <= MOST_FILES_OF_A_FIRST_STEP, files


MOST_MODULES_OF_A_START = 3_600
_SAYS_WHAT_IS_LOADED = """
import os, sys
from furlong.cli.main import main

class Out:
    def write(self, text):
        if text.startswith("model:"):
            sys.__stdout__.write(" ".join(sys.modules))
            sys.__stdout__.flush()
            os._exit(0)

    def flush(self):
        pass

sys.stdout = Out()
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_run_loads_no_more_than_a_model_takes(tmp_path):
    """Modules, which take the seconds of a start, where data and model are known: transformers'
    are two thirds of them."""
    from helpers.tiny_runs import build_tiny_run

    arguments = build_tiny_run(tmp_path).arguments(tmp_path / "out")
    run = subprocess.run(
        [sys.executable, "-c", _SAYS_WHAT_IS_LOADED, *arguments],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    loaded = set(run.stdout.split())
    assert "furlong.train" in loaded, run.stderr
    assert loaded.isdisjoint(
        {"datasets", "pandas", "matplotlib", "tensorboard", "trl", "furlong.integrations"}
    )
    assert len(loaded) <= MOST_MODULES_OF_A_START


def files_of_a_warm_step(rank=0, sp_size=1, values=False):
    """What is entered by the second of two steps of a tiny Qwen2 enters, three chunks, keep=kv."""
    import torch
    from helpers.tiny_families import build

    from furlong.runtime.distributed.mesh import make_ranks
    from furlong.values import log_prob

    ranks = make_ranks(1, sp_size, 1, "cpu") if sp_size > 1 else None
    engine = furlong.Engine(build("qwen2"), ranks=ranks)
    ids, options = torch.arange(3, 27), furlong.ChunkOptions(size=8, keep="kv")
    sequences = [{"input_ids": ids, "labels": ids}]

    def step():
        if not values:
            engine.forward_backward(sequences, options)
            return
        engine.token_values(sequences, options, log_prob())[0].sum().backward()

    step()
    return entered_by(step)


def test_a_warm_step_enters_few_files():
    alone = files_of_a_warm_step()
    assert misplaced("follow-step.md", alone) == []
    assert misplaced("follow-step.md", alone[::-1]) != []
    found = {
        "one device": alone,
        "token values": files_of_a_warm_step(values=True),
        "sp 2": run_ranks(files_of_a_warm_step, 2, num_ranks=2)[0],
    }
    for name, entered in found.items():
        files = files_of(entered)
        assert 0 < len(files) <= MOST_FILES_OF_A_STEP[name], (name, files)
