"""The pages: links that lead somewhere, here and on a git host, and promises about their size."""

import json
import logging
import pkgutil
import re
import shlex
import shutil
from contextlib import suppress
from pathlib import Path

import nbformat
import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from nbclient import NotebookClient

from furlong.cli.main import main
from furlong.config.schema import all_keys
from furlong.config.sources import build_run, read_yaml
from furlong.errors import UserError
from furlong.planners.search import METHODS

ROOT = Path(__file__).parents[1]
BESIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "recipes/README.md")]
PAGES = [*BESIDE, *sorted((ROOT / "docs").rglob("*.md"))]
_VERBS = '"--help"' + "".join(
    file.read_text(encoding="utf-8") for file in (ROOT / "src/furlong/cli").glob("*.py")
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page):
    """The anchors of a page's headings, as they are made from their words."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-") for words in headings}


def broken_links(page):
    """Relative links of a page to a file or a heading that is not there."""
    broken = []
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere_on_a_git_host(page):
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "other.md").write_text("# Some words: here\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#some-words-here) [b](other.md#no) [c](gone.md) [d](https://x.y)")
    assert broken_links(page) == ["other.md#no", "gone.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_run_files_keys_and_flags_of_pages_are_there(page):
    assert unknown_names(page.read_text(encoding="utf-8")) == []


def unknown_names(text):
    """Keys and flags of a page that no schema and no verb has; its run files are read, too."""
    for block in re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL):
        values = {"model": {"name": "x"}, "out": "x"} | read_yaml(block, "", "")
        values["data"] = {"train": "x"} | (values.get("data") or {})
        build_run(values, "run.yaml")
    keys = all_keys()
    sections = "data|train|chunks|memory|log|hub|model.(?:lora|rope)"
    named = re.findall(rf"`((?:{sections})\.[a-z]\w*(?:\.[a-z]\w*)*)(?!\.)\b", text)
    flags = [
        flag
        for command in re.findall(r"furlong (?:train|plan|convert|lengths|export) [^`\n#]*", text)
        for flag in re.findall(r"--([a-z][\w.-]*)", command)
    ]
    unknown = {name for name in named if name not in keys and not name.endswith(".py")}
    return sorted(unknown | {f for f in flags if f not in keys and f'"--{f}"' not in _VERBS})


def test_python_names_of_pages_are_there():
    assert {page.name: names for page in PAGES if (names := unknown_python(page))} == {}


def unknown_python(page):
    """Names of furlong in code that cannot be imported."""
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"`(furlong(?:\.[A-Za-z_]\w*)+)", text))
    for module, imported in re.findall(r"^ *from (furlong[\w.]*) import (.+)$", text, re.MULTILINE):
        names |= {f"{module}.{name.strip()}" for name in imported.split(",")}
    return sorted(name for name in names if not is_importable(name))


def is_importable(name):
    with suppress(ImportError, AttributeError):
        pkgutil.resolve_name(name)
        return True
    return False


def test_a_name_that_is_nowhere_is_found():
    text = "`train.stepps: 3`, `train.steps`, `furlong plan run.yaml --smallesst --devices 8`"
    assert unknown_names(text) == ["smallesst", "train.stepps"]
    assert is_importable("furlong.errors.UserError") and not is_importable("furlong.Enginee")
    with pytest.raises(UserError, match="sequences_per_stp"):
        unknown_names("```yaml\ntrain: {sequences_per_stp: 3}\n```")


@pytest.fixture
def build_site(tmp_path, monkeypatch):
    """Builds the site of a folder of pages as scripts/docs does; gives the folder it is in."""
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")

    def build_strictly(docs):
        settings = {"docs_dir": str(docs), "site_dir": str(tmp_path / "site"), "strict": True}
        config = load_config(str(ROOT / "mkdocs.yml"), **settings)
        try:
            build(config)
        finally:
            config.plugins.on_shutdown()
        return tmp_path / "site"

    return build_strictly


def test_the_site_is_built_without_a_warning_and_takes_nothing_from_other_hosts(build_site):
    site = build_site(ROOT / "docs")
    for page in site.rglob("*.html"):
        fetched = r"<(?:script|link|img|iframe)[^>]*(?:src|href)=.?(?:https?:)?//[^>]*>"
        found = re.findall(fetched, page.read_text(encoding="utf-8"))
        assert [tag for tag in found if 'rel="canonical"' not in tag] == []


def test_what_leads_nowhere_stops_the_site(build_site, tmp_path, caplog):
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (docs / "start.md").open("a", encoding="utf-8") as page:
        page.write("\n[a](gone.md) [b](plan.md#gone) `src/furlong/gone.py`\n")
    (docs / "left-out.md").write_text("# In no list\n")
    with caplog.at_level(logging.WARNING, "mkdocs"), pytest.raises(Abort, match="4 warnings"):
        build_site(docs)
    for words in ("'gone.md'", "'#gone'", "src/furlong/gone.py", "left-out.md"):
        assert any(words in record.getMessage() for record in caplog.records), words


def test_the_readme_is_short_and_counts_models_and_the_words_of_our_own_are_few():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 120
    models = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    right = re.findall(r"^- (\d+) (?:exact|rounded|widened):", models, flags=re.MULTILINE)
    assert f"{sum(map(int, right))} model types" in readme
    words = (ROOT / "docs/how-it-works.md").read_text(encoding="utf-8").split("\n## Words\n")[1]
    assert len([row for row in words.splitlines() if row.startswith("| ")]) - 2 <= 15


def test_files_that_contributors_are_sent_to_are_there():
    text = "".join(
        (ROOT / page).read_text("utf-8") for page in ("CONTRIBUTING.md", "docs/extend.md")
    )
    named = set(re.findall(r"`([\w/]+/[\w.]+\.\w+)`", text)) - {"src/furlong/planners/whole.py"}
    assert len(named) > 40
    homes = ROOT, ROOT / "src/furlong", ROOT / "tests/helpers"
    assert [file for file in named if not any((home / file).exists() for home in homes)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_takes_ten_minutes_and_its_code_fits_a_window(page):
    text = page.read_text(encoding="utf-8")
    looked_up = {"reference.md", "paper_numbers.md"}  # tables that are written by scripts
    assert len(text.split()) <= 2_000 or page.name in looked_up
    blocks = re.findall(r"```.*?```", text, flags=re.DOTALL)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 100] == []


@pytest.mark.slow
def test_the_notebook_runs_and_says_the_same_again():
    notebook = nbformat.read(ROOT / "examples/notebook.ipynb", as_version=4)
    before = [written(cell) for cell in notebook.cells]
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    after = [written(cell) for cell in notebook.cells]
    assert after[:-1] == before[:-1]  # the last one tells seconds of a search
    assert "RTX4090" in before[-1] and "RTX4090" in after[-1]


def written(cell):
    """What a cell has printed."""
    return "".join(
        output.text for output in cell.get("outputs", ()) if output.get("name") == "stdout"
    )


_TRANSCRIPT = re.compile(r"```\n\$ furlong (plan (?!runs/)(?:.*\\\n)*.*)\n((?:(?!```).*\n)*)```")


def pieces(text):
    """What stands between the dots of a text, without line breaks and seconds of a search."""
    words = " ".join(re.sub(r"\([\d.]+ m?s\)", "", text).split())
    return [piece.strip() for piece in re.split(r"\[?\.\.\.\]?,?", words)]


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if _TRANSCRIPT.search(p.read_text("utf-8"))],
                         ids=lambda page: page.name)  # fmt: skip
def test_plans_of_pages_are_what_their_commands_print_today(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no calibration"))
    text = page.read_text(encoding="utf-8")
    for lengths in re.findall(r"`({\"version\": 1, \"lengths\": \[\d.*})`", text):
        Path("lens.json").write_text(lengths)
    for command, shown in _TRANSCRIPT.findall(text):
        main(shlex.split(command.replace("\\\n", " ")))
        printed, start = " ".join(pieces("".join(capsys.readouterr()))), 0
        for piece in pieces(shown):
            assert piece in printed[start:], (command, piece)
            start = printed.index(piece, start) + len(piece)


@pytest.mark.slow
def test_the_commands_of_the_five_systems_plan_what_they_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/five-systems.md").read_text(encoding="utf-8")
    commands = re.findall(r"```bash\n(furlong plan .*?)```", text, flags=re.DOTALL)
    named = [shlex.split(c.replace("\\\n", " "), comments=True)[1:] for c in commands]
    for words in named:
        assert main([*words, "--json"]) == 0
        method, picture = (words[words.index(f) + 1] for f in ("--chunks.method", "--picture"))
        assert json.loads(capsys.readouterr().out)["method"] == method
        assert Path(picture).exists() and f"](pictures/{picture})" in text
    assert {words[words.index("--chunks.method") + 1] for words in named} == {*METHODS} - {"places"}
