// What the reader does: zoom, pan, hover, light up chunks, choose a panel.

function show(start, stop) {
  const least = panel.duration * 1e-6 || 1e-9, most = panel.duration || 1;
  const span = Math.min(Math.max(stop - start, least), most);
  from = Math.min(Math.max(start, 0), most - span);
  to = from + span;
  element("range").textContent = [from, to].map((time) => formatStep(time, span / 1e3, to)).join(" to ");
  redraw();
}

function zoom(factor, x = (LEFT + width() - right()) / 2) {
  const time = Math.min(Math.max(toTime(x), from), to);
  show(time - (time - from) / factor, time + (to - time) / factor);
}

// Light up some chunks alone, or all of them again.
function light(chunks) {
  const same = lit !== null && chunks.length === lit.size && chunks.every((chunk) => lit.has(chunk));
  lit = same ? null : new Set(chunks);
  for (const button of document.querySelectorAll("#legend button")) {
    const own = lit !== null && JSON.parse(button.dataset.chunks).some((chunk) => lit.has(chunk));
    button.classList.toggle("dim", lit !== null && !own);
    button.setAttribute("aria-pressed", String(own));
  }
  redraw();
}

// The chunks of the sequence that a chunk is cut from; or it alone.
function together(chunk) {
  const { of } = panel.chunks[chunk];
  const all = panel.chunks.map((_, other) => other);
  return of === null ? [chunk] : all.filter((other) => panel.chunks[other].of === of);
}

function hover(event) {
  const box = canvas.getBoundingClientRect();
  const found = lookUp(event.clientX - box.left, event.clientY - box.top);
  const bar = found?.bar ?? null;
  if (bar !== hovered) { hovered = bar; redraw(); }
  if (!found) { tooltip.hidden = true; return; }
  const rows = bar ? barRows(bar, found.rank) : memoryRows(found);
  tooltip.replaceChildren(Object.assign(document.createElement("b"), { textContent: rows[0] }));
  const table = tooltip.appendChild(document.createElement("table"));
  for (const [name, value] of rows.slice(1)) {
    const row = table.insertRow();
    row.insertCell().textContent = name;
    row.insertCell().textContent = value;
  }
  tooltip.hidden = false;
  const { offsetWidth, offsetHeight } = tooltip;
  const x = event.clientX + 16 + offsetWidth > innerWidth ? event.clientX - offsetWidth - 12 : event.clientX + 16;
  const y = event.clientY + 16 + offsetHeight > innerHeight ? event.clientY - offsetHeight - 12 : event.clientY + 16;
  tooltip.style.left = `${Math.max(4, x)}px`;
  tooltip.style.top = `${Math.max(4, y)}px`;
}

function barRows(bar, rank) {
  const [start, stop, , chunk, , , action, device, host] = bar;
  const rows = [describe(bar), ["action", action], ["on", rank.name.replaceAll("\n", ", ")],
    ["from", formatTime(start)], ["to", formatTime(stop)], ["takes", formatTime(stop - start)]];
  if (chunk >= 0) rows.push(["chunk", panel.chunks[chunk].words]);
  if (panel.highest[0]) rows.push(["device", formatBytes(device)]);
  if (panel.highest[1]) rows.push(["host", formatBytes(host)]);
  return rows;
}

function memoryRows({ rank, time }) {
  const rows = ["Memory in use", ["on", rank.name.replaceAll("\n", ", ")], ["at", formatTime(time)]];
  for (const { times, parts: bytes } of [rank.device, rank.lower]) {
    const at = Math.max(0, lastAt(times, time)), entries = Object.entries(bytes).reverse();
    if (entries.length > 1) rows.push(["sum", formatBytes(entries.reduce((sum, [, own]) => sum + own[at], 0))]);
    for (const [part, own] of entries) if (own[at]) rows.push([part === "in use" ? "device" : panel.parts[part][0], formatBytes(own[at])]);
  }
  if (rank.limit) rows.push(["limit", formatBytes(rank.limit)]);
  return rows;
}

