// What every page has: its data, elements, figures with their units, light and dark.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const GIB = 2 ** 30, HOUR_S = 3600, DAY_S = 86400;

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter((child) => child !== null));
  return made;
}
const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

const formats = [1, 2, 3, 4].map((n) => new Intl.NumberFormat("en", { maximumSignificantDigits: n })); // slow to make
const digits = (value, n = 4) => formats[n - 1].format(value);
const fourDigits = new Intl.NumberFormat("en", { minimumSignificantDigits: 4, maximumSignificantDigits: 4 });
const percent = (value, n = 1) => (100 * value).toFixed(n) + " %";
/** A share with its sign; without one where it rounds to zero. */
function signed(value, n = 1) {
  const text = percent(Math.abs(value), n);
  return (parseFloat(text) === 0 ? "" : value > 0 ? "+" : "\u2212") + text;
}
function scaled(value, unit) {
  for (const [scale, prefix] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= scale) return digits(value / scale, 3) + " " + prefix + unit;
  return digits(value, 3) + " " + unit;
}
const SECONDS = [[1, "s"], [1e-3, "ms"], [1e-6, "\u00b5s"], [1e-9, "ns"]];
/** Two times in one unit, that of the longer. */
function secondsRange(low, high) {
  const [scale, unit] = SECONDS.find(([one]) => Math.abs(high) >= one) ?? SECONDS.at(-1);
  return `${fourDigits.format(low / scale)} \u2013 ${fourDigits.format(high / scale)} ${unit}`;
}
/** Always four digits, so that the points of a column lie below one another. */
function seconds(value) {
  for (const [scale, unit] of SECONDS.slice(0, 3))
    if (Math.abs(value) >= scale) return fourDigits.format(value / scale) + " " + unit;
  return Math.abs(value) < 1e-10 ? "0 s" : digits(value / 1e-9, 3) + " ns";
}
function span(value) { // of days and hours
  if (value < 120) return seconds(value);
  if (value < 2 * HOUR_S) return digits(value / 60, 3) + " minutes";
  return value < 2 * DAY_S ? digits(value / HOUR_S, 3) + " hours" : digits(value / DAY_S, 3) + " days";
}
const bar = (pieces, whole) => element("div", { className: "bar" }, ...pieces.filter((one) => one.value > 0).map((one) => {
  const piece = element("span", { title: one.title });
  piece.style.width = (100 * one.value) / whole + "%";
  piece.style.background = one.colour;
  return piece;
}));
function listed(heads, lines, className = "") {
  const made = element("table", { className });
  if (heads) made.createTHead().append(element("tr", {}, ...heads.map((text) => element("th", { textContent: text, scope: "col" }))));
  const inside = made.createTBody();
  for (const line of lines) inside.append(element("tr", {}, ...line.map((text) => {
    const cell = element("td");
    cell.append(text);
    return cell;
  })));
  return made;
}
const patch = (fill) => { const made = element("i", { className: "patch" }); made.style.background = fill; return made; };
const copied = (text, label = "copy") => {
  const button = element("button", { textContent: label });
  button.addEventListener("click", () => { // the clipboard is closed to files and frames in some browsers
    const done = () => { button.textContent = "copied"; setTimeout(() => { button.textContent = label; }, 1200); };
    const select = () => {
      const field = element("textarea", { value: text });
      document.body.append(field); field.select(); document.execCommand("copy"); field.remove(); done();
    };
    if (navigator.clipboard) navigator.clipboard.writeText(text).then(done, select); else select();
  });
  return button;
};
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const tip = $("tip");
function showTip(text, event) {
  tip.textContent = text; tip.hidden = !text;
  const size = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - size.width - 4)) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - size.height - 4)) + "px";
}

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").textContent = dark ? "light" : "dark";
}

/** Light or dark as the browser has it until a click; `draw` paints what styles do not reach. */
function themed(draw) {
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches);
  $("theme").addEventListener("click", () => { setTheme(document.documentElement.dataset.theme !== "dark"); draw(); });
  $("print").addEventListener("click", () => window.print());
}
