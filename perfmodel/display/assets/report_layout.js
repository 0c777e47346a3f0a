// Everything about the layout chosen, beside the one kept for comparison.
const MEMORY_COLOURS = ["#0072B2", "#56B4E9", "#CC79A7", "#009E73", "#E69F00"];
const command = (name, row, rest) => `perfmodel ${name} ${data.flags} --global-batch ${row.global_batch} --layout ${row.layout}${rest}`;
const both = () => (state.kept >= 0 && state.kept !== state.chosen ? [state.chosen, state.kept] : [state.chosen]);
const placed = (i) => (rows.length > 1 ? `#${i + 1}` : "the layout");

function drawAnswer() {
  const row = rows[state.chosen], steps_s = ((state.tokens / row.tokens_per_s) * changed(row, state.at)) / row.goodput;
  const price = data.price === null ? "" : element("span", { title: data.price_source },
    `, $${digits((data.price * row.devices * steps_s) / HOUR_S, 3)} at $${digits(data.price, 3)} per device and hour`);
  const title = rows.length === 1 ? "The layout" : state.chosen === data.recommended ? "Recommended" : `Layout ${placed(state.chosen)}`;
  const trained = data.tokens_per_unit === 1 ? state.tokens : Number(counted("tokens", state.tokens).toPrecision(3));
  const field = element("input", { value: trained >= 1e6 ? trained.toExponential().replace("+", "") : trained, size: 7, id: "tokens", title: `${data.unit} to train on` });
  field.addEventListener("change", () => {
    const value = Number(field.value.replace(/,/g, ""));
    if (value > 0 && Number.isFinite(value)) state.tokens = value * data.tokens_per_unit;
    drawAnswer();
    drawClusters();
  });
  const step = seconds(row.step_s) + (turnedAway() ? `, ${seconds(now(row))} with the sliders below` : "");
  const resting = data.origins.map((name, k) => [name, row.origins[k]]).filter(([, share]) => share >= 0.005)
    .sort((a, b) => b[1] - a[1]).map(([name, share]) => `${percent(share, 0)} ${name}`).join(", ");
  const lines = [
    ["launch with", element("span", {}, element("code", { textContent: row.layout }), copied(row.layout))],
    ["how long", element("span", {}, `${step}; `, element("b", { textContent: span(steps_s) }), " for ", field, ` ${data.unit}`, price, `, with failures (goodput ${percent(row.goodput)}); `
      + `${digits(counted("tokens_per_s", row.tokens_per_s) * (row.step_s / now(row)))} ${data.unit}/s`)],
    ["how sure", element("span", {}, `9 of 10 steps like it take ${seconds(row.lo_s)} to ${seconds(row.hi_s)}; memory: ${row.fit_words}; `
      + `times are ${resting}`)],
    ...slowNetwork(row),
  ];
  $("answer").replaceChildren(element("h2", { textContent: title }), listed(null, lines, "facts"));
}

/** How much longer or shorter the step becomes with each parameter of the machine, the most telling one first. */
function drawSensitivity() {
  const row = rows[state.chosen], holder = $("sensitivity");
  const told = machine.knobs.map((knob, i) => ({ knob, gradient: 1.01 ** row.elasticity[i] - 1 })).filter((one) => !one.knob.idle)
    .sort((a, b) => Math.abs(b.gradient) - Math.abs(a.gradient));
  holder.hidden = !told.length;
  const widest = Math.max(...told.map((one) => Math.abs(one.gradient)), 1e-12);
  const lines = told.map(({ knob, gradient }) => [
    knob.label,
    bar([{ value: Math.abs(gradient), colour: gradient > 0 ? "#D55E00" : "#0072B2", title: signed(gradient, 2) }], widest),
    signed(gradient, 2),
    ...[0.5, 2].map((factor) => { const ratio = changed(row, { [knob.name]: factor });
      return element("span", {}, `${seconds(row.step_s * ratio)} `, element("span", { className: "unbroken", textContent: `(${signed(ratio - 1)})` })); }),
  ]);
  holder.querySelector("div").replaceChildren(listed(["parameter", "", "1 % more", "half", "double"], lines, "figures"));
  holder.querySelector("p").textContent = "\u201c1 % more\u201d is the gradient of the step time. The steps at half and double were predicted anew. The sliders below combine several changes.";
}

