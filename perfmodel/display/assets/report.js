// The page as a whole: the machine's sliders, clusters, what the search did, keys.
function buildKnobs() {
  const working = machine.knobs.filter((knob) => !knob.idle), idle = machine.knobs.filter((knob) => knob.idle);
  const lines = working.map((knob) => {
    const slider = element("input", { type: "range", min: -1, max: 1, step: 0.05, value: 0, ariaLabel: knob.label });
    const told = element("output"), effect = element("small");
    slider.dataset.knob = knob.name;
    slider.addEventListener("input", () => { state.at[knob.name] = 2 ** Number(slider.value); turn(); });
    knob.show = () => {
      const i = machine.knobs.indexOf(knob), row = rows[state.chosen];
      slider.value = Math.log2(state.at[knob.name]);
      told.textContent = "\u00d7 " + state.at[knob.name].toFixed(2);
      effect.textContent = `1 % more: ${signed(1.01 ** row.elasticity[i] - 1, 2)}`;
    };
    return element("div", { className: "knob" }, element("label", { textContent: knob.label }), slider, told, effect);
  });
  const half = element("button", { textContent: "half the network" }), back = element("button", { textContent: "reset" });
  half.addEventListener("click", () => {
    for (const knob of machine.knobs) state.at[knob.name] = knob.name.endsWith("node_bandwidth") ? 0.5 : 1;
    turn();
  });
  back.addEventListener("click", () => { for (const knob of machine.knobs) state.at[knob.name] = 1; turn(); });
  $("knobs").replaceChildren(element("p", { className: "tools" }, half, back), element("p", { id: "turned" }), ...lines);
  const [one, all] = errors(), checked = machine.checked.length;
  $("holds").textContent = "\u201c1 % more\u201d is the exact gradient of the step time. At 0.5, 0.71, 1.41 and 2 times each parameter the sliders show exact steps; "
    + "between these they interpolate, and the effects of several sliders are added. Compared with further exact steps of the first "
    + `${checked > 1 ? checked + " layouts" : "layout"}, they are off by at most ${percent(one)} for one parameter and ${percent(all)} for all together.`
    + (idle.length ? ` Between half and double, these parameters do not change the step: ${idle.map((knob) => knob.label).join(", ")}.` : "");
}

function turn() {
  refreshNow();
  for (const knob of machine.knobs) knob.show?.();
  const row = rows[state.chosen], best = fastestAt(state.at), other = rows[best];
  $("turned").textContent = !turnedAway() ? "" : `${placed(state.chosen)}: ${seconds(row.step_s)} becomes ${seconds(now(row))} (${signed(now(row) / row.step_s - 1)})`
    + (best !== state.chosen && now(other) < now(row) * (1 - 1e-3) ? `; #${best + 1} is then the fastest: ${seconds(now(other))}` : "");
  drawAnswer();
  drawTogether();
  if ([drawnBy.across, drawnBy.up].some((one) => one.key === "now_s")) drawScatter();
}

function choose(i) {
  state.chosen = i;
  for (const draw of [drawSensitivity, paintRows, drawScatter, drawBreakdown, drawMemory, drawSure, drawLaunch, drawPath, drawTimeline, turn]) draw();
}

function keep() {
  state.kept = state.kept === state.chosen ? -1 : state.chosen;
  $("compare").textContent = state.kept < 0 ? "compare (c)" : `compared with ${placed(state.kept)} (c)`;
  choose(state.chosen);
}

const CLUSTER_FIGURES = { // key of a record -> head and how it is written
  devices: ["devices", digits], step_time_s: ["step", seconds], tokens_per_s: [`${data.unit}/s`, digits], mfu: ["MFU", percent],
  usd_per_million_tokens: [`$ per million ${data.unit}`, (v) => "$" + digits(v, 3)], days: ["days", (v) => digits(v, 3)], cost_usd: ["cost", (v) => "$" + digits(v, 3)],
  energy_per_million_tokens_j: [`energy per million ${data.unit}`, (v) => scaled(v, "J")],
};
function drawClusters() {
  if (!data.clusters.length) return;
  for (const one of data.clusters) { // of as many tokens as the page is asked about
    if (one.tokens_per_s) one.days = state.tokens / one.tokens_per_s / DAY_S / (one.goodput?.fraction ?? 1);
    if (one.usd_per_million_tokens) one.cost_usd = (one.usd_per_million_tokens * state.tokens) / 1e6;
  }
  const known = Object.keys(CLUSTER_FIGURES).filter((key) => data.clusters.some((one) => typeof one[key] === "number"));
  const lines = data.clusters.map((one) => [one.cluster, ...known.map((key) =>
    (typeof one[key] === "number" ? CLUSTER_FIGURES[key][1](counted(key, one[key])) : (one.why ? "" : "not known"))), one.why ?? element("code", { textContent: one.layout ?? "" })]);
  document.querySelector("#clusters div").replaceChildren(listed(["cluster", ...known.map((key) => CLUSTER_FIGURES[key][0]), "best layout"], lines, "figures"));
  $("clusters").hidden = false;
}

