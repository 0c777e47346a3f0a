// A calibration: errors by group, predictions beside measurements, what it is unsure of, what to measure next.
const { groups, rows } = data, count = rows.measured_s.length;
const ORIGINS = { measured: "#009E73", learned: "#0072B2", analytical: "#E69F00", extrapolated: "#D55E00", "": "#CC79A7" };
const RUN = "a whole run";
const state = { chosen: -1 }; // a group, or -1 for all
const shown = (i) => state.chosen < 0 || (rows.group[i] === groups[state.chosen].group && rows.device[i] === groups[state.chosen].device);
const listedRows = () => [...Array(count).keys()].filter(shown);
const error = (i) => rows.predicted_s[i] / rows.measured_s[i] - 1;
const width = (i) => (rows.lo_s[i] > 0 ? Math.sqrt(rows.hi_s[i] / rows.lo_s[i]) : Infinity); // times or by this
const inside = (i) => rows.lo_s[i] <= rows.measured_s[i] && rows.measured_s[i] <= rows.hi_s[i];
const times = (factor) => "\u00d7\u00f7 " + digits(factor, 3);
const known = (half) => (half < 0.5 ? "\u00b1 " + percent(half, 0) : `a factor of ${digits(1 + half, 2)}`);
const command = (text) => element("p", {}, element("code", { textContent: text }), copied(text));
const named = (one) => (one.device ? `${one.group} on ${one.device}` : one.group);
const several = new Set(groups.map((one) => one.device)).size > 1;
const labelled = (what, device) => element("span", {}, what, several && device ? element("small", { textContent: ` ${device}` }) : null);
const quoted = (path) => (/^[\w./@%+=:,-]+$/.test(path) ? path : `'${path.replaceAll("'", "'\\''")}'`);

function drawAnswer() {
  const rowsOf = (kind) => groups.filter((one) => one.kind === kind);
  const lines = ["kernels", "collectives", "runs"].filter((kind) => rowsOf(kind).length).map((kind) => {
    const own = rowsOf(kind), n = own.reduce((a, one) => a + one.n, 0), mean = (key) => own.reduce((a, one) => a + one.n * one[key], 0) / n;
    return [kind, `off by ${percent(mean("mean_ape"))} in the mean, ${mean("bias") < 0 ? "predicted too short by" : "predicted too long by"} ${percent(Math.abs(mean("bias")))}; `
      + `${percent(mean("coverage_90"), 0)} of ${n.toLocaleString("en")} rows lie inside their 90 % intervals`];
  });
  if (!lines.length) lines.push(["measured rows", "none were given; what follows the calibration says of itself"]);
  const worst = groups.filter((one) => one.coverage_90 < 0.8).sort((a, b) => b.n * b.mean_ape - a.n * a.mean_ape)[0];
  if (worst) lines.push(["do not trust", `the intervals of ${named(worst)}: only ${percent(worst.coverage_90, 0)} of its ${worst.n.toLocaleString("en")} rows lie inside`]);
  const unfitted = groups.filter((one) => one.kind !== "runs" && one.from_measured !== null && one.from_measured < 0.5);
  if (unfitted.length) {
    const said = `perfmodel fit ${data.fitted_from.map(quoted).join(" ")} --out fitted`;
    lines.push(["fit first", element("span", {}, `these rows of ${unfitted.slice(0, 4).map(named).join(", ")}${unfitted.length > 4 ? " and more" : ""} are measured, but not in the calibration: `,
      element("code", { textContent: said }), copied(said))]);
  }
  if (data.next.length) lines.push(["measure next", `${data.next[0].what} on ${data.next[0].device}: now known within ${known(data.next[0].half_width)}`]);
  $("answer").replaceChildren(element("h2", { textContent: "In short" }), listed(null, lines, "facts"));
}

function buildGroups() {
  const heads = ["group", "device", "rows", "mean error", "median", "bias", "inside 90 %", "width"];
  const lines = groups.map((one) => [one.group, one.device, one.n.toLocaleString("en"), percent(one.mean_ape), percent(one.median_ape), signed(one.bias),
    percent(one.coverage_90, 0), one.width_90 ? times(Math.sqrt(one.width_90)) : ""]);
  const made = listed(heads, lines, "figures");
  [...made.tBodies[0].rows].forEach((line, k) => line.addEventListener("click", () => choose(k)));
  $("groups").replaceChildren(made);
}