/** What the network at half its bandwidth does, and which layout is then the fastest. */
function slowNetwork(row) {
  const known = machine.knobs.map((knob) => knob.name).filter((name) => name.endsWith("node_bandwidth"));
  if (!known.length) return [];
  const at = Object.fromEntries(known.map((name) => [name, 0.5])), outer = { [known[0]]: 0.5 };
  const told = known.length > 1 ? [[outer, machine.knobs.find((k) => k.name === known[0]).label], [at, "all links"]]
    : [[at, machine.knobs.find((k) => k.name === known[0]).label]];
  const parts = told.map(([where, label]) => {
    const ratio = changed(row, where), best = fastestAt(where), other = rows[best];
    const better = best !== rows.indexOf(row) && other.step_s * changed(other, where) < row.step_s * ratio * (1 - 1e-3);
    return `${label}: ${seconds(row.step_s * ratio)} (${signed(ratio - 1)})`
      + (better ? `, then #${best + 1} is faster: ${seconds(other.step_s * changed(other, where))}` : "");
  });
  return [["with half the network", element("span", {}, parts.join("; "))]];
}

function drawBreakdown() {
  const longest = Math.max(...both().map((i) => rows[i].step_s));
  const bars = both().map((i) => element("div", {}, element("small", { textContent: `${placed(i)}: ${seconds(rows[i].step_s)}` }),
    bar(data.parts.map((part, k) => ({
      value: rows[i].breakdown_s[k], colour: part.colour, title: `${part.label}: ${seconds(rows[i].breakdown_s[k])}`,
    })), longest)));
  const lines = data.parts.map((part, k) => [part, k]).filter(([, k]) => both().some((i) => rows[i].breakdown_s[k] > 0)).map(([part, k]) => [
    element("span", {}, patch(part.colour), part.label),
    ...both().flatMap((i) => [seconds(rows[i].breakdown_s[k]), percent(rows[i].breakdown_s[k] / rows[i].step_s)]),
  ]);
  $("breakdown").replaceChildren(...bars, listed(["mean over pipeline ranks", ...both().flatMap((i) => [placed(i), "share"])], lines, "figures"));
}

function drawMemory() {
  const { capacity_bytes: capacity } = rows[state.chosen];
  const whole = Math.max(capacity, ...both().flatMap((i) => rows[i].memory.map((rank) => rank.reduce((a, b) => a + b, 0))));
  const made = both().flatMap((i) => [
    element("small", { textContent: `${placed(i)}: ${(rows[i].memory_bytes / GIB).toFixed(1)} of ${(capacity / GIB).toFixed(1)} GiB needed` }),
    ...rows[i].memory.map((rank, r) => {
      const pieces = rank.map((value, k) => ({ value, colour: MEMORY_COLOURS[k], title: `rank ${r}, ${data.categories[k]}: ${(value / GIB).toFixed(2)} GiB` }));
      const line = element("div", { className: "stage" }, element("small", { textContent: `rank ${r}` }), bar(pieces, whole),
        element("small", { textContent: (rank.reduce((a, b) => a + b, 0) / GIB).toFixed(1) }));
      const mark = element("b", { className: "limit", title: `${(capacity / GIB).toFixed(1)} GiB of the device` });
      mark.style.left = (100 * capacity) / whole + "%";
      line.children[1].append(mark);
      return line;
    }),
  ]);
  const legend = element("p", { className: "legend" }, ...data.categories.map((name, k) => element("span", {}, patch(MEMORY_COLOURS[k]), name)));
  $("memory").replaceChildren(...made, legend);
}

