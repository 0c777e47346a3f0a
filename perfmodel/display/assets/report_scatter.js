// Layouts between two quantities, with those that no other beats in both.
const canvas = document.querySelector("#scatter canvas"), pen = canvas.getContext("2d");
const drawnBy = { across: column("step_s"), up: column("memory_bytes") };
const MARGIN = { left: 62, right: 12, top: 10, bottom: 40 };
let points = [], hovered = -1;

function front() { // by falling preference across, those better up than all before; only where both have a better end
  const { across, up } = drawnBy;
  if (!across.better || !up.better || across === up) return [];
  const sign = (one) => (one.better === "low" ? 1 : -1);
  const shown = rows.map((_, i) => i).filter((i) => state.shown[i]);
  shown.sort((a, b) => sign(across) * (across.of(a) - across.of(b)) || sign(up) * (up.of(a) - up.of(b)));
  let best = Infinity;
  return shown.filter((i) => { const value = sign(up) * up.of(i); if (value < best) { best = value; return true; } return false; });
}

function extent(one) {
  const values = rows.map((_, i) => plain(one, i)).filter(Number.isFinite);
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) { low -= Math.abs(low) / 10 || 1; high += Math.abs(high) / 10 || 1; }
  return [low - (high - low) * 0.04, high + (high - low) * 0.04];
}

function ticks([low, high], most) {
  const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= raw), found = [];
  for (let k = Math.ceil(low / step); k * step <= high; k++) found.push(Number((k * step).toPrecision(12)));
  return found;
}

const unitOf = (one) => ({ s: " in s", bytes: " in GiB", share: " in %", J: " in J", money: " in $" }[one.unit] ?? "");
let pending = false;
function drawScatter() { // once, before the next frame
  if (!pending && rows.length > 1) { pending = true; requestAnimationFrame(paintScatter); }
}

function paintScatter() {
  pending = false;
  const ratio = window.devicePixelRatio || 1, { width, height } = canvas.getBoundingClientRect();
  if (!width) return;
  canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  const { across, up } = drawnBy, xs = extent(across), ys = extent(up);
  const x = (v) => MARGIN.left + ((v - xs[0]) / (xs[1] - xs[0])) * (width - MARGIN.left - MARGIN.right);
  const y = (v) => height - MARGIN.bottom - ((v - ys[0]) / (ys[1] - ys[0])) * (height - MARGIN.top - MARGIN.bottom);
  pen.font = "11px system-ui, sans-serif"; pen.lineWidth = 1; pen.strokeStyle = colour("--line"); pen.fillStyle = colour("--soft");
  pen.textAlign = "center"; pen.textBaseline = "top";
  for (const t of ticks(xs, 5)) {
    pen.beginPath(); pen.moveTo(x(t), MARGIN.top); pen.lineTo(x(t), height - MARGIN.bottom); pen.stroke();
    pen.fillText(digits(t), x(t), height - MARGIN.bottom + 5);
  }
  pen.fillText(across.label + unitOf(across), (MARGIN.left + width) / 2, height - 16);
  pen.textAlign = "right"; pen.textBaseline = "middle";
  for (const t of ticks(ys, 6)) {
    pen.beginPath(); pen.moveTo(MARGIN.left, y(t)); pen.lineTo(width - MARGIN.right, y(t)); pen.stroke();
    pen.fillText(digits(t), MARGIN.left - 6, y(t));
  }
  pen.save(); pen.translate(12, (height - MARGIN.bottom) / 2); pen.rotate(-Math.PI / 2); pen.textAlign = "center";
  pen.fillText(up.label + unitOf(up), 0, 0); pen.restore();
  points = rows.map((_, i) => ({ x: x(plain(across, i)), y: y(plain(up, i)) }));
  const edge = front();
  const dot = (i, radius, fill) => {
    pen.fillStyle = fill; pen.beginPath(); pen.arc(points[i].x, points[i].y, radius, 0, 7); pen.fill();
  };
  const fill = colour("--point"), edged = colour("--accent");
  rows.forEach((_, i) => { pen.globalAlpha = state.shown[i] ? 0.55 : 0.1; dot(i, 3, fill); });
  pen.globalAlpha = 1;
  if (edge.length) {
    pen.strokeStyle = edged; pen.lineWidth = 1.5; pen.beginPath();
    edge.forEach((i, k) => {
      if (k) pen.lineTo(points[i].x, points[edge[k - 1]].y);
      pen[k ? "lineTo" : "moveTo"](points[i].x, points[i].y);
    });
    pen.stroke();
    for (const i of edge) dot(i, 3.5, edged);
  }
  const ring = (i, name, radius) => {
    pen.strokeStyle = colour(name); pen.lineWidth = 2; pen.beginPath(); pen.arc(points[i].x, points[i].y, radius, 0, 7); pen.stroke();
  };
  if (state.kept >= 0) ring(state.kept, "--kept", 7);
  ring(state.chosen, "--text", 7);
  document.querySelector("#scatter figcaption").textContent = edge.length
    ? `line: the Pareto front, ${edge.length} layouts with no other better in both` : "";
}

function near(event) { // the shown layout under the pointer, -1 for none
  const at = canvas.getBoundingClientRect();
  let best = -1, least = 12 ** 2;
  points.forEach((point, i) => {
    const away = (point.x - event.clientX + at.left) ** 2 + (point.y - event.clientY + at.top) ** 2;
    if (state.shown[i] && away < least) { best = i; least = away; }
  });
  return best;
}

function buildScatter() {
  for (const side of ["across", "up"]) {
    $(side).append(...columns.filter((one) => rows.every((_, i) => typeof one.of(i) === "number")).map((one) =>
      element("option", { value: one.key, textContent: one.label, selected: one === drawnBy[side] })));
    $(side).addEventListener("change", () => { drawnBy[side] = column($(side).value); drawScatter(); });
  }
  new ResizeObserver(drawScatter).observe(canvas);
  canvas.addEventListener("pointermove", (event) => {
    hovered = near(event);
    canvas.style.cursor = hovered < 0 ? "default" : "pointer";
    const told = [drawnBy.across, drawnBy.up].map((one) => `${one.label} ${hovered < 0 ? "" : cellText(one, hovered)}`);
    showTip(hovered < 0 ? "" : [`${hovered + 1}: ${rows[hovered].layout}`, ...told].join("\n"), event);
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("click", (event) => { const i = near(event); if (i >= 0) { choose(i); scrollToChosen(); } });
}
