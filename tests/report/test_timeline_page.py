"""The HTML page: self-contained, and in a real browser it zooms, pans and explains every action."""

import html
import json
import re
import shutil
import subprocess

import pytest
from papers.chunkflow_plan import plan_chunkflow

from furlong.cost.devices.hardware import hardware
from furlong.cost.memory.training import Training
from furlong.cost.model import CostModel
from furlong.cost.shapes.known_models import model_shape
from furlong.plan.values import Backward, Forward, Recompute
from furlong.planners.options import ChunkOptions
from furlong.report.pictures.scene import Panel
from furlong.report.pictures.timeline import save_timelines
from furlong.report.plan_report import report_plan
from furlong.simulate.clock import simulate
from furlong.simulate.unit_costs import UnitCosts

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)


class Linked(UnitCosts):
    def transfer_s(self, action, rank):
        return 0.5


def bytes_in_use(plan):
    return [[(1 << 30) * (1 + i % 5) for i in range(len(own))] for own in plan.actions]


def panel(title="a </script> title", num_stages=3):
    options = ChunkOptions(size=4, keep="kv", hybrid=False)
    plan = plan_chunkflow((9, 1, 2, 3, 1), options, stages=(1,) * num_stages)
    timeline = simulate(plan, Linked(plan), device_bytes=bytes_in_use(plan))
    return Panel(timeline, plan, title, (6 << 30,) * num_stages, "units")


def test_needs_no_network_and_no_placeholder_is_left(tmp_path):
    path = tmp_path / "a.html"
    save_timelines([panel()], path)
    text = path.read_text()
    assert not re.search(r"(src|href|url|@import|fetch|XMLHttp|WebSocket)\s*[=(]", text)
    assert not re.search(r"https?://", text)
    assert not re.search(r"\{\{\w+\}\}", text)
    # the title of a plan may be anything; each of the two script elements ends once
    assert text.count("</script>") == 2


@pytest.mark.parametrize(
    "name",
    ["a<!--b", "</script>", "<script>", "<!--<script>", "<img src=x onerror=alert(1)>", 'a"b\\c',
     "\u2028", "a & b", "]]>", "{{data}}", "<" * 50],
)  # fmt: skip
def test_any_name_is_data_and_comes_back_whole(tmp_path, name):
    path = tmp_path / "a.html"
    save_timelines([panel(name), panel("second")], path)
    text = path.read_text(encoding="utf-8")
    found = re.search(r'<script [^>]*id="data"[^>]*>(.*?)</script>', text, re.DOTALL)
    assert "<" not in found[1]
    first, second = json.loads(found[1])
    assert first["name"] == name
    assert first["title"].startswith(f"{name}   ·   bubble")
    assert second["name"] == "second"
    assert text.count("<script") == text.count("</script>") == 2
    assert f"<title>{html.escape(name)}   ·   bubble" in text