const MARGIN = { left: 64, right: 12, top: 10, bottom: 40 }, WITHIN = 1.25;
const canvas = document.querySelector("#scatter canvas"), pen = canvas.getContext("2d");
let points = [];
function paint() {
  const ratio = window.devicePixelRatio || 1, { width: wide, height } = canvas.getBoundingClientRect(), mine = listedRows();
  points = [];
  if (!wide || !mine.length) return;
  canvas.width = Math.round(wide * ratio); canvas.height = Math.round(height * ratio);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  let low = Infinity, high = 0;
  for (const i of mine) { low = Math.min(low, rows.measured_s[i], rows.predicted_s[i]); high = Math.max(high, rows.measured_s[i], rows.predicted_s[i]); }
  low /= 1.4; high *= 1.4;
  if (high < 10 * low) { const room = Math.sqrt((10 * low) / high); low /= room; high *= room; }
  const along = (v) => (Math.log(v) - Math.log(low)) / (Math.log(high) - Math.log(low));
  const x = (v) => MARGIN.left + along(v) * (wide - MARGIN.left - MARGIN.right), y = (v) => height - MARGIN.bottom - along(v) * (height - MARGIN.top - MARGIN.bottom);
  pen.font = "11px system-ui, sans-serif"; pen.lineWidth = 1;
  const decades = Math.log10(high / low), every = Math.max(1, Math.round(decades / 6));
  for (let k = Math.ceil(Math.log10(low)); k <= Math.log10(high); k++) {
    const value = 10 ** k;
    pen.strokeStyle = colour("--line"); pen.fillStyle = colour("--soft");
    pen.beginPath(); pen.moveTo(x(value), y(low)); pen.lineTo(x(value), y(high)); pen.moveTo(x(low), y(value)); pen.lineTo(x(high), y(value)); pen.stroke();
    if (k % every) continue;
    pen.textAlign = "center"; pen.textBaseline = "top"; pen.fillText(seconds(value), x(value), y(low) + 5);
    pen.textAlign = "right"; pen.textBaseline = "middle"; pen.fillText(seconds(value), x(low) - 6, y(value));
  }
  pen.fillStyle = colour("--soft"); pen.textAlign = "center"; pen.textBaseline = "alphabetic"; pen.fillText("measured", (MARGIN.left + wide) / 2, height - 6);
  pen.save(); pen.translate(13, height / 2); pen.rotate(-Math.PI / 2); pen.fillText("predicted", 0, 0); pen.restore();
  pen.save(); pen.beginPath(); pen.rect(x(low), y(high), x(high) - x(low), y(low) - y(high)); pen.clip();
  pen.fillStyle = colour("--line"); pen.globalAlpha = 0.45;
  pen.beginPath(); pen.moveTo(x(low), y(low * WITHIN)); pen.lineTo(x(high), y(high * WITHIN)); pen.lineTo(x(high), y(high / WITHIN)); pen.lineTo(x(low), y(low / WITHIN)); pen.fill();
  pen.globalAlpha = 1; pen.strokeStyle = colour("--text");
  pen.beginPath(); pen.moveTo(x(low), y(low)); pen.lineTo(x(high), y(high)); pen.stroke();
  const few = mine.length <= 200;
  for (const i of mine) {
    const point = { i, x: x(rows.measured_s[i]), y: y(rows.predicted_s[i]) };
    points.push(point);
    pen.fillStyle = pen.strokeStyle = ORIGINS[rows.origin[i]] ?? ORIGINS[""];
    pen.globalAlpha = 0.45;
    if (few && rows.lo_s[i] > 0) { pen.beginPath(); pen.moveTo(point.x, y(rows.lo_s[i])); pen.lineTo(point.x, y(rows.hi_s[i])); pen.stroke(); }
    pen.globalAlpha = few ? 0.9 : 0.5;
    pen.beginPath(); pen.arc(point.x, point.y, few ? 3.5 : 2, 0, 2 * Math.PI); pen.fill();
  }
  pen.restore(); pen.globalAlpha = 1;
  const seen = [...new Set(mine.map((i) => rows.origin[i]))].sort();
  const all = state.chosen < 0 ? rows.of : groups[state.chosen].n;
  document.querySelector("#scatter figcaption").replaceChildren(
    element("span", { className: "legend" }, ...seen.map((origin) => element("span", {}, patch(ORIGINS[origin] ?? ORIGINS[""]), origin || RUN))),
    `line: equal; band: within 25 %${few ? "; bars: 90 % intervals" : ""}${mine.length < all ? `; ${mine.length.toLocaleString("en")} of ${all.toLocaleString("en")} rows drawn, those farthest off among them` : ""}`);
}

function listRows(id, order, figure, empty) {
  const mine = listedRows().sort((a, b) => order(b) - order(a)).slice(0, 8);
  const lines = mine.map((i) => [labelled(rows.what[i], rows.device[i]),
    seconds(rows.measured_s[i]), seconds(rows.predicted_s[i]), figure(i)]);
  document.querySelector(`#${id} div`).replaceChildren(lines.length ? listed(["row", "measured", "predicted", id === "farthest" ? "error" : "90 % interval"], lines, "figures")
    : element("p", { className: "note", textContent: empty }));
}

