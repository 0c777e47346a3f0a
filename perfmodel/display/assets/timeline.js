"use strict";
// Events come sorted by device, stream and start; a lane is one stream of one device.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const decode = (text, Type) => new Type(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  const start = decode(data.start, Float64Array), duration = decode(data.duration, Float64Array);
  const device = decode(data.device, Int32Array), stream = decode(data.stream, Uint8Array);
  const kind = decode(data.kind, Uint8Array), stage = decode(data.stage, Int32Array);
  const microBatch = decode(data.micro_batch, Int32Array), critical = decode(data.critical, Uint8Array);
  const inside = decode(data.inside, Int32Array);
  const count = start.length, end = data.end_s;
  const memory = data.memory.map((line) => ({
    colour: line.colour, time: decode(line.time, Float64Array), bytes: decode(line.bytes, Float64Array),
  }));
  const $ = (id) => document.getElementById(id);
  const rows = $("rows"), pen = rows.getContext("2d"), tip = $("tip");
  const memoryCanvas = $("memory"), memoryPen = memoryCanvas.getContext("2d");
  const GUTTER = 74, AXIS = 22, GAP = 0.08, COMPUTE_SHARE = 0.6, GIB = 2 ** 30;
  const BLOCK_PX = 5, KERNELS_PX = 40; // widths of a block from which it, and the kernels in it, are drawn

  const lanes = [];
  const usedStreams = [...new Set(stream)].sort((a, b) => a - b);
  const sides = usedStreams.filter((s) => s !== 0);
  for (let i = 0; i < count; i++) {
    const last = lanes[lanes.length - 1];
    if (last && last.device === device[i] && last.stream === stream[i]) {
      last.to = i + 1;
      last.longest = Math.max(last.longest, duration[i]);
    } else {
      lanes.push({ device: device[i], stream: stream[i], from: i, to: i + 1, longest: duration[i] });
    }
  }
  const top0 = GAP / 2, computeHeight = sides.length ? COMPUTE_SHARE : 1 - GAP;
  const sideHeight = sides.length ? (1 - GAP - COMPUTE_SHARE) / sides.length : 0;
  for (const lane of lanes) {
    const side = sides.indexOf(lane.stream);
    lane.top = lane.device + (side < 0 ? top0 : top0 + COMPUTE_SHARE + side * sideHeight);
    lane.height = side < 0 ? computeHeight : sideHeight * 0.85;
  }

  const view = { from: 0, to: end, scroll: 0, row: 20, width: 0, height: 0 };
  const matches = new Uint8Array(count);
  let searching = false, found = 0, current = -1, hovered = -1, drawn = 0, pending = false;

  const x = (t) => GUTTER + ((t - view.from) / (view.to - view.from)) * (view.width - GUTTER);
  const timeAt = (px) => view.from + ((px - GUTTER) / (view.width - GUTTER)) * (view.to - view.from);
  const y = (row) => AXIS + row * view.row - view.scroll;
  const label = (i) => data.kinds[kind[i]].label + (microBatch[i] >= 0 ? " " + microBatch[i] : "");
  const seconds = (s) => {
    for (const [scale, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]])
      if (Math.abs(s) >= scale) return Number((s / scale).toPrecision(4)) + " " + unit;
    return s === 0 ? "0 s" : Number((s / 1e-9).toPrecision(3)) + " ns";
  };

  function firstAfter(lane, t) { // first event of the lane that starts at or after t
    let lo = lane.from, hi = lane.to;
    while (lo < hi) {
      const mid = (lo + hi) >> 1;
      if (start[mid] < t) lo = mid + 1; else hi = mid;
    }
    return lo;
  }

  function emphasis(i) { // 0: in the background, 1: as it is
    return (!searching || matches[i]) && (!$("critical").checked || critical[i]) ? 1 : 0;
  }

  function box(i, left, width, lane) {
    pen.globalAlpha = emphasis(i) ? 1 : 0.15;
    pen.fillStyle = data.kinds[kind[i]].colour;
    pen.fillRect(left, y(lane.top), width, lane.height * view.row);
  }

  function* pieces(i, withKernels = () => true) { // blocks of a pass, each before its kernels: [label, from, to, depth, communicates]
    let at = start[i];
    for (const b of inside[i] < 0 ? [] : data.passes[inside[i]]) {
      const [name, span, events] = data.blocks[b];
      yield [data.names[name], at, at + span, 0, 0];
      let inner = at;
      for (const [kernel, time, n, communicates] of withKernels(span) ? events : []) {
        yield [(n === 1 ? "" : n + " \u00d7 ") + data.names[kernel], inner, inner + time, 1, communicates];
        inner += time;
      }
      at += span;
    }
  }

  function drawInside(i, lane) { // in the lower part of a wide pass; whether any was drawn
    const scale = (view.width - GUTTER) / (view.to - view.from), half = (lane.height * view.row) / 2, top = y(lane.top) + half;
    if (inside[i] < 0 || half < 6 || (duration[i] * scale) / data.passes[inside[i]].length < BLOCK_PX) return false;
    let k = 0;
    for (const [name, from, to, depth, communicates] of pieces(i, (span) => span * scale >= KERNELS_PX)) {
      const left = Math.max(GUTTER, x(from)), width = Math.min(view.width, x(to)) - left;
      if (width < 1) continue;
      pen.fillStyle = communicates ? "#E69F00" : depth ? `rgba(0,0,0,${k++ % 2 ? 0.34 : 0.2})` : "rgba(255,255,255,0.45)";
      pen.fillRect(left, top, width - (width > 3 ? 1 : 0), half - 1);
      const wide = depth || (to - from) * scale < KERNELS_PX;
      if (!wide || width < 5.6 * name.length + 6) continue;
      pen.fillStyle = "#000";
      pen.fillText(name, left + width / 2, top + half / 2);
    }
    return true;
  }

  function drawLane(lane) {
    const x0 = y(lane.top), x1 = x0 + lane.height * view.row;
    if (x1 < AXIS || x0 > view.height) return;
    // events narrower than a pixel: of each pixel one, an emphasised one before a longer one
    let pixel = -1, chosen = -1;
    const flush = () => {
      if (chosen < 0) return;
      box(chosen, pixel, 1, lane);
      chosen = -1;
    };
    for (let i = firstAfter(lane, view.from - lane.longest); i < lane.to && start[i] <= view.to; i++) {
      const left = x(start[i]), width = x(start[i] + duration[i]) - left;
      if (left + width < GUTTER) continue;
      drawn++;
      if (width < 1) {
        const at = Math.floor(left);
        if (at !== pixel) { flush(); pixel = at; }
        if (chosen < 0 || emphasis(i) - emphasis(chosen) + Math.sign(duration[i] - duration[chosen]) / 2 > 0) chosen = i;
        continue;
      }
      flush();
      const from = Math.max(left, GUTTER);
      box(i, from, left + width - from - (width > 3 ? 1 : 0), lane);
      const opened = emphasis(i) && drawInside(i, lane);
      const text = microBatch[i] >= 0 && lane.stream === 0 ? String(microBatch[i]) : "";
      if (text && lane.height * view.row >= 9 && width > 6.5 * text.length + 4 && left >= GUTTER) {
        pen.fillStyle = data.kinds[kind[i]].text;
        pen.fillText(text, left + width / 2, y(lane.top + lane.height / (opened ? 4 : 2)));
      }
      if (critical[i] && $("critical").checked) {
        pen.fillStyle = "#000";
        pen.fillRect(from, x1 - 3, left + width - from, 3);
      }
    }
    flush();
    pen.globalAlpha = 1;
  }

  function outline(i, colour) {
    const lane = lanes.find((one) => i >= one.from && i < one.to);
    const left = Math.max(x(start[i]), GUTTER), right = x(start[i] + duration[i]);
    if (right < GUTTER) return;
    pen.strokeStyle = colour; pen.lineWidth = 2;
    pen.strokeRect(left, y(lane.top), Math.max(2, right - left), lane.height * view.row);
  }

  function ticks(draw) {
    const raw = (view.to - view.from) / Math.max(2, (view.width - GUTTER) / 110);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 5, 10].find((m) => m * power >= raw);
    for (let k = Math.ceil(view.from / step); k * step <= view.to; k++) draw(k * step);
  }

  function sized(canvas, context) {
    const ratio = window.devicePixelRatio || 1, box = canvas.getBoundingClientRect();
    if (canvas.width !== Math.round(box.width * ratio) || canvas.height !== Math.round(box.height * ratio)) {
      canvas.width = Math.round(box.width * ratio);
      canvas.height = Math.round(box.height * ratio);
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, box.width, box.height);
    return box;
  }

  function draw() {
    pending = false;
    const size = sized(rows, pen);
    if (!size.width) return;
    view.width = size.width; view.height = size.height;
    view.row = Math.max(14, Math.min(64, (view.height - AXIS - 4) / data.devices));
    view.scroll = Math.max(0, Math.min(view.scroll, data.devices * view.row + AXIS + 4 - view.height));
    drawn = 0;
    pen.font = "10px system-ui, sans-serif"; pen.textAlign = "center"; pen.textBaseline = "middle";
    pen.strokeStyle = "#eee"; pen.lineWidth = 1;
    ticks((t) => { pen.beginPath(); pen.moveTo(x(t), AXIS); pen.lineTo(x(t), view.height); pen.stroke(); });
    for (const lane of lanes) drawLane(lane);
    if (current >= 0) outline(current, "#D55E00");
    if (hovered >= 0) outline(hovered, "#000");
    pen.fillStyle = "#fff"; pen.fillRect(0, 0, view.width, AXIS); pen.fillRect(0, 0, GUTTER, view.height);
    pen.fillStyle = "#444";
    ticks((t) => pen.fillText(seconds(t), Math.min(x(t), view.width - 20), AXIS / 2));
    pen.textAlign = "right";
    const every = Math.max(1, Math.ceil(12 / view.row));
    for (let d = 0; d < data.devices; d += every)
      if (y(d + 0.5) > AXIS + 4) pen.fillText(`rank ${d}`, GUTTER - 6, y(d + 0.5));
    drawMemory();
  }

  function drawMemory() {
    if (!memory.length) return;
    const size = sized(memoryCanvas, memoryPen), low = size.height - 6, high = 8;
    let most = data.capacity_bytes || 0;
    for (const line of memory) for (const b of line.bytes) if (b > most) most = b;
    const yOf = (bytes) => low - (bytes / most) * (low - high);
    memory.scale = { yOf, most };
    for (const line of memory) {
      const back = hovered >= 0 && memory[device[hovered]] !== line;
      memoryPen.globalAlpha = back ? 0.25 : 1;
      memoryPen.strokeStyle = line.colour; memoryPen.lineWidth = back ? 1 : 1.5;
      memoryPen.beginPath();
      let lastX = -1, lowest = 0, highest = 0, level = line.bytes[0];
      memoryPen.moveTo(x(view.from), yOf(level));
      for (let k = 0; k < line.time.length && line.time[k] <= view.to; k++) {
        const px = Math.max(GUTTER, Math.round(x(line.time[k])));
        const next = yOf(line.bytes[k]);
        if (px !== lastX) { // one vertical stroke per pixel, over all levels within it
          memoryPen.lineTo(px, yOf(level));
          lowest = highest = yOf(level); lastX = px;
        }
        if (next < highest || next > lowest) memoryPen.lineTo(px, next);
        lowest = Math.max(lowest, next); highest = Math.min(highest, next);
        level = line.bytes[k];
        memoryPen.lineTo(px, next);
      }
      memoryPen.lineTo(x(view.to), yOf(level));
      memoryPen.stroke();
    }
    memoryPen.globalAlpha = 1;
    memoryPen.clearRect(0, 0, GUTTER, size.height);
    memoryPen.fillStyle = "#444"; memoryPen.font = "10px system-ui, sans-serif";
    memoryPen.textAlign = "right"; memoryPen.textBaseline = "middle";
    memoryPen.fillText((most / GIB).toFixed(0) + " GiB", GUTTER - 6, high + 2);
    memoryPen.fillText("memory", GUTTER - 6, (low + high) / 2);
    memoryPen.fillText("0", GUTTER - 6, low - 2);
    if (data.capacity_bytes) {
      memoryPen.strokeStyle = "#000"; memoryPen.setLineDash([5, 4]); memoryPen.lineWidth = 1;
      memoryPen.beginPath();
      memoryPen.moveTo(GUTTER, yOf(data.capacity_bytes)); memoryPen.lineTo(size.width, yOf(data.capacity_bytes));
      memoryPen.stroke(); memoryPen.setLineDash([]);
    }
  }

  function redraw() {
    if (!pending) { pending = true; requestAnimationFrame(draw); }
  }

  function hit(px, py) { // event under a point of the canvas, -1 for none
    if (px < GUTTER || py < AXIS) return -1;
    const row = (py - AXIS + view.scroll) / view.row, slack = timeAt(px + 2) - timeAt(px), t = timeAt(px);
    for (const lane of lanes) {
      if (row < lane.top || row > lane.top + lane.height) continue;
      let best = -1, distance = slack;
      for (let i = firstAfter(lane, t + slack) - 1; i >= lane.from && start[i] >= t - lane.longest - slack; i--) {
        const away = Math.max(0, start[i] - t, t - start[i] - duration[i]);
        if (away < distance || (away === 0 && best < 0)) { best = i; distance = away; }
        if (away === 0) break;
      }
      if (best >= 0) return best;
    }
    return -1;
  }

  function memoryAt(line, t) {
    let lo = 0, hi = line.time.length;
    while (lo < hi) { const mid = (lo + hi) >> 1; if (line.time[mid] <= t) lo = mid + 1; else hi = mid; }
    return line.bytes[Math.max(0, lo - 1)];
  }

  function showTip(text, event) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(0, Math.min(event.clientX + 14, innerWidth - box.width - 4)) + "px";
    tip.style.top = Math.max(0, event.clientY + 14 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 14) + "px";
  }

  function describe(i, t = NaN) {
    const lines = [label(i), `${seconds(duration[i])}, from ${seconds(start[i])} to ${seconds(start[i] + duration[i])}`];
    lines.push(`rank ${device[i]}, ${data.streams[stream[i]]}` + (stage[i] >= 0 ? `, stage ${stage[i]}` : ""));
    if (microBatch[i] >= 0) lines.push(`micro-batch ${microBatch[i]}`);
    if (critical[i]) lines.push("on the critical path");
    for (const [name, from, to] of pieces(i)) if (t >= from && t < to) lines.push(`${name}: ${seconds(to - from)}`);
    return lines.join("\n");
  }

  function zoom(factor, at) {
    const least = Math.max(end * 1e-9, 1e-12);
    const span = Math.min(end, Math.max(least, (view.to - view.from) * factor));
    const share = (at - view.from) / (view.to - view.from);
    show(at - share * span, at - share * span + span);
  }

  function show(from, to) {
    const span = Math.min(end, to - from);
    view.from = Math.max(0, Math.min(from, end - span));
    view.to = view.from + span;
    tip.hidden = true; // what it told has moved
    redraw();
  }

  function goTo(i) {
    current = i;
    const span = Math.min(end, Math.max(duration[i] * 12, (view.to - view.from) / 1e3));
    if (duration[i] / (view.to - view.from) < 0.02 || start[i] < view.from || start[i] + duration[i] > view.to)
      show(start[i] + duration[i] / 2 - span / 2, start[i] + duration[i] / 2 + span / 2);
    const middle = AXIS + (device[i] + 0.5) * view.row;
    if (middle - view.scroll < AXIS || middle - view.scroll > view.height) view.scroll = middle - view.height / 2;
    redraw();
  }

  function search(text) {
    const terms = text.toLowerCase().split(/\s+/).filter(Boolean);
    searching = terms.length > 0; found = 0; current = -1;
    const tests = terms.map((term) => {
      const [name, value] = term.split(":");
      const column = { mb: microBatch, "micro-batch": microBatch, device, rank: device, stage }[name];
      if (value !== undefined && column) return (i) => column[i] === Number(value);
      if (name === "stream" && value !== undefined) return (i) => data.streams[stream[i]].includes(value);
      if (/^\d+$/.test(term)) return (i) => microBatch[i] === Number(term);
      const kinds = data.kinds.map((k) => k.label.toLowerCase().includes(term));
      return (i) => kinds[kind[i]];
    });
    for (let i = 0; i < count; i++) {
      matches[i] = searching && tests.every((test) => test(i)) ? 1 : 0;
      found += matches[i];
    }
    $("found").textContent = searching ? `${found.toLocaleString("en")} of ${count.toLocaleString("en")}` : "";
    redraw();
  }

  function next() {
    if (!found) return;
    let best = -1, first = -1; // in order of time
    for (let i = 0; i < count; i++) {
      if (!matches[i]) continue;
      const later = current < 0 || start[i] > start[current] || (start[i] === start[current] && i > current);
      if (later && (best < 0 || start[i] < start[best])) best = i;
      if (first < 0 || start[i] < start[first]) first = i;
    }
    goTo(best < 0 ? first : best);
  }

  let grip = null;
  rows.addEventListener("pointerdown", (e) => {
    grip = { x: e.clientX, y: e.clientY, from: view.from, to: view.to, scroll: view.scroll };
    rows.setPointerCapture(e.pointerId); rows.classList.add("moving"); rows.focus();
  });
  rows.addEventListener("pointerup", () => { grip = null; rows.classList.remove("moving"); });
  rows.addEventListener("pointermove", (e) => {
    if (grip) {
      const moved = ((e.clientX - grip.x) / (view.width - GUTTER)) * (grip.to - grip.from);
      view.scroll = grip.scroll - (e.clientY - grip.y);
      tip.hidden = true;
      show(grip.from - moved, grip.to - moved);
      return;
    }
    const was = hovered, at = rows.getBoundingClientRect();
    hovered = hit(e.clientX - at.left, e.clientY - at.top);
    if (hovered < 0) tip.hidden = true; else showTip(describe(hovered, timeAt(e.clientX - at.left)), e);
    if (was !== hovered) redraw();
  });
  rows.addEventListener("pointerleave", () => { hovered = -1; tip.hidden = true; redraw(); });
  rows.addEventListener("dblclick", (e) => {
    const at = rows.getBoundingClientRect(), i = hit(e.clientX - at.left, e.clientY - at.top);
    if (i < 0) show(0, end); else show(start[i] - duration[i], start[i] + 2 * duration[i]);
  });
  const wheel = (e) => {
    e.preventDefault();
    const along = e.deltaX || (e.shiftKey ? e.deltaY : 0);
    if (along) show(view.from + (along / view.width) * (view.to - view.from), view.to + (along / view.width) * (view.to - view.from));
    else if (e.altKey) { view.scroll += e.deltaY; redraw(); }
    else zoom(Math.exp(e.deltaY * 0.0015), timeAt(Math.max(GUTTER, e.clientX - rows.getBoundingClientRect().left)));
  };
  for (const canvas of [rows, memoryCanvas]) canvas.addEventListener("wheel", wheel, { passive: false });
  memoryCanvas.addEventListener("pointermove", (e) => {
    const at = memoryCanvas.getBoundingClientRect(), t = timeAt(Math.max(GUTTER, e.clientX - at.left));
    const levels = memory.map((line) => memoryAt(line, t));
    let near = 0;
    levels.forEach((b, d) => {
      const away = (bytes) => Math.abs(memory.scale.yOf(bytes) - (e.clientY - at.top));
      if (away(b) < away(levels[near])) near = d;
    });
    showTip(`rank ${near}: ${(levels[near] / GIB).toFixed(2)} GiB at ${seconds(t)}`, e);
  });
  memoryCanvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  document.addEventListener("keydown", (e) => {
    if (e.target === $("search")) {
      if (e.key === "Enter") next();
      if (e.key === "Escape") { $("search").value = ""; search(""); rows.focus(); }
      return;
    }
    const span = view.to - view.from, middle = (view.from + view.to) / 2;
    const does = {
      ArrowLeft: () => show(view.from - span / 8, view.to - span / 8),
      ArrowRight: () => show(view.from + span / 8, view.to + span / 8),
      ArrowUp: () => { view.scroll -= view.row; redraw(); }, ArrowDown: () => { view.scroll += view.row; redraw(); },
      "+": () => zoom(0.7, middle), "=": () => zoom(0.7, middle), "-": () => zoom(1 / 0.7, middle), 0: () => show(0, end),
      n: next, "/": () => $("search").focus(), c: () => $("critical").click(),
    }[e.key];
    if (does && !e.ctrlKey && !e.metaKey) { e.preventDefault(); does(); }
  });
  $("search").addEventListener("input", (e) => search(e.target.value));
  $("next").addEventListener("click", next);
  $("critical").addEventListener("change", redraw);
  $("in").addEventListener("click", () => zoom(0.5, (view.from + view.to) / 2));
  $("out").addEventListener("click", () => zoom(2, (view.from + view.to) / 2));
  $("fit").addEventListener("click", () => show(0, end));

  for (const k of new Set(kind)) {
    const item = document.createElement("span"), patch = document.createElement("i");
    patch.style.background = data.kinds[k].colour;
    item.append(patch, data.kinds[k].label);
    $("legend").append(item);
  }
  if (!memory.length) memoryCanvas.classList.add("none");
  new ResizeObserver(redraw).observe(document.body);
  // for tests: where an event is on the page, and what is shown
  window.perfmodelTimeline = {
    count, view, draw, hit, describe,
    centre: (i) => {
      const lane = lanes.find((one) => i >= one.from && i < one.to), at = rows.getBoundingClientRect();
      return { x: at.left + x(start[i] + duration[i] / 2), y: at.top + y(lane.top + lane.height / 2) };
    },
    state: () => ({ found, current, hovered, drawn, from: view.from, to: view.to }),
  };
  draw();
})();
