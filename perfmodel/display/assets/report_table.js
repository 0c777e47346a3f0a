// The table: sorted by a click on a head, filtered by words, one row chosen.
const HIDDEN = new Set(["lo_s", "hi_s", "tokens_per_s", "tokens_per_s_per_device", "best", "energy_j"]); // drawn and filtered, but no column
const heads = [
  { key: "rank", label: "#", text: (i) => String(i + 1), value: (i) => i },
  ...columns.filter((one) => !HIDDEN.has(one.key) && !(one.key === "devices" && same(one)) && one.key !== "now_s").map(
    (one) => ({ ...one, text: (i) => cellText(one, i), value: one.of })),
  { key: "layout", label: "layout", text: (i) => rows[i].layout, value: (i) => rows[i].layout },
];
heads.splice(2, 0,
  { key: "now_s", label: "what if", text: (i) => seconds(now(rows[i])), value: (i) => now(rows[i]) },
  { key: "interval", label: "90 % interval", text: (i) => `${digits(rows[i].lo_s)} \u2013 ${seconds(rows[i].hi_s)}`, value: (i) => rows[i].hi_s });
const sorting = { key: "rank", down: false };
const body = document.querySelector("#table tbody"), box = $("table");
function same(one) { return rows.every((_, i) => one.of(i) === one.of(0)); }

function buildTable() {
  document.querySelector("#table thead tr").innerHTML = heads.map((head) =>
    `<th class="${head.key}" data-key="${head.key}" tabindex="0" scope="col">${escaped(head.label.replaceAll("_", " "))}</th>`).join("");
  body.innerHTML = rows.map((_, i) => `<tr data-row="${i}">` + heads.map((head) =>
    `<td class="${head.key}">${escaped(head.text(i))}</td>`).join("") + "</tr>").join("");
  state.lines = [...body.rows];
  const at = heads.findIndex((head) => head.key === "now_s");
  state.nowCells = state.lines.map((line) => line.cells[at]);
  arrange();
}

function compareValues(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

function arrange() { // order and filter of the rows as they are
  const { value } = heads.find((head) => head.key === sorting.key);
  const values = rows.map((_, i) => value(i)), sign = sorting.down ? -1 : 1;
  state.order = rows.map((_, i) => i).sort((a, b) => sign * compareValues(values[a], values[b]) || a - b);
  body.replaceChildren(...state.order.filter((i) => state.shown[i]).map((i) => state.lines[i]));
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

function markRows() {
  for (const line of body.querySelectorAll(".chosen, .kept")) line.classList.remove("chosen", "kept");
  if (state.kept >= 0) state.lines[state.kept].classList.add("kept");
  state.lines[state.chosen].classList.add("chosen");
}

function scrollToChosen() { // within the table, not the page
  const line = state.lines[state.chosen], top = line.offsetTop - 26, below = line.offsetTop + line.offsetHeight;
  if (top < box.scrollTop) box.scrollTop = top;
  else if (below > box.scrollTop + box.clientHeight) box.scrollTop = below - box.clientHeight;
}

function step(by) { // choose the next row that is shown
  const visible = state.order.filter((i) => state.shown[i]);
  if (!visible.length) return;
  const at = visible.indexOf(state.chosen);
  choose(visible[Math.max(0, Math.min(visible.length - 1, at < 0 ? 0 : at + by))]);
  scrollToChosen();
}

function refreshNow() { // times on the machine as it is turned
  document.body.classList.toggle("turned", turnedAway());
  if (turnedAway()) state.nowCells.forEach((cell, i) => { cell.textContent = seconds(now(rows[i])); });
  if (sorting.key === "now_s") arrange();
}