function drawNext() {
  const box = document.querySelector("#next div"), made = [];
  if (data.next_of) made.push(element("p", { className: "note", textContent: data.next_of }));
  const step = data.next.some((one) => one.step_share !== null);
  made.push(data.next.length
    ? listed(["measurement", ...(step ? ["of the step"] : []), "predicted", "known within"], data.next.map((one) => [labelled(one.what, one.device),
      ...(step ? [percent(one.step_share)] : []), seconds(one.predicted_s), known(one.half_width)]), "figures")
    : element("p", { className: "note", textContent: "Nothing that was looked at is known less well than a measurement would tell it." }));
  if (data.plan) {
    const said = "perfmodel calibrate --plan next.toml --out measured";
    made.push(element("p", { className: "apart" }, "As a plan: save it as next.toml on the machine, measure, then fit. "), element("p", { className: "tools" }, copied(data.plan, "copy the plan")),
      element("details", {}, element("summary", { textContent: "next.toml" }), element("pre", { textContent: data.plan })), command(said));
  } else if (data.next.length) made.push(element("p", { className: "note", textContent: "No collector of this package measures these; time them by your own means and give the table to 'perfmodel fit'." }));
  box.replaceChildren(...made);
}

function drawRests() {
  const ways = ["shapes", "larger shapes", "devices"].filter((way) => data.files.some((file) => file.kept_out?.some((one) => one[0] === way)));
  const missing = ways.length ? "" : "too few rows to keep any out";
  const lines = data.files.map((file) => (file.series !== undefined ? [file.name, `${digits(file.series)} measured series`, ...ways.map(() => ""), ""]
    : [file.name, `${file.rows.toLocaleString("en")} rows, ${file.devices.slice(0, 2).join(", ")}${file.devices.length > 2 ? ` and ${file.devices.length - 2} more devices` : ""}`,
      ...ways.map((way) => { const found = file.kept_out.find((one) => one[0] === way); return found ? percent(found[2]) : ""; }),
      file.coverage_90 === null ? missing : percent(file.coverage_90, 0)]));
  document.querySelector("#rests div").replaceChildren(listed(["file", "fitted to", ...ways.map((way) => `mean error on ${way} kept out`), "inside 90 %"], lines, "figures texts"),
    element("p", { className: "note", textContent: "Kinds of kernels without a file here are priced by the shipped calibration." }));
}

function choose(k) {
  state.chosen = k === state.chosen ? -1 : k;
  $("chosen").textContent = state.chosen < 0 ? "all rows" : named(groups[state.chosen]);
  $("all").hidden = state.chosen < 0;
  [...document.querySelectorAll("#groups tbody tr")].forEach((line, i) => line.classList.toggle("chosen", i === state.chosen));
  listRows("farthest", (i) => Math.abs(Math.log(1 + error(i))), (i) => signed(error(i)) + (inside(i) ? "" : ", outside its interval"), "no row was compared");
  listRows("unsure", width, (i) => `${seconds(rows.lo_s[i])} \u2013 ${seconds(rows.hi_s[i])}`, "no row was compared");
  paint();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !groups.length) return;
  if (event.key === "Escape" && state.chosen >= 0) choose(state.chosen);
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!by) return;
  event.preventDefault();
  const to = Math.max(0, Math.min(groups.length - 1, state.chosen < 0 ? 0 : state.chosen + by));
  if (to !== state.chosen) choose(to);
});
canvas.addEventListener("pointermove", (event) => {
  const at = canvas.getBoundingClientRect(), away = (p) => (p.x - event.clientX + at.left) ** 2 + (p.y - event.clientY + at.top) ** 2;
  const near = points.filter((p) => away(p) < 144).sort((a, b) => away(a) - away(b))[0];
  showTip(!near ? "" : [rows.what[near.i], `${rows.group[near.i]} on ${rows.device[near.i]}${rows.origin[near.i] ? `, ${rows.origin[near.i]}` : ""}`,
    `measured ${seconds(rows.measured_s[near.i])}`, `predicted ${seconds(rows.predicted_s[near.i])} (${signed(error(near.i))})`,
    `90 % from ${seconds(rows.lo_s[near.i])} to ${seconds(rows.hi_s[near.i])}`].join("\n"), event);
});
canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
$("all").addEventListener("click", () => choose(state.chosen));

themed(paint);
$("facts").textContent = data.tables.length ? `${rows.of.toLocaleString("en")} rows of ${data.tables.map((path) => path.split("/").at(-1)).join(", ")}` : "";
if (!groups.length) for (const id of ["choose", "farthest", "unsure"]) $(id).hidden = true;
if (!data.next.length && !data.tables.length) $("next").hidden = true;
if (data.skipped.length) {
  document.querySelector("#skipped div").replaceChildren(listed(["why", "rows"], data.skipped.map(([why, n]) => [why, n.toLocaleString("en")]), "figures"));
  $("skipped").hidden = false;
}
drawAnswer();
buildGroups();
drawNext();
drawRests();
choose(-1);
new ResizeObserver(paint).observe(canvas);
window.perfmodelCalibration = { state, choose, shown: listedRows, point: (k) => points[k] }; // for tests