def test_the_page_has_the_parts_of_memory_and_the_colours_of_chunks(tmp_path):
    model = CostModel(model_shape("Qwen2.5-0.5B"), hardware("RTX4090"), Training())
    plan = plan_chunkflow([9000, 900, 800, 3000, 4000], ChunkOptions(size=4096), stages=(24,))
    report = report_plan(plan, model)
    save_timelines([report.panel("one rank")], tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    (page,) = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    (rank,) = page["ranks"]
    sums = [sum(row) for row in zip(*rank["device"]["parts"].values(), strict=True)]
    assert max(sums) == rank["device"]["peak"] == report.peak_bytes
    assert len(sums) == len(rank["device"]["times"])
    assert set(rank["device"]["parts"]) <= set(page["parts"])
    by_sequence = {}
    for chunk in page["chunks"]:
        by_sequence.setdefault(chunk["of"], []).append(chunk["colour"])
    assert by_sequence.keys() == {0, None}
    assert all(len(set(colours)) == len(colours) for colours in by_sequence.values())
    # what lights up together is what a legend's entry names
    lit = {chunk for entry in page["legend"][1] for chunk in entry["chunks"]}
    assert lit == set(range(len(plan.chunks)))


ACT = """
const found = { errors: window.errors, tooltips: {} };
const canvas = document.getElementById("canvas"), tooltip = document.getElementById("tooltip");
const view = document.getElementById("view");
const text = (id) => document.getElementById(id).textContent;
const box = () => canvas.getBoundingClientRect();
function point(kind, x, y, Event = PointerEvent, more = {}) {
  canvas.dispatchEvent(new Event(kind, { clientX: box().left + x, clientY: box().top + y,
    bubbles: true, cancelable: true, pointerId: 1, ...more }));
}
function look(y) {
  const seen = [];
  for (let x = 100; x < box().width; x += 3) {
    point("pointermove", x, y);
    const words = tooltip.hidden ? null : tooltip.innerText;
    if (words && !seen.includes(words)) seen.push(words);
  }
  return seen;
}
function ink() {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  return new Set(new Uint32Array(pixels.buffer)).size;
}
try {
  draw();
  found.title = text("title");
  found.colours = ink();
  found.range = text("range");
  found.cells = look(AXIS + 15);
  found.links = look(AXIS + cells + 3);
  found.memory = look(AXIS + laneHeight() + 20);
  point("wheel", 400, 45, WheelEvent, { deltaY: -400 });
  draw();
  found.zoomed = text("range");
  point("pointerdown", 400, 45); point("pointermove", 300, 45); point("pointerup", 300, 45);
  draw();
  found.moved = text("range");
  for (const key of ["ArrowLeft", "+", "-"]) {
    view.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    draw();
    found[key] = text("range");
  }
  point("dblclick", 300, 45, MouseEvent);
  draw();
  found.fitted = text("range");
  document.getElementById("zoom-in").click();
  draw();
  found.button = text("range");
  document.getElementById("fit").click();
  const owner = document.querySelector("#legend button");
  owner.click();
  found.lit = owner.getAttribute("aria-pressed");
  owner.click();
  const tabs = [...document.querySelectorAll("#panels button")];
  found.tabs = tabs.map((tab) => tab.textContent);
  if (tabs.length) tabs[1].click();
  draw();
  found.second = text("title");
  found.used = rowTop(panel.ranks.length) / view.clientHeight;
  const report = document.createElement("pre");
  report.id = "report";
  report.textContent = JSON.stringify(found);
  document.body.append(report);
} catch (error) { console.error(error.stack); }
"""


def in_browser(path, tmp_path):
    """What the page reports after the acts, and what its console said."""
    watch = "<script>window.errors = []; onerror = (m) => { errors.push(m); };</script>"
    text = path.read_text().replace("<head>", "<head>" + watch, 1)
    text = text.replace("</body>", f"<script type='module'>{ACT}</script></body>")
    acted = tmp_path / "acted.html"
    acted.write_text(text)
    finished = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,800",
            "--enable-logging=stderr", "--virtual-time-budget=4000", "--dump-dom", acted.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    reports = re.findall(r'<pre id="report">(.*?)</pre>', finished.stdout, flags=re.DOTALL)
    assert reports, finished.stderr
    console = [line for line in finished.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(reports[0])), console


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_zoom_pan_and_tooltips_in_a_browser(tmp_path):
    path = tmp_path / "a.html"
    save_timelines([panel(), panel("another", num_stages=1)], path)
    found, console = in_browser(path, tmp_path)
    assert (found["errors"], console) == ([], [])
    assert found["title"].startswith("a </script> title   ·   bubble")
    assert found["colours"] > 50
    duration = panel().timeline.duration_s
    assert found["range"] == found["fitted"] == f"0 units to {duration:g} units"

    cells = "\n".join(found["cells"])
    assert "Forward of chunk 0, stage 0; keeps its input and K,V" in cells
    assert "split, 4 tokens: 0:4-8" in cells
    # every cell of the first rank has a tooltip of its own
    plan = panel().plan
    cells_of_rank = [a for a in plan.actions[0] if isinstance(a, (Forward, Recompute, Backward))]
    assert len(found["cells"]) == len(cells_of_rank)
    links = "\n".join(found["links"])
    assert "Send the activation of chunk 0, stage 0 to rank 1" in links
    assert "Receive the gradient of chunk 2, stage 1 from rank 1" in links
    assert any("Memory in use" in words and "6 GiB" in words for words in found["memory"])

    steps = ("range", "zoomed", "moved", "ArrowLeft", "+")
    assert len({found[step] for step in steps}) == len(steps)
    start, stop = (float(t) for t in re.findall(r"([\d.]+) units", found["zoomed"]))
    assert 0 < start < stop < duration
    moved = [float(t) for t in re.findall(r"([\d.]+) units", found["moved"])]
    assert moved[0] > start
    assert moved[1] - moved[0] == pytest.approx(stop - start, abs=0.1)
    assert found["-"] == found["ArrowLeft"]
    assert found["button"] != found["fitted"]
    assert found["lit"] == "true"
    assert found["tabs"] == ["a </script> title", "another"]
    assert found["second"].startswith("another")
    assert 0.9 < found["used"] <= 1  # one rank takes the height that there is
