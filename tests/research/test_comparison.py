"""The comparison of all methods: settings add up, and a broken promise is an exit status."""

import json

import pytest
from comparison import ALL, fingerprint, load, main, save, searches

pytestmark = pytest.mark.nightly


def answers(name, *, ours=1.0, best=1.1, bound=0.9):
    """Of every search of a setting; the best published method is FlexSP."""
    found = {}
    for asked in searches(ALL[name]):
        seconds = {"furlong": ours, "bound": bound, "FlexSP": best, "published": best}
        method = "FlexSP" if asked == "published" else asked
        found[asked] = {"s": seconds.get(asked, 2.0), "method": method, "dials": f"{method}: it",
                        "is_pool": method == "FlexSP", "cpu_s": 1.0}  # fmt: skip
    return found


def ran(tmp_path, results, *settings):
    """(exit status, page) with these results there, so that no search is left to be made."""
    save(tmp_path / "results.json", results, fingerprint())
    page = tmp_path / "page.md"
    files = ["--results", str(tmp_path / "results.json"), "--page", str(page)]
    status = main(["--jobs", "1", *files, "--settings", *settings])
    return status, page.read_text() if page.exists() else ""


def test_settings_add_up(tmp_path):
    results = {name: answers(name) for name in ("github-32", "wikipedia-8")}
    status, page = ran(tmp_path, results, "wikipedia-8")
    assert status == 0
    assert "| github | GPT-13B, 32 A800" in page and "**1.1**" in page and "9.1%" in page
    assert "| wikipedia | Qwen2.5-7B with LoRA 16, 8 H100" in page
    assert "**Not run** of 31 settings: lmsys-chunkflow-32, " in page
    assert json.loads((tmp_path / "results.json").read_text())["results"] == results


def test_other_code_finds_anew(tmp_path):
    found = {"github-32": answers("github-32")}
    save(tmp_path / "results.json", found, "this")
    assert load(tmp_path / "results.json", "this") == found
    assert load(tmp_path / "results.json", "other") == load(tmp_path / "none.json", "this") == {}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ({"ours": 1.2}, "FlexSP takes 1.1 s, ours 1.2 s"),
        ({"bound": 1.15}, "the pool of FlexSP takes 1.1 s, its bound 1.15 s"),
    ],
)
def test_a_broken_promise_is_an_exit_status(tmp_path, capsys, seconds, words):
    name = "github-8" if "bound" in seconds else "github-32"
    status, _ = ran(tmp_path, {name: answers(name, **seconds)})
    assert status == 1 and f"promise broken: {name}: {words}" in capsys.readouterr().out