function drawSure() {
  const low = Math.min(...both().map((i) => rows[i].lo_s)), high = Math.max(...both().map((i) => rows[i].hi_s));
  const from = low - (high - low) * 0.1, width = (high - low) * 1.2 || 1;
  const intervals = both().map((i) => {
    const row = rows[i], line = element("div", { className: "range", title: "90 % interval" });
    const range = element("span"), middle = element("b");
    range.style.left = (100 * (row.lo_s - from)) / width + "%";
    range.style.width = (100 * (row.hi_s - row.lo_s)) / width + "%";
    middle.style.left = (100 * (row.step_s - from)) / width + "%";
    line.append(range, middle);
    return element("div", {}, element("small", { textContent: `${placed(i)}: ${seconds(row.step_s)}, 90 % from ${seconds(row.lo_s)} to ${seconds(row.hi_s)}` }), line);
  });
  const row = rows[state.chosen];
  const measuring = `perfmodel calibrate ${data.measured_by} --global-batch ${row.global_batch} --layouts ${row.layout} --dry-run`;
  const lines = [
    ...(row.best === undefined ? [] : [["probability of being the best of these layouts", percent(row.best, 0)]]),
    ...data.origins.map((name, k) => [`critical path: ${name}`, percent(row.origins[k], 0)]),
    ...row.sources.map(([name, half]) => [`uncertainty: ${name}`, "\u00b1 " + percent(Math.expm1(half))]),
  ];
  $("sure").replaceChildren(...intervals, listed(null, lines, "figures"), ...row.notes.map((text) => element("p", { className: "note", textContent: text })),
    element("p", {}, "Measuring its kernels and collectives on two nodes narrows the interval. How long that takes: ", element("code", { textContent: measuring }), copied(measuring)));
}

function drawLaunch() {
  const files = data.launch[state.chosen], row = rows[state.chosen];
  const more = (text, said) => element("p", {}, text, element("code", { textContent: said }), copied(said));
  if (!files) {
    $("launch").replaceChildren(more(`This page has the launch files of the first ${data.launch.length} layouts. For this one, run `, command("report", row, " --html one.html")));
    return;
  }
  const can = files.filter((file) => file.text), cannot = files.filter((file) => !file.text);
  const shown = element("pre"), pick = element("select", { ariaLabel: "framework" }, ...can.map((file) => element("option", { textContent: file.name })));
  if (can.some((file) => file.name === state.framework)) pick.value = state.framework;
  const chosen = () => can[pick.selectedIndex];
  const tools = element("p", { className: "tools" }, pick);
  const show = () => {
    shown.textContent = chosen().text;
    tools.replaceChildren(pick, copied(chosen().text, "copy the file"));
  };
  pick.addEventListener("change", () => { state.framework = pick.value; show(); });
  if (can.length) show();
  const refused = element("details", {}, element("summary", { textContent: `frameworks that cannot run it: ${cannot.map((file) => file.name).join(", ")}` }),
    ...cannot.map((file) => element("p", { className: "note", textContent: `${file.name}: ${file.why}` })));
  $("launch").replaceChildren(...(can.length ? [tools, shown] : [element("p", { textContent: "None of the frameworks that perfmodel writes launch files for can run this layout." })]),
    ...(cannot.length ? [refused] : []), more("To predict only this layout: ", command("predict", row, "")));
}

function drawPath() {
  const row = rows[state.chosen];
  $("path").replaceChildren(listed(["event", "count", "time", "share"], row.path.map(([event, count, time_s]) =>
    [data.events[event], digits(count, 3), seconds(time_s), percent(time_s / row.step_s)]), "figures"));
}

function drawTimeline() {
  const holder = document.querySelector("#timeline div"), page = data.timelines[state.chosen], row = rows[state.chosen];
  if (!$("timeline").open) return;
  if (page) {
    if (holder.dataset.row === String(state.chosen)) return;
    holder.replaceChildren(element("iframe", { srcdoc: page, title: `timeline of ${row.layout}` }));
  } else {
    const said = command("timeline", row, " --html timeline.html");
    holder.replaceChildren(element("p", {}, "This page does not have the timeline of this layout. To write it: ", element("code", { textContent: said }), copied(said)));
  }
  holder.dataset.row = state.chosen;
}

function drawTogether() { // the chosen layout beside the kept one
  const [a, b] = both();
  $("together").hidden = b === undefined;
  if (b === undefined) return;
  const lines = columns.filter((one) => one.key !== "now_s" || turnedAway()).map((one) => {
    const x = one.of(a), y = one.of(b), points = one.unit === "share" && signed(x - y).replace("%", "points");
    const difference = one.unit === null || !y ? "" : points || signed(x / y - 1);
    return [one.label, cellText(one, a), cellText(one, b), x === y ? "same" : difference];
  });
  $("together").replaceChildren(element("h2", { textContent: `${placed(a)} beside ${placed(b)}` }),
    ...[a, b].map((i) => element("p", {}, `${placed(i)} `, element("code", { textContent: rows[i].layout }))),
    listed(["", placed(a), placed(b), `${placed(a)} against ${placed(b)}`], lines, "figures"));
}
