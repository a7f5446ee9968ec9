// What the reader does: zoom, pan, hover, light up a sequence, choose a panel.

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

function light(owner) {
  lit = lit === owner ? null : owner;
  for (const button of element("owner-legend").querySelectorAll("button")) {
    const own = Number(button.dataset.owner) === lit;
    button.classList.toggle("dim", lit !== null && !own);
    button.setAttribute("aria-pressed", String(own));
  }
  redraw();
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
  const rows = [describe(bar), ["action", action], ["on", rank.name.replace("\n", ", ")],
    ["from", formatTime(start)], ["to", formatTime(stop)], ["takes", formatTime(stop - start)]];
  if (chunk >= 0) rows.push(["chunk", panel.chunks[chunk]]);
  if (panel.highest) rows.push(["device", formatBytes(device)]);
  if (panel.hasHost) rows.push(["host", formatBytes(host)]);
  return rows;
}

function memoryRows({ rank, time }) {
  const at = (points) => points[Math.max(0, lastAt(points, time))]?.[1] ?? 0;
  const rows = ["Memory in use", ["on", rank.name.replace("\n", ", ")], ["at", formatTime(time)],
    ["device", formatBytes(at(rank.device))]];
  if (rank.limit) rows.push(["limit", formatBytes(rank.limit)]);
  if (panel.hasHost) rows.push(["host", formatBytes(at(rank.host))]);
  return rows;
}

function openPanel(index) {
  panel = data[index];
  lit = hovered = null;
  [...element("panels").children].forEach((tab, i) => tab.setAttribute("aria-pressed", String(i === index)));
  for (const name of ["title", "batch", "shares"]) element(name).textContent = panel[name];
  readColours();
  fillLegends();
  view.scrollTop = 0;
  show(0, panel.duration);
}

function fillLegends() {
  const entry = (tag, words, background, line) => {
    const item = document.createElement(tag), swatch = document.createElement("span");
    swatch.className = line ? "swatch line" : "swatch";
    if (line) swatch.style.borderTop = `2px ${line} ${background}`;
    else swatch.style.background = background;
    item.append(swatch, words);
    return item;
  };
  const shades = panel.kinds.map(([kind, words]) =>
    entry("span", words, kind in colours ? colours[kind] : shade(kind)));
  shades.push(entry("span", "idle", colours.lane));
  if (panel.hasHost) shades.push(entry("span", "host memory", colours.host, "solid"));
  if (panel.ranks.some((rank) => rank.limit))
    shades.push(entry("span", "limit of device memory", colours.limit, "dashed"));
  element("shade-legend").replaceChildren(...shades);
  const owners = panel.shownOwners.map((owner) => {
    const button = entry("button", panel.owners[owner].name, panel.owners[owner].colour);
    button.dataset.owner = owner;
    button.onclick = () => light(owner);
    return button;
  });
  if (panel.moreOwners) owners.push(Object.assign(document.createElement("span"), { textContent: panel.moreOwners }));
  element("owner-legend").replaceChildren(...owners);
}

function shade(kind) {
  const colour = "#7b8798", plain = mix(colour, LIGHTER[kind] ?? 0), line = mix(colour, 0.25);
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
      if (found?.bar && found.bar[3] >= 0) light(found.bar[5]);
      else if (lit !== null) light(lit);
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
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); fillLegends(); redraw(); });
}

data.forEach(({ name }, index) => {
  const tab = Object.assign(document.createElement("button"), { textContent: name });
  tab.onclick = () => openPanel(index);
  element("panels").append(tab);
});
element("panels").hidden = data.length < 2;
listen();
openPanel(0);
