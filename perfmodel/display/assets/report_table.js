// The table: sorted by a click on a head, filtered by words, one row chosen.
const HIDDEN = new Set(["lo_s", "hi_s", "tokens_per_s", "tokens_per_s_per_device", "best", "energy_j", "usd"]); // drawn and filtered, but no column
// Settings that all layouts share need no column: a line below the filter states them once.
const isShared = (one) => (one.key === "devices" || one.unit === null) && rows.length > 1 && same(one);
const shared = columns.filter((one) => one.unit === null && isShared(one));
const statedKeys = new Set(settings.map((one) => one.key));
const sharedParts = rows.length > 1 ? otherParts(0).filter((part) => rows.every((row) => row.layout.split(",").includes(part))) : [];
const heads = [
  { key: "rank", label: "#", text: (i) => String(i + 1), value: (i) => i },
  ...columns.filter((one) => !HIDDEN.has(one.key) && !isShared(one) && one.key !== "now_s").map(
    (one) => ({ ...one, text: (i) => cellText(one, i), value: one.of })),
  { key: "layout", label: "other settings", text: otherSettings, value: otherSettings },
];
heads.splice(2, 0,
  { key: "now_s", label: "what if", text: (i) => seconds(now(rows[i])), value: (i) => now(rows[i]) },
  { key: "interval", label: "90 % interval", text: (i) => secondsRange(rows[i].lo_s, rows[i].hi_s), value: (i) => rows[i].hi_s });
const sorting = { key: "rank", down: false };
const body = document.querySelector("#table tbody"), box = $("table");
const ROW_PX = 22, AROUND = 12; // height of a row, as the style has it; rows kept above and below those in sight
/** The part of a layout's notation that no other column states; the whole notation of the chosen one is at the top. */
function otherSettings(i) { return otherParts(i).filter((part) => !sharedParts.includes(part)).join(","); }
function otherParts(i) { return rows[i].layout.split(",").filter((part) => !statedKeys.has(part.split("=")[0])); }
function same(one) { return rows.every((_, i) => one.of(i) === one.of(0)); }

function buildTable() {
  document.querySelector("#table thead tr").innerHTML = heads.map((head) =>
    `<th class="${head.key}" data-key="${head.key}" tabindex="0" scope="col">${escaped(head.label.replaceAll("_", " "))}</th>`).join("");
  const common = [...shared.map((one) => `${one.key.replaceAll("_", " ")} ${cellText(one, 0)}`), ...sharedParts];
  $("shared").textContent = common.length ? `all layouts: ${common.join(", ")}` : "";
  setWidths();
  box.addEventListener("scroll", () => requestAnimationFrame(() => { paintRows(); markHidden(); }));
  addEventListener("beforeprint", () => { box.scrollTop = 0; paintRows(); });
  new ResizeObserver(() => { paintRows(); markHidden(); }).observe(box);
}

/** Fade the right edge while columns are hidden behind it: some systems show no scroll bar until one scrolls. */
function markHidden() {
  box.parentElement.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
}

function setWidths() { // as wide as the longest of some cells, in digits
  const some = rows.map((_, i) => i).filter((i) => i % Math.ceil(rows.length / 40) === 0 || i === rows.length - 1);
  const shown = heads.map((head) => head.key !== "now_s" || turnedAway());
  const widths = heads.map((head, k) => {
    const words = head.label.split(/[ _]/), scale = head.key === "layout" ? 0.9 : 1;
    return shown[k] ? 1.6 + scale * Math.max(...words.map((word) => word.length), ...some.map((i) => head.text(i).length)) : 0;
  });
  const table = body.parentElement;
  table.querySelector("colgroup")?.remove();
  table.prepend(element("colgroup", {}, ...widths.filter((_, k) => shown[k]).map((width) => {
    const col = element("col");
    col.style.width = width + "ch";
    return col;
  })));
  table.style.width = `max(100%, ${widths.reduce((a, b) => a + b)}ch)`;
  box.style.setProperty("--rank-width", table.tHead.querySelector(".rank").offsetWidth + "px"); // what stands still to the left of the step
}