function openPanel(index) {
  panel = data[index];
  lit = hovered = null;
  [...element("panels").children].forEach((tab, i) => tab.setAttribute("aria-pressed", String(i === index)));
  element("title").textContent = panel.title;
  element("lines").replaceChildren(...panel.lines.map((line) =>
    Object.assign(document.createElement("p"), { textContent: line })));
  readColours();
  fillLegend();
  view.scrollTop = 0;
  show(0, panel.duration);
}

function fillLegend() {
  element("legend").replaceChildren(...panel.legend.filter((entries) => entries.length).map((entries) => {
    const line = document.createElement("div");
    line.append(...entries.map(legendItem));
    return line;
  }));
}

function legendItem({ text, colours: own, kind, dashed, chunks }) {
  const item = document.createElement(chunks.length ? "button" : "span");
  if (own.length) {
    const swatch = document.createElement("span");
    swatch.className = dashed ? "swatch line" : "swatch";
    if (dashed) swatch.style.borderTop = `2px dashed ${colours.limit}`;
    else swatch.style.background = kind ? pattern(kind, own[0]) : text === "idle" ? colours.lane : stripes(own);
    item.append(swatch);
  }
  item.append(text);
  if (chunks.length) {
    item.dataset.chunks = JSON.stringify(chunks);
    item.onclick = () => light(chunks);
  }
  return item;
}

function stripes(own) {
  const stops = own.map((colour, i) => `${colour} ${(100 * i) / own.length}% ${(100 * (i + 1)) / own.length}%`);
  return `linear-gradient(90deg, ${stops.join(", ")})`;
}

function pattern(kind, colour) {
  const { plain } = look(kind, colour), line = mix(colour, 0.25);
  if (kind === "recompute") return `repeating-linear-gradient(-45deg, ${line} 0 1.5px, ${plain} 1.5px 5px)`;
  if (kind === "rebuild") return `radial-gradient(${line} 1.6px, ${plain} 1.8px) 0 0 / 6px 6px`;
  return plain;
}

function listen() {
  let grip = null, moved = false;
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.shiftKey) view.scrollTop += event.deltaY;
    else zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0016)), event.clientX - canvas.getBoundingClientRect().left);
    hover(event);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    grip = { x: event.clientX, y: event.clientY, from, to, top: view.scrollTop };
    moved = false;
    canvas.setPointerCapture?.(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!grip) { hover(event); return; }
    const right = event.clientX - grip.x, down = event.clientY - grip.y;
    if (Math.hypot(right, down) > 4) moved = true;
    if (!moved) return;
    canvas.classList.add("moving");
    tooltip.hidden = true;
    show(grip.from - right / scale(), grip.to - right / scale());
    view.scrollTop = grip.top - down;
  });
  canvas.addEventListener("pointerup", (event) => {
    const clicked = grip && !moved;
    grip = null;
    canvas.classList.remove("moving");
    if (clicked) {
      const box = canvas.getBoundingClientRect();
      const found = lookUp(event.clientX - box.left, event.clientY - box.top);
      if (found?.bar && found.bar[3] >= 0) light(together(found.bar[3]));
      else if (lit !== null) light([...lit]);
    }
  });
  canvas.addEventListener("pointerleave", () => { tooltip.hidden = true; hovered = null; redraw(); });
  canvas.addEventListener("dblclick", () => show(0, panel.duration));
  view.addEventListener("scroll", redraw);
  view.addEventListener("keydown", (event) => {
    const step = (to - from) / 5;
    const keys = { "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5),
      "0": () => show(0, panel.duration), ArrowLeft: () => show(from - step, to - step),
      ArrowRight: () => show(from + step, to + step) };
    if (keys[event.key]) { keys[event.key](); event.preventDefault(); }
  });
  element("zoom-in").onclick = () => zoom(1.5);
  element("zoom-out").onclick = () => zoom(1 / 1.5);
  element("fit").onclick = () => show(0, panel.duration);
  new ResizeObserver(redraw).observe(view);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); fillLegend(); redraw(); });
}

data.forEach(({ name }, index) => {
  const tab = Object.assign(document.createElement("button"), { textContent: name });
  tab.onclick = () => openPanel(index);
  element("panels").append(tab);
});
element("panels").hidden = data.length < 2;
listen();
openPanel(0);