function drawProfile() { // where a profile of the layout and its prediction part
  const told = data.profile;
  if (!told) return;
  const widest = Math.max(...told.differences.map((one) => Math.abs(one.effect_s)), 1e-12);
  const lines = told.differences.filter((one) => Math.abs(one.effect_s) > 1e-3 * widest).map((one) => {
    const effect = bar([{ value: Math.abs(one.effect_s), colour: one.effect_s > 0 ? "#D55E00" : "#009E73", title: seconds(one.effect_s) }], widest);
    return [one.event, effect, seconds(one.effect_s), seconds(one.predicted_s), seconds(one.measured_s),
      `${digits(one.predicted_calls)} / ${digits(one.measured_calls)}`, one.remedy];
  });
  document.querySelector("#profile div").replaceChildren(
    element("p", { textContent: `Step: ${seconds(told.predicted_step_s)} predicted, ${seconds(told.measured_step_s)} measured (${signed(told.measured_step_s / told.predicted_step_s - 1)}), `
      + `over ${told.steps} steps on ${told.devices} devices; events of the prediction account for ${percent(told.matched_share, 0)} of the measured time.` }),
    listed(["largest differences, per device and step", "", "effect", "predicted", "measured", "calls", "remedy"], lines, "figures"),
    ...Object.entries(told.unread).map(([what, calls]) => element("p", { className: "note", textContent: `${digits(calls)} calls are not compared, because the profile does not record ${what}` })));
  $("profile").hidden = false;
}

function drawAccount() {
  const { job } = data, first = rows[0];
  const each = job.seq_len > 1 ? ` (${digits(job.seq_len)} tokens each)` : "";
  const batch = data.unit === "tokens" ? `global batch ${digits(first.global_batch)}, sequence ${digits(job.seq_len)}`
    : `global batch of ${digits(first.global_batch)} ${data.unit}${each}`;
  $("facts").textContent = [batch, job.dtype, `${job.devices_per_node} ${job.device} per node`,
    ...(job.framework === "generic" ? [] : [job.framework])].join(", ");
  if (data.kind !== "search") return;
  const lines = [
    `${data.feasible.toLocaleString("en")} layouts fit into memory; ${data.evaluated.toLocaleString("en")} of them were fully evaluated, in ${data.seconds.toFixed(1)} s; ${data.certificate}.`,
    ...(data.objective === "step_time" ? [] : [`Ranked by ${data.objective}.`]),
    ...(data.constraints.length ? [`Where ${data.constraints.join(" and ")}.`] : []),
    ...(data.beyond ? [`If ${job.framework} could run every layout: ${seconds(data.beyond.step_time_s)} with ${data.beyond.layout}.`] : []),
  ];
  const out = element("details", {}, element("summary", { textContent: "why other layouts were rejected" }),
    listed(["reason", "layouts"], data.rejected.map(([why, count]) => [why, count.toLocaleString("en")]), "figures"));
  $("account").replaceChildren(element("h2", { textContent: "The search" }), ...lines.map((text) => element("p", { textContent: text })), out);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches("input, textarea, select");
  if (event.key === "Escape") {
    if (event.target === $("filter")) { $("filter").value = ""; filter(""); }
    else if (state.kept >= 0) { state.kept = state.chosen; keep(); }
    event.target.blur();
    return;
  }
  if (event.key === "Enter" && event.target.matches("th")) return sortBy(event.target.dataset.key);
  if (typing && !(event.target === $("filter") && event.key.startsWith("Arrow") && /Up|Down/.test(event.key))) return;
  const does = { ArrowDown: () => step(1), ArrowUp: () => step(-1), "/": () => { $("filter").focus(); $("filter").select(); }, c: keep }[event.key];
  if (does && rows.length > 1) { event.preventDefault(); does(); }
});
$("table").addEventListener("click", (event) => {
  const head = event.target.closest("th"), line = event.target.closest("tr[data-row]");
  if (head) sortBy(head.dataset.key); else if (line) choose(Number(line.dataset.row));
});
$("filter").addEventListener("input", (event) => filter(event.target.value));
$("compare").addEventListener("click", keep);
themed(drawScatter);
$("timeline").addEventListener("toggle", drawTimeline);

if (rows.length < 2) $("choose").hidden = true;
buildTable();
buildScatter();
buildKnobs();
drawAccount();
drawClusters();
drawProfile();
filter("");
choose(data.recommended);
// for tests: what is chosen and shown, and the arithmetic of the sliders
window.perfmodelReport = { state, rows, changed, errors, signed, fastestAt, choose, front, point: (i) => points[i] };