function paintRows() { // those in sight and a few around them: a thousand cost no more than thirty
  const first = Math.max(0, Math.floor(box.scrollTop / ROW_PX) - AROUND);
  const last = Math.min(state.listed.length, first + Math.ceil(box.clientHeight / ROW_PX) + 2 * AROUND);
  const gap = (count) => `<tr class="gap" style="height: ${count * ROW_PX}px"></tr>`;
  body.innerHTML = gap(first) + state.listed.slice(first, last).map((i) =>
    `<tr data-row="${i}" class="${i === state.chosen ? "chosen" : ""} ${i === state.kept ? "kept" : ""}">` + heads.map((head) =>
      `<td class="${head.key}">${escaped(head.text(i))}</td>`).join("") + "</tr>").join("") + gap(state.listed.length - last);
}

function compareValues(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

function arrange() { // order and filter of the rows as they are
  const { value } = heads.find((head) => head.key === sorting.key);
  const values = rows.map((_, i) => value(i)), sign = sorting.down ? -1 : 1;
  state.order = rows.map((_, i) => i).sort((a, b) => sign * compareValues(values[a], values[b]) || a - b);
  state.listed = state.order.filter((i) => state.shown[i]);
  paintRows();
  for (const head of document.querySelectorAll("#table th")) {
    const on = head.dataset.key === sorting.key;
    if (on) head.setAttribute("aria-sort", sorting.down ? "descending" : "ascending"); else head.removeAttribute("aria-sort");
  }
}

function sortBy(key) {
  const one = heads.find((head) => head.key === key);
  sorting.down = sorting.key === key ? !sorting.down : one.better === "high";
  sorting.key = key;
  arrange();
}

const NAMED = { step: "step_s", memory: "memory_bytes", gib: "memory_bytes", mb: "micro_batch", batch: "global_batch" };
/** A test for each word: `tp=8`, `memory<70` (GiB), `mfu>40` (percent), else a part of the layout. */
function tests(text) {
  return text.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const found = word.match(/^([a-z_0-9]+)(<=|>=|=|:|<|>)(.+)$/);
    const one = found && column(NAMED[found[1]] ?? found[1]);
    if (!one) return (i) => rows[i].layout.toLowerCase().includes(word);
    const [, , sign, raw] = found, number = Number(raw);
    if (Number.isNaN(number)) return (i) => String(one.of(i)).toLowerCase().includes(raw);
    return {
      "<": (i) => plain(one, i) < number, ">": (i) => plain(one, i) > number, "<=": (i) => plain(one, i) <= number,
      ">=": (i) => plain(one, i) >= number, "=": (i) => plain(one, i) === number, ":": (i) => plain(one, i) === number,
    }[sign];
  });
}

function filter(text) {
  const all = tests(text);
  state.shown = rows.map((_, i) => all.every((test) => test(i)));
  const left = state.shown.filter(Boolean).length;
  $("count").textContent = `${left.toLocaleString("en")} of ${rows.length.toLocaleString("en")} layouts`;
  arrange();
  drawScatter();
}

function scrollToChosen() { // within the table, not the page
  const top = state.listed.indexOf(state.chosen) * ROW_PX, inside = box.clientHeight - body.parentElement.tHead.offsetHeight - ROW_PX;
  if (top < box.scrollTop) box.scrollTop = top;
  else if (top > box.scrollTop + inside) box.scrollTop = top - inside;
  paintRows();
}

function step(by) { // choose the next row that is listed
  if (!state.listed.length) return;
  const at = state.listed.indexOf(state.chosen);
  choose(state.listed[Math.max(0, Math.min(state.listed.length - 1, at < 0 ? 0 : at + by))]);
  scrollToChosen();
}

function refreshNow() { // times on the machine as it is turned
  const turned = turnedAway(), was = document.body.classList.contains("turned");
  document.body.classList.toggle("turned", turned);
  if (turned !== was) setWidths();
  if (sorting.key === "now_s") arrange(); else if (turned || was) paintRows();
}
